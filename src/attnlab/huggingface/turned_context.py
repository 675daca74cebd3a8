"""What an attention module does to its context before the output projection: a gate, a norm, or both.

The module runs again with chosen contexts c in place of its own, until its last linear map, and f(c) is the input of
that map. A norm that reads the context keeps the scale of the recorded pass: gain·scale·c, as `records.record` treats
norms after attention. Then f must be affine in each number:

    f(c) = factor ⊙ c + offset        factor is f(1) − f(0), proved on a random context and on the model's own

So contributions are exact: ‖(factor ⊙ α v) W‖. A constant offset becomes part of the output bias. Nothing here imports
transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface.projections import is_projection
from attnlab.mechanisms.mechanism import widen
from attnlab.records.tolerance import is_close, measure_difference

# runs an attention module with this context (b,h,i,d) as its attention's, and calls the function when it asks for it
Rerun = Callable[[Tensor, Callable[[], None]], None]


class ReachedProjectionError(Exception):
    """Ends a pass through an attention module at its output projection."""


@dataclass(frozen=True, eq=False)
class TurnedContext:
    """The affine map between the context of an attention and its output projection."""

    projection: nn.Module
    factor: Tensor  # (b,h,i,d), or (b,h,i,1)
    offset: Tensor | None  # (h·d,)
    outputs: Tensor  # (b,i,e) of the projection


@dataclass(eq=False)
class LeafCalls:
    """The modules without children that ran after the attention, with the input and output of each."""

    calls: list[tuple[nn.Module, Tensor, Tensor]]

    def find_projection(self, size: int, width: int) -> tuple[nn.Module, Tensor, Tensor] | None:
        """Return the last linear map that reads a tensor of the context's size."""
        found = [c for c in self.calls if is_projection(c[0]) and c[1].numel() == size and c[1].shape[-1] == width]
        return found[-1] if found else None


def read_turned_context(module: nn.Module, context: Tensor, rerun: Rerun) -> TurnedContext | None:
    """Return what happens to the context (b,h,i,d) of a module that has just run. None: it has no linear map after it.

    Raises ValueError with the reason if it is not an affine map in each number.
    """
    leaves = collect_leaves(module, context, rerun)
    found = leaves.find_projection(context.numel(), context.shape[1] * context.shape[3])
    if found is None:
        return None
    projection, own, outputs = found
    norms = {leaf: scale for leaf, x, y in leaves.calls if (scale := match_scale(leaf, x, y)) is not None}

    def run(c: Tensor) -> Tensor:
        with freeze_norms(norms), stop_at(projection) as reached, _catch_stop():
            rerun(c.to(context.dtype), lambda: None)
        return _split(reached[0], context)

    offset = run(torch.zeros_like(context))
    factor = run(torch.ones_like(context)) - offset
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(context.shape, generator=generator, dtype=torch.float32).to(context)
    for c, expected in ((drawn, run(drawn)), (context, _split(own, context))):
        turned = factor * c + offset
        if not is_close(turned, expected):
            error, _ = measure_difference(turned, expected)
            raise ValueError(
                "between its context and its output projection is more than a gate or an RMSNorm "
                f"(off by {error:.2g} from a factor for each number)"
            )
    if torch.equal(factor, factor[..., :1].expand_as(factor)):
        factor = factor[..., :1].clone()
    first = offset[:1, :, :1]
    if not is_close(first.expand_as(offset), offset):
        raise ValueError("an offset that varies is added to its context before the output projection")
    constant = first.transpose(1, 2).flatten() if offset.any() else None
    return TurnedContext(projection, factor, constant, outputs)


def collect_leaves(module: nn.Module, context: Tensor, rerun: Rerun) -> LeafCalls:
    """Run the module with its own context again, and note its parts that run after the attention."""
    found = LeafCalls([])

    def note(leaf: nn.Module, args: tuple, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            found.calls.append((leaf, args[0], output))

    with ExitStack() as stack:
        for leaf in _list_leaves(module):
            stack.callback(leaf.register_forward_hook(note).remove)
        rerun(context, found.calls.clear)
    return found


def _list_leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a module that are a linear map, with its adapters if it has any, or have no parts."""
    for part in module.children():
        if is_projection(part) or next(part.children(), None) is None:
            yield part
        else:
            yield from _list_leaves(part)


def match_scale(norm: nn.Module, x: Tensor, output: Tensor) -> Tensor | None:
    """Return gain · scale of an RMSNorm that mapped x to output, of x's shape. None: it is no RMSNorm."""
    if is_projection(norm) or x.shape != output.shape or isinstance(norm, nn.Dropout | nn.Identity):
        return None
    wide = widen(x)
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    weight = getattr(norm, "weight", None)
    gains = [torch.ones_like(wide[..., :1])] if weight is None else [widen(weight.detach()), 1 + widen(weight.detach())]
    for gain in gains:
        if gain.shape[-1] in (1, x.shape[-1]) and is_close(wide * scale * gain, output):
            return (scale * gain).expand_as(wide)
    return None


@contextmanager
def freeze_norms(norms: dict[nn.Module, Tensor]) -> Iterator[None]:
    """Let norms multiply by the scale of the recorded pass while the context is open."""
    with ExitStack() as stack:
        for norm, scale in norms.items():

            def keep_scale(_norm: nn.Module, args: tuple, output: Tensor, scale: Tensor = scale) -> Tensor:
                return (widen(args[0]) * scale).to(output.dtype)

            stack.callback(norm.register_forward_hook(keep_scale).remove)
        yield


@contextmanager
def stop_at(projection: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that gets the input of the projection, which ends the pass."""
    reached: list[Tensor] = []

    def stop(_module: nn.Module, args: tuple) -> None:
        reached.append(args[0])
        raise ReachedProjectionError

    handle = projection.register_forward_pre_hook(stop)
    try:
        yield reached
    finally:
        handle.remove()


@contextmanager
def _catch_stop() -> Iterator[None]:
    try:
        yield
    except ReachedProjectionError:
        return


def _split(x: Tensor, like: Tensor) -> Tensor:
    """Return (b,i,h·d) as (b,h,i,d)."""
    b, h, i, d = like.shape
    return x.reshape(b, i, h, d).transpose(1, 2)
