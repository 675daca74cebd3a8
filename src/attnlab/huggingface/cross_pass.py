"""Passes of a Hugging Face encoder-decoder that keep only what an alignment reads, and stop as soon as it is known.

read_cross_layers   the cross attention of some layers; nothing after the last of them runs, so neither does the readout
probe_positions     β_{t,l} = log p(y_t) if the last cross attention reads position l alone (Snell et al. 2021)
weigh_gradients     Δ_{t,l} = e_l · ∂ log p(y_t) / ∂e_l, e_l the vector of source token l

Attention elsewhere runs on torch's fused functions. Nothing here imports transformers.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlab.huggingface import dispatch
from attnlab.huggingface.native import AttentionCall
from attnlab.records.record import Layer, Record

PROBED = 2**26  # logits in memory at a time


class _FinishedError(Exception):
    """Ends a forward pass whose remaining layers nobody reads."""


@dataclass(frozen=True, eq=False)
class CrossPlan:
    """The cross-attention modules of a model, in order, with their output projections."""

    names: dict[Any, int]  # index of each module
    projections: list[tuple[Tensor, Tensor | None]]

    @classmethod
    def from_record(cls, model: Any, record: Record) -> "CrossPlan":
        """Find the modules that a Record of the same model names. Raises ValueError if it has no cross attention."""
        layers = record.kind("cross")
        if not layers:
            raise ValueError(f"{type(model).__name__} has no cross attention, so it cannot align words by it")
        modules = dict(model.named_modules())
        names = {modules[layer.name]: layer.index for layer in layers}
        return cls(names, [(layer.output_weight, layer.output_bias) for layer in layers])

    def __len__(self) -> int:
        return len(self.projections)


@torch.no_grad()
def read_cross_layers(
    model: Any, plan: CrossPlan, batch: Mapping[str, Tensor], wanted: Collection[int]
) -> dict[int, Layer]:
    """Return the wanted cross-attention layers of one pass. Their inputs and outputs are left empty."""
    found: dict[int, Layer] = {}

    def attend(call: AttentionCall) -> tuple[Tensor, None]:
        index = plan.names.get(call.module)
        if index is None or index not in wanted:
            return _run_own(model, call), None
        seen = call.build_bool_mask()
        context, weights = call.attend_rows(seen, 0, call.query.shape[2])
        found[index] = _build_layer(index, plan, call, seen, context.transpose(1, 2), weights)
        if len(found) == len(wanted):
            raise _FinishedError
        return context, None

    with dispatch.switch_attention(model, dispatch.WATCHED_BOOL, attend), suppress(_FinishedError):
        dispatch.run_forward(model, batch)
    return found


@torch.no_grad()
def probe_positions(model: Any, plan: CrossPlan, batch: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Return β (b,i,j) of the labels (b,i). One pass of the decoder for each source position."""
    last = len(plan) - 1
    inputs = dict(batch)
    encoded = model.get_encoder()(input_ids=inputs.pop("input_ids"), attention_mask=inputs["attention_mask"])
    columns = []
    for position in range(batch["input_ids"].shape[1]):

        def attend(call: AttentionCall, position: int = position) -> tuple[Tensor, None]:
            context = _run_own(model, call)
            if plan.names.get(call.module) == last:
                values = call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
                context = values[:, :, position].unsqueeze(1).expand_as(context)
            return context, None

        with dispatch.switch_attention(model, dispatch.WATCHED_BOOL, attend):
            logits = dispatch.run_forward(model, inputs | {"encoder_outputs": encoded}).logits
        columns.append(_score_labels(logits, labels))
    seen = batch["attention_mask"].bool().unsqueeze(1)
    return torch.stack(columns, dim=-1).masked_fill(~seen, -torch.inf)


def weigh_gradients(model: Any, batch: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Return Δ (b,i,j), 0 at padding. One backward pass for each target position."""
    mask = batch["attention_mask"].bool()
    emphasis = torch.ones(mask.shape, dtype=model.dtype, device=mask.device, requires_grad=True)
    used: list[bool] = []

    def scale_words(_module: Any, _args: Any, vectors: Tensor) -> Tensor | None:
        if used:  # the decoder shares the embedding, and runs after the encoder
            return None
        used.append(True)
        return vectors.detach() * emphasis.unsqueeze(-1)

    embedding = model.get_encoder().get_input_embeddings()
    with torch.enable_grad(), embedding.register_forward_hook(scale_words):
        log_prob = _score_labels(dispatch.run_forward(model, batch).logits, labels)
    columns = [torch.autograd.grad(each.sum(), emphasis, retain_graph=True)[0] for each in log_prob.unbind(1)]
    return torch.stack(columns, dim=1) * mask.unsqueeze(1)


def _score_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log p of the labels (b,i) in float32."""
    flat, wanted = logits.flatten(0, 1), labels.flatten()
    size = max(1, PROBED // flat.shape[-1])
    parts = zip(flat.split(size), wanted.split(size), strict=True)
    picked = [x.float().log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1) for x, y in parts]
    return torch.cat(picked).view(labels.shape)


def _run_own(model: Any, call: AttentionCall) -> Tensor:
    """Compute the context (b,i,h,d) as the model itself does, fused where torch supports it."""
    if model._supports_sdpa and not call.needs_eager():
        return call.run_fused()
    return call.run_eager_in_chunks(call.build_bool_mask())


def _build_layer(
    index: int, plan: CrossPlan, call: AttentionCall, seen: Tensor, context: Tensor, weights: Tensor
) -> Layer:
    weight, bias = plan.projections[index]
    empty = context.new_empty(0)
    return Layer(
        kind="cross", index=index, name=f"cross.{index}", attended=weights, grouped_values=call.value, context=context,
        mixed=context, output_weight=weight, output_bias=bias, inputs=empty, outputs=empty, mask=seen,
    )  # fmt: skip
