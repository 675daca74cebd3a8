"""Attentions of the layers of one stack, written as one text.

    coda(alpha=8)                                   one attention with its options, in every layer
    softmax*3,dagpam                                three layers of softmax, then one of dagpam
    {0-2: softmax, 3: dagpam(initial=0.5)}          each layer by its number, exactly once

A list is repeated where its length divides the number of layers: softmax*3,dagpam fills 4, 8 or 12 layers. Parentheses
around a list change nothing. Nothing here imports torch before `check_carries` looks at a mechanism.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attnlab.config import parse_numbers, split_list, split_pairs, write_ranges
from attnlab.registry.own_files import is_own_file

if TYPE_CHECKING:
    from attnlab.mechanisms.mechanism import Mechanism

MOST_LAYERS = 10_000
COUNT = r"\*\s*\d*$"  # at the end of a term
ADVICE = "write NAME*3,NAME or {0-2: NAME, 3: NAME}"


@dataclass(frozen=True)
class LayerAttention:
    """The attention of a layer: its name, and its options as texts."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerTerm:
    """A part of a text: an attention with the number of its layers, or in braces with the layers themselves."""

    attention: LayerAttention
    count: int = 1
    layers: tuple[int, ...] = ()


def is_per_layer(text: str) -> bool:
    """Whether a text is more than one name: a list, braces, options or a number of layers."""
    if is_own_file(text):  # whose path may have commas or parentheses
        return False
    text = text.strip()
    return text.startswith(("{", "(")) or "," in text or text.endswith(")") or re.search(COUNT, text) is not None


def list_names(text: str) -> tuple[str, ...]:
    """Return the different names in a text, in their order. Raises ValueError if the text cannot be read."""
    return tuple(dict.fromkeys(term.attention.name for term in _read_terms(text))) if is_per_layer(text) else (text,)


def replace_names(text: str, change: Callable[[str], str]) -> str:
    """Return the text with every name changed."""
    if not is_per_layer(text):
        return change(text)
    if all(change(name) == name for name in list_names(text)):
        return text
    parts = []
    for term in _read_terms(text):
        name = change(term.attention.name)
        if re.search(r"[,(){}*\"]", name):
            raise ValueError(f"{name}: a path in a per-layer attention must not contain , ( ) {{ }} * or quotes")
        options = term.attention.options
        named = f"{name}({_write_options(options)})" if options else name
        parts += [f"{numbers}: {named}" for numbers in write_ranges(term.layers)] or [f"{named}*{term.count}"]
    return f"{{{', '.join(parts)}}}" if text.strip().startswith("{") else f"({','.join(parts)})"


def split_layers(text: str, layers: int, where: str = "the model") -> list[LayerAttention]:
    """Return the attention of each layer. Raises ValueError for a text that does not fill the layers exactly.

    where   what has the layers, for errors
    """
    if not is_per_layer(text):
        return [LayerAttention(text)] * layers
    terms = _read_terms(text)
    if any(term.layers for term in terms):
        return _place_layers(text, terms, layers, where)
    listed = [term.attention for term in terms for _ in range(term.count)]
    if layers % len(listed) == 0:
        return listed * (layers // len(listed))
    lacks = f"{layers - len(listed)} missing" if len(listed) < layers else f"{len(listed) - layers} too many"
    raise ValueError(
        f"attention={text} lists {_count(len(listed))}, but {where} has {layers} ({lacks}): "
        f"list {layers}, or a pattern whose length divides {layers}"
    )


def describe_layers(chosen: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    """Return the attention of each layer in braces, as `split_layers` reads it."""
    texts = [f"{name}({_write_options(options)})" if options else name for name, options in chosen]
    layers: dict[str, list[int]] = {}
    for layer, text in enumerate(texts):
        layers.setdefault(text, []).append(layer)
    return "{" + ", ".join(f"{run}: {text}" for text, own in layers.items() for run in write_ranges(own)) + "}"


def check_carries(text: str, chosen: Sequence[LayerAttention], find: Callable[[str], type[Mechanism]]) -> None:
    """Raise ValueError unless the layers that carry are several, alike and come first, so that each carry is read."""
    carrying = [layer for layer, one in enumerate(chosen) if find(one.name).carries]
    for place, layer in enumerate(carrying):
        if layer != place or chosen[layer] != chosen[0]:
            name = chosen[layer].name
            raise ValueError(
                f"attention={text}: layer {layer} ({name}) reads a carry, which only layers like it before it pass on: "
                f"put all layers of {name} first, with the same options"
            )
    if len(carrying) == 1 and len(chosen) > 1:
        name = chosen[0].name
        raise ValueError(f"attention={text}: no layer reads the carry of layer 0: give at least two layers to {name}")


def _place_layers(text: str, terms: Iterable[LayerTerm], layers: int, where: str) -> list[LayerAttention]:
    placed: dict[int, LayerAttention] = {}
    for term in terms:
        for layer in term.layers:
            if layer in placed:
                names = f"{placed[layer].name} and {term.attention.name}"
                raise ValueError(f"attention={text} sets layer {layer} twice, to {names}: keep one of them")
            placed[layer] = term.attention
    has = f"{where} has layers 0-{layers - 1}"
    if missing := [layer for layer in range(layers) if layer not in placed]:
        raise ValueError(f"attention={text} leaves out {_name_layers(missing)}: {has}")
    if extra := sorted(set(placed) - set(range(layers))):
        raise ValueError(f"attention={text} sets {_name_layers(extra)}: {has}")
    return [placed[layer] for layer in range(layers)]


def _read_terms(text: str) -> list[LayerTerm]:
    """Split a text into its terms."""
    inner = text.strip()
    braces = inner.startswith("{")
    if braces:
        if not inner.endswith("}"):
            raise ValueError(f"attention={text}: a brace is not closed; {ADVICE}")
        inner = inner[1:-1]
    elif inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    parts = [part.strip() for part in split_list(inner, "attention", repeats=True)]
    if not all(parts):
        raise ValueError(f"attention={text}: an attention is missing; {ADVICE}")
    terms = [_read_placed(text, part) if braces else _read_counted(text, part) for part in parts]
    if sum(term.count for term in terms) > MOST_LAYERS:
        raise ValueError(f"attention={text:.60} lists more than {MOST_LAYERS:,} layers")
    return terms


def _read_placed(text: str, part: str) -> LayerTerm:
    """Read "0-2: softmax"."""
    numbers, colon, attention = part.partition(":")
    if not colon or re.search(COUNT, attention):
        raise ValueError(f"attention={text}: {part!r} must have the form LAYERS: NAME, as 0-2: softmax")
    layers = parse_numbers(numbers.strip(), "layers") or ()
    return LayerTerm(split_options(attention.strip()), layers=layers)


def _read_counted(text: str, part: str) -> LayerTerm:
    """Read "softmax*3"."""
    name, star, count = (piece.strip() for piece in part.rpartition("*"))
    if not star:
        return LayerTerm(split_options(part))
    if not count.isdecimal() or len(count) > 5 or not 1 <= int(count) <= MOST_LAYERS:
        raise ValueError(f"attention={text}: {part!r} needs a number of layers from 1 to {MOST_LAYERS} after *")
    return LayerTerm(split_options(name), int(count))


def split_options(text: str) -> LayerAttention:
    """'dagpam(initial=0.5,fixed=true)' -> dagpam with {'initial': '0.5', 'fixed': 'true'}."""
    if is_own_file(text):
        return LayerAttention(text)
    name, bracket, rest = text.partition("(")
    if not name or re.search(r"[{}*]", name) or (bracket and not rest.endswith(")")) or (not bracket and ")" in name):
        raise ValueError(f"attention={text}: write an attention as NAME or NAME(key=value,key=value)")
    words = split_list(rest[:-1], name) if bracket else []
    return LayerAttention(name.strip(), split_pairs(re.sub(r"\s*=\s*", "=", word.strip(), count=1) for word in words))


def _count(number: int) -> str:
    return f"{number} layer{'s' if number > 1 else ''}"


def _write_options(options: Mapping[str, object]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items())


def _name_layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(write_ranges(numbers))}"
