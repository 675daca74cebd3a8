"""Beam search as tensors on one device: the rules, the state of the search, and the step from one length to the next.

    score(y) = Σ_t log p(y_t | source, y_<t) / |y|^length_penalty            |y| counts eos, as in fairseq

Sentences are searched independently, as in fairseq. At each length, the continuations of the K running hypotheses are
ranked by Σ log p. Those among the first K that end are finished; the K best that do not end keep running. A sentence is
done when K hypotheses have finished, or when no running hypothesis can still beat the n_best-th finished one:

    max over the lengths ahead of  Σ log p so far / length^length_penalty  ≤  its score.

This early stop never changes a result, since log p ≤ 0. At the maximum length only eos may follow, so every hypothesis
ends. Padding and bos are never emitted. Probabilities are those of the model and are not renormalised.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.config import LengthPenalty, Natural, NonNegative, check_fields
from attnlab.decoding.ranking import rank_words


@dataclass(frozen=True)
class Hypothesis:
    """A finished output sequence."""

    tokens: tuple[int, ...]  # the last one is eos
    log_probs: tuple[float, ...]  # of each token
    score: float
    cut: bool  # whether it reached the maximum length, where only eos could follow


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings of a search. Lengths count eos."""

    beam: int = 5
    n_best: int = 1
    length_penalty: LengthPenalty = 1.0
    max_length: int | tuple[NonNegative, float] = (2.0, 20.0)  # a number, or (a, b) for a · (source tokens) + b
    min_length: int = 1
    bos: Natural = 1
    eos: Natural = 2
    padding: Natural = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.n_best <= self.beam:
            raise ValueError(f"n_best={self.n_best} must be from 1 to beam={self.beam}")
        if len({self.bos, self.eos, self.padding}) < 3:
            raise ValueError(f"bos={self.bos}, eos={self.eos}, padding={self.padding} must be three different tokens")

    def compute_limits(self, source: Tensor) -> Tensor:
        """Compute the maximum length of each sentence, (b,)."""
        slope, offset = (0.0, self.max_length) if isinstance(self.max_length, int) else self.max_length
        limits = [int(slope * n + offset) for n in (source != self.padding).sum(1).tolist()]
        if (shortest := min(limits)) < self.min_length:
            minimum = f"min_length={self.min_length}"
            raise ValueError(f"max_length={self.max_length} allows a sentence {shortest} tokens, fewer than {minimum}")
        return torch.tensor(limits, device=source.device)

    def check_vocabulary(self, size: int) -> None:
        if size <= max(self.bos, self.eos, self.padding):
            tokens = f"bos={self.bos}, eos={self.eos} and padding={self.padding}"
            raise ValueError(f"{tokens} are not all in the model's vocabulary of {size}")


class Search:
    """The tensors of a search over b sentences with k beams, and the step that advances all of them in place.

    `restart_` and `advance` never wait for the device, so a CUDA graph can capture them. A sentence with limit 0 is
    done from the start.
    """

    def __init__(self, rules: Rules, limit: Tensor, longest: int, dtype: torch.dtype) -> None:
        b, k = len(limit), rules.beam
        self.rules, self.limit = rules, limit  # (b,)
        self.sentences = torch.arange(b, device=limit.device)  # sentence numbers
        self.time = limit.new_zeros(1)  # number of tokens chosen
        self.last = limit.new_zeros(b, k)  # the newest token of each running hypothesis
        self.rows = limit.new_zeros(b, k)  # the former row, of b·k, that each running hypothesis continues
        self.total = limit.new_zeros(b, k, dtype=dtype)  # Σ log p of the running hypotheses; −∞: none
        self.best = torch.zeros_like(self.total)  # scores of the finished hypotheses, best first; −∞: none
        self.ending = limit.new_zeros(b, k)  # where the finished hypotheses end: length · k + slot
        self.count = limit.new_zeros(b)  # number of finished hypotheses
        self.done, self.broken = (limit.new_zeros(b, dtype=torch.bool) for _ in range(2))
        self.words, self.parents = (limit.new_zeros(longest, b, k) for _ in range(2))  # of the running, at each length
        self.log_probs, self.ends = (limit.new_zeros(longest, b, k, dtype=dtype) for _ in range(2))  # of word, of eos
        self.restart_()

    def restart_(self) -> None:
        for x in (self.time, self.count, self.broken):
            x.zero_()
        self.last.fill_(self.rules.bos)
        self.total.fill_(-torch.inf)[:, 0].zero_()
        self.best.fill_(-torch.inf)
        self.done.copy_(self.limit == 0)

    @property
    def tokens(self) -> Tensor:
        """The next input of the model, (b·k,1)."""
        return self.last.view(-1, 1)

    def advance(self, logits: Tensor) -> None:
        """Extend the hypotheses by the logits (b·k,1,vocabulary) after `tokens`. Then reorder the state by `rows`."""
        (b, k), length, rules = self.total.shape, self.time + 1, self.rules
        rules.check_vocabulary(logits.shape[2])
        special = {"padding": rules.padding, "bos": rules.bos, "eos": rules.eos}
        ranked = rank_words(logits[:, -1], k, **special, dtype=self.total.dtype)
        value, word, end = (x.unflatten(0, (b, k)) for x in ranked)  # (b,k,≤k), (b,k,≤k), (b,k)
        self.broken |= end.isnan().any(1) & ~self.done
        end.masked_fill_(length < rules.min_length, -torch.inf)
        final = (length == self.limit).unsqueeze(1)
        total, place = (self.total.unsqueeze(2) + value).flatten(1).masked_fill(final, -torch.inf).topk(k)  # (b,k)
        self._finish_hypotheses(self.total + end, total, length)
        slot, word, value = place // value.shape[2], word.flatten(1).gather(1, place), value.flatten(1).gather(1, place)
        pasts = (self.words, self.parents, self.log_probs, self.ends)
        for past, new in zip(pasts, (word, slot, value, end), strict=True):
            past.index_copy_(0, self.time, new.unsqueeze(0))
        self.last.copy_(word)
        self.rows.copy_(slot + torch.arange(0, b * k, k, device=slot.device).unsqueeze(1))
        self.total.copy_(total)
        self.time += 1

    def _finish_hypotheses(self, stopped: Tensor, total: Tensor, length: Tensor) -> None:
        """Keep the k best finished hypotheses, including those that end now, and mark the sentences that are done.

        stopped (b,k)   Σ log p of the hypotheses if they end now
        total (b,k)     Σ log p of those that keep running; −∞ at the maximum length, so that the sentence is done
        """
        k, penalty, dtype = self.rules.beam, self.rules.length_penalty, total.dtype
        bar = torch.cat([total, stopped], 1).topk(k).values[:, -1:]
        ended = (stopped >= bar) & (stopped > -torch.inf) & ~self.done.unsqueeze(1)
        score = (stopped / length.to(dtype) ** penalty).masked_fill(~ended, -torch.inf)
        best, kept = torch.cat([self.best, score], 1).topk(k)
        ending = (length * k + torch.arange(k, device=length.device)).expand_as(self.ending)
        self.ending.copy_(torch.cat([self.ending, ending], 1).gather(1, kept))
        self.best.copy_(best)
        self.count += ended.sum(1)
        soonest, latest = (n.to(dtype) ** penalty for n in (length + 1, self.limit))
        reachable = torch.maximum(total[:, 0] / soonest, total[:, 0] / latest)
        self.done |= (self.count >= k) | (best[:, self.rules.n_best - 1] >= reachable)

    def select(self, sentences: Tensor) -> "Search":
        """Return the search of some sentences, given as (m,) indices or a (b,) mask."""
        other = object.__new__(Search)
        other.rules, other.time = self.rules, self.time
        for name in ("limit", "sentences", "last", "rows", "total", "best", "ending", "count", "done", "broken"):
            setattr(other, name, getattr(self, name)[sentences])
        for name in ("words", "parents", "log_probs", "ends"):
            setattr(other, name, getattr(self, name)[:, sentences])
        return other

    def is_over(self) -> bool:
        """Return whether every sentence is done, waiting for the device. Raises ValueError for NaN logits."""
        is_over, is_broken = torch.stack([self.done.all(), self.broken.any()]).tolist()
        if is_broken:
            sentence = int(self.sentences[self.broken][0])
            raise ValueError(
                f"sentence {sentence}: the model's logits are NaN or infinite at or before token {int(self.time)}"
            )
        return is_over

    def list_hypotheses(self) -> list[list[Hypothesis]]:
        """Return the n_best finished hypotheses of each sentence, best first."""
        scores, limits = self.best[:, : self.rules.n_best].tolist(), self.limit.tolist()
        tokens, log_probs, lengths = (x.tolist() for x in self._trace_back())
        hypotheses = []
        for n, limit in enumerate(limits):
            ranked = [
                Hypothesis(tuple(words[:length]), tuple(chances[:length]), score, cut=length == limit)
                for words, chances, length, score in zip(tokens[n], log_probs[n], lengths[n], scores[n], strict=True)
                if score > -torch.inf
            ]
            if not ranked:
                sentence = int(self.sentences[n])
                raise ValueError(f"sentence {sentence}: no hypothesis can end because eos has probability 0")
            hypotheses.append(ranked)
        return hypotheses

    def _trace_back(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and log p (b,n_best,t) of the finished hypotheses, on the host, and their lengths (b,n_best).

        It follows all of them from their ends to their beginnings at once. After the end, the values are arbitrary.
        """
        steps, ending = int(self.time), self.ending[:, : self.rules.n_best].cpu()
        pasts = (past[:steps].cpu() for past in (self.words, self.parents, self.log_probs, self.ends))
        length, slot = ending // self.rules.beam, ending % self.rules.beam
        tokens, chances = [], []
        for t, past in reversed(list(enumerate(zip(*pasts, strict=True)))):
            word, parent, log_prob, end = (x.gather(1, slot) for x in past)
            inside = t < length - 1
            tokens.append(word.masked_fill(~inside, self.rules.eos))
            chances.append(torch.where(inside, log_prob, end))
            slot = torch.where(inside, parent, slot)
        return torch.stack(tokens[::-1], 2), torch.stack(chances[::-1], 2), length
