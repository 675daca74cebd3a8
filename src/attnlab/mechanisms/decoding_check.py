"""Check that a mechanism decodes with a cache as it computes a whole sequence: one query at a time equals all at once.

Models call it before they cache keys and values. A mechanism that mixes queries, such as a convolution over them, would
otherwise decode to something else without an error.
"""

from copy import deepcopy

import torch
from torch import Tensor

from attnlab.config import describe_error
from attnlab.mechanisms.law_trial import LENGTH, LawTrial, make_trial
from attnlab.mechanisms.laws import one_query_at_a_time
from attnlab.mechanisms.mechanism import Mechanism

ALLOWED = 1e-5  # relative to 1 + max; a mechanism may compute in float32


def has_laws(mechanism: Mechanism) -> bool:
    """Return whether a mechanism is one of attnlab, whose decoding the laws prove."""
    return type(mechanism).__module__.startswith("attnlab.mechanisms.")


def check_cached_decoding(mechanism: Mechanism, *, cross: bool = False) -> None:
    """Raise ValueError if a copy of the mechanism, with perturbed parameters, decodes with a cache to other numbers.

    cross   compare as in cross attention, whose keys are all there from the first query on
    """
    kind = type(mechanism).__name__
    try:
        error = measure_cached_decoding(mechanism, cross=cross)
    except (Exception, SystemExit) as cause:  # by a user-written class
        raise ValueError(
            f"{kind} cannot decode with a cache: computing one query alone fails: {describe_error(cause)}"
        ) from None
    if not error <= ALLOWED:
        raise ValueError(
            f"{kind} cannot decode with a cache: one query at a time differs from all at once by {error:.2g}; "
            "compute each row of weights from its own query"
        )


@torch.no_grad()
def measure_cached_decoding(mechanism: Mechanism, *, cross: bool = False) -> float:
    """Return the worst difference between one query at a time and all at once, relative to 1 + max."""

    def build(layer: int) -> Mechanism:
        tried = deepcopy(mechanism).cpu()
        tried.first, tried.impl = layer == 0, "reference"
        return tried

    trial = make_trial(build)
    whole = trial.output(causal=not cross)
    error = _read_cross(trial, whole) if cross else one_query_at_a_time(trial)[0]
    return error / (1 + float(whole.abs().max()))


def _read_cross(trial: LawTrial, whole: Tensor) -> float:
    """Return the worst difference of a query that sees all keys, alone and among the others."""
    worst = 0.0
    for now in range(LENGTH):
        rows = slice(max(0, now - trial.mechanism.lookback), now + 1)
        alone = trial.select_queries(rows).output(at=torch.arange(LENGTH)[rows])
        worst = max(worst, float((alone[:, :, -1] - whole[:, :, now]).abs().max()))
    return worst
