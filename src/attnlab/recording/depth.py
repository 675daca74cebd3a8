"""What the states of a Transformer become with depth, with parts of its layers left out (Dong et al. 2021).

    pure attention     x ← attention(x)                       skip=False, feed_forward=False, norm=False
    with skip          x ← x + attention(x)                   skip=True,  feed_forward=False, norm=False
    with MLP           x ← attention(x), x ← MLP(x)           skip=False, feed_forward=True,  norm=False
    the layer itself                                          skip=True,  feed_forward=True,  norm=True

The model may stand at its initialisation or be trained: its own weights are used. A part that is left out is the
identity; without skip, what a part returns takes the place of what it was given.
"""

import copy
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlab.models.blocks import Block, Residual, Stack
from attnlab.models.transformer import Transformer
from attnlab.recording.probe import Batch, called, evaluated
from attnlab.records.record import KINDS


class Passed(NamedTuple):
    """The states of one stack: before its first layer and after each, before any last norm."""

    kind: str  # of its self-attention
    states: Tensor  # (layers+1,b,n,e)
    mask: Tensor  # (b,n) bool, True = a token


@torch.no_grad()
def states(model: nn.Module, batch: Batch) -> list[Passed]:
    """The states of every stack of a Transformer of ours, in evaluation mode; a translator's encoder comes first."""
    inner = _transformer(model)
    stacks = [module for module in inner.modules() if isinstance(module, Stack)]
    passed: list[list[Tensor]] = [[] for _ in stacks]
    with ExitStack() as hooks:
        for stack, found in zip(stacks, passed, strict=True):
            first, *_ = blocks = list(stack.blocks)
            hooks.enter_context(first.register_forward_pre_hook(lambda _, args, to=found: to.append(args[0])))
            for block in blocks:
                hooks.enter_context(block.register_forward_hook(lambda _, args, out, to=found: to.append(out[0])))
        hooks.enter_context(torch.compiler.set_stance("force_eager"))  # hooks on compiled code never fire
        called(inner.hidden, batch)
    sequences, made = called(inner.sequences, batch), []
    for stack, found in zip(stacks, passed, strict=True):
        kind = stack.blocks[0].attention.kind  # type: ignore[union-attr]
        made.append(Passed(str(kind), torch.stack(found), sequences[KINDS[str(kind)][0]][1]))
    return made


def stripped(model: nn.Module, *, skip: bool = False, feed_forward: bool = False, norm: bool = False) -> Transformer:
    """The same Transformer with only these parts around its attentions; by default pure attention, layer on layer.

    It shares its weights with the model, and is for evaluation: nothing is dropped.
    """
    inner = _transformer(model)
    shared = {id(x): x for x in (*inner.parameters(), *inner.buffers())}
    made = copy.deepcopy(inner, shared)
    for module in list(made.modules()):
        if isinstance(module, Stack) and not norm:
            module.norm = None
        elif isinstance(module, Block):
            for name, part in list(module.named_children()):
                if isinstance(part, Residual):
                    kept = feed_forward or name != "feed_forward_residual"
                    setattr(module, name, Reduced(part, skip=skip, norm=norm, kept=kept))
            if not feed_forward:
                module.feed_forward = nn.Identity()  # type: ignore[assignment]
    return made


class Reduced(nn.Module):
    """As Residual, but for what is left out; kept=False leaves out the part itself."""

    def __init__(self, residual: Residual, *, skip: bool, norm: bool, kept: bool) -> None:
        super().__init__()
        self.norm = residual.norm if norm else nn.Identity()
        self.pre, self.skip, self.kept = residual.pre, skip, kept

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.pre else x

    def after(self, x: Tensor, part: Tensor) -> Tensor:
        if not self.kept:
            return x
        x = x + part if self.skip else part
        return x if self.pre else self.norm(x)


def _transformer(model: nn.Module) -> Transformer:
    inner = evaluated(model)
    if not isinstance(inner, Transformer):
        raise ValueError(f"depth is of a Transformer made by build; a {type(inner).__name__} is not one")
    return inner
