"""Optimisers of torch that do not import its compiler, which takes one to four seconds.

torch wraps `step` and `add_param_group` for torch.compile, and the wrappers import torch._dynamo. We never compile an
optimiser, so these classes use the functions inside the wrappers.
"""

from inspect import unwrap
from typing import Any

import torch


def _unwrap_step(kind: type[torch.optim.Optimizer]) -> Any:
    return torch.no_grad()(unwrap(kind.step))


ADD_GROUP: Any = unwrap(torch.optim.Optimizer.add_param_group)


class Adam(torch.optim.Adam):
    """torch.optim.Adam."""

    add_param_group, step = ADD_GROUP, _unwrap_step(torch.optim.Adam)


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW."""

    add_param_group, step = ADD_GROUP, _unwrap_step(torch.optim.AdamW)


class SGD(torch.optim.SGD):
    """torch.optim.SGD."""

    add_param_group, step = ADD_GROUP, _unwrap_step(torch.optim.SGD)
