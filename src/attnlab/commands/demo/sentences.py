"""Sentences of the lexicon with their true alignments, as a model reads them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlab.analysis.alignment import NOWHERE
from attnlab.report.view import ViewGold
from attnlab.tasks.lexicon import Links
from attnlab.tasks.task import EOS, PAD, Batch

SHOWN = 5  # number of sentences on the page; odd, so that one has the median error rate


@dataclass(frozen=True, eq=False)
class Sentences:
    """A batch with its true alignments.

    links   of each sentence: (source word, target word), from 0
    right   (b,i,j) bool: key j is a source of the word that row i predicts
    """

    batch: Batch
    links: Sequence[Links]
    right: Tensor
    words: dict[str, list[list[str]]]

    @classmethod
    def take(cls, task: Any, part: str, indices: Sequence[int] | None = None) -> "Sentences":
        """Take sentence pairs of a part of the lexicon, by default all."""
        indices = range(task.count_examples(part)) if indices is None else indices
        batch = task.make_batch(part, list(indices))
        source, given = batch.inputs
        links = [task.problem.get_links(part, index) for index in indices]
        right = torch.zeros(*given.shape, source.shape[1], dtype=torch.bool)
        for sentence, pairs in enumerate(links):
            for word, target in pairs:
                right[sentence, target, word] = True
        sides = {"source": (task.problem.source, source), "target": (task.problem.target, given)}
        words = {name: [known.get_tokens(row) for row in ids.tolist()] for name, (known, ids) in sides.items()}
        return cls(batch, links, right, words)

    @property
    def rows(self) -> Tensor:
        """The target word that each decoder row predicts, or NOWHERE: (b,i)."""
        targets = self.batch.targets
        scored = (targets != PAD) & (targets != EOS)
        return torch.arange(targets.shape[1]).expand_as(targets).where(scored, NOWHERE)

    @property
    def keys(self) -> Tensor:
        """The source word of each key, or NOWHERE for padding: (b,j). </s> has the number `special`."""
        source = self.batch.inputs[0]
        words = torch.arange(source.shape[1]).expand_as(source)
        return words.where(source != EOS, self.special).where(source != PAD, NOWHERE)

    @property
    def special(self) -> int:
        return self.batch.inputs[0].shape[1]

    def list_gold(self) -> list[ViewGold]:
        """Return the alignments for the viewer, without padding."""
        gold = []
        for links, *sides in zip(self.links, self.words["source"], self.words["target"], strict=True):
            keys, rows = (sum(word != "<pad>" for word in side) for side in sides)
            gold.append(ViewGold(links, frozenset(), (*range(rows - 1), NOWHERE), tuple(range(keys)), keys - 1))
        return gold


def choose_shown(task: Any) -> list[int]:
    """Return the held-out sentences on the page: those whose number of aligned words is nearest to the median."""
    links = task.read_alignments("valid")
    middle = statistics.median(len(pairs) for pairs in links)
    return sorted(sorted(range(len(links)), key=lambda k: abs(len(links[k]) - middle))[:SHOWN])
