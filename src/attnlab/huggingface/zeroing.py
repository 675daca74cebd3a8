"""Value zeroing: how far a token's state moves when the value of another token is set to 0 (Mohebbi et al. 2023).

In one layer the value of token j becomes 0 in every head, and no weight changes. With x_i the state after that layer's
block and x_i' the changed one,

    zeroing_ij = 1 − cos(x_i, x_i')

It sees the whole block, feed-forward and norms included, where `contribution` sees the attention alone. One pass for
each layer, with the example repeated once for each token.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.huggingface import dispatch, inputs
from attnlab.huggingface.capture import find_blocks
from attnlab.huggingface.intervening import intervene
from attnlab.huggingface.projections import find_inner
from attnlab.huggingface.recorder import record
from attnlab.mechanisms.mechanism import widen
from attnlab.models.model import Model
from attnlab.recording.depth import record_states
from attnlab.recording.interventions import KnockOutValue
from attnlab.records.record import KINDS, Record


@torch.no_grad()
def record_zeroing(model: nn.Module, batch: Any, **how: Any) -> Record:
    """Record a batch, with "zeroing" (b,i,j) in the extras of every layer; how is that of attnlab.record.

    The last state of a Hugging Face model is after its final norm, as transformers returns it. MAPS and `rollout` know
    the map by the name "zeroing". Needs a Transformer.
    """
    inner = find_inner(model)
    full = record(model, batch, **how)
    ours = isinstance(inner, Model)
    given = _name_inputs(inner, batch) if ours else _build_inputs(inner, batch, how)
    maps: list[list[Tensor]] = [[] for _ in full.layers]
    for example in range(len(full)):
        one = {name: x[example : example + 1] for name, x in given.items()}
        whole = _read_states(inner, one)
        _check_states(inner, full, whole)
        for layer, held in zip(full.layers, maps, strict=True):
            count = layer.grouped_values.shape[2]
            many = {name: x.expand(count, *x.shape[1:]) for name, x in one.items()}
            with intervene(model, KnockOutValue(kind=layer.kind, layer=layer.index, token=torch.arange(count))):
                changed = _read_states(inner, many)
            stack = KINDS[layer.kind][0]
            x, y = widen(whole[stack][layer.index]), widen(changed[stack][layer.index])  # (1,i,e), (j,i,e)
            held.append((1 - F.cosine_similarity(x, y, dim=-1).mT).clamp_min(0.0))  # (i,j)
    extras = [{**layer.extras, "zeroing": torch.stack(held)} for layer, held in zip(full.layers, maps, strict=True)]
    return replace(full, layers=[replace(layer, extras=x) for layer, x in zip(full.layers, extras, strict=True)])


def _check_states(model: nn.Module, full: Record, states: Mapping[str, Any]) -> None:
    """Check that the number of each layer names the state after its block, also where blocks have no attention."""
    for stack in {KINDS[layer.kind][0] for layer in full.layers}:
        numbers = [layer.index for layer in full.layers if layer.kind != "cross" and KINDS[layer.kind][0] == stack]
        blocks = sorted(set(find_blocks(model).values())) if "missing_layers" in full.meta else numbers
        if len(states[stack]) != len(blocks) or not set(numbers) <= set(blocks):
            kind, count = type(model).__name__, len(states[stack])
            raise ValueError(f"value zeroing needs the state after each layer: {kind} has {count} for {len(blocks)}")


def _name_inputs(model: Model, batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch of our model by the names of its forward."""
    if isinstance(batch, Mapping):
        return dict(batch)
    tensors = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    return dict(zip(("source", "target") if len(tensors) == 2 else ("tokens",), tensors, strict=True))


def _build_inputs(model: Any, batch: Any, how: Mapping[str, Any]) -> dict[str, Tensor]:
    return inputs.build_batch(model, how.get("tokenizer"), batch, how.get("target"), how.get("max_length"))


def _read_states(model: Any, batch: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the states (b,n,e) after each block, by "source" and "target"."""
    if isinstance(model, Model):
        return {KINDS[stack.kind][0]: list(stack.states[1:]) for stack in record_states(model, batch)}
    output = dispatch.run_forward(model.base_model, batch, output_hidden_states=True)  # without logits
    if model.config.is_encoder_decoder:
        lists = {"source": output.encoder_hidden_states, "target": output.decoder_hidden_states}
    elif "hidden_states" in output:
        lists = dict.fromkeys(("source", "target"), output.hidden_states)
    else:
        what = f"value zeroing needs the state after each layer, and {type(model).__name__} returns none"
        raise ValueError(f"{what}; pass one of its towers, such as model.text_model")
    return {side: list(states[1:]) for side, states in lists.items()}
