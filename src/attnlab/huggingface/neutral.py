"""Neutral starts: parameters that make a mechanism softmax, so that a pretrained model is unchanged.

    attnlab.adapt(model, "dagpam", neutral=True)        then fine-tune; the mechanism departs from softmax by training

A neutral start must leave gradients: sink and fox are near softmax, not at it, where their gradients would be 0.
Mechanisms without an entry have no parameters that make them softmax.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.mechanisms import Mechanism, find_mechanism
from attnlab.mechanisms.per_layer import is_per_layer

NEAR = 10.0  # exp(−10) = 4.5e-5: the share that a sink takes from a logit of 0, or that fox forgets with each token


@dataclass(frozen=True)
class NeutralStart:
    """Options and initial parameters that make a mechanism softmax."""

    options: Mapping[str, Any] = field(default_factory=dict)
    fill: Callable[[Any], None] | None = None  # sets parameters for which there is no option
    near: bool = False  # close to softmax, but not equal to it


def fill_resformer(mechanism: Any) -> None:
    mechanism.lambdas.copy_(torch.tensor([0.0, 1.0]))  # V' = V of the layer itself


def fill_shaped(mechanism: Any) -> None:
    for parameter, value in ((mechanism.alpha, 0.0), (mechanism.beta, 1.0), (mechanism.gamma, 0.0)):
        parameter.fill_(value)


def fill_fox(mechanism: Any) -> None:
    mechanism.forget.weight.zero_()
    mechanism.forget.bias.fill_(NEAR)


def fill_dcmha(mechanism: Any) -> None:
    mechanism.base.copy_(torch.eye(mechanism.heads).expand(2, -1, -1))
    for side in (mechanism.of_query, mechanism.of_key):
        side.outward[..., side.outward.shape[-1] // 2 :] = 0.0  # w = 0; u stays, so w has a gradient
        side.gate.weight.zero_()


NEUTRAL: dict[str, NeutralStart] = {
    "softmax": NeutralStart(),
    "dagpam": NeutralStart({"initial": 0.0}),
    "talking-heads": NeutralStart(),
    "knocking-heads": NeutralStart(),
    "multi-token": NeutralStart({"norm": False}),
    "resformer": NeutralStart(fill=fill_resformer),
    "shaped": NeutralStart(fill=fill_shaped),
    "dcmha": NeutralStart(fill=fill_dcmha),
    "sink": NeutralStart({"initial": -NEAR}, near=True),
    "fox": NeutralStart(fill=fill_fox, near=True),
}


def choose_neutral_options(name: str | type[Mechanism], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a neutral start with those given. Raises ValueError if there is none, or they disagree."""
    start = NEUTRAL.get(name) if isinstance(name, str) else None
    if start is None:
        layered = isinstance(name, str) and is_per_layer(name)
        if not layered:
            find_mechanism(name)  # refuses a name that does not exist
        what = "different layers" if layered else name if isinstance(name, str) else name.__name__
        advice = "leave out neutral=True: training then starts from a changed model"
        raise ValueError(f"neutral=True has no start for {what}: choose from {', '.join(NEUTRAL)}, or {advice}")
    for key, value in start.options.items():
        if options.get(key, value) != value:
            raise ValueError(f"neutral=True sets {key}={value}: leave out {key}={options[key]}")
    return {**options, **start.options}


@torch.no_grad()
def fill_neutral(model: torch.nn.Module, name: str) -> None:
    """Set the parameters of every mechanism of an adapted model to its neutral start."""
    fill = NEUTRAL[name].fill
    for module in model.modules():
        if fill is not None and isinstance(module, Mechanism):
            fill(module)
