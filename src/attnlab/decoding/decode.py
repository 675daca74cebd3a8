"""Greedy decoding and beam search, over anything with start(source), step(tokens, state) and state.select(rows).

`search.py` says what beam search computes. It runs in one of two ways, with the same result:

    plain      caches grow, the host looks at every step, and a sentence that is done leaves the batch
    captured   everything stays in its place on the GPU; one step (model, ranking, bookkeeping, reordering of caches) is
               a CUDA graph, replayed for every token, and the host looks every few steps
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from attnlab.decoding.search import Hypothesis, Rules, Search, refuse_nan

LOOK_EVERY = 8  # captured steps between two looks of the host
SMALLEST_ROOM = 32  # places of the caches that the first captured steps see; later ones see 64, 128, …
SESSIONS = 8  # sizes of batches for which a search keeps its graphs


class Stepwise(Protocol):
    """What can be decoded: log p of the next token is log softmax of what step returns, (b,1,vocabulary).

    A state has select(rows), and perhaps reorder_(rows): in place, where each row continues one of the same sentence.
    """

    def start(self, source: Tensor, *, static: int | None = None) -> Any: ...
    def step(self, tokens: Tensor, state: Any) -> Tensor: ...


@runtime_checkable
class Pinnable(Protocol):
    """A state that can stay in its place, as captured steps need; `models.cache.Decoding` says what the methods do."""

    limit: int | None

    def pin(self, device: torch.device) -> None: ...
    def within(self, limit: int) -> Self: ...
    def reorder_(self, examples: Tensor) -> None: ...
    def restart_(self, fresh: Self) -> None: ...


@dataclass(frozen=True)
class DecodedBatch:
    hypotheses: list[list[Hypothesis]]  # of each sentence, the best first
    captured: bool  # whether CUDA graphs ran
    steps: int  # of the model

    @property
    def best(self) -> list[Hypothesis]:
        return [found[0] for found in self.hypotheses]


@torch.no_grad()
def decode_greedy(model: Stepwise, source: Tensor, **rules: Any) -> DecodedBatch:
    """The likeliest token, again and again. rules are `Rules`; score is Σ log p unless length_penalty is given.

    On a GPU, beam(model, source, beam=1) gives the same sooner.
    """
    made = Rules(**{"beam": 1, "length_penalty": 0.0} | rules)
    if made.beam != 1:
        raise ValueError(f"greedy decoding follows one hypothesis, not beam={made.beam}")
    source = _check_source(model, source, made)
    limits, state = made.compute_limits(source), model.start(source)
    last, done = source.new_full((len(source), 1), made.bos), torch.zeros_like(limits, dtype=torch.bool)
    tokens, log_probs = [], []
    for length in range(1, int(limits.max()) + 1):
        logits = model.step(last, state)[:, -1]
        made.check_vocabulary(logits.shape[1])
        log_prob = logits.log_softmax(-1, dtype=_choose_dtype(model))  # (b,vocabulary)
        refuse_nan((log_prob.isnan().any(1) & ~done).nonzero(), length)
        allowed = log_prob.clone()
        allowed[:, [made.padding, made.bos] + [made.eos] * (length < made.min_length)] = -torch.inf
        last = torch.where(limits == length, made.eos, allowed.argmax(1)).unsqueeze(1)
        tokens.append(last)
        log_probs.append(log_prob.gather(1, last))
        done |= last[:, 0] == made.eos
        if done.all():
            break
    rows = zip(torch.cat(tokens, 1).tolist(), torch.cat(log_probs, 1).tolist(), limits.tolist(), strict=True)
    return DecodedBatch([[_build_hypothesis(*row, made)] for row in rows], captured=False, steps=len(tokens))


def decode_beam(
    model: Stepwise,
    source: Tensor,
    *,
    captured: bool | None = None,
    weights: torch.dtype | None = None,
    **rules: Any,
) -> DecodedBatch:
    """The best hypotheses for each row of source (b,j), padded on the right; for more batches keep a `BeamSearch`."""
    return BeamSearch(model, captured=captured, weights=weights, **rules)(source)


class BeamSearch:
    """Beam search with one model by one set of `Rules`, batch after batch.

    captured   True: CUDA graphs, kept for later batches of about the same size; False: plain; None: captured on a GPU
               where the model's states allow it (`Pinnable`). The result says what ran.
    weights    torch.bfloat16, say: search with a copy of the model in this type, made now
    """

    def __init__(
        self, model: Stepwise, *, captured: bool | None = None, weights: torch.dtype | None = None, **rules: Any
    ) -> None:
        self.rules, self.captured = Rules(**rules), captured
        self.model = model if weights is None else _in_type(model, weights)
        self._sessions: dict[tuple[int, ...], Session] = {}
        self._tensors: tuple[int, ...] = ()  # where those of the model were when the graphs were captured

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
            raise ValueError(f"captured=True needs a CUDA device, but the source is on {source.device}")
        if self._sessions:
            return True
        state = self.model.start(source[:1])
        if self.captured and not isinstance(state, Pinnable):
            raise TypeError(f"captured=True needs a state that can be pinned; a {type(state).__name__} cannot")
        return isinstance(state, Pinnable)

    def _get_session(self, source: Tensor, longest: int) -> "Session":
        """The session for batches of this size, rounded up; when the tensors of the model have moved, a new one."""
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
    search = Search(rules, limits, int(limits.max()), _choose_dtype(model))
    state = model.start(source).select(_repeat_rows(source, rules.beam))
    found: dict[int, list[Hypothesis]] = {}
    over = False
    while not over:
        search.advance(model.step(search.tokens, state))
        over, done = search.is_over(), search.done
        if done.any():
            ended = search.select(done)
            found.update(zip(ended.sentences.tolist(), ended.list_hypotheses(), strict=True))
        if over:
            break
        rows = search.rows[~done].flatten()
        if len(rows) == search.rows.numel() and hasattr(state, "reorder_"):
            state.reorder_(rows)
        else:
            state, search = state.select(rows), search.select(~done)
    return DecodedBatch([found[n] for n in range(len(source))], captured=False, steps=int(search.time))


class Session:
    """Beam search in tensors that stay in their place, for batches of up to `batch` sentences of `width` tokens.

    The caches have places for the longest hypothesis; a step sees the first 32, 64, … of them, as many as it needs.
    With captured=False each step runs as it stands, on any device: what a graph would replay.
    """

    def __init__(
        self,
        model: Stepwise,
        rules: Rules,
        batch: int,
        width: int,
        longest: int,
        device: torch.device,
        *,
        captured: bool,
    ) -> None:
        self.model, self.rules, self.longest, self.captured = model, rules, longest, captured
        self.source = torch.full((batch, width), rules.padding, device=device)
        self.search = Search(rules, torch.zeros(batch, dtype=torch.long, device=device), longest, _choose_dtype(model))
        self.state = self._start_state()
        self.state.pin(device)
        model.step(self.search.tokens, self.state)  # allocates the caches
        self.begin = self._make_replay(self._begin)
        self.steps: dict[int, Callable[[], None]] = {}  # by the places that they see

    def run(self, source: Tensor, limits: Tensor) -> DecodedBatch:
        (b, j), last = source.shape, int(limits.max())
        places = self.longest if self.state.limit is None else self.state.limit
        if last > places:
            raise ValueError(f"max_length allows {last} tokens, but the model has positions for {places}")
        self.source.fill_(self.rules.padding)[:b, :j] = source
        self.search.limit.zero_()[:b] = limits
        self.begin()
        for step in range(1, last + 1):
            self._get_step(min(_find_room(step), places))()
            if (step == last or step % LOOK_EVERY == 0) and self.search.is_over():
                break
        found = self.search.select(self.search.sentences[:b]).list_hypotheses()
        return DecodedBatch(found, captured=self.captured, steps=step)

    def _begin(self) -> None:
        self.state.restart_(self._start_state())
        self.search.restart_()

    def _start_state(self) -> Any:
        return self.model.start(self.source, static=self.longest).select(_repeat_rows(self.source, self.rules.beam))

    def _get_step(self, places: int) -> Callable[[], None]:
        if places not in self.steps:
            state = self.state.share_prefix(places)

            def step() -> None:
                self.search.advance(self.model.step(self.search.tokens, state))
                state.reorder_(self.search.rows.flatten())

            self.steps[places] = self._make_replay(step)
        return self.steps[places]

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
                raise RuntimeError(f"this model cannot be captured, say captured=False: {reason}") from reason
            self.graph = graph
        self.graph.replay()


def _check_source(model: Any, source: Tensor, rules: Rules) -> Tensor:
    """The source, with at least one column; refuses what cannot be decoded."""
    if getattr(model, "training", False):
        raise ValueError("the model is in training mode, where dropout and noise are on; call model.eval() first")
    if isinstance(model, nn.Module) and any(getattr(m, "sample_seed", None) is not None for m in model.modules()):
        raise ValueError("noise is for scoring, not for decoding; leave sampled(…) first")
    if getattr(model, "padding", rules.padding) != rules.padding:
        raise ValueError(f"padding={rules.padding}, but the model's is {model.padding}")
    if source.dim() != 2 or source.is_floating_point() or not len(source):
        raise ValueError(f"source must be whole numbers (batch, length), not {source.dtype} {tuple(source.shape)}")
    return source if source.shape[1] else source.new_full((len(source), 1), rules.padding)


def _in_type(model: Any, dtype: torch.dtype) -> Any:
    """A copy of the model with its weights in this type."""
    return deepcopy(model).to(dtype)


def _build_hypothesis(tokens: list[int], log_probs: list[float], limit: int, rules: Rules) -> Hypothesis:
    length = tokens.index(rules.eos) + 1
    score = sum(log_probs[:length]) / length**rules.length_penalty
    return Hypothesis(tuple(tokens[:length]), tuple(log_probs[:length]), score, cut=length == limit)


def _choose_dtype(model: Any) -> torch.dtype:
    """In what log-probabilities are summed: at least float32."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.float64 if parameter is None else torch.promote_types(parameter.dtype, torch.float32)


def _repeat_rows(source: Tensor, times: int) -> Tensor:
    return torch.arange(len(source) * times, device=source.device) // times


def _find_room(length: int) -> int:
    """The first of 32, 64, 128, … that holds so many."""
    return max(SMALLEST_ROOM, 1 << (length - 1).bit_length())


def _round_size(size: int, step: int = 1) -> int:
    """Up to a multiple of step and to one of four sizes between a power of two and the next."""
    step = max(step, 1 << max(size.bit_length() - 3, 0))
    return -(-size // step) * step
