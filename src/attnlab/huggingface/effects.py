"""What an intervention does to a model: its loss, its logits and its states, before and after.

    loss       mean −log p of the targets, in nats. Targets are the next tokens of a causal or encoder-decoder model;
               for others (a classifier, a masked model), what the whole model finds likeliest. A causal model that
               reads a single token has no target and no loss
    kl         mean KL(p ‖ p') in nats over all tokens, of the distributions before and after
    distance   ‖y − y'‖ / ‖y‖ of the model's first output y, over all its tokens; for models without logits, too

Importance ranks heads by the change that knocking each out makes: one pass for each head (Michel et al. 2019).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from attnlab.config import check_known
from attnlab.huggingface import dispatch, inputs
from attnlab.huggingface.intervening import find_sites, intervene
from attnlab.huggingface.projections import find_inner
from attnlab.mechanisms.mechanism import widen
from attnlab.models.model import Model
from attnlab.recording.interventions import Intervention, KnockOutHead
from attnlab.recording.probe import call_with_batch

Progress = Callable[[int, int, str], None]
COLUMNS = ("loss_change_nats", "kl_nats", "distance")


@dataclass(frozen=True, eq=False)
class ModelTrial:
    """A model and a batch, ready to run: `run` returns the first output, and `scored` marks what counts."""

    run: Callable[[], Tensor]  # -> (b,i,words), (b,classes) or states (b,i,e)
    has_logits: bool
    targets: Tensor | None  # (b,i), with −1 where nothing is predicted, or (b,); None: the likeliest of the whole model
    tokens: Tensor  # (b,i) bool: positions that are not padding

    def compare(self, before: Tensor, after: Tensor) -> "Effect":
        """Compare the outputs of two passes."""
        before, after = widen(before), widen(after)
        counted = self.tokens if before.dim() == 3 else torch.ones(before.shape[:-1], dtype=torch.bool)
        counted = counted.to(before.device)
        y, changed = before[counted], after[counted]
        distance = float((y - changed).norm() / y.norm().clamp_min(torch.finfo(y.dtype).tiny))
        if not self.has_logits:
            return Effect(before, after, None, None, None, distance)
        targets = before.argmax(-1).where(counted, -1) if self.targets is None else self.targets
        p, q = before.log_softmax(-1), after.log_softmax(-1)
        kl = max(0.0, float((p.exp() * (p - q)).sum(-1)[counted].mean()))  # the last token counts, without a target too
        scored = targets >= 0
        if not bool(scored.any()):
            return Effect(before, after, None, None, kl, distance)
        index = targets.clamp_min(0).unsqueeze(-1)
        loss, changed_loss = (float(-x.gather(-1, index).squeeze(-1)[scored].mean()) for x in (p, q))
        return Effect(before, after, loss, changed_loss, kl, distance)


@dataclass(frozen=True, eq=False)
class Effect:
    """The outputs of a model without and with interventions, and what differs."""

    logits: Tensor  # before; the first output of a model without logits
    changed_logits: Tensor
    loss: float | None  # mean nats for each target; None without logits or targets
    changed_loss: float | None
    kl: float | None  # None without logits
    distance: float

    @property
    def loss_change(self) -> float | None:
        """How many nats a target costs more; below 0, the model predicts better with the interventions."""
        return None if self.loss is None or self.changed_loss is None else self.changed_loss - self.loss

    def __repr__(self) -> str:
        if self.kl is None:
            return f"Effect(distance {self.distance:.4g}; the model has no logits)"
        if self.loss is None:
            return f"Effect(KL {self.kl:.4g} nats, distance {self.distance:.4g}; there is no next token to predict)"
        change = f"loss {self.loss:.4f} → {self.changed_loss:.4f} nats, KL {self.kl:.4g} nats"
        return f"Effect({change}, distance {self.distance:.4g})"


def measure_effect(model: nn.Module, batch: Any, *interventions: Intervention, **how: Any) -> Effect:
    """Run a batch without and with interventions and compare the outputs.

    batch   as for attnlab.record: our model's inputs; texts or a mapping of tensors for a Hugging Face model
    how     tokenizer, target and max_length for texts; targets for our models: true next tokens (b,i), classes (b,)
    """
    trial = prepare_trial(model, batch, **how)
    with torch.no_grad():
        before = trial.run()
        with intervene(model, *interventions):
            after = trial.run()
    return trial.compare(before, after)


def rank_heads(
    model: nn.Module, batch: Any, *, layers: Collection[int] | None = None, heads: Collection[int] | None = None,
    progress: Progress = lambda done, total, what: None, **how: Any,
) -> pd.DataFrame:  # fmt: skip
    """Knock out every head in turn, and return kind, layer, head and the effect, the most important head first.

    The columns are loss_change_nats (if there are tokens to predict), kl_nats (for models with logits) and distance.
    Heads are ordered by the first of these.

    layers, heads   knock out only these; layers are counted within their kind
    how             as for measure_effect
    """
    trial, places = prepare_trial(model, batch, **how), _list_heads(model, layers, heads)
    rows = []
    with torch.no_grad():
        before = trial.run()
        for done, (kind, layer, head) in enumerate(places):
            with intervene(model, KnockOutHead(kind=kind, layer=layer, head=head)):
                effect = trial.compare(before, trial.run())
            values = dict(zip(COLUMNS, (effect.loss_change, effect.kl, effect.distance), strict=True))
            rows.append({"kind": kind, "layer": layer, "head": head} | values)
            progress(done + 1, len(places), "heads")
    table = pd.DataFrame(rows).dropna(axis=1, how="all")
    order = next(name for name in COLUMNS if name in table)
    return table.sort_values(order, ascending=False, ignore_index=True)


def _list_heads(
    model: nn.Module, layers: Collection[int] | None, heads: Collection[int] | None
) -> list[tuple[str, int, int]]:
    """Return kind, layer and head of the selected heads. Raises ValueError for a layer or head that does not exist."""
    sites = find_sites(model)
    check_known(layers, (site.layer for site in sites), "the model", "layer")
    check_known(heads, range(max(site.heads for site in sites)), "the model", "head")
    places = [
        (site.kind, site.layer, head)
        for site in sites
        for head in range(site.heads)
        if (layers is None or site.layer in layers) and (heads is None or head in heads)
    ]
    if not places:
        raise ValueError("there is no head to knock out: none of the chosen layers has one of the chosen heads")
    return places


def prepare_trial(model: nn.Module, batch: Any, **how: Any) -> ModelTrial:
    """Return the trial of a model on a batch; arguments as for `measure_effect`."""
    inner = find_inner(model)
    if inner.training:
        raise ValueError(f"this {type(inner).__name__} is in training mode; call model.eval() first")
    return _prepare_ours(inner, batch, **how) if isinstance(inner, Model) else _prepare_pretrained(inner, batch, **how)


def _prepare_ours(model: Any, batch: Any, *, targets: Tensor | None = None) -> ModelTrial:
    sequences = call_with_batch(model.sequences, batch)
    classifies = "target" not in sequences
    tokens, mask = sequences["source" if classifies else "target"]
    if targets is None and not classifies:
        targets = follow_tokens(tokens, mask)
    elif targets is not None and targets.dim() == 2:
        targets = targets.masked_fill(targets == model.padding, -1)
    return ModelTrial(lambda: call_with_batch(model, batch), True, targets, mask)


def _prepare_pretrained(
    model: Any, batch: Any, *, tokenizer: Any = None, target: Any = None, max_length: int | None = None
) -> ModelTrial:
    given = inputs.build_batch(model, tokenizer, batch, target, max_length)
    side = "decoder_" if model.config.is_encoder_decoder else ""
    ids = given.get(f"{side}input_ids")
    if ids is None:
        kind = type(model).__name__
        raise ValueError(f"{kind}: the effect on a loss needs tokens, and the batch has no {side}input_ids")
    mask = given.get(f"{side}attention_mask")
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.dim() != 2 else mask.bool()
    names_words = model.get_output_embeddings() is not None
    has_logits = names_words or type(model).__name__.endswith("Classification")
    causal = names_words and any(site.kind == "decoder-self" for site in find_sites(model))
    targets = follow_tokens(ids, mask) if causal else None
    return ModelTrial(lambda: dispatch.run_forward(model, given)[0], has_logits, targets, mask)


def follow_tokens(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the next token at each position (b,i), −1 at the last one and at padding."""
    following = torch.full_like(tokens, -1)
    following[:, :-1] = tokens[:, 1:].where(mask[:, 1:] & mask[:, :-1], -1)
    return following
