"""Check that a mechanism decodes with a cache as it computes a whole sequence: one query at a time equals all at once.

Models call it before they cache keys and values. A mechanism that mixes queries, such as a convolution over them, would
otherwise decode to something else without an error.
"""

from copy import deepcopy

import torch

from attnlab.config import describe_error
from attnlab.mechanisms.laws import shake_parameters
from attnlab.mechanisms.mechanism import Mechanism

LENGTH = 5
ALLOWED = 1e-5  # relative to 1 + max; a mechanism may compute in float32


def check_cached_decoding(mechanism: Mechanism, *, cross: bool = False) -> None:
    """Raise ValueError if a copy of the mechanism, with perturbed parameters, decodes with a cache to other numbers.

    cross   compare as in cross attention, whose keys are all there from the first query on
    """
    kind = type(mechanism).__name__
    try:
        error = measure_cached_decoding(mechanism, cross=cross)
    except (Exception, SystemExit) as cause:  # by a user-written class
        raise ValueError(f"{kind} cannot decode with a cache: one query alone {describe_error(cause)}") from None
    if not error <= ALLOWED:
        raise ValueError(
            f"{kind} cannot decode with a cache: one query at a time differs from all at once by {error:.2g}; "
            "compute each row of weights from its own query"
        )


@torch.no_grad()
def measure_cached_decoding(mechanism: Mechanism, *, cross: bool = False) -> float:
    """Return the worst difference between one query at a time and all at once, relative to 1 + max.

    Keys come from a cache that grows, then from one that is allocated for all keys.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        tried = shake_parameters(deepcopy(mechanism).cpu())
        tried.impl = "reference"
        shape = (1, tried.heads, LENGTH, tried.head_dim)
        q, k, v = torch.randn(3, *shape, dtype=torch.float64)
        carry = None
        if tried.carries and not tried.first:
            carry = torch.randn(1, tried.carry_heads, LENGTH, LENGTH, dtype=torch.float64)
    whole = tried(q, k, v, carry=carry, causal=not cross)[0]
    worst = 0.0
    for now in range(LENGTH):
        rows = slice(now, now + 1)
        row = None if carry is None else carry[:, :, rows]
        steps = [tried(q[:, :, rows], k, v, carry=row, causal=not cross, at=torch.tensor([now]))[0]]
        if not cross:
            past = slice(0, now + 1)
            row = None if row is None else row[..., past]
            steps.append(tried(q[:, :, rows], k[:, :, past], v[:, :, past], carry=row, causal=True)[0])
        worst = max(worst, *(float((step - whole[:, :, rows]).abs().max()) for step in steps))
    return worst / (1 + float(whole.abs().max()))
