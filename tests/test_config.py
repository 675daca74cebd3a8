"""Configurations: values are parsed by the type of their field, and an unknown key suggests the nearest."""

from dataclasses import dataclass
from typing import Literal

import pytest

from attnlab.config import compute_digest, parse_value, replace_values, split_pairs


@dataclass(frozen=True)
class Example:
    width: int = 8
    rate: float = 0.1
    norm: Literal["pre", "post"] = "pre"
    tied: bool = False
    cutoffs: tuple[int, ...] = ()
    pair: tuple[float, float] | float = 1.0
    limit: int | None = None
    out: str = ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("width=1_000", {"width": 1000}),
        ("rate=5e-4", {"rate": 5e-4}),
        ("norm=post", {"norm": "post"}),
        ("tied=yes", {"tied": True}),
        ("cutoffs=2,3,5", {"cutoffs": (2, 3, 5)}),
        ("cutoffs=", {"cutoffs": ()}),
        ("pair=3,1", {"pair": (3.0, 1.0)}),
        ("pair=2", {"pair": 2.0}),
        ("limit=none", {"limit": None}),
        ("limit=7", {"limit": 7}),
    ],
)
def test_values_are_read_by_their_type(text, value):
    assert replace_values(Example(), split_pairs([text])) == Example(**value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["widht=3"], "did you mean 'width'"),
        (["width=wide"], "whole number"),
        (["width=1.5"], "whole number"),
        (["norm=both"], "one of pre, post"),
        (["tied=maybe"], "true or false"),
        (["pair=1,2,3"], "separated by commas or a number"),
        (["width"], "key=value"),
        (["width=1", "width=2"], "twice"),
    ],
)
def test_what_cannot_be_read_is_said(words, message):
    with pytest.raises(ValueError, match=message):
        replace_values(Example(), split_pairs(words))


def test_any_value_is_guessed():
    from typing import Any

    assert [parse_value(text, Any, "x") for text in ("3", "0.5", "true", "word")] == [3, 0.5, True, "word"]


def test_the_digest_names_the_values_and_not_where_they_go():
    assert compute_digest(Example()) == compute_digest(Example(out="elsewhere"))
    assert compute_digest(Example()) != compute_digest(Example(width=9))
