"""Probes of single source positions: how well each predicts a target (Snell et al. 2021, §2.2, §2.4, §5.1).

    γ_{t,l,w}   the logit of word w at target t if attention reads position l alone
    β_{t,l}     log p(y_t) from these logits, of the true target y_t                                       eq. 4, 9
    Δ_{t,l}     e_l · ∂ log p(y_t) / ∂e_l, e_l the word vector at position l: the change of log p as e_l is scaled up

β is a logarithm, as in the authors' code; the paper's β is its exponential, with the same order. For a classifier of
two classes, γ of the second class is w·h_l + b, as in eq. 22, and γ of the first is 0, so that
β_l = log σ((2y − 1)(w·h_l + b)). The probe β^uf is β of a model trained with attention=uniform.

The probes replace the context of every head of the last cross attention by the value of position l, whatever the sum of
the weights. The mechanism's `turn` and `finish`, the output projection and all later parts do not change. In an LSTM,
c_t becomes h_l in every head, and s_t does not change. In a Transformer, this is the last decoder layer: later parts
read the output of its cross attention at its own target position only, and the residual does not change.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnlab.models.attention import Attention
from attnlab.models.lstm import LSTMTranslator
from attnlab.models.lstm_classifier import LSTMClassifier
from attnlab.models.model import Model
from attnlab.models.transformer import Translator
from attnlab.recording.watch import record, unwrap_model
from attnlab.records.record import Layer, Record, turn_values

ROWS = 1024  # pairs (target, position) whose distributions over the words are in memory at once

Batch = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]  # the arguments of the model's forward


def record_probes(model: torch.nn.Module, batch: Batch, targets: Tensor, *, rows: int = ROWS) -> Record:
    """Record a batch, with extras "targets" (b,i), "beta" and "saliency" (b,i,j) in its last cross attention.

    targets  the true next tokens (b,i), padding where nothing is predicted; or the classes (b,)
    rows     number of pairs (target, position) to compute at once; it bounds the memory
    """
    cut = _cut_pass(model, batch)
    y = cut.shape_targets(targets)
    extras = {"targets": y, "beta": _beta(cut, y, rows), "saliency": saliency(model, batch, targets)}
    probed = replace(cut.layer, extras={**cut.layer.extras, **extras})
    return replace(cut.record, layers=[probed if layer is cut.layer else layer for layer in cut.record.layers])


def beta(model: torch.nn.Module, batch: Batch, targets: Tensor, *, rows: int = ROWS) -> Tensor:
    """Return β (b,i,j), −∞ where the target or the position is padding; arguments as for `record_probes`."""
    cut = _cut_pass(model, batch)
    return _beta(cut, cut.shape_targets(targets), rows)


@torch.no_grad()
def gamma(model: torch.nn.Module, batch: Batch, *, position: int = 0, words: Tensor | None = None) -> Tensor:
    """Return γ (b,j,words) at one target position, 0 at padding; words defaults to the whole vocabulary."""
    cut = _cut_pass(model, batch)
    if not 0 <= position < cut.states.shape[1]:
        raise ValueError(f"position must be a target position, 0 to {cut.states.shape[1] - 1}, got {position}")
    examples = torch.arange(len(cut.states), device=cut.states.device)
    logits: Tensor = cut.model.readout(cut.hidden(examples, torch.full_like(examples, position)))  # (b,j,vocabulary)
    logits = logits.masked_fill(~cut.record.masks["source"].unsqueeze(-1), 0.0)
    return logits if words is None else logits[..., words]


def saliency(model: torch.nn.Module, batch: Batch, targets: Tensor) -> Tensor:
    """Return Δ (b,i,j), 0 where the target or the position is padding; one backward pass for each target position.

    e_l is the vector of the source word without its position. A Transformer classifier works too.
    """
    inner = require_eval_model(model)
    if not hasattr(inner, "encoder"):
        raise ValueError(f"saliency needs a model with an encoder, got a {type(inner).__name__}")
    tokens, live = call_with_batch(inner.sequences, batch)["source"]
    emphasis = torch.ones(tokens.shape, dtype=_dtype(inner), device=tokens.device, requires_grad=True)  # (b,j)

    def scale_words(embedding: Any, args: tuple[Tensor, ...], x: Tensor) -> Tensor:
        words: Tensor = embedding.scale * embedding.words(args[0]).detach()
        return x + (emphasis - 1).unsqueeze(-1) * words

    with torch.enable_grad(), inner.encoder.embedding.register_forward_hook(scale_words):
        nll, scored = compute_nll(inner, batch, targets)
    log_prob = -nll.view(len(tokens), -1)  # (b,i)
    columns = [torch.autograd.grad(each.sum(), emphasis, retain_graph=True)[0] for each in log_prob.unbind(1)]
    mask: Tensor = scored.view(len(tokens), -1, 1) & live.unsqueeze(1)
    return torch.stack(columns, dim=1) * mask


@dataclass(frozen=True, eq=False)
class _CutPass:
    """A forward pass over a batch, cut at the output of the last cross attention."""

    model: Any
    record: Record
    layer: Layer
    states: Tensor  # (b,i,e) the tensor that the output is combined with
    rest: Callable[[Tensor, Tensor], Tensor]  # states and outputs (…,e) -> input of the readout (…,e)

    def hidden(self, b: Tensor, t: Tensor) -> Tensor:
        """Return the inputs (r,j,e) of the readout at the targets t (r,) of the examples b (r,), for each position."""
        alone = self._attend_alone(b, t)
        return self.rest(self.states[b, t].unsqueeze(1).expand(-1, alone.shape[1], -1), alone)

    def _attend_alone(self, b: Tensor, t: Tensor) -> Tensor:
        """Return the outputs (r,j,e) of the attention if these targets read each position alone."""
        if self.layer.turning is None:
            return self._alone[b]
        turning = self.layer.turning[b, :, t].unsqueeze(2)  # (r,h,1,·)
        return self._project(turn_values(turning, self.layer.values[b]).squeeze(2))

    @cached_property
    def _alone(self) -> Tensor:
        return self._project(self.layer.values)  # (b,j,e)

    def _project(self, contexts: Tensor) -> Tensor:
        """Return the outputs (b,j,e) of contexts (b,h,j,d)."""
        layer, attention = self.layer, self.model.get_submodule(self.layer.name)
        assert isinstance(attention, Attention)
        output = torch.einsum("bhjd,hde->bje", attention.mechanism.finish(contexts), layer.output_weight)
        return output if layer.output_bias is None else output + layer.output_bias

    def shape_targets(self, targets: Tensor) -> Tensor:
        """Return the targets as (b,i), after a check of their shape."""
        shape = self.states.shape[:2]
        check_targets(targets, shape if "target" in self.record.tokens else shape[:1])
        return targets.view(shape)


@torch.no_grad()
def _beta(cut: _CutPass, targets: Tensor, rows: int) -> Tensor:
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    classes = "target" not in cut.record.tokens
    pairs = torch.nonzero(torch.ones_like(targets) if classes else targets != cut.model.padding)  # example, position
    positions = cut.layer.grouped_values.shape[2]
    log_prob = cut.states.new_full((*targets.shape, positions), -torch.inf, dtype=_dtype(cut.model))
    for chunk in torch.split(pairs, max(1, rows // max(positions, 1))):
        b, t = chunk.T
        hidden = cut.hidden(b, t)
        log_prob[b, t] = -cut.model.readout.nll(hidden, targets[b, t].unsqueeze(1).expand(-1, positions))
    return log_prob.masked_fill(~cut.record.masks["source"].unsqueeze(1), -torch.inf)


@torch.no_grad()
def _cut_pass(model: torch.nn.Module, batch: Batch) -> _CutPass:
    inner = require_eval_model(model)
    if isinstance(inner, Translator):
        return _cut_translator(inner, batch)
    if not isinstance(inner, LSTMTranslator | LSTMClassifier):
        raise ValueError(f"β and γ need a translator or an LSTM classifier, got a {type(inner).__name__}")
    full = record(inner, batch)
    layer = full.kind("cross")[-1]
    rest = inner.combine if isinstance(inner, LSTMTranslator) else lambda states, context: context
    return _CutPass(inner, full, layer, layer.inputs, rest)


def _cut_translator(model: Translator, batch: Batch) -> _CutPass:
    block: Any = model.decoder.blocks[-1]
    seen: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        hooks.enter_context(block.register_forward_pre_hook(lambda _, args: seen.update(x=args[0])))
        hooks.enter_context(block.attention.register_forward_hook(lambda _, args, out: seen.update(own=out[0])))
        full = record(model, batch)
    layer = full.kind("cross")[-1]
    before_cross = block.attention_residual.add(seen["x"], seen["own"])

    def rest(states: Tensor, output: Tensor) -> Tensor:
        x = block.cross_residual.add(states, output)
        last = block.feed_forward_residual
        x = last.add(x, block.feed_forward(last.prepare(x)))
        norm: Callable[[Tensor], Tensor] | None = model.decoder.norm
        return x if norm is None else norm(x)

    return _CutPass(model, full, layer, before_cross, rest)


def require_eval_model(model: torch.nn.Module) -> Any:
    """Unwrap our model. Raises ValueError for another model, and for one in training mode."""
    inner = unwrap_model(model)
    if not isinstance(inner, Model):
        raise ValueError(f"this needs a model from attnlab's build, got a {type(inner).__name__}")
    if inner.training:
        raise ValueError(f"this {type(inner).__name__} is in training mode; call model.eval() first")
    return inner


def compute_nll(model: Any, batch: Batch, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return −log p of each target, and a mask of the targets that are scored, both in the shape of the targets.

    targets   the true next tokens (b,i), padding where nothing is predicted; or the classes (b,)
    """
    with torch.compiler.set_stance("force_eager"):  # hooks on compiled code never fire
        hidden = call_with_batch(model.hidden, batch)
    check_targets(targets, hidden.shape[:-1])
    scored = torch.ones_like(targets, dtype=torch.bool) if targets.dim() == 1 else targets != model.padding
    return model.readout.nll(hidden, targets), scored


def check_targets(targets: Tensor, shape: torch.Size) -> None:
    if targets.shape != shape or targets.is_floating_point():
        actual = f"{targets.dtype} {tuple(targets.shape)}"
        raise ValueError(f"targets must be integers {tuple(shape)}, one for each prediction, got {actual}")


def call_with_batch(function: Callable[..., Any], batch: Batch) -> Any:
    """Call a function with the tensors of a batch: one, a sequence or a mapping."""
    if isinstance(batch, Mapping):
        return function(**batch)
    return function(batch) if isinstance(batch, Tensor) else function(*batch)


def _dtype(model: Model) -> torch.dtype:
    return torch.promote_types(next(model.parameters()).dtype, torch.float32)
