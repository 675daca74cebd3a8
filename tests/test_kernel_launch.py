"""An Operator computes the same eager and traced; a kernel is launched as it was compiled for its kind of call."""

from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from triton import JITFunction, knobs, language
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

from attnlab.mechanisms import attention
from attnlab.mechanisms.kernels.launch import compile_ahead, find_launcher, operator, remember_calls

CALLS: list[str] = []


@operator("attnlab_tests::scaled_square")
def scaled_square(x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    CALLS.append(type(x).__name__)
    return x * x * scale, x.abs()


@scaled_square.register_fake
def _(x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x)


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, None, None]:
    return grad * 2 * ctx.saved_tensors[0] * ctx.scale, None, None


scaled_square.register_autograd(_gradients, setup_context=_save_inputs)


def square(x: Tensor) -> Tensor:
    return scaled_square(x, None, scale=0.5)[0].sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_operator_has_its_derivative_eager_and_compiled(compiled):
    call = torch.compile(square, fullgraph=True, backend="aot_eager") if compiled else square
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    call(x).backward()
    assert x.grad.tolist() == [1.0, -2.0, 3.0]
    with torch.no_grad():
        assert call(x).item() == 7.0


def test_an_operator_is_one_opaque_call_where_tensors_have_no_data():
    CALLS.clear()
    with FakeTensorMode(), FlopCounterMode(display=False):
        assert square(torch.empty(3)).shape == ()
    assert CALLS == []
    square(torch.ones(3))
    assert CALLS == ["Tensor"]


def test_an_operator_must_get_every_parameter():
    with pytest.raises(KeyError, match="mask"):
        scaled_square(torch.ones(3), scale=1.0)


class Compiled:
    """What Triton returns for a kind of call; it lists the arguments that it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, *arguments))


class Launcher:
    """A launcher as that of Triton 3.6 to 3.9; it lists the arguments that it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, gridX, gridY, gridZ, stream, function, *arguments):  # noqa: N803 (Triton's names)
        self.calls.append((gridX, gridY, gridZ, stream, function, *arguments))


class Direct(Compiled):
    """A compiled kernel whose launcher can be called directly."""

    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self) -> None:
        super().__init__()
        self.run = Launcher()


class Streams:
    """A driver whose stream is its device plus 100."""

    @staticmethod
    def get_current_stream(device: int) -> int:
        return device + 100


def make_kernel(monkeypatch, compiled):
    """Return a kernel that remembers its calls, for which Triton compiles an instance of `compiled`."""

    def add(x, y, n, size, even):
        pass

    monkeypatch.setattr(driver, "_active", Streams())
    monkeypatch.setattr(JITFunction, "run", lambda *arguments, grid, warmup, **constants: compiled())
    return remember_calls(JITFunction(add))


@pytest.fixture
def kernel(monkeypatch):
    return make_kernel(monkeypatch, Compiled)


def test_a_kernel_is_launched_again_as_it_was_compiled(kernel):
    """Triton launches it by itself, because its launcher is not one that is known."""
    x, y = torch.zeros(64), torch.zeros(64)
    first = kernel[(3,)](x, y, 64, even=True, size=16, num_warps=4)
    assert first.launches == []  # Triton has launched it
    assert kernel[(5, 2)](y, x, 64, even=True, size=16, num_warps=4) is first
    assert first.launches == [((5, 2, 1), y.data_ptr(), x.data_ptr(), 64, 16, True)]


def test_kernels_compile_ahead_in_threads_and_none_of_them_runs(monkeypatch):
    calls, both = [], Barrier(2, timeout=20)  # only two threads at a time pass

    def compile_slowly(self, *arguments, grid, warmup, **constants):
        calls.append((warmup, [x.dtype for x in arguments[:2]], [x.data_ptr() % 16 for x in arguments[:2]]))
        if warmup:
            both.wait()
        return Compiled()

    kernel, x, y = make_kernel(monkeypatch, Compiled), torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    monkeypatch.setattr(JITFunction, "run", compile_slowly)
    kernel = remember_calls(JITFunction(kernel.fn))
    with compile_ahead(torch.device("cpu")):
        for _ in range(3):  # layers
            assert kernel[(3,)](x, y, 64, even=True, size=16) is None
            assert kernel[(3,)](x, y[1:], 64, even=True, size=16) is None
        assert calls == []
    types = [torch.float32, torch.bfloat16]
    assert sorted(calls) == sorted([(True, types, [0, 0]), (True, types, [0, 2])], key=str)
    kernel[(3,)](x, y, 64, even=True, size=16)
    assert calls[2][0] is False  # Triton launches it


def test_kernels_compile_ahead_once_for_all_numbers_that_triton_compiles_alike(monkeypatch):
    given = []
    kernel, x = make_kernel(monkeypatch, Compiled), torch.zeros(64)
    monkeypatch.setattr(JITFunction, "run", lambda *_, grid, warmup, even, size: given.append((even, size)))

    def add(x, y, n, plain, even, size):
        pass

    kernel = remember_calls(JITFunction(add, do_not_specialize=["plain"]))
    with compile_ahead(torch.device("cpu")):
        for n, plain in [(1, 1), (7, 1), (9, 16), (16, 2), (48, 5)]:  # n: 1, other, other, 16 k, 16 k
            kernel[(3,)](x, x, n, plain, even=True, size=16)
        kernel[(3,)](x, x, 7, 2**31, even=True, size=16)  # of 64 bits
        kernel[(3,)](x, x, 7, 1, even=False, size=16)
        kernel[(3,)](x, x, 7.0, 1, even=False, size=8)
    assert sorted(given) == [(False, 8), (False, 16), *[(True, 16)] * 4]


def test_an_error_while_compiling_ahead_leaves_launches_as_they_were(monkeypatch):
    kernel, x = make_kernel(monkeypatch, Compiled), torch.zeros(64)
    with pytest.raises(KeyError), compile_ahead(torch.device("cpu")):
        raise KeyError
    assert isinstance(kernel[(3,)](x, x, 64, even=True, size=16), Compiled)


@pytest.mark.parametrize("grid", [(5,), (5, 2), (5, 2, 3)])
def test_a_known_launcher_is_called_directly_on_the_stream_of_the_tensors(monkeypatch, grid):
    kernel, x, y = make_kernel(monkeypatch, Direct), torch.zeros(64), torch.zeros(64)
    first = kernel[grid](x, y, 64, even=True, size=16, num_warps=4)
    assert kernel[grid](y, x, 64, even=True, size=16, num_warps=4) is first
    stream = Streams.get_current_stream(x.get_device())
    given = (*(*grid, 1, 1)[:3], stream, 77, (4, 1, 0), None, None, None, y.data_ptr(), x.data_ptr(), 64, 16, True)
    assert (first.run.calls, first.launches) == ([given], [])


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [False, True])
def test_triton_launches_by_itself_while_a_hook_is_set(monkeypatch, name, chained):
    kernel, x = make_kernel(monkeypatch, Direct), torch.zeros(64)
    first = kernel[(1,)](x, x, 64, even=True, size=16)
    with monkeypatch.context() as patch:
        hook = knobs.HookChain() if chained else print
        patch.setattr(knobs.runtime, name, hook)
        if chained:
            hook.add(print)
        kernel[(1,)](x, x, 64, even=True, size=16)
        assert (len(first.run.calls), len(first.launches)) == (0, 1)
    kernel[(1,)](x, x, 64, even=True, size=16)
    assert (len(first.run.calls), len(first.launches)) == (1, 1)


def test_the_launcher_of_this_triton_is_known():
    class Real(Direct):
        def __init__(self) -> None:
            self.run = object.__new__(CudaLauncher)

    assert find_launcher(Real()) is not None
    assert find_launcher(Compiled()) is None


def test_a_kernel_is_compiled_for_types_alignment_numbers_and_constants(kernel):
    x, constants = torch.zeros(64), {"size": 16, "even": True, "num_warps": 4}
    kinds = [kernel[(1,)](x, x, 64, **constants), kernel[(1,)](x[1:], x, 64, **constants)]
    kinds += [kernel[(1,)](x, x.double(), 64, **constants), kernel[(1,)](x, x, 1, **constants)]
    kinds += [kernel[(1,)](x, x, 64, **constants | {"even": False})]
    kinds += [kernel[(1,)](x, x, 64, **constants | {"num_warps": 8})]
    assert len({id(kind) for kind in kinds}) == 6


@pytest.mark.parametrize("name", ["n", "size"])
def test_a_kernel_is_compiled_apart_for_integers_and_floats_of_equal_value(kernel, name):
    """Triton computes 3 // 2 and 3.0 / 2.0 differently, for numbers and for constants."""
    x, given = torch.zeros(64), {"n": 2, "size": 16, "even": True}
    kinds = []
    for value in (given[name], float(given[name])):
        n, *constants = (given | {name: value}).values()
        kinds.append(kernel[(1,)](x, x, n, size=constants[0], even=constants[1]))
    assert kinds[0] is not kinds[1]


def test_a_kernel_is_compiled_apart_for_options_and_types_of_equal_place(kernel):
    """4 warps are not 4 stages; Triton's types are constants, too."""
    x, given = torch.zeros(64), {"size": 16, "even": True}
    kinds = [kernel[(1,)](x, x, 64, **given, num_warps=4), kernel[(1,)](x, x, 64, **given, num_stages=4)]
    kinds += [kernel[(1,)](x, x, 64, **given | {"size": kind}) for kind in (language.float32, language.float16)]
    assert len({id(kind) for kind in kinds}) == 4
    assert kernel[(1,)](x, x, 64, **given | {"size": language.float16}) is kinds[-1]


class Cut(torch.autograd.Function):
    """The same numbers, which pass no gradient on, not even zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("name", ["sigmoid", "stick-breaking", "sparsemax", "coda", "dagpam"])
def test_a_context_without_a_gradient_gives_none_to_its_inputs(name):
    q, k, v = torch.randn(3, 1, 2, 5, 16, requires_grad=True)
    context, _ = attention(name, heads=2, head_dim=16, impl="fused")(q, k, v, causal=True)
    (Cut.apply(context).sum() + q.sum()).backward()
