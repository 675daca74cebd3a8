"""Copying (Snell et al. 2021, §3.3, §6.2, A.3): distributions of sequences from which attention is learnt or not.

    permutations    x a permutation of the same types                 y = x
    subset          x a random subset of the types, in random order   y = x
    mixture         x a permutation of one of two sets of types       y = x
    function        x as in subset                                    y_t = x_π(t) for one fixed π

Each seed has two curves: accuracy, and the share of targets whose largest attention weight is on the position to copy.
Accuracy alone would hide a second, slow solution: it may rise without attention on the right position. As in the
authors' code, each sequence ends with </s>, which is predicted too, and every step has new examples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from attnlab.config import Natural, Positive, check_fields
from attnlab.experiments.population import Experiment, Feed, Population, Stacked
from attnlab.experiments.population_training import SeedResults
from attnlab.experiments.seed_run import SeedRun
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.models.lstm import LSTMTranslator, build
from attnlab.models.lstm_config import SETTINGS
from attnlab.report.figures import draw_seed_curves
from attnlab.studies.snell2021.gru import GRUTranslator

BEGIN, END, FIRST = 0, 1, 2  # <s>, also the id of padding, which never occurs; </s>; the first type
Data = Literal["permutations", "subset", "mixture", "function"]
LEARNT, RIGHT = 0.99, 0.9  # accuracy; share of targets with attention on the right position
CHUNK = 50  # steps whose batches are drawn at once


@dataclass(frozen=True, kw_only=True)
class CopyExperiment(Experiment):
    """One distribution of sequences; seeds differ in weights and data."""

    data: Data = "permutations"
    length: int = 40
    types: int = 40  # of one set
    mix: Annotated[float, "[0, 1]"] = 0.5  # of a mixture: probability of the first set
    shared: Natural = 0  # of a mixture: number of types in both sets
    width: int = 256
    heads: int = 1
    examples: int = 128  # in a batch
    lr: Positive = Experiment.lr
    held_out: int = 50  # number of new examples for each measurement
    steps: int = 200
    every: int = 10  # updates between two measurements

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.length <= self.types:
            raise ValueError(f"length must be from 1 to types={self.types}, got {self.length}")
        if not 0 <= self.shared < self.types or (self.shared and self.data != "mixture"):
            raise ValueError(f"shared must be below types={self.types}, and 0 unless data=mixture, got {self.shared}")

    @property
    def measured_at(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(range(0, self.steps + 1, self.every))

    @property
    def words(self) -> int:
        return (2 * self.types - self.shared if self.data == "mixture" else self.types) + FIRST

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        width = {"width": self.width, "embedding_width": self.width}
        return build(replace(SETTINGS["copy"], vocabulary=self.words, heads=self.heads, **width))  # type: ignore[arg-type]

    def feed(self, seeds: Sequence[int], device: torch.device) -> Feed:
        return draw_in_chunks(lambda part, number: self.draw(seeds, part, number, device), self.examples)

    def draw(self, seeds: Sequence[int], part: int, number: int, device: torch.device) -> tuple[Tensor, ...]:
        """Draw source, decoder input and targets, (s,number,length+1) each; part: the number of the draw."""
        sequences = torch.stack([self._draw_sequences(seed, part, number, device) for seed in seeds]) + FIRST
        copied = sequences[..., self.find_order().to(device)]
        begin, end = (sequences.new_full((*sequences.shape[:2], 1), word) for word in (BEGIN, END))
        source, targets = torch.cat([sequences, end], -1), torch.cat([copied, end], -1)
        return source, torch.cat([begin, copied], -1), targets

    def find_order(self) -> Tensor:
        """Return π, the source position of each target, (length,)."""
        if self.data != "function":
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(0))

    def measure(self, population: Population, seeds: Sequence[int], step: int) -> dict[str, Tensor]:
        source, given, targets = self.draw(seeds, -1 - step, self.held_out, population.device)
        logits, weights = population.map(attend, source, given)  # (s,b,n,words), (s,b,h,n,n)
        right = self.find_order().to(targets.device)
        on = weights[..., : self.length, :].argmax(-1) == right  # (s,b,h,length)
        return {
            "accuracy": (logits.argmax(-1) == targets).float().mean((1, 2)),
            "attention": on.float().mean((1, 3)).amax(1),  # of the head that is on it most often
        }

    def _draw_sequences(self, seed: int, part: int, number: int, device: torch.device) -> Tensor:
        """Draw types from 0, (number,length); other seeds of the population make no difference."""
        draw = torch.Generator(device).manual_seed((seed << 20) + part % (1 << 20))
        order = torch.rand(number, self.types, generator=draw, device=device).argsort(-1)[:, : self.length]
        if self.data != "mixture":
            return order
        second = torch.rand(number, 1, generator=draw, device=device) >= self.mix
        return order + (self.types - self.shared) * second


def draw_in_chunks(draw: Callable[[int, int], Stacked], examples: int) -> Feed:
    """Return a feed of batches with this many examples, drawn for CHUNK steps at once by draw(part, number)."""
    chunks: dict[int, Stacked] = {}

    def make_batch(step: int) -> tuple[Stacked]:
        chunk, place = divmod(step, CHUNK)
        if chunk not in chunks:
            chunks.clear()
            chunks[chunk] = draw(1 + chunk, CHUNK * examples)
        return (tuple(x[:, place * examples : (place + 1) * examples] for x in chunks[chunk]),)

    return make_batch


def attend(model: LSTMTranslator | GRUTranslator, source: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (b,n,words) and attention weights (b,h,n,n)."""
    memory, mask, start = model.encode(source)
    states, _ = model.decoder(given, start=start)
    weights, _ = model.attention.mechanism.weights(model.attention.queries(states), memory.unsqueeze(1), mask)
    context, _ = model.attention(states, memory, mask)
    return model.readout(model.combine(states, context)), weights


def make_experiment(setting: Setting, **changes: Any) -> CopyExperiment:
    """Return permutations at the size of the scale, with these changes."""
    length = changes.get("length", setting.at(smoke=8, small=16, full=40))
    shape = {
        "length": length,
        "types": length,
        "width": setting.at(smoke=64, small=64, full=256),
        "steps": setting.at(smoke=70, small=500, full=200),
        "examples": setting.at(smoke=32, small=128, full=128),
        "lr": setting.at(smoke=8e-3, small=1e-3, full=1e-3),
    }
    return CopyExperiment(**shape | changes)


def fig3(setting: Setting) -> Findings:
    """The item: permutations of 40, 40 of 60, and a mixture of permutations."""
    base = make_experiment(setting)
    length = base.length
    cases = {
        f"permutations of {length}": base,
        f"{length} of {length * 3 // 2}": replace(base, data="subset", types=length * 3 // 2),
        f"mixture of two sets of {length}": replace(base, data="mixture"),
    }
    results = read_seeds(setting, cases, setting.seeds)
    hard, easy, mixed = cases
    cells = [
        _make_share("fig3", name, result, 1.0 if name == easy else None, setting.tags)
        for name, result in results.items()
    ]
    for name in (hard, mixed):
        gain = results[easy].measures["accuracy"][:, -1] - results[name].measures["accuracy"][:, -1]
        about: dict[str, Any] = {"column": f"final accuracy: {easy} − this", "values": tuple(gain.tolist()), "sign": 1}
        note = "in the paper's curves the control always learns, and this one sometimes fails"
        cells.append(Cell(item="fig3", row=name, tags=setting.tags, note=note, **about))
    return Findings(cells, _draw_figures(results), (_describe_horizon(base),))


def mixtures(setting: Setting) -> Findings:
    """The item: in the paper mixtures sometimes fail, in fig3 always. Does the number of updates explain it?"""
    base = make_experiment(setting)
    times = setting.at(smoke=2, small=5, full=15)
    longer = replace(base, steps=times * base.steps, every=times * base.every)
    cases = {
        f"mixture of two sets of {base.length}": replace(base, data="mixture"),
        f"the same, {longer.steps:,} updates": replace(longer, data="mixture"),
        f"permutations of {base.length}, {longer.steps:,} updates": longer,
    }
    results, cells = read_seeds(setting, cases, setting.seeds), []
    for name, result in results.items():
        cells.append(_make_share("mixtures", name, result, None, setting.tags))
        on = (result.measures["attention"][result.finite][:, -1] >= RIGHT).float().tolist()
        column = f"share of seeds with attention {RIGHT} on the right position"
        cells.append(Cell(item="mixtures", row=name, column=column, values=tuple(on), share=True, tags=setting.tags))
    remark = (
        "The paper prints no number. If longer training teaches mixtures, with attention on the right position, its "
        "curves had more updates than A.3 says; if accuracy rises without such attention, they show the slow route."
    )
    return Findings(cells, _draw_figures(results), (remark, _describe_horizon(longer)))


def section62(setting: Setting) -> Findings:
    """The item: copying is learnt within 300 updates; a fixed permutation is not, however long the training."""
    base = make_experiment(setting, data="subset", steps=setting.at(smoke=70, small=300, full=300))
    base = replace(base, types=base.length * 3 // 2)
    horizon = setting.at(smoke=100, small=600, full=2000)
    cases = {"copy": base, "permutation function": replace(base, data="function", steps=horizon, every=horizon // 20)}
    results, published = read_seeds(setting, cases, setting.seeds), {"copy": 1.0, "permutation function": 0.0}
    cells = [_make_share("section62", name, results[name], share, setting.tags) for name, share in published.items()]
    return Findings(cells, _draw_figures(results), (_describe_horizon(cases["permutation function"]),))


def find_learnt(results: SeedResults) -> Tensor:
    """Return which seeds ever reach the accuracy LEARNT, (s,) of 0 and 1."""
    return (results.measures["accuracy"] >= LEARNT).any(1).float()


def read_seeds(setting: Setting, cases: Mapping[str, Experiment], seeds: Sequence[int]) -> dict[str, SeedResults]:
    """Read the seeds of several cases from the ledger, by the names of the cases."""
    together = setting.scale == "smoke"  # on a CPU too: Python takes most of the time
    plan = {(name, seed): SeedRun(case, seed, together) for name, case in cases.items() for seed in seeds}
    measured = setting.rows.read_plan(plan)
    results = {}
    for name in cases:
        rows = {seed: measured.values[name, seed] for seed in seeds if (name, seed) in measured.values}
        if not rows or (setting.running and len(rows) < len(seeds)):
            raise ValueError(f"{name}: {next(iter(measured.failures.values()))}")
        first = next(iter(rows.values()))
        curves = {key: torch.tensor([row["measures"][key] for row in rows.values()]) for key in first["measures"]}
        finite = torch.tensor([row["is_finite"] for row in rows.values()])
        results[name] = SeedResults(tuple(rows), tuple(first["steps"]), curves, {}, finite)
    return results


def _make_share(item: str, row: str, results: SeedResults, published: float | None, tags: tuple[str, ...]) -> Cell:
    values = find_learnt(results)[results.finite].tolist()
    end = float(results.measures["attention"][:, -1].mean())
    note = f"within {results.steps[-1]} updates; attention on the right position at the end: {end:.2f}, mean over seeds"
    about: dict[str, Any] = {"published": published, "tags": tags, "note": note}
    column = f"share of seeds that reach accuracy {LEARNT}"
    return Cell(item=item, row=row, column=column, values=tuple(values), share=True, **about)


def _draw_figures(results: Mapping[str, SeedResults]) -> dict[str, tuple[Figure, str]]:
    captions = {
        "accuracy": "Accuracy on new sequences. Each line is a seed.",
        "attention": "Share of targets whose largest weight is on the position to copy. Each line is a seed.",
    }
    return {name: (draw_measure(results, name), caption) for name, caption in captions.items()}


def draw_measure(results: Mapping[str, SeedResults], name: str) -> Figure:
    """Draw one measure over training, with a panel for each case."""
    return draw_seed_curves({case: (x.steps, x.measures[name]) for case, x in results.items()}, x="updates", y=name)


def _describe_horizon(case: CopyExperiment) -> str:
    return (
        f"{case.steps} updates of {case.examples} new sequences of {case.length} + </s>, width {case.width}, Adam "
        f"{case.lr}; measured on {case.held_out} new sequences every {case.every} updates. Longer training might still "
        "help."
    )
