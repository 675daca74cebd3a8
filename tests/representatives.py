"""Six mechanisms that stand for all where a test is above the laws: each is of a kind that others have to treat apart.

The laws, the definitions and the kernels are tested for every mechanism.
"""

import pytest

REPRESENTATIVES = {
    "softmax": "plain",
    "realformer": "carrying",
    "coda": "stochastic",
    "differential": "finish",
    "shaped": "self-only",
    "dagpam": "signed",
}
CROSS = [name for name, kind in REPRESENTATIVES.items() if kind != "self-only"]  # those that read another sequence too

every_kind = pytest.mark.parametrize("name", REPRESENTATIVES)
