"""A Record in the layouts of other tools: plain dictionaries and arrays, without importing any of them.

    to_transformer_lens   tensors by the names of TransformerLens' cache: blocks.0.attn.hook_pattern, …
    to_bertviz            the arguments of BertViz' head_view and model_view
    to_inseq              tokens and arrays as in inseq's attribution of one sequence
    to_numpy, save_npz    every tensor as an array; numpy.load reads the file
    attnlab.contribution  a pandas table, one row for each query and key

b examples, h heads, i queries, j keys, d head size, e model size, l layers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.files import replace_file
from attnlab.records.record import KINDS, Layer, Record

BERTVIZ = {"encoder-self": "encoder", "decoder-self": "decoder", "cross": "cross"}


def to_transformer_lens(record: Record) -> dict[str, Tensor]:
    """Return tensors by the names of a TransformerLens cache, as far as a Record has them.

    attn.hook_pattern (b,h,i,j)     attn.hook_v (b,j,g,d)           attn.hook_z (b,i,h,d)     attn.hook_result (b,i,h,e)
    hook_attn_out (b,i,e)           hook_resid_pre and hook_resid_mid (b,i,e), if the block around is known

    Models with one stack have the prefix blocks.0, encoder-decoders encoder.0 and decoder.0, with cross_attn. Groups of
    heads that share values have one hook_v. Our z is after a gate, where there is one. Weights are not folded.
    """
    cache: dict[str, Tensor] = {}
    two_sided = len({kind for kind in record.kinds if kind != "cross"}) == 2
    for layer in record.layers:
        stack = ("encoder" if KINDS[layer.kind][0] == "source" else "decoder") if two_sided else "blocks"
        block = f"{stack}.{layer.index}"
        cross = layer.kind == "cross"
        attention = f"{block}.{'cross_attn' if cross else 'attn'}"
        cache[f"{attention}.hook_pattern"] = layer.weights
        cache[f"{attention}.hook_v"] = layer.grouped_values.transpose(1, 2)
        cache[f"{attention}.hook_z"] = layer.mixed.transpose(1, 2)
        cache[f"{attention}.hook_result"] = torch.einsum("bhid,hde->bihe", layer.mixed, layer.output_weight)
        cache[f"{block}.hook_{'cross_attn' if cross else 'attn'}_out"] = layer.outputs
        if "residual" in layer.around:
            names = ("hook_resid_mid", "hook_resid_mid_cross") if cross else ("hook_resid_pre", "hook_resid_mid")
            residual = layer.around["residual"]
            cache |= {f"{block}.{names[0]}": residual, f"{block}.{names[1]}": residual + layer.outputs}
    return cache


def to_bertviz(record: Record, example: int = 0) -> dict[str, Any]:
    """Return the keyword arguments of BertViz' head_view and model_view for one example, without its padding.

    attention, tokens                                      a model with one stack: a list of tensors (1,h,i,j)
    encoder_attention, decoder_attention, cross_attention  an encoder-decoder, with encoder_tokens and decoder_tokens
    """
    one = record[example]
    lists: dict[str, list[Tensor]] = {}
    for layer in one.layers:
        lists.setdefault(layer.kind, []).append(_cut_padding(one, layer))
    if len(lists) == 1 and "cross" not in lists:
        kind, attention = next(iter(lists.items()))
        return {"attention": attention, "tokens": _read_tokens(one, KINDS[kind][0])}
    arguments: dict[str, Any] = {f"{BERTVIZ[kind]}_attention": attention for kind, attention in lists.items()}
    return arguments | {
        "encoder_tokens": _read_tokens(one, "source"),
        "decoder_tokens": _read_tokens(one, "target"),
    }


def to_inseq(record: Record, example: int = 0) -> dict[str, Any]:
    """Return one sequence as inseq lays it out: rows are the tokens that are read, columns the tokens that are written.

    source, target         the tokens
    source_attributions    (source,target,l,h) of the cross attention
    target_attributions    (target,target,l,h) of the decoder's self-attention

    Column t is the query that writes token t, the one that reads token t − 1. NaN: that query cannot see the row, and
    no query writes token 0. An encoder alone writes nothing, so it has no such layout: ValueError.
    """
    one = record[example]
    if not any(KINDS[kind][0] == "target" for kind in one.kinds):
        raise ValueError("to_inseq needs a decoder, which writes tokens; this record has encoder-self layers only")
    result: dict[str, Any] = {"target": _read_tokens(one, "target")}
    for kind, name in (("cross", "source_attributions"), ("decoder-self", "target_attributions")):
        layers = one.kind(kind)
        if not len(layers):
            continue
        maps = []
        for layer in layers:
            seen = layer.mask.expand(1, 1, layer.context.shape[2], layer.grouped_values.shape[2])
            visible = _cut_padding(one, layer, layer.weights.masked_fill(~seen, torch.nan))[0]  # (h,i,j)
            written = torch.full_like(visible, torch.nan)
            written[:, 1:] = visible[:, :-1]
            maps.append(written.permute(2, 1, 0))  # (j,i,h)
        result[name] = torch.stack(maps, dim=2)
        if kind == "cross":
            result["source"] = _read_tokens(one, "source")
    return result


def to_numpy(record: Record) -> dict[str, np.ndarray]:
    """Return every tensor of a record as an array, named kind/layer/what, tokens/side, masks/side, readout/what.

    Words are arrays of text, words/side (b,n). Half precision without a numpy type (bfloat16) becomes float32.
    """
    arrays: dict[str, np.ndarray] = {}
    for layer in record.layers:
        tensors = layer.tensors() | {"weights": layer.weights, "values": layer.values}
        tensors.pop("attended", None)
        arrays |= {f"{layer.kind}/{layer.index}/{name}": _to_array(x) for name, x in tensors.items()}
    for part in ("tokens", "masks", "readout"):
        arrays |= {f"{part}/{name}": _to_array(x) for name, x in getattr(record, part).items()}
    return arrays | {f"words/{side}": np.array(lines) for side, lines in record.words.items()}


def save_npz(record: Record, path: str | Path) -> None:
    """Write the arrays of `to_numpy` to an .npz file, atomically. It holds no pickle and is not compressed."""
    if Path(path).suffix != ".npz":
        raise ValueError(f"the file must end in .npz, got {path}")
    with replace_file(Path(path)) as scratch, open(scratch, "wb") as file:
        np.savez(file, **to_numpy(record))  # type: ignore[arg-type]


def _to_array(x: Tensor) -> np.ndarray:
    x = x.detach().cpu()
    array: np.ndarray = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    return array


def _find_tokens(record: Record, side: str, count: int) -> Tensor:
    """Return the positions of an example that are not padding."""
    mask = record.masks.get(side)
    return torch.arange(count) if mask is None else mask[0].cpu().nonzero().flatten()


def _cut_padding(record: Record, layer: Layer, weights: Tensor | None = None) -> Tensor:
    """Return the weights (1,h,i,j) of one example without padding, in memory of the CPU."""
    x = (layer.weights if weights is None else weights).detach().cpu()
    query, key = KINDS[layer.kind]
    return x[:, :, _find_tokens(record, query, x.shape[2])][..., _find_tokens(record, key, x.shape[3])]


def _read_tokens(record: Record, side: str) -> list[str]:
    """Return the tokens of one example as text, or their ids, or their positions."""
    places = list(_iterate_places(record, side))
    if side in record.words:
        return [record.words[side][0][place] for place in places]
    if side in record.tokens:
        return [str(int(record.tokens[side][0, place])) for place in places]
    return [str(place) for place in places]


def _iterate_places(record: Record, side: str) -> Iterator[int]:
    if side not in record.tokens and side not in record.words:  # patches, or frames of a sound
        layer = record.kind(next(kind for kind, (_, key) in KINDS.items() if key == side and kind in record.kinds))[0]
        yield from range(layer.grouped_values.shape[2])
        return
    count = record.tokens[side].shape[1] if side in record.tokens else len(record.words[side][0])
    yield from _find_tokens(record, side, count).tolist()
