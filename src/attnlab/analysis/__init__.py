"""Analyses: each reads a Record and returns a table. None imports a model.

ANALYSES has those that `attnlab inspect --analysis NAME` adds over a corpus; `--analysis all` adds every one that
applies to the model. To add one, add a file and a line below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlab.config import suggest_nearest
from attnlab.registry import Registry
from attnlab.registry.own_files import is_own, load_class

if TYPE_CHECKING:
    from attnlab.analysis.sums import Analysis

ANALYSES: Registry[type[Analysis]] = Registry(
    {
        "diversity": "attnlab.analysis.diversity:Diversity",
        "rank": "attnlab.analysis.rank:Rank",
        "rollout": "attnlab.analysis.rollout:RolloutShares",
        "sharing": "attnlab.analysis.sharing:Sharing",
        "signed": "attnlab.analysis.signed:Signed",
    }
)
EVERY = "all"  # stands for every analysis that applies


def find_analysis(name: str) -> type[Analysis]:
    """Return the class of an analysis, by its name or from its file (`./mine.py:Mine`). Raises ValueError if none."""
    if is_own(name):
        from attnlab.analysis.sums import Analysis

        return load_class(name, Analysis)  # type: ignore[type-abstract]
    if name not in ANALYSES:
        known = f"{', '.join(ANALYSES)}, {EVERY}, or ./file.py:Class"
        raise ValueError(f"unknown analysis {name!r}{suggest_nearest(name, ANALYSES)}; available: {known}")
    return ANALYSES[name]
