"""Greedy decoding and beam search for any model with start(source), step(tokens, state) and state.select(rows).

`search.py` defines what beam search computes. It runs in one of two ways, with the same result:

    plain      caches grow, the host checks every step, and finished sentences leave the batch
    captured   all tensors stay in place on the GPU; one step (model, ranking, bookkeeping, reordering of caches) is a
               CUDA graph, replayed for every token, and the host checks every few steps
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor, nn

from attnlab.decoding.search import Hypothesis, Rules, Search

LOOK_EVERY = 8  # captured steps between two checks of the host
SMALLEST_ROOM = 32  # cache positions that the first captured steps see; later steps see 64, 128, …
SESSIONS = 8  # number of batch sizes for which a search keeps its graphs


class Stepwise(Protocol):
    """A model that can be decoded. Its step returns logits (b,1,vocabulary) of the next token.

    A state has select(rows). Optionally it has reorder_(rows), which works in place if each row continues a row of the
    same sentence, and repeat(times, batch, device), which returns the state of several hypotheses for each sentence.
    """

    def start(self, source: Tensor, *, static: int | None = None) -> Any: ...
    def step(self, tokens: Tensor, state: Any) -> Tensor: ...


@runtime_checkable
class Pinnable(Protocol):
    """A state whose tensors can stay in place, as captured steps need; `models.cache.Decoding` defines the methods."""

    limit: int | None

    def pin(self, device: torch.device) -> None: ...
    def share_prefix(self, limit: int) -> Self: ...
    def reorder_(self, examples: Tensor) -> None: ...
    def restart_(self, fresh: Self) -> None: ...


@dataclass(frozen=True)
class DecodedBatch:
    """The hypotheses of a batch of sentences."""

    hypotheses: list[list[Hypothesis]]  # for each sentence, best first
    captured: bool  # whether CUDA graphs ran
    steps: int  # number of steps of the model

    @property
    def best(self) -> list[Hypothesis]:
        return [ranked[0] for ranked in self.hypotheses]


def decode_greedy(model: Stepwise, source: Tensor, **rules: Any) -> DecodedBatch:
    """Decode by taking the most likely token at each step: a search with one beam, whose score is Σ log p by default.

    rules   fields of `Rules` other than beam
    """
    return BeamSearch(model, captured=False, beam=1, **{"length_penalty": 0.0} | rules)(source)


def decode_beam(model: Stepwise, source: Tensor, **settings: Any) -> DecodedBatch:
    """Search the best hypotheses of each row of source (b,j), padded on the right; settings: those of `BeamSearch`."""
    return BeamSearch(model, **settings)(source)


class BeamSearch:
    """Beam search with one model and one set of `Rules`, for any number of batches.

    captured   True: CUDA graphs, kept for later batches of similar sizes; False: plain; None: captured on a GPU if the
               model's states allow it (`Pinnable`). The result records which one ran.
    weights    search with a copy of the model in this type, for example torch.bfloat16
    """

    def __init__(
        self, model: Stepwise, *, captured: bool | None = None, weights: torch.dtype | None = None, **rules: Any
    ) -> None:
        self.rules, self.captured = Rules(**rules), captured
        self.model: Any = model if weights is None else deepcopy(cast(Any, model)).to(weights)
        self._sessions: dict[tuple[int, ...], Session] = {}
        self._tensors: tuple[int, ...] = ()  # addresses of the model's tensors when the graphs were captured

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, source: Tensor) -> DecodedBatch:
        source = _check_source(self.model, source, self.rules)
        limits = self.rules.compute_limits(source)
        with torch.cuda.device(source.device) if source.is_cuda else nullcontext():
            if self._can_capture(source):
                return self._get_session(source, int(limits.max())).run(source, limits)
            return search_plain(self.model, self.rules, source, limits)

    def _can_capture(self, source: Tensor) -> bool:
        if self.captured is False or (self.captured is None and not source.is_cuda):
            return False
        if not source.is_cuda:
            raise ValueError(f"captured=True needs a CUDA device, but source is on {source.device}")
        if self._sessions:
            return True
        state = self.model.start(source[:1])
        if self.captured and not isinstance(state, Pinnable):
            raise TypeError(f"captured=True needs a state that can be pinned, got {type(state).__name__}")
        return isinstance(state, Pinnable)

    def _get_session(self, source: Tensor, longest: int) -> "Session":
        """Return the session for this batch size, rounded up; create a new one if the model's tensors have moved."""
        model = self.model if isinstance(self.model, nn.Module) else nn.Module()
        tensors = tuple(x.data_ptr() for x in chain(model.parameters(), model.buffers()))
        if tensors != self._tensors:
            self._sessions, self._tensors = {}, tensors
        batch, width, room = _round_size(len(source)), _round_size(source.shape[1], 8), _find_room(longest)
        size = (batch, width, room, source.get_device())
        if size not in self._sessions:
            if len(self._sessions) == SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[size] = Session(self.model, self.rules, batch, width, room, source.device, captured=True)
        return self._sessions[size]


def search_plain(model: Stepwise, rules: Rules, source: Tensor, limits: Tensor) -> DecodedBatch:
    """Run beam search step by step, dropping finished sentences from the batch."""
    search = Search(rules, limits, int(limits.max()), _choose_dtype(model))
    state = _repeat_state(model.start(source), source, rules.beam)
    hypotheses: dict[int, list[Hypothesis]] = {}
    while True:
        search.advance(model.step(search.tokens, state))
        is_over, done = search.is_over(), search.done
        if done.any():
            finished = search.select(done)
            hypotheses.update(zip(finished.sentences.tolist(), finished.list_hypotheses(), strict=True))
        if is_over:
            break
        rows = search.rows[~done].flatten()
        if len(rows) == search.rows.numel() and hasattr(state, "reorder_"):
            state.reorder_(rows)
        else:
            state, search = state.select(rows), search.select(~done)
    return DecodedBatch([hypotheses[n] for n in range(len(source))], captured=False, steps=int(search.time))


class Session:
    """Beam search in tensors that stay in place, for batches of up to `batch` sentences of `width` tokens.

    The caches have `room` positions, for the longest hypothesis; a step sees only the first 32, 64, … that it needs.
    With captured=False, each step runs on any device without a graph.
    """

    def __init__(
        self, model: Stepwise, rules: Rules, batch: int, width: int, room: int, device: torch.device, *, captured: bool
    ) -> None:
        self.model, self.rules, self.room, self.captured = model, rules, room, captured
        self.source = torch.full((batch, width), rules.padding, device=device)
        self.search = Search(rules, torch.zeros(batch, dtype=torch.long, device=device), room, _choose_dtype(model))
        self.state = self._start_state()
        self.state.pin(device)
        model.step(self.search.tokens, self.state)  # allocates the caches
        self.begin = self._make_replay(self._begin)
        self.steps: dict[int, Callable[[], None]] = {}  # by the number of positions they see

    def run(self, source: Tensor, limits: Tensor) -> DecodedBatch:
        """Search the hypotheses of source (b,j), of at most limits (b,) tokens."""
        (b, j), last = source.shape, int(limits.max())
        positions = self.room if self.state.limit is None else self.state.limit
        if last > positions:
            raise ValueError(f"max_length allows {last} tokens, but the model has only {positions} positions")
        self.source.fill_(self.rules.padding)[:b, :j] = source
        self.search.limit.zero_()[:b] = limits
        self.begin()
        for step in range(1, last + 1):
            self._get_step(min(_find_room(step), positions))()
            if (step == last or step % LOOK_EVERY == 0) and self.search.is_over():
                break
        hypotheses = self.search.select(self.search.sentences[:b]).list_hypotheses()
        return DecodedBatch(hypotheses, captured=self.captured, steps=step)

    def _begin(self) -> None:
        self.state.restart_(self._start_state())
        self.search.restart_()

    def _start_state(self) -> Any:
        return _repeat_state(self.model.start(self.source, static=self.room), self.source, self.rules.beam)

    def _get_step(self, positions: int) -> Callable[[], None]:
        if positions not in self.steps:
            state = self.state.share_prefix(positions)

            def step() -> None:
                self.search.advance(self.model.step(self.search.tokens, state))
                state.reorder_(self.search.rows.flatten())

            self.steps[positions] = self._make_replay(step)
        return self.steps[positions]

    def _make_replay(self, function: Callable[[], None]) -> Callable[[], None]:
        return GraphReplay(function) if self.captured else function


class GraphReplay:
    """A function that runs the first time, is captured as a CUDA graph the second, and is replayed from then on."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function, self.ran = function, False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.ran:
            self.ran = True
            return self.function()
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self.function()
            except RuntimeError as reason:
                raise RuntimeError(f"cannot capture this model; set captured=False ({reason})") from reason
            self.graph = graph
        self.graph.replay()


def _check_source(model: Any, source: Tensor, rules: Rules) -> Tensor:
    """Return the source with at least one column. Raises ValueError if model and source cannot be decoded."""
    if getattr(model, "training", False):
        raise ValueError("the model is in training mode; call model.eval() before decoding")
    if isinstance(model, nn.Module) and any(getattr(m, "sample_seed", None) is not None for m in model.modules()):
        raise ValueError("the model samples noise, which is only for scoring; leave seed_noise(…) before decoding")
    if getattr(model, "padding", rules.padding) != rules.padding:
        raise ValueError(f"padding={rules.padding} must be that of the model, {model.padding}")
    if source.dim() != 2 or source.is_floating_point() or not len(source):
        raise ValueError(f"source must be integers (batch, length), got {source.dtype} {tuple(source.shape)}")
    return source if source.shape[1] else source.new_full((len(source), 1), rules.padding)


def _choose_dtype(model: Any) -> torch.dtype:
    """Return the type in which log-probabilities are summed, at least float32."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.float64 if parameter is None else torch.promote_types(parameter.dtype, torch.float32)


def _repeat_state(state: Any, source: Tensor, times: int) -> Any:
    """Return the state of `times` hypotheses for each sentence."""
    if hasattr(state, "repeat"):
        return state.repeat(times, len(source), source.device)
    return state.select(torch.arange(len(source) * times, device=source.device) // times)


def _find_room(length: int) -> int:
    """Return the first of 32, 64, 128, … that is at least `length`."""
    return max(SMALLEST_ROOM, 1 << (length - 1).bit_length())


def _round_size(size: int, step: int = 1) -> int:
    """Round up to a multiple of step, and to one of four sizes between consecutive powers of two."""
    step = max(step, 1 << max(size.bit_length() - 3, 0))
    return -(-size // step) * step
