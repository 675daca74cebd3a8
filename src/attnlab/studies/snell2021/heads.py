"""Several heads (Snell et al. 2021, §5.2, Figure 6): one good initialisation among them is enough.

All heads share one backbone; a head is its W and b of eq. 20, drawn by its own seed. It is trained alone on the
backbone with three streams of permutations. It is good if it reaches accuracy 0.95 with each stream, bad if with none,
and left out otherwise. Then eight heads train together, contexts summed (eq. 21): all bad, seven bad and one good, or
random ones.

How many heads are good depends on the backbone. So backbones are tried until one has eight good and eight bad heads. If
none has, the nearest one is taken, and its heads are drawn with repetition.

The authors' code differs from the paper: it has a GRU, a value projection for each head and the mean over heads, and a
head is bad below accuracy 0.6. Here it is the paper's model, whose slow solution (see copying) passes 0.6.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from attnlab.config import Natural
from attnlab.experiments.population_training import SeedResults
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.models.lstm import LSTMTranslator
from attnlab.studies.snell2021.copying import CopyExperiment, draw_measure, make_experiment, read_seeds

STREAMS = 3
REACHED = 0.95
HEADS = 8


@dataclass(frozen=True, kw_only=True)
class Combination(CopyExperiment):
    """Seed k is combination k of head seeds, trained on stream k of data."""

    backbone: Natural = 0
    combinations: tuple[tuple[Natural, ...], ...] = ()
    streams: tuple[Natural, ...] = ()

    def model(self, seed: int) -> nn.Module:
        """Build the shared backbone with the heads of a combination."""
        model = cast(LSTMTranslator, super().model(self.backbone))
        heads = [make_head(number, self.width) for number in self.combinations[seed]]
        model.attention.mechanism = type(model.attention.mechanism)(len(heads), self.width)
        query = nn.Linear(self.width, len(heads) * self.width)
        with torch.no_grad():
            query.weight.copy_(torch.cat([one.weight for one in heads]))
            query.bias.copy_(torch.cat([one.bias for one in heads]))
        model.attention.query = query
        return model

    def draw(self, seeds: Sequence[int], part: int, number: int, device: torch.device) -> tuple[Tensor, ...]:
        return super().draw([self.streams[seed] for seed in seeds], part, number, device)


def make_head(number: int, width: int) -> nn.Linear:
    """Draw W and b of one head."""
    torch.manual_seed(1_000_003 * (number + 1))
    return nn.Linear(width, width)


def fig6(setting: Setting) -> Findings:
    """The item: heads selected by training them alone, then eight of them together."""
    candidates, tags = setting.at(smoke=6, small=24, full=60), setting.tags
    length, steps = setting.at(smoke=(8, 50), small=(12, 300), full=(40, 200))
    base = make_experiment(setting, length=length, steps=steps)
    tried = _try_backbones(setting, base, candidates)
    backbone, good, bad = max(tried, key=lambda each: min(len(each.good), len(each.bad), HEADS))
    counts = ", ".join(f"{len(each.good)} and {len(each.bad)}" for each in tried)
    remark = (
        f"Of {candidates} heads on backbone {backbone}, {len(good)} are good, {len(bad)} bad, "
        f"{candidates - len(good) - len(bad)} left out. Good and bad heads on every backbone tried: {counts}."
    )
    if min(len(good), len(bad)) < HEADS:
        remark += f" If there are fewer than {HEADS} heads of a kind, they are drawn with repetition."
    if not good or not bad:
        reason = f"{len(good)} good and {len(bad)} bad heads among {candidates}: one of each is needed"
        cell = Cell(item="fig6", row="one good − all bad", column="final accuracy", not_run=reason, tags=tags)
        return Findings([cell], {}, (remark,))
    draw, runs = torch.Generator().manual_seed(0), len(setting.seeds)
    conditions = {
        "all bad": [_draw_heads(bad, HEADS, draw) for _ in setting.seeds],
        "one good": [(*_draw_heads(bad, HEADS - 1, draw), *_draw_heads(good, 1, draw)) for _ in setting.seeds],
        "random": [_draw_heads(range(candidates), HEADS, draw) for _ in setting.seeds],
    }
    streams = [100 + k for k in range(runs)]
    cases = {name: _make_combination(base, backbone, chosen, streams) for name, chosen in conditions.items()}
    results = read_seeds(setting, cases, range(runs))
    caption = "Accuracy of eight heads together. Each line is a run."
    figures = {"accuracy": (draw_measure(results, "accuracy"), caption)}
    return Findings(_make_cells(results, tags), figures, (remark,))


def _make_cells(results: Mapping[str, SeedResults], tags: tuple[str, ...]) -> list[Cell]:
    bad, cells = results["all bad"].measures["accuracy"], []
    for name, result in results.items():
        curve = result.measures["accuracy"]
        reached = tuple((curve >= REACHED).any(1).float().tolist())
        column = f"share of runs that reach accuracy {REACHED}"
        cells.append(Cell(item="fig6", row=name, column=column, values=reached, share=True, tags=tags))
        if name != "all bad":
            gain = tuple((curve - bad)[:, -1].tolist())
            row = f"{name} − all bad"
            cells.append(Cell(item="fig6", row=row, column="final accuracy", values=gain, sign=1, tags=tags))
    return cells


class SortedHeads(NamedTuple):
    """The good and the bad heads of a backbone."""

    backbone: int
    good: list[int]
    bad: list[int]


def _try_backbones(setting: Setting, base: CopyExperiment, candidates: int) -> list[SortedHeads]:
    """Sort the heads of one backbone after another, until one has enough of both kinds."""
    tried: list[SortedHeads] = []
    for backbone in range(setting.at(smoke=1, small=2, full=8)):
        tried.append(_sort_heads(setting, base, backbone, candidates))
        if min(len(tried[-1].good), len(tried[-1].bad)) >= HEADS:
            break
    return tried


def _sort_heads(setting: Setting, base: CopyExperiment, backbone: int, candidates: int) -> SortedHeads:
    """Read each head trained alone on every stream."""
    alone = [(number,) for number in range(candidates) for _ in range(STREAMS)]
    streams = [stream for _ in range(candidates) for stream in range(STREAMS)]
    name = f"heads alone on backbone {backbone}"
    case = _make_combination(base, backbone, alone, streams)
    results = read_seeds(setting, {name: case}, range(len(alone)))[name]
    reached = (results.measures["accuracy"] >= REACHED).any(1).view(candidates, STREAMS)
    every, none = reached.all(1), ~reached.any(1)
    return SortedHeads(backbone, every.nonzero().flatten().tolist(), none.nonzero().flatten().tolist())


def _make_combination(
    base: CopyExperiment, backbone: int, chosen: Sequence[tuple[int, ...]], streams: Sequence[int]
) -> Combination:
    return Combination(**asdict(base), backbone=backbone, combinations=tuple(chosen), streams=tuple(streams))


def _draw_heads(pool: Sequence[int], number: int, draw: torch.Generator) -> tuple[int, ...]:
    """Draw this many heads of a pool: different ones if there are enough, else with repetition."""
    if len(pool) >= number:
        return tuple(pool[k] for k in torch.randperm(len(pool), generator=draw)[:number].tolist())
    return tuple(pool[k] for k in torch.randint(len(pool), (number,), generator=draw).tolist())
