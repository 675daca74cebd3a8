"""Several heads (Snell et al. 2021, §5.2, Figure 6): one good initialisation among them is enough.

All heads share one backbone; a head is its W and b of eq. 20, drawn by its own seed. It is trained alone on the
backbone with three streams of permutations. It is good if it reaches accuracy 0.95 with each stream, bad if with none,
and left out otherwise. Then eight heads train together: all bad, seven bad and one good, or random ones.

How many heads are good depends on the backbone. So backbones are tried until one has eight good and eight bad heads. If
none has, the nearest one is taken, and its heads are drawn with repetition.

The item has two forms, and form=lstm or form=gru selects one:

    lstm    the paper's model: contexts are summed (eq. 21). Its slow solution (see copying) passes accuracy 0.6
    gru     the authors' code (gru.py): heads have value projections, drawn by the same seed, and are averaged; a head
            is bad only if its accuracy at the end is below 0.6 with each stream (at full scale)
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnlab.config import Natural, suggest_nearest
from attnlab.experiments.population_training import SeedResults
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.models.lstm import LSTMTranslator
from attnlab.studies.snell2021.copying import CopyExperiment, draw_measure, make_experiment, read_seeds
from attnlab.studies.snell2021.gru import GRUTranslator

STREAMS = 3
REACHED = 0.95
HEADS = 8
CONDITIONS = ("all bad", "one good", "random")  # the first is what the others are compared with


@dataclass(frozen=True, kw_only=True)
class Combination(CopyExperiment):
    """Seed k is combination k of head seeds, trained on stream k of data."""

    backbone: Natural = 0
    combinations: tuple[tuple[Natural, ...], ...] = ()
    streams: tuple[Natural, ...] = ()

    def model(self, seed: int) -> nn.Module:
        """Build the shared backbone with the heads of a combination."""
        model = cast(LSTMTranslator, super().model(self.backbone))
        heads = [make_head(number, self.width).query for number in self.combinations[seed]]
        model.attention.mechanism = type(model.attention.mechanism)(len(heads), self.width)
        model.attention.query = _join_queries(heads)
        return model

    def draw(self, seeds: Sequence[int], part: int, number: int, device: torch.device) -> tuple[Tensor, ...]:
        return super().draw([self.streams[seed] for seed in seeds], part, number, device)


@dataclass(frozen=True, kw_only=True)
class GRUCombination(Combination):
    """The same with the authors' model."""

    def model(self, seed: int) -> nn.Module:
        heads = [make_head(number, self.width) for number in self.combinations[seed]]
        torch.manual_seed(self.backbone)
        model = GRUTranslator(self.words, self.width, heads=len(heads))
        model.attention.query = _join_queries([head.query for head in heads])
        model.attention.outputs = nn.ModuleList(head.value for head in heads)
        return model


class Head(NamedTuple):
    """A head: W and b of its queries, and its value projection, which only the GRU form has."""

    query: nn.Linear
    value: nn.Linear


def make_head(number: int, width: int) -> Head:
    """Draw a head."""
    torch.manual_seed(1_000_003 * (number + 1))
    return Head(nn.Linear(width, width), nn.Linear(width, width))


def _join_queries(heads: Sequence[nn.Linear]) -> nn.Linear:
    """Return one linear map to the queries of all heads."""
    joined = nn.Linear(heads[0].in_features, len(heads) * heads[0].out_features)
    with torch.no_grad():
        joined.weight.copy_(torch.cat([head.weight for head in heads]))
        joined.bias.copy_(torch.cat([head.bias for head in heads]))
    return joined


@dataclass(frozen=True)
class Form:
    """One of the two models: how its rows and figures are named, and how its heads are judged."""

    experiment: type[Combination]
    prefix: str  # of its rows and remarks
    figure: str
    bad_below: float  # at full scale, a run that is not good is bad if its last accuracy is below
    smoke: tuple[int, int]  # length and updates at smoke scale, with which some heads are good and some bad
    small: tuple[int, int]


FORMS = {
    "lstm": Form(Combination, "", "accuracy", REACHED, smoke=(8, 50), small=(12, 300)),
    "gru": Form(GRUCombination, "GRU: ", "accuracy-gru", 0.6, smoke=(10, 40), small=(12, 150)),
}


def fig6(setting: Setting) -> Findings:
    """The item: heads selected by training them alone, then eight of them together."""
    names = tuple(dict.fromkeys(setting.options.get("form", ",".join(FORMS)).split(",")))
    for name in names:
        if name not in FORMS:
            raise ValueError(f"form must be {' or '.join(FORMS)}, got {name!r}{suggest_nearest(name, FORMS)}")
    return Findings.join(_read_form(setting, FORMS[name]) for name in names)


def _read_form(setting: Setting, form: Form) -> Findings:
    try:
        return _compare_heads(setting, form)
    except ValueError as error:
        if setting.running:
            raise
        return Findings(_make_absent(form, str(error), setting.tags))  # the other form may be in the ledger


def _compare_heads(setting: Setting, form: Form) -> Findings:
    candidates, tags = setting.at(smoke=6, small=24, full=60), setting.tags
    length, steps = setting.at(smoke=form.smoke, small=form.small, full=(40, 200))
    base = make_experiment(setting, length=length, steps=steps)
    tried = _try_backbones(setting, form, base, candidates)
    backbone, good, bad = max(tried, key=lambda each: min(len(each.good), len(each.bad), HEADS))
    counts = ", ".join(f"{len(each.good)} and {len(each.bad)}" for each in tried)
    remark = (
        f"{form.prefix}Of {candidates} heads on backbone {backbone}, {len(good)} are good, {len(bad)} bad, "
        f"{candidates - len(good) - len(bad)} left out. Good and bad heads on every backbone tried: {counts}."
    )
    if min(len(good), len(bad)) < HEADS:
        remark += f" If there are fewer than {HEADS} heads of a kind, they are drawn with repetition."
    if not good or not bad:
        reason = f"{len(good)} good and {len(bad)} bad heads among {candidates}: one of each is needed"
        return Findings(_make_absent(form, reason, tags), {}, (remark,))
    draw, runs = torch.Generator().manual_seed(0), len(setting.seeds)
    conditions = {
        "all bad": [_draw_heads(bad, HEADS, draw) for _ in setting.seeds],
        "one good": [(*_draw_heads(bad, HEADS - 1, draw), *_draw_heads(good, 1, draw)) for _ in setting.seeds],
        "random": [_draw_heads(range(candidates), HEADS, draw) for _ in setting.seeds],
    }
    streams = [100 + k for k in range(runs)]
    cases = {name: _make_combination(form, base, backbone, chosen, streams) for name, chosen in conditions.items()}
    results = _read_all(setting, {f"{form.prefix}{name}": case for name, case in cases.items()}, runs)
    caption = f"{form.prefix}Accuracy of eight heads together. Each line is a run."
    figures = {form.figure: (draw_measure(results, "accuracy"), caption)}
    return Findings(_make_cells(form, results, tags), figures, (remark,))


def _make_cells(form: Form, results: Mapping[str, SeedResults], tags: tuple[str, ...]) -> list[Cell]:
    curves = {name: results[f"{form.prefix}{name}"].measures["accuracy"] for name in CONDITIONS}
    cells = []
    for name, curve in curves.items():
        reached = tuple((curve >= REACHED).any(1).float().tolist())
        cells.append(_make_share(form, name, tags, values=reached))
        if name != CONDITIONS[0]:
            gain = tuple((curve - curves[CONDITIONS[0]])[:, -1].tolist())
            cells.append(_make_contrast(form, name, tags, values=gain))
    return cells


def _make_absent(form: Form, reason: str, tags: tuple[str, ...]) -> list[Cell]:
    cells = [_make_share(form, name, tags, not_run=reason) for name in CONDITIONS]
    return cells + [_make_contrast(form, name, tags, not_run=reason) for name in CONDITIONS[1:]]


def _make_share(form: Form, name: str, tags: tuple[str, ...], **found: Any) -> Cell:
    column = f"share of runs that reach accuracy {REACHED}"
    return Cell(item="fig6", row=f"{form.prefix}{name}", column=column, share=True, tags=tags, **found)


def _make_contrast(form: Form, name: str, tags: tuple[str, ...], **found: Any) -> Cell:
    row = f"{form.prefix}{name} − {CONDITIONS[0]}"
    return Cell(item="fig6", row=row, column="final accuracy", sign=1, tags=tags, **found)


class SortedHeads(NamedTuple):
    """The good and the bad heads of a backbone."""

    backbone: int
    good: list[int]
    bad: list[int]


def _try_backbones(setting: Setting, form: Form, base: CopyExperiment, candidates: int) -> list[SortedHeads]:
    """Sort the heads of one backbone after another, until one has enough of both kinds."""
    tried: list[SortedHeads] = []
    for backbone in range(setting.at(smoke=1, small=2, full=8)):
        tried.append(_sort_heads(setting, form, base, backbone, candidates))
        if min(len(tried[-1].good), len(tried[-1].bad)) >= HEADS:
            break
    return tried


def _sort_heads(setting: Setting, form: Form, base: CopyExperiment, backbone: int, candidates: int) -> SortedHeads:
    """Read each head trained alone on every stream."""
    alone = [(number,) for number in range(candidates) for _ in range(STREAMS)]
    streams = [stream for _ in range(candidates) for stream in range(STREAMS)]
    name = f"{form.prefix}heads alone on backbone {backbone}"
    case = _make_combination(form, base, backbone, alone, streams)
    curves = _read_all(setting, {name: case}, len(alone))[name].measures["accuracy"].view(candidates, STREAMS, -1)
    reached = (curves >= REACHED).any(-1)
    limit = setting.at(smoke=REACHED, small=REACHED, full=form.bad_below)  # short sequences pass 0.6 without copying
    every, none = reached.all(1), (~reached & (curves[..., -1] < limit)).all(1)
    return SortedHeads(backbone, every.nonzero().flatten().tolist(), none.nonzero().flatten().tolist())


def _read_all(setting: Setting, cases: Mapping[str, Combination], runs: int) -> dict[str, SeedResults]:
    """Read this many runs of each case. Raises ValueError if the ledger has only some of them."""
    results = read_seeds(setting, cases, range(runs))
    for name, result in results.items():
        if len(result.seeds) < runs:
            raise ValueError(f"{name}: {len(result.seeds)} of {runs} runs are measured")
    return results


def _make_combination(
    form: Form, base: CopyExperiment, backbone: int, chosen: Sequence[tuple[int, ...]], streams: Sequence[int]
) -> Combination:
    return form.experiment(**asdict(base), backbone=backbone, combinations=tuple(chosen), streams=tuple(streams))


def _draw_heads(pool: Sequence[int], number: int, draw: torch.Generator) -> tuple[int, ...]:
    """Draw this many heads of a pool: different ones if there are enough, else with repetition."""
    if len(pool) >= number:
        return tuple(pool[k] for k in torch.randperm(len(pool), generator=draw)[:number].tolist())
    return tuple(pool[k] for k in torch.randint(len(pool), (number,), generator=draw).tolist())
