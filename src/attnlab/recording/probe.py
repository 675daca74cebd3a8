"""Probes of what single source positions say of a target, stored in a Record (Snell et al. 2021, §2.2, §2.4, §5.1).

    γ_{t,l,w}   the logit of word w at target t, were the attention's output that of attending to position l alone
    β_{t,l}     log p(y_t) from these logits, of the true target y_t                                       eq. 4, 9
    Δ_{t,l}     e_l · ∂ log p(y_t) / ∂e_l, e_l the word vector at position l: what scaling it up adds to log p

β is a logarithm, as in the authors' code; the paper's is its exponential, with the same order. For a classifier of two
classes γ of the second is w·h_l + b, as in eq. 22, and of the first 0, so that β_l = log σ((2y − 1)(w·h_l + b)). The
probe β^uf is β of a model trained with attention=uniform.

What is replaced: in every head of the last cross attention the context becomes the value of position l, whatever the
weights sum to; the mechanism's `finish`, the output projection and all that follows stay as they are. In an LSTM c_t
becomes h_l and s_t is kept; with several heads each context is h_l. In a Transformer it is the last decoder layer, the
output of whose cross attention is read at its own target position only; the residual beside it is kept.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.models.attention import Attention
from attnlab.models.lstm import LSTMTranslator
from attnlab.models.lstm_classifier import LSTMClassifier
from attnlab.models.model import Model
from attnlab.models.transformer import Translator
from attnlab.recording.watch import record, unwrapped
from attnlab.records.record import Layer, Record

ROWS = 1024  # pairs (target, position) whose distributions over the words are held at once

Batch = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]  # what the model's forward takes


def probed(model: torch.nn.Module, batch: Batch, targets: Tensor, *, rows: int = ROWS) -> Record:
    """The record of a batch, with extras "targets" (b,i), "beta" and "saliency" (b,i,j) in its last cross attention.

    targets  the true next tokens (b,i), padding where nothing is predicted; or the classes (b,)
    rows     how many pairs (target, position) are computed at once: what bounds the memory
    """
    opened = _opened(model, batch)
    y = opened.fitting(targets)
    extras = {"targets": y, "beta": _beta(opened, y, rows), "saliency": saliency(model, batch, targets)}
    layers = [
        replace(layer, extras={**layer.extras, **extras}) if layer is opened.layer else layer
        for layer in opened.record.layers
    ]
    return replace(opened.record, layers=layers)


def beta(model: torch.nn.Module, batch: Batch, targets: Tensor, *, rows: int = ROWS) -> Tensor:
    """β (b,i,j), −∞ where the target or the position is padding; the arguments are those of `probed`."""
    opened = _opened(model, batch)
    return _beta(opened, opened.fitting(targets), rows)


@torch.no_grad()
def gamma(model: torch.nn.Module, batch: Batch, *, position: int = 0, words: Tensor | None = None) -> Tensor:
    """γ (b,j,words) at one target position, 0 where l is padding; of all words of the vocabulary, or of those given."""
    opened = _opened(model, batch)
    if not 0 <= position < opened.states.shape[1]:
        raise ValueError(f"position={position}: there are target positions 0 to {opened.states.shape[1] - 1}")
    logits = opened.model.readout(opened.hidden(opened.states[:, position], opened.alone))  # (b,j,vocabulary)
    logits = logits.masked_fill(~opened.source_mask.unsqueeze(-1), 0.0)
    return logits if words is None else logits[..., words]


def saliency(model: torch.nn.Module, batch: Batch, targets: Tensor) -> Tensor:
    """Δ (b,i,j), 0 where the target or the position is padding; one backward pass for each target position.

    e_l is the vector of the source word alone, without its position. Also of a Transformer classifier.
    """
    inner = evaluated(model)
    if not hasattr(inner, "encoder"):
        raise ValueError(f"saliency is of a source, and a {type(inner).__name__} has no encoder")
    tokens, live = called(inner.sequences, batch)["source"]
    emphasis = torch.ones(tokens.shape, dtype=_dtype(inner), device=tokens.device, requires_grad=True)  # (b,j)

    def scaled(embedding: Any, args: tuple[Tensor, ...], x: Tensor) -> Tensor:
        return x + (emphasis - 1).unsqueeze(-1) * embedding.scale * embedding.words(args[0]).detach()

    with torch.enable_grad(), inner.encoder.embedding.register_forward_hook(scaled):
        hidden = called(inner.hidden, batch)
        check_targets(targets, hidden.shape[:-1])
        log_prob = -inner.readout.nll(hidden, targets).view(len(tokens), -1)  # (b,i)
    columns = [torch.autograd.grad(each.sum(), emphasis, retain_graph=True)[0] for each in log_prob.unbind(1)]
    scored = torch.ones_like(targets, dtype=torch.bool) if targets.dim() == 1 else targets != inner.padding
    return torch.stack(columns, dim=1) * (scored.view(len(tokens), -1, 1) & live.unsqueeze(1))


@dataclass(frozen=True, eq=False)
class _Opened:
    """A model's pass over a batch, cut open at the output of its last cross attention."""

    model: Any
    record: Record
    layer: Layer
    states: Tensor  # (b,i,e) what the output is combined with
    alone: Tensor  # (b,j,e) the output, were all attention at position l
    rest: Callable[[Tensor, Tensor], Tensor]  # states and outputs (…,e) -> what the readout reads (…,e)

    @property
    def source_mask(self) -> Tensor:
        return self.record.masks["source"]

    def hidden(self, states: Tensor, alone: Tensor) -> Tensor:
        """States (r,e), each with every output of its row (r,j,e) -> (r,j,e)."""
        return self.rest(states.unsqueeze(1).expand(-1, alone.shape[1], -1), alone)

    def fitting(self, targets: Tensor) -> Tensor:
        """The targets as (b,i)."""
        shape = self.states.shape[:2]
        check_targets(targets, shape if "target" in self.record.tokens else shape[:1])
        return targets.view(shape)


@torch.no_grad()
def _beta(opened: _Opened, targets: Tensor, rows: int) -> Tensor:
    if rows < 1:
        raise ValueError(f"rows must be at least 1, not {rows}")
    classes = "target" not in opened.record.tokens
    example, place = torch.nonzero(torch.ones_like(targets) if classes else targets != opened.model.padding).T
    positions = opened.alone.shape[1]
    found = opened.alone.new_full((*targets.shape, positions), -torch.inf, dtype=_dtype(opened.model))
    for some in torch.arange(len(example), device=example.device).split(max(1, rows // max(positions, 1))):
        b, t = example[some], place[some]
        hidden = opened.hidden(opened.states[b, t], opened.alone[b])
        found[b, t] = -opened.model.readout.nll(hidden, targets[b, t].unsqueeze(1).expand(-1, positions))
    return found.masked_fill(~opened.source_mask.unsqueeze(1), -torch.inf)


@torch.no_grad()
def _opened(model: torch.nn.Module, batch: Batch) -> _Opened:
    inner = evaluated(model)
    if isinstance(inner, Translator):
        return _opened_translator(inner, batch)
    if not isinstance(inner, LSTMTranslator | LSTMClassifier):
        raise ValueError(f"a {type(inner).__name__} has no attention from a target to a source, which β and γ are of")
    found = record(inner, batch)
    layer = found.kind("cross")[-1]
    rest = inner.combine if isinstance(inner, LSTMTranslator) else lambda states, context: context
    return _Opened(inner, found, layer, layer.inputs, _alone(inner, layer), rest)


def _opened_translator(model: Translator, batch: Batch) -> _Opened:
    block: Any = model.decoder.blocks[-1]
    seen: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        hooks.enter_context(block.register_forward_pre_hook(lambda _, args: seen.update(x=args[0])))
        hooks.enter_context(block.attention.register_forward_hook(lambda _, args, out: seen.update(own=out[0])))
        found = record(model, batch)
    layer = found.kind("cross")[-1]
    before_cross = block.attention_residual.after(seen["x"], seen["own"])

    def rest(states: Tensor, output: Tensor) -> Tensor:
        x = block.cross_residual.after(states, output)
        last = block.feed_forward_residual
        x = last.after(x, block.feed_forward(last.before(x)))
        return x if model.decoder.norm is None else model.decoder.norm(x)

    return _Opened(model, found, layer, before_cross, _alone(model, layer), rest)


def _alone(model: Model, layer: Layer) -> Tensor:
    """The output of an attention that gives each position in turn all it has, (b,j,e)."""
    attention = model.get_submodule(layer.name)
    assert isinstance(attention, Attention)
    output = torch.einsum("bhjd,hde->bje", attention.mechanism.finish(layer.values), layer.output_weight)
    return output if layer.output_bias is None else output + layer.output_bias


def evaluated(model: torch.nn.Module) -> Any:
    """The model of ours inside any wrapper; refuses another, and one in training mode."""
    inner = unwrapped(model)
    if not isinstance(inner, Model):
        raise ValueError(f"this needs a model made by attnlab's build; a {type(inner).__name__} is not one")
    if inner.training:
        raise ValueError(f"this {type(inner).__name__} is in training mode; call model.eval() first")
    return inner


def check_targets(targets: Tensor, shape: torch.Size) -> None:
    if targets.shape != shape or targets.is_floating_point():
        given = f"{targets.dtype} {tuple(targets.shape)}"
        raise ValueError(f"targets must be whole numbers {tuple(shape)}, one for each prediction, not {given}")


def called(function: Callable[..., Any], batch: Batch) -> Any:
    """What the function returns for a batch, whichever form that has."""
    if isinstance(batch, Mapping):
        return function(**batch)
    return function(batch) if isinstance(batch, Tensor) else function(*batch)


def _dtype(model: Model) -> torch.dtype:
    return torch.promote_types(next(model.parameters()).dtype, torch.float32)
