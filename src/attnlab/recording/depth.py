"""The states of a Transformer at every depth, optionally without some parts of its layers (Dong et al. 2021).

    pure attention     x ← attention(x)                       skip=False, feed_forward=False, norm=False
    with skip          x ← x + attention(x)                   skip=True,  feed_forward=False, norm=False
    with MLP           x ← attention(x), x ← MLP(x)           skip=False, feed_forward=True,  norm=False
    the whole layer                                           skip=True,  feed_forward=True,  norm=True

The model may be freshly initialized or trained: its own weights are used. A part that is left out is the identity.
Without skip, the output of a part replaces its input.
"""

import copy
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlab.models.blocks import Block, Residual, Stack
from attnlab.models.transformer import Transformer
from attnlab.recording.probe import Batch, call_with_batch, require_eval_model
from attnlab.records.record import KINDS


class StackStates(NamedTuple):
    """The states of one stack: before its first layer and after each layer, without the final norm."""

    kind: str  # of its self-attention
    states: Tensor  # (layers+1,b,n,e)
    mask: Tensor  # (b,n) bool, True = a token


@torch.no_grad()
def record_states(model: nn.Module, batch: Batch) -> list[StackStates]:
    """Return the states of every stack of a Transformer in evaluation mode; a translator's encoder comes first."""
    inner = _require_transformer(model)
    stacks = [module for module in inner.modules() if isinstance(module, Stack)]
    states: list[list[Tensor]] = [[] for _ in stacks]
    with ExitStack() as hooks:
        for stack, own in zip(stacks, states, strict=True):
            first, *_ = blocks = list(stack.blocks)
            hooks.enter_context(first.register_forward_pre_hook(lambda _, args, to=own: to.append(args[0])))
            for block in blocks:
                hooks.enter_context(block.register_forward_hook(lambda _, args, out, to=own: to.append(out[0])))
        hooks.enter_context(torch.compiler.set_stance("force_eager"))  # hooks on compiled code never fire
        call_with_batch(inner.hidden, batch)
    sequences, results = call_with_batch(inner.sequences, batch), []
    for stack, own in zip(stacks, states, strict=True):
        kind = str(stack.blocks[0].attention.kind)  # type: ignore[union-attr]
        results.append(StackStates(kind, torch.stack(own), sequences[KINDS[kind][0]][1]))
    return results


def strip_model(model: nn.Module, *, skip: bool = False, feed_forward: bool = False, norm: bool = False) -> Transformer:
    """Return the same Transformer with only these parts around its attentions; by default pure attention.

    It shares its weights with the model. Use it for evaluation only: it has no dropout.
    """
    inner = _require_transformer(model)
    shared = {id(x): x for x in (*inner.parameters(), *inner.buffers())}
    stripped = copy.deepcopy(inner, shared)
    for module in list(stripped.modules()):
        if isinstance(module, Stack) and not norm:
            module.norm = None
        elif isinstance(module, Block):
            for name, part in list(module.named_children()):
                if isinstance(part, Residual):
                    active = feed_forward or name != "feed_forward_residual"
                    setattr(module, name, ReducedResidual(part, skip=skip, norm=norm, active=active))
            if not feed_forward:
                module.feed_forward = nn.Identity()  # type: ignore[assignment]
    return stripped


class ReducedResidual(nn.Module):
    """A Residual without its skip connection or its norm; active=False also leaves out the part itself."""

    def __init__(self, residual: Residual, *, skip: bool, norm: bool, active: bool) -> None:
        super().__init__()
        self.norm = residual.norm if norm else nn.Identity()
        self.pre, self.skip, self.active = residual.pre, skip, active

    def prepare(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.pre else x

    def add(self, x: Tensor, part: Tensor) -> Tensor:
        if not self.active:
            return x
        x = x + part if self.skip else part
        return x if self.pre else self.norm(x)


def _require_transformer(model: nn.Module) -> Transformer:
    inner = require_eval_model(model)
    if not isinstance(inner, Transformer):
        raise ValueError(f"this needs a Transformer from attnlab's build, got a {type(inner).__name__}")
    return inner
