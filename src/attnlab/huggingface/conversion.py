"""Write a Transformer of ours as a Hugging Face model, and prove that it computes the same logits.

A model with softmax becomes a plain one, which transformers loads. Another mechanism is put into the same skeleton by
`adapt`, with its trained parameters; `attnlab.load` loads it. The proof loads the written files again and compares the
logits of random tokens. Nothing here imports transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface import dispatch, pretrained
from attnlab.huggingface.skeletons import POSITIONS, Skeleton
from attnlab.mechanisms import MECHANISMS, find_mechanism
from attnlab.models.attention import MultiHead
from attnlab.models.scaled_linear import ScaledLinear
from attnlab.models.transformer import Transformer
from attnlab.models.transformer_config import TransformerConfig
from attnlab.tasks.task import SPECIALS

TOLERANCE = 1e-5  # of logits, times the largest logit if that is above 1
LENGTHS = (23, 11, 2)  # of the texts in the proof
PLAIN = "softmax"
QUERY = "q_proj"  # the query projection of every skeleton


@dataclass(frozen=True)
class Installation:
    """The mechanism that `adapt` puts into the kinds of attention that have it."""

    name: str  # or one for each layer, as in the configuration
    options: Mapping[str, Any]
    kinds: tuple[str, ...]


def plan_installation(config: TransformerConfig) -> Installation | None:
    """Return the mechanism of a model that is not softmax, or None. Raises ValueError if a model cannot hold it."""
    own = (config.attention, config.attention_options)
    cross = own if config.cross_attention is None else (config.cross_attention, config.cross_attention_options)
    others = {}
    for kind in config.attention_kinds:
        layers = config.list_attentions(kind)
        for name, options in layers:
            _check_attention(config, name, options)
        if any(name != PLAIN for name, _ in layers):
            others[kind] = cross if kind == "cross" else own
    if not others:
        return None
    (text, given), *_ = others.values()
    if any(each != (text, given) for each in others.values()):
        raise ValueError(f"an adapted model has one attention beside softmax, not both {own[0]} and {cross[0]}")
    return Installation(text, given, tuple(others))


def _check_attention(config: TransformerConfig, name: str, options: Mapping[str, Any]) -> None:
    if name not in MECHANISMS:
        raise ValueError(f"attention={name} is not a mechanism of attnlab, so other machines cannot load it")
    lost = [f"{key}={value}" for key, value in options.items() if key == "scale" or (name == PLAIN and key != "impl")]
    if lost:  # impl does not change what a mechanism computes
        raise ValueError(f"attention={name} with {', '.join(lost)} cannot be expressed: the model sets that itself")
    if config.positions == "rope" and (parts := find_mechanism(name).head_parts) > 1:
        what = f"attention={name} rotates the {parts} parts of each head separately"
        raise ValueError(f"{what}; Llama and Qwen3 rotate whole heads")


def write_model(model: Transformer, skeleton: Skeleton, installed: Installation | None, folder: Path) -> float:
    """Write the model to a new folder, and return what `check_logits` returns."""
    with pretrained.silence_transformers():
        kind = pretrained.find_class(skeleton.kind)
        theirs = kind(kind.config_class(**skeleton.config)).eval()
        fill_weights(theirs, model, skeleton)
        theirs.generation_config.update(**skeleton.generation)
        if installed is not None:
            pretrained.adapt(theirs, installed.name, kinds=installed.kinds, **installed.options)
            _fill_mechanisms(theirs, model, skeleton)
        theirs._keys_to_ignore_on_save = None  # tables of positions
        theirs.save_pretrained(folder)
    return check_logits(model, folder)


@torch.no_grad()
def fill_weights(theirs: Any, ours: Transformer, skeleton: Skeleton) -> None:
    """Copy the weights of our model. A bias that ours does not have is 0 there."""
    for name, parameter in theirs.named_parameters():
        module, _, part = name.rpartition(".")
        if module.endswith(POSITIONS):
            parameter.copy_(_tabulate_positions(ours, skeleton.modules[module], parameter))
            continue
        inner: Any = ours.get_submodule(skeleton.modules[module])
        folded = inner.fold_scale() if isinstance(inner, ScaledLinear) else (inner.weight, getattr(inner, "bias", None))
        value = folded[part == "bias"]
        if value is not None and module.endswith(QUERY):
            value = _group_queries(_find_attention(ours, skeleton, module), value)[0]
        parameter.copy_(torch.zeros_like(parameter) if value is None else value)


def _find_attention(ours: Transformer, skeleton: Skeleton, query: str) -> MultiHead:
    """Return our attention, given the name of its query projection there."""
    attention = ours.get_submodule(skeleton.modules[query].rpartition(".")[0])
    assert isinstance(attention, MultiHead)
    return attention


def _group_queries(attention: MultiHead, x: Tensor) -> Tensor:
    """Divide the outputs of a query projection, (h·m·d, …) with the m queries of each head side by side: (m,h·d,…)."""
    return x.unflatten(0, (attention.mechanism.heads, -1, attention.mechanism.head_dim)).transpose(0, 1).flatten(1, 2)


def _tabulate_positions(ours: Transformer, name: str, table: Tensor) -> Tensor:
    embedding: Any = ours.get_submodule(name.rpartition(".")[0])
    positions = embedding.positions
    return torch.zeros_like(table) if positions is None else positions(table[None], 0)


@torch.no_grad()
def _fill_mechanisms(theirs: nn.Module, ours: Transformer, skeleton: Skeleton) -> None:
    """Copy the parameters of our mechanisms, and the queries that each head has beyond the first."""
    for module in theirs.modules():
        place = getattr(module, "attnlab_place", None)
        if place is None:
            continue
        attention, inside = _find_attention(ours, skeleton, f"{place.name}.{QUERY}"), dict(module.named_children())
        inside["attnlab"].load_state_dict(attention.mechanism.state_dict())
        if "attnlab_queries" in inside:
            for name, parameter in inside["attnlab_queries"].named_parameters():
                parameter.copy_(_group_queries(attention, getattr(attention.query, name))[1:].flatten(0, 1))


@torch.no_grad()
def check_logits(ours: Any, folder: Path) -> float:
    """Load the model of a folder and return the largest difference of its logits from ours, on random tokens.

    Raises ValueError if it is more than TOLERANCE times the largest logit, or times 1 if all are smaller.
    """
    theirs = pretrained.open_model(str(folder))
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for size in _list_vocabularies(ours):
        words = torch.tensor([word for word in range(len(SPECIALS), size) if word != ours.padding])
        tokens = words[torch.randint(len(words), (len(LENGTHS), max(LENGTHS)), generator=generator)]
        for row, length in enumerate(LENGTHS):
            tokens[row, length:] = ours.padding
        sequences.append(tokens)
    mask, target = sequences[0] != ours.padding, sequences[-1]
    batch = {"input_ids": sequences[0], "attention_mask": mask.long()}
    if len(sequences) == 2:
        batch["decoder_input_ids"] = target
    logits = dispatch.run_forward(theirs, batch).logits
    own = ours.to("cpu")(*sequences)
    real = target != ours.padding
    error, largest = float((logits[real] - own[real]).abs().max()), float(own[real].abs().max())
    if not error <= TOLERANCE * max(largest, 1.0):  # also for nan
        raise ValueError(f"the {type(theirs).__name__} was not written: its logits differ from ours by {error:.2g}")
    return error


def _list_vocabularies(model: Any) -> list[int]:
    stacks = [getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)]
    return [len(stack.embedding.words.weight) for stack in stacks]
