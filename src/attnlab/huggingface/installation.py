"""Build the mechanisms of an adapted model, and install them in its attention modules.

Nothing here imports transformers.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attnlab.config import describe_error
from attnlab.huggingface import dispatch, dummy_inputs, layer_inputs
from attnlab.huggingface.adaptation import FROM_MODEL, Adaptation, AttentionModule, run_on_tokens
from attnlab.huggingface.carries import Place
from attnlab.huggingface.query_projection import QueryProbe, QueryProjection, build_projection, replace_queries
from attnlab.mechanisms import Mechanism, attention, choose_attentions, find_mechanism
from attnlab.mechanisms.decoding_check import check_cached_decoding, has_laws


def install_mechanisms(model: Any, adaptation: Adaptation, found: Collection[AttentionModule]) -> None:
    """Give each attention module of the chosen kinds its mechanism, and what that reads beside q, k and v."""
    built = build_mechanisms(adaptation, found)
    wider = [one.module for one, mechanism, _ in built if mechanism.query_heads != mechanism.heads]
    projections = find_projections(model, wider) if wider else {}
    for one, mechanism, place in built:  # change the model only after every mechanism is built
        one.module.attnlab = mechanism.to(one.device, one.dtype).train(one.module.training)
        if (projection := projections.get(one.module)) is not None:
            place = replace(place, query_projection=projection.name, query_features=projection.features)
            queries = build_projection(projection, mechanism.query_heads // mechanism.heads - 1, one.dtype, one.device)
            one.module.attnlab_queries = queries.train(one.module.training)
            projection.linear.register_forward_hook(replace_queries)
        one.module.attnlab_place = place  # type: ignore[assignment]
        if mechanism.needs_layer:
            one.module.register_forward_pre_hook(dispatch.begin_attention, with_kwargs=True)
            one.module.register_forward_hook(layer_inputs.end_inputs, always_call=True)


def build_mechanisms(
    adaptation: Adaptation, found: Collection[AttentionModule]
) -> list[tuple[AttentionModule, Mechanism, Place]]:
    """Build the mechanism of each attention module of the chosen kinds, with its place in the cascade.

    Layers with different windows see different keys, so a mechanism that carries gets a cascade for each window.
    Raises ValueError for a mechanism that does not fit its module, or that a decoder cannot cache.
    """
    stacks: dict[str, list[AttentionModule]] = {}
    for one in found:
        if one.kind in adaptation.kinds:
            stacks.setdefault(re.sub(r"\.\d+(?=\.|$)|^\d+\.", "", one.name), []).append(one)
    built: list[tuple[AttentionModule, Mechanism, Place]] = []
    lengths: Counter[str] = Counter()  # of the cascades so far
    proved: set[Any] = set()  # one layer stands for all that differ from it only in their number
    for stem, members in stacks.items():
        chosen = choose_attentions(
            adaptation.attention, adaptation.options, len(members), where=f"{stem} of the model", decided=FROM_MODEL
        )
        for index, (one, (name, options)) in enumerate(zip(members, chosen, strict=True)):
            carries = find_mechanism(name).carries
            cascade = f"{stem} {one.window}" if carries else stem
            layer, lengths[cascade] = lengths[cascade] if carries else index, lengths[cascade] + 1
            sizes = {"heads": one.heads, "head_dim": one.head_dim, "model_size": one.widths[0]}
            mechanism = attention(name, **sizes, layer=layer, **options)
            mechanism.scale *= one.scale / one.head_dim**-0.5  # follow models whose scale is not 1/√d
            check_fit(mechanism, one)
            case = (name, repr(options), mechanism.first, one.kind, *sizes.values())
            if one.kind != "encoder-self" and not has_laws(mechanism) and case not in proved:
                check_cached_decoding(mechanism, cross=one.kind == "cross")
                proved.add(case)
            built.append((one, mechanism, Place(one.name, one.kind, cascade, layer)))
    return built


def check_fit(mechanism: Mechanism, one: AttentionModule) -> None:
    """Raise ValueError if an attention module cannot give the mechanism what it reads."""
    kind, heads = type(mechanism).__name__, mechanism.heads
    if mechanism.query_heads % heads:
        raise ValueError(f"{kind} has {mechanism.query_heads} query heads, not a multiple of the {heads} of {one.name}")
    if type(mechanism).key_side is not Mechanism.key_side and one.widths[0] != one.widths[1]:
        reads = f"{kind} reads the inputs of queries and keys, which have different sizes {one.widths} in {one.name}"
        raise ValueError(f"{reads}: choose other kinds=")
    if mechanism.head_parts > 1 and one.rotates:
        what = f"{one.name} rotates whole heads (RoPE), but {kind} divides each into {mechanism.head_parts} parts"
        raise ValueError(f"{what}: choose a mechanism that does not, such as differential-v2")
    if mechanism.lookback and one.kind != "encoder-self" and not one.window.endswith("window=None"):
        raise ValueError(f"{kind} reads former queries, which the sliding window of {one.name} does not keep")
    if mechanism.lookback and one.kind != "encoder-self" and one.has_bias:
        raise ValueError(f"{kind} reads former queries, for which {one.name} has no position bias")
    if one.caps and mechanism.query_heads != heads:
        raise ValueError(f"{kind} has further queries, whose logits the cap of {one.name} does not reach")
    reads_keys = mechanism.positional or mechanism.self_only or mechanism.lookback or mechanism.carry_of == "keys"
    if one.sinks and (reads_keys or type(mechanism).key_side is not Mechanism.key_side):
        what = f"{kind} reads the position or the input of every key, which the attention sink of {one.name} lacks"
        raise ValueError(f"{what}: choose another mechanism")
    try:
        attend_once(mechanism, one)
    except Exception as error:  # of many types, by a user-written class
        what, size = f"{kind} does not fit {one.name}", one.values[1]
        if size != one.head_dim:
            what += f": its values have heads of size {size}, its keys of {one.head_dim}"
        raise ValueError(f"{what}: {describe_error(error)}") from error


@torch.no_grad()
def attend_once(mechanism: Mechanism, one: AttentionModule) -> None:
    """Call the mechanism, by its definition, on zeros of the shapes that the attention module gives it."""
    (groups, size), impl = one.values, mechanism.impl
    mechanism.eval()
    x, y = (torch.zeros(1, 2, width) for width in one.widths)
    q, k = (torch.zeros(1, heads, 2, one.head_dim) for heads in (mechanism.query_heads, groups))
    bias = torch.zeros(1, mechanism.query_heads, 2, 2) if one.has_bias else None
    options: dict[str, Any] = {"causal": one.kind == "decoder-self", "bias": bias}
    try:
        mechanism.impl = "reference"
        sides = (mechanism.query_side(x), mechanism.key_side(y))
        mechanism(q, k, torch.zeros(1, groups, 2, size), **options, sides=sides)
    finally:
        mechanism.impl = impl


def find_projections(model: Any, modules: Collection[nn.Module]) -> dict[nn.Module, QueryProjection]:
    """Return the query projection of each attention module. Raises ValueError if one cannot be found."""
    probe, names = QueryProbe(), {module: name for name, module in model.named_modules()}
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        watched = dispatch.switch_attention(model, dispatch.WATCHED_BOOL, probe.attend)
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"), watched, probe.watch_linears(modules):
            run_on_tokens(model, dummy_inputs.build_dummy_batch(model))
    finally:
        for module in training:
            module.training = True
    for module in modules:
        if module not in probe.found:
            raise ValueError(
                f"{names[module]} has no linear map of its queries alone, so it cannot get more query heads"
            )
    return probe.found
