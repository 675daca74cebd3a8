"""Where an intervention acts: the attention layers of a model, and the place of a pass in its text.

A step with a cache reads new tokens after those of the passes before. Positions count from the first token of the text.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import ALL, Mechanism
from attnlab.models.attention import Attention
from attnlab.models.cache import BeamDecoding
from attnlab.records.record import KINDS

BEAMS = "positions are not known where hypotheses share a cache or a step is captured: decode with beam=1 on a CPU"


@dataclass(frozen=True)
class Site:
    """One attention layer of a model: its kind, its index within the kind, and its number of heads.

    part   the tensor of a Record's layer that `change_mixed` gets: context if a gate of the model's own comes after it

    In one pass:
    end           number of tokens up to the last query, with those in a cache; None: the queries are the whole text
    first_query   position of the first query; None: the last query is the last token
    first_key     position of the first key that is a token
    sinks         number of keys before it that are no tokens
    unplaced      why positions are not known, if they are not
    later         the error of each position that has not come yet, where a cache grows; None: the text is complete
    """

    kind: str
    layer: int
    heads: int
    part: str = "mixed"
    end: int | Tensor | None = field(default=None, compare=False)
    first_query: int | None = field(default=None, compare=False)
    first_key: int = field(default=0, compare=False)
    sinks: int = field(default=0, compare=False)
    unplaced: str = field(default="", compare=False)
    later: dict[Any, ValueError] | None = field(default=None, compare=False)

    def place_queries(self, count: int) -> Tensor:
        """Return the positions (i,) of the queries of this pass; those before the first token are below 0."""
        if self.unplaced:
            raise ValueError(self.unplaced)
        first = (count if self.end is None else int(self.end)) - count if self.first_query is None else self.first_query
        return torch.arange(first, first + count)

    def place_keys(self, count: int) -> Tensor:
        """Return the positions (j,) of the keys of this pass; those that are no tokens are below 0."""
        if self.unplaced and self.kind != "cross":
            raise ValueError(self.unplaced)
        own = torch.arange(self.first_key, self.first_key + count - self.sinks)
        return torch.cat([torch.full((self.sinks,), -1), own])


class TextProgress:
    """How far the passes of a model have read a text, with those before that filled its cache."""

    def __init__(self) -> None:
        self.later: dict[Any, ValueError] = {}
        self.known: dict[str, Any] = {}  # fields of a Site in the current pass

    def begin_pass(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note what a pass of our model begins with (a pre-hook of a Stack or a StateAttention)."""
        state, at = named.get("state"), named.get("at")
        if state is not None and (isinstance(state, BeamDecoding) or isinstance(state.length, Tensor)):
            self.known = {"unplaced": BEAMS}
        elif state is not None:
            self.continue_text(state.length, args[0].shape[1])
        elif at is not None:
            self.continue_text(at[0], len(at))
        else:
            self.known = {}

    def continue_text(self, past: int | Tensor, new: int) -> None:
        """Note that the pass reads new tokens after those in a cache."""
        self.known = {"end": past + new, "later": self.later}

    def locate(self, site: Site, mechanism: Mechanism) -> Site:
        """Return the site with the place of this pass. A mechanism may also read the queries before it."""
        every = {"first_query": 0} if mechanism.lookback == ALL else {}
        return replace(site, **self.known | every)

    def check_reached(self) -> None:
        """Raise the error of a position that no pass reached."""
        for error in self.later.values():
            raise error


def list_sites(model: nn.Module) -> list[Site]:
    """Return the attention layers of our model, by kind and index."""
    found = [module for module in model.modules() if isinstance(module, Attention)]
    sites = [Site(module.kind, module.index, module.mechanism.heads) for module in found]
    return sorted(sites, key=lambda site: (list(KINDS).index(site.kind), site.layer))
