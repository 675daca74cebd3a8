"""What kind of mechanism a class is: what it declares, and what a trial of the laws shows.

    carries logits, values     passes them to the next layer            positional   depends on the order of keys
    signed                     weights may be negative                  stochastic   draws noise in training
    cross-head                 a head reads other heads                 self-only    queries and keys are one sequence
    gated                      reads the input of the layer             lookback     reads former queries
    sink-free                  a head can attend to nothing, so no key has to take the weight that is left over

Signed, cross-head and sink-free are measured; the others are declared by the class.
"""

from dataclasses import replace
from functools import partial

import torch

from attnlab.mechanisms.law_trial import Build, LawTrial, make_trial
from attnlab.mechanisms.mechanism import Mechanism

FAR = 30.0  # a logit or a gate that decides


@torch.no_grad()
def list_kinds(build: Build) -> list[str]:
    """Return the kinds of the mechanism that `build` makes for a layer."""
    trial = make_trial(build)
    mechanism = trial.mechanism
    kinds = {
        f"carries {'values' if mechanism.carry_of == 'keys' else 'logits'}": mechanism.carries,
        "signed": has_negative_weights(trial) or has_negative_weights(make_trial(partial(build_apart, build))),
        "cross-head": reads_other_heads(trial),
        "gated": trial.sides != (None, None),
        "sink-free": can_attend_to_nothing(trial),
        "positional": mechanism.positional,
        "stochastic": mechanism.stochastic,
        "self-only": mechanism.self_only,
        "lookback": mechanism.lookback > 0,
    }
    return [kind for kind, applies in kinds.items() if applies]


def build_apart(build: Build, layer: int) -> Mechanism:
    """Build a mechanism with parameters far from their initial values."""
    mechanism = build(layer)
    for parameter in mechanism.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    return mechanism


def has_negative_weights(trial: LawTrial) -> bool:
    return bool((trial.weights(causal=True) < -1e-9).any())


def reads_other_heads(trial: LawTrial) -> bool:
    """Whether the context of the first head changes with what belongs to the last head."""
    names = [name for name in trial.arguments if name not in ("x", "y")]
    changed = {name: getattr(trial, name).clone() for name in names}
    for x in changed.values():
        x[:, -1] += 1.0 + x[:, -1].square()
    return not torch.allclose(trial.context(causal=True)[:, 0], replace(trial, **changed).context(causal=True)[:, 0])


def can_attend_to_nothing(trial: LawTrial) -> bool:
    """Whether each head has a query, or a gate, with which its weights are all near 0.

    All keys are the same here, and so are all inputs: what a query gives one key it gives all. A gate on the context,
    which is not in the weights, is one too.
    """
    mechanism = trial.mechanism
    if type(mechanism).turn is not Mechanism.turn and trial.sides[0] is not None:
        return True
    u = trial.k[:1, :1, :1] / trial.k[:1, :1, :1].norm() * mechanism.head_dim**0.25
    totals = []
    for strength in (-FAR, 0.0, FAR):
        for gate in (-FAR, FAR):
            alike = replace(
                trial,
                q=(strength * u).expand_as(trial.q),
                k=u.expand_as(trial.k),
                x=gate * trial.x[:, :1].expand_as(trial.x),
                y=gate * trial.y[:, :1].expand_as(trial.y),
            )
            totals.append(alike.weights(causal=True).abs().sum(-1)[:, :, -1])
    return bool((torch.stack(totals).amin(0) < 0.05).all())
