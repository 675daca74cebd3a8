"""What all kernels share: operators, the device they run on, the record of launches, the layout of their outputs."""

import inspect
import marshal
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial, reduce
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor

WIDEST = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}  # a side of a matrix in shared memory
LAUNCHED: set[str] = set()  # names of the kernels that this process has run; a reader clears it beforehand


NOWHERE = nullcontext()
find_dtype = attrgetter("dtype")
MOST_CALLS = 4096  # kinds of calls of one kernel that are remembered
Launch = Callable[[Any, list[int], tuple[Any, ...]], None]  # grid, addresses, numbers
Jobs = dict[Any, Callable[[], Any]]  # compilations, by kernel and what Triton compiles it for
_collected: Jobs | None = None  # where launches put their compilations while compile_ahead collects them


class Operator:
    """A function of tensors and numbers that launches kernels, and its derivative.

    An eager call runs the Python function, inside an autograd.Function if gradients are recorded. That takes a small
    part of the host time of a custom operator of torch.library. The custom operator, `opaque`, is for those who must
    not look inside: torch.compile, torch.export, torch.func, and modes such as FakeTensorMode and FlopCounterMode.
    All parameters must be given, by position or by name.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function, self.record = function, function  # record: the function, recorded by autograd
        self.names = tuple(inspect.signature(function).parameters)
        self.opaque = torch.library.custom_op(name, function, mutates_args=())

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if named:
            inputs += tuple(named[name] for name in self.names[len(inputs) :])
        if torch.compiler.is_compiling() or is_intercepted():
            return self.opaque(*inputs)
        return self.record(*inputs) if torch.is_grad_enabled() else self.function(*inputs)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Set what allocates the outputs without computing them, as of torch.library.custom_op."""
        return self.opaque.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Set the derivative, as of torch.library.custom_op. It is not called where no output has a gradient."""
        function, inputs = self.function, len(self.names)

        def derive(ctx: Any, *grads: Any) -> Any:
            for grad in grads:
                if grad is not None:
                    return backward(ctx, *grads)
            return (None,) * inputs

        self.opaque.register_autograd(derive, setup_context=setup_context)

        class Recorded(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                outputs = function(*inputs)
                setup_context(ctx, inputs, outputs)
                return outputs

            backward = staticmethod(derive)

        self.record = Recorded.apply


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make the function below an Operator with this name, "library::name"; it is used like torch.library.custom_op."""
    return lambda function: Operator(name, function)


def remember_calls(kernel: Any) -> Any:
    """Let a kernel remember what Triton compiled for each kind of call: most of the host time of a launch is saved.

    It decorates a function with @triton.jit whose pointers come first, then numbers, then constants. Triton compiles
    for the types, for integers that are 1 or multiples of 16, and for pointers that are multiples of 16 bytes. Calls
    with the same numbers, constants, types and alignments are of one kind. The device of the first tensor must be the
    current one.
    """
    from triton import JITFunction
    from triton.runtime.jit import MockTensor

    if not isinstance(kernel, JITFunction):  # the interpreter
        return kernel
    compile_and_run, pointers = kernel.run, 0
    known: dict[Any, tuple[Any, Launch]] = {}

    def start(grid: Any, *arguments: Any, **constants: Any) -> Any:
        nonlocal pointers
        pointers = pointers or sum(isinstance(x, Tensor) for x in arguments)
        tensors, numbers = arguments[:pointers], arguments[pointers:]
        addresses = list(map(Tensor.data_ptr, tensors))
        aligned = tuple(x % 16 == 0 for x in addresses) if reduce(or_, addresses) % 16 else True
        device, values = tensors[0].get_device(), constants.values()
        kind = (device, aligned, encode_numbers((*numbers, *values)), tuple(map(find_dtype, tensors)), *constants)
        found = known.get(kind)
        if _collected is not None:
            if found is None:
                given = (*[MockTensor(x.dtype) for x in tensors], *numbers) if aligned is True else arguments
                plain = [param.do_not_specialize for param in kernel.params[pointers:]]
                classes = tuple(map(classify_number, numbers, plain))
                variant = (kernel, device, aligned, classes, encode_numbers((*values,)), kind[3:])
                _collected[variant] = partial(compile_and_run, *given, grid=grid, warmup=True, **constants)
            return None
        if found is None:
            compiled = compile_and_run(*arguments, grid=grid, warmup=False, **constants)
            if len(known) == MOST_CALLS:
                known.clear()
            rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            known[kind] = compiled, prepare_launch(compiled, device, rest)
            return compiled
        found[1](grid, addresses, numbers)
        return found[0]

    def run(*arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        if warmup or not arguments:  # torch.compile passes all by name
            return compile_and_run(*arguments, grid=grid, warmup=warmup, **constants)
        return start(grid, *arguments, **constants)

    kernel.run, kernel.start = run, start
    kernel.__class__ = find_quick_class()
    return kernel


@contextmanager
def compile_ahead(device: torch.device) -> Iterator[None]:
    """Compile the kernels that the block launches, many at a time in threads, and load them. None of them runs.

    Otherwise Triton compiles one kernel after another while a model takes its first step. Some versions also call a C
    compiler for the launcher of each kernel, when it is loaded. Outputs of kernels stay unwritten, so the block must
    not use them as indices. Kernels without `remember_calls`, and those of Triton's interpreter, run as usual.
    """
    global _collected
    jobs: Jobs = {}
    _collected = jobs
    try:
        yield
    finally:
        _collected = None
    on_gpu = device.type == "cuda"
    select = partial(torch.cuda.set_device, device) if on_gpu else None
    with ThreadPoolExecutor(os.cpu_count(), initializer=select) as threads:
        for result in [threads.submit(_compile, job, load=on_gpu) for job in jobs.values()]:
            result.result()


def _compile(job: Callable[[], Any], *, load: bool) -> None:
    compiled = job()
    if load:
        getattr(compiled, "run", None)  # reading it makes the launcher and loads the kernel


def start_triton() -> None:
    """Import Triton and let it do what it does once in a process before its first kernel, compiled or from its cache.

    It hashes its compiler, half a gigabyte, and in an empty cache it compiles its interface to the driver. Both leave
    time for other threads.
    """
    with suppress(ImportError):  # not available on this system, or a version that does this elsewhere
        from triton.runtime import driver

        driver.active.get_current_target()
        from triton.runtime.cache import triton_key

        triton_key()


@cache
def find_quick_class() -> Any:
    """Return the class of kernels that remember calls: kernel[grid](…) calls `start`, without Triton's wrapper."""
    from triton import JITFunction

    class Quick(JITFunction):  # type: ignore[misc]
        def __getitem__(self, grid: Any) -> Any:
            return partial(self.start, grid)

    return Quick


def classify_number(x: Any, plain: bool) -> Any:
    """Return what Triton compiles for: the type of a number, and unless it is `plain`, whether it is 1 or 16 k."""
    if type(x) is not int:
        return type(x)
    wide = x.bit_length() > 31
    return wide if plain else (wide, x == 1, x % 16 == 0)


def encode_numbers(numbers: tuple[Any, ...]) -> Any:
    """Return a key of numbers and their types, which is faster to hash and compare: 2 == 2.0, but not for Triton."""
    try:
        return marshal.dumps(numbers, 2)  # later versions mark objects that occur twice
    except ValueError:  # other objects, as Triton's types
        return (*numbers, *map(type, numbers))


def prepare_launch(compiled: Any, device: int, rest: tuple[Any, ...]) -> Launch:
    """Return a function of the grid, addresses and numbers that launches a compiled kernel with the constants `rest`.

    It calls Triton's launcher directly. If that is not the launcher known here, or while hooks such as those of a
    profiler are set, Triton launches by itself, which takes three times as long.
    """
    from triton import knobs
    from triton.runtime import driver

    def launch_by_triton(grid: Any, addresses: list[int], numbers: tuple[Any, ...]) -> None:
        compiled[(*grid, 1, 1)[:3]](*addresses, *numbers, *rest)

    launcher, hooks = find_launcher(compiled), knobs.runtime
    if launcher is None:
        return launch_by_triton
    function, metadata, get_stream = compiled.function, compiled.packed_metadata, driver.active.get_current_stream

    def launch(grid: Any, addresses: list[int], numbers: tuple[Any, ...]) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook  # None, a function, or a chain of them
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            return launch_by_triton(grid, addresses, numbers)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        launcher(x, y, z, get_stream(device), function, metadata, None, None, None, *addresses, *numbers, *rest)

    return launch


def find_launcher(compiled: Any) -> Callable[..., None] | None:
    """Return the launcher of a compiled kernel, or None if it takes other arguments than that of Triton 3.6 to 3.9."""
    launcher = getattr(compiled, "run", None)
    if launcher is None or not hasattr(compiled, "function") or not hasattr(compiled, "packed_metadata"):
        return None
    names = tuple(inspect.signature(type(launcher).__call__).parameters)
    return launcher if names[1:6] == ("gridX", "gridY", "gridZ", "stream", "function") else None


def divide_up(n: int, size: int) -> int:
    """The number of tiles of this size that cover n; triton.cdiv takes ten times as long on the host."""
    return -(-n // size)


def round_up(n: int, least: int = 16) -> int:
    """The smallest power of 2 that is at least n and `least`, the least side of a product of tiles."""
    return max(least, 1 << (n - 1).bit_length())


def is_mapped(x: Tensor) -> bool:
    """Whether torch.func maps over x, for which fused functions have no rule."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_intercepted() -> bool:
    """Whether torch.func or a dispatch mode is active."""
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


def select_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device the current one, where Triton launches."""
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():  # CUDA is running, so this needs no check
        return NOWHERE
    return torch.cuda.device(x.device)


def note_launch(kernel: str) -> bool:
    """Add a name to LAUNCHED.

    Outside of a custom operator, torch.compile runs this only when it traces the call. A second model that reuses the
    compiled program of a first one is not recorded.
    """
    LAUNCHED.add(kernel)
    return True


# like torch.compiler.assume_constant_result, without importing the compiler, which takes a second or more
note_launch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def find_device_gap(x: Tensor) -> str | None:
    """Name why no kernel can run on x, or return None. Custom operators have no batching rule for torch.func."""
    if not x.is_cuda and not os.environ.get("TRITON_INTERPRET"):
        return f"tensors on {x.device}"
    if is_mapped(x):
        return "tensors that torch.func maps over"
    return None


def find_head_gap(q: Tensor) -> str | None:
    """Name why the heads of q do not fit into a multiprocessor's memory, or why no kernel can run; or return None."""
    if gap := find_device_gap(q):
        return gap
    if q.dtype not in WIDEST:
        return str(q.dtype)
    if q.shape[3] > WIDEST[q.dtype]:
        return f"head_dim={q.shape[3]} in {q.dtype} (at most {WIDEST[q.dtype]})"
    return None


def refuse_second_derivative() -> None:
    """Raise in a backward pass that is itself recorded, as with create_graph=True."""
    if torch.is_grad_enabled():
        raise NotImplementedError("the fused kernels have no second derivative; use impl='reference'")


def empty_by_token(x: Tensor) -> Tensor:
    """Allocate a tensor like x (b,h,n,d) with the memory layout (b,n,h,d), which the output projection reads."""
    b, h, n, d = x.shape
    return x.new_empty_strided((b, h, n, d), (n * h * d, d, h * d, 1))
