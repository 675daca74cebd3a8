"""Does β stay local? The keyword task under frozen uniform attention (Snell et al. 2021, §6.1, Figure 7).

    γ_l = w·h_l + b        the log-odds if the classifier attended to position l alone (eq. 22)

γ is measured over training on positive sequences: at the keyword l*, one position after it, averaged over all
positions, and at the last position L. Sequences with the keyword in the last two positions are left out, so that the
four differ.

    Hypothesis 1   γ_l* ≫ γ̄ ≫ γ_L ≈ γ_l*+1        only the word itself                            eq. 23
    Hypothesis 2   γ_l* ≫ γ_l*+1 ≫ γ̄ ≈ γ_L        the word and its neighbours: found early        eq. 24
    Observation 3  γ_L ≫ γ_l*+1 ≫ γ̄ ≈ γ_l*        what the paper finds after long training        eq. 25

The paper does not say whether this encoder reads in one direction or in both, so both are run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnlab.experiments.population import Experiment, Feed, Population
from attnlab.experiments.population_training import SeedResults
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.models.lstm import build
from attnlab.models.lstm_classifier import BinaryReadout, LSTMClassifier
from attnlab.models.lstm_config import SETTINGS
from attnlab.report.figures import draw_curves
from attnlab.studies.snell2021.copying import draw_in_chunks, read_seeds

KEYWORD, FIRST = 1, 1  # ids; 0 is padding, which never occurs
PLACES = ("γ_l*", "γ_l*+1", "γ̄", "γ_L")


@dataclass(frozen=True, kw_only=True)
class KeywordExperiment(Experiment):
    """Classification of random sequences with or without the keyword; seeds differ in weights and data."""

    length: int = 40
    types: int = 40
    width: int = 256
    bidirectional: bool = True
    examples: int = 32
    held_out: int = 400
    steps: int = 4000
    every: int = 100
    finely: tuple[int, int] = (0, 1)  # up to the first number of updates, also measured every second number of them

    @property
    def measured_at(self) -> tuple[int, ...]:  # type: ignore[override]
        end, every = self.finely
        return tuple(sorted({*range(0, self.steps + 1, self.every), *range(0, min(end, self.steps) + 1, every)}))

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        sizes = {"vocabulary": self.types + FIRST, "width": self.width, "embedding_width": self.width}
        shape = {"bidirectional": self.bidirectional, "attention": "uniform"}
        return build(replace(SETTINGS["classification"], **sizes, **shape))  # type: ignore[arg-type]

    def feed(self, seeds: Sequence[int], device: torch.device) -> Feed:
        return draw_in_chunks(lambda part, number: self.draw(seeds, part, number, device)[:2], self.examples)

    def draw(self, seeds: Sequence[int], part: int, number: int, device: torch.device) -> tuple[Tensor, ...]:
        """Draw tokens (s,number,length), labels (s,number) and the keyword's position, used or not (s,number)."""
        drawn = []
        for seed in seeds:
            draw = torch.Generator(device).manual_seed((seed << 24) + part % (1 << 24))
            options: dict[str, Any] = {"generator": draw, "device": device}
            tokens = torch.randint(KEYWORD + 1, self.types + FIRST, (number, self.length), **options)
            place = torch.randint(self.length, (number,), **options)
            positive = torch.randperm(number, **options) % 2
            marked = torch.nn.functional.one_hot(place, self.length).bool() & (positive == 1)[:, None]
            drawn.append((tokens.masked_fill(marked, KEYWORD), positive, place))
        tokens, labels, places = (torch.stack(each) for each in zip(*drawn, strict=True))
        return tokens, labels, places

    def measure(self, population: Population, seeds: Sequence[int], step: int) -> dict[str, Tensor]:
        tokens, labels, places = self.draw(seeds, -1 - step, self.held_out, population.device)
        gamma, logits = population.map(compute_log_odds, tokens)  # (s,b,length), (s,b,2)
        used = (labels == 1) & (places < self.length - 2)
        at, after = (gamma.gather(2, (places + k).clamp(max=self.length - 1)[..., None])[..., 0] for k in (0, 1))
        values = zip(PLACES, (at, after, gamma.mean(2), gamma[..., -1]), strict=True)
        means = {name: (x * used).sum(1) / used.sum(1) for name, x in values}
        return means | {"accuracy": (logits.argmax(-1) == labels).float().mean(1)}


def compute_log_odds(model: LSTMClassifier, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return γ of every position (b,n), and the logits of the classifier (b,2)."""
    memory, _ = model.encoder(tokens, tokens != model.padding)
    return cast(BinaryReadout, model.readout).positive(memory).squeeze(-1), model(tokens)


def fig7(setting: Setting) -> Findings:
    """The item: γ at the four places, early and late in training."""
    length = setting.at(smoke=8, small=20, full=40)
    base = KeywordExperiment(
        length=length,
        types=length,
        width=setting.at(smoke=24, small=64, full=256),
        steps=setting.at(smoke=200, small=2000, full=6000),
        every=setting.at(smoke=20, small=100, full=100),
        finely=setting.at(smoke=(160, 5), small=(200, 5), full=(100, 2)),  # the early order lasts about ten updates
    )
    cells, figures = [], {}
    cases = {"both directions": replace(base, bidirectional=True), "one direction": replace(base, bidirectional=False)}
    for name, results in read_seeds(setting, cases, setting.seeds).items():
        cells += _make_cells(results, name, setting.tags)
        lines = {place: (results.steps, results.measures[place].mean(0).tolist()) for place in PLACES}
        caption = f"The log-odds at four places over training, {name}, mean over seeds."
        figures[name.replace(" ", "-")] = (draw_curves(lines, x="updates", y="γ"), caption)
    remark = (
        f"Sequences of {length} of {length} types; uniform attention, never trained; {base.steps} updates of "
        f"{base.examples}. Early is the first measurement at which γ_l* exceeds γ̄ by 1, late is the last. A hypothesis "
        "holds in a seed if both of its ≫ are differences above 0, and its ≈ is a smaller difference than either."
    )
    return Findings(cells, figures, (remark,))


def find_early(results: SeedResults) -> Tensor:
    """Return for each seed the first measurement at which γ_l* exceeds γ̄ by 1 nat, or −1, (s,)."""
    apart = results.measures["γ_l*"] - results.measures["γ̄"] > 1.0  # (s,times)
    return torch.where(apart.any(1), apart.float().argmax(1), -1)


HYPOTHESES = {  # in the order most, second, least, and the one that is about equal to the least
    ("early", "Hypothesis 1 (eq. 23)"): ("γ_l*", "γ̄", "γ_L", "γ_l*+1"),
    ("early", "Hypothesis 2 (eq. 24)"): ("γ_l*", "γ_l*+1", "γ̄", "γ_L"),
    ("late", "Observation 3 (eq. 25)"): ("γ_L", "γ_l*+1", "γ̄", "γ_l*"),
}


def check_hypothesis(most: Tensor, second: Tensor, least: Tensor, equal: Tensor) -> Tensor:
    """Return whether most ≫ second ≫ least ≈ equal holds in each seed, bool."""
    gaps = torch.stack([most - second, second - torch.maximum(least, equal)])
    return (gaps > 0).all(0) & ((least - equal).abs() < gaps.amin(0))


def _make_cells(results: SeedResults, row: str, tags: tuple[str, ...]) -> list[Cell]:
    first, claims = find_early(results), []
    times = {"early": first, "late": torch.full_like(first, len(results.steps) - 1)}
    used = {when: results.finite & (at >= 0) for when, at in times.items()}
    missing = int((results.finite & (first < 0)).sum())
    never = f"in {missing} of {len(first)} seeds γ_l* never exceeds γ̄ by 1" if missing else ""

    def make_cell(when: str, column: str, values: Tensor, note: str = "", **about: Any) -> Cell:
        kept = tuple(values.float()[used[when]].tolist())
        notes = "; ".join(filter(None, (note, never if when == "early" else "")))
        about |= {"tags": tags, "not_run": "" if kept else never, "note": notes if kept else ""}
        return Cell(item="fig7", row=row, column=f"{when}: {column}", values=kept, **about)

    at = {
        (when, place): results.measures[place].gather(1, time.clamp_min(0)[:, None])[:, 0]
        for when, time in times.items()
        for place in PLACES
    }
    for (when, law), places in HYPOTHESES.items():
        holds = check_hypothesis(*(at[when, place] for place in places))
        claims.append(make_cell(when, f"{law} holds, share of seeds", holds, share=True))
    for when, greater, smaller, law in (
        ("early", "γ_l*", "γ_l*+1", "Hypotheses 1 and 2"),
        ("early", "γ_l*+1", "γ̄", "Hypothesis 2, against Hypothesis 1"),
        ("late", "γ_L", "γ_l*+1", "Observation 3"),
        ("late", "γ_l*+1", "γ̄", "Observation 3"),
        ("late", "γ_L", "γ_l*", "Observation 3"),
    ):
        claims.append(make_cell(when, f"{greater} − {smaller}", at[when, greater] - at[when, smaller], law, sign=1))
    return claims
