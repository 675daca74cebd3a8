"""Mechanisms that stand for all where a test is above the laws: each is of a kind that others have to treat apart.

The laws, the definitions and the kernels are tested for every mechanism.
"""

import pytest

from attnlab.mechanisms import MECHANISMS

REPRESENTATIVES = {
    "softmax": "plain",
    "realformer": "carrying",
    "coda": "stochastic",
    "differential": "finish",
    "shaped": "self-only",
    "dagpam": "signed",
    "gated": "turning",
    "fox": "key side",
    "resformer": "carrying values",
    "differential-v2": "query heads",
    "multi-token": "lookback",
    "selective": "all former queries",
}
CROSS = [name for name in REPRESENTATIVES if not MECHANISMS[name].self_only]  # those that read another sequence too


def mark_others_slow(names):
    """All mechanisms as parameters of a test; those that are not named run in make test-slow alone."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in MECHANISMS]


every_kind = pytest.mark.parametrize("name", REPRESENTATIVES)
every_kind_and_slowly_all = pytest.mark.parametrize("name", mark_others_slow(REPRESENTATIVES))
