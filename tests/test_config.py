"""Configurations: values are parsed by the type of their field, and an unknown key suggests the nearest."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from attnlab.aligning.choice import Reading
from attnlab.commands.align import AlignOptions
from attnlab.commands.demo.settings import DemoConfig
from attnlab.commands.inspect.inspection import InspectionRequest
from attnlab.config import (
    Natural,
    Positive,
    Probability,
    Share,
    check_fields,
    compute_digest,
    parse_value,
    replace_values,
    split_pairs,
)
from attnlab.decoding.search import Rules
from attnlab.experiments.reproduction import StudyTerms
from attnlab.huggingface.fine_tuning import TunedConfig
from attnlab.models.lstm_config import LSTMConfig
from attnlab.models.transformer_config import TransformerConfig
from attnlab.studies.snell2021.copying import CopyExperiment
from attnlab.tasks import TASKS
from attnlab.training.loop import TrainConfig
from attnlab.training.recipe import DecodeConfig


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
        ("width=1e3", {"width": 1000}),
        ("limit=2.0", {"limit": 2}),
        ("cutoffs=1e2,3", {"cutoffs": (100, 3)}),
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
        (["width=1e400"], "whole number"),
        (["width=nan"], "whole number"),
        (["width=" + "9" * 5000], "whole number"),
        (["norm=both"], "one of pre, post"),
        (["tied=maybe"], "true or false"),
        (["pair=1,2,3"], "2 values separated by commas or a number"),
        (["width"], "key=value"),
        (["width=1", "width=2"], "twice"),
    ],
)
def test_what_cannot_be_read_is_said(words, message):
    with pytest.raises(ValueError, match=message):
        replace_values(Example(), split_pairs(words))


@dataclass(frozen=True)
class Ranges:
    plain: int = 1
    natural: Natural = 0
    finite: float = 0.0
    drop: Probability = 0.0
    pair: tuple[Positive, Share] = (1.0, 0.5)
    either: Annotated[int, "[2, 5]"] | Literal["mean"] | None = None
    choice: Literal[2, 4] = 2
    flag: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        check_fields(self)


@pytest.mark.parametrize(
    "values",
    [
        {"plain": 10**15, "natural": 0, "finite": -3e30, "drop": 0, "pair": (1e-9, 0.999), "either": 5, "choice": 4},
        {"either": "mean", "plain": np.int64(3), "finite": np.float64(2.0)},
        {"options": {"heads": 0, "name": "a", "rate": 0.5, "pair": (1.0, 2.0)}},
    ],
)
def test_values_inside_their_ranges_pass(values):
    assert Ranges(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"plain": 0}, "plain must be at least 1, got 0"),
        ({"plain": 1.0}, "plain must be a whole number, got 1.0"),
        ({"plain": True}, "plain must be a whole number"),
        ({"plain": 10**400}, "plain must be between"),
        ({"natural": -1}, "natural must be at least 0"),
        ({"finite": math.nan}, "finite must be finite"),
        ({"finite": -math.inf}, "finite must be finite"),
        ({"finite": 1e300}, "finite must be between"),
        ({"finite": "0.1"}, "finite must be a number"),
        ({"drop": 1.0}, "drop must be at least 0 and below 1"),
        ({"pair": (0.0, 0.5)}, "pair must be above 0"),
        ({"pair": (1.0, 1.0)}, "pair must be above 0 and below 1"),
        ({"pair": (1.0,)}, "pair must be 2 values"),
        ({"pair": 1.0}, "pair must be 2 values"),
        ({"either": 6}, "either must be at least 2 and at most 5"),
        ({"either": "median"}, "either must be one of mean"),
        ({"choice": 3}, "choice must be one of 2, 4"),
        ({"flag": "yes"}, "flag must be true or false"),
        ({"options": {"rate": math.nan}}, "rate must be finite"),
        ({"options": {"pair": (1.0, math.inf)}}, "pair must be finite"),
    ],
)
def test_values_outside_their_ranges_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Ranges(**values)


CONFIGS = [
    TrainConfig(), DecodeConfig(), Rules(), LSTMConfig(model="translator", vocabulary=9), TunedConfig(path="x"),
    TransformerConfig(model="translator", vocabulary=9), *(TASKS[name].config_type() for name in TASKS),
    DemoConfig(attention=("softmax",)), InspectionRequest(model="x", text="a"), AlignOptions(), Reading(),
    StudyTerms("smoke"), CopyExperiment(),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_number_of_every_configuration_is_checked(config):
    """Nothing that is not finite, and no whole number below the smallest, comes into any configuration."""
    hints = get_type_hints(type(config))
    for name, hint in ((each.name, hints[each.name]) for each in fields(config)):
        kinds = {hint, *get_args(hint)}
        bad = [math.nan, math.inf, -math.inf, 1e300] if float in kinds else []
        bad += [-1, 10**30, 1.5, math.nan] if int in kinds else []
        for value in bad:
            wrong = (
                (value,) * len(get_args(hint))
                if get_origin(hint) is tuple and get_args(hint)[-1] is not ...
                else (value,)
            )
            with pytest.raises(ValueError, match=name):
                replace(config, **{name: wrong if get_origin(hint) is tuple else value})


def test_any_value_is_guessed():
    assert [parse_value(text, Any, "x") for text in ("3", "0.5", "true", "word")] == [3, 0.5, True, "word"]


def test_the_digest_names_the_values_and_not_where_they_go():
    assert compute_digest(Example()) == compute_digest(Example(out="elsewhere"))
    assert compute_digest(Example()) != compute_digest(Example(width=9))


@pytest.mark.parametrize("text", ["inf", "nan", "1e400", "9" * 30])
def test_a_number_of_no_declared_type_is_finite_and_an_error_names_its_key(text):
    with pytest.raises(ValueError, match="alpha"):
        parse_value(text, Any, "alpha")
