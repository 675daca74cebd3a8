"""The agreement of the scores of two models, checkpoint by checkpoint (Snell et al. 2021, §3.1–3.2, §5.1).

For a part of the data (valid, or as many training examples) and every checkpoint τ of a role:

    PART/accuracy, PART/bleu                      the performance of the model, in per cent
    PART/REFERENCE/PAIR/agreement, …/kendall      the mean of A(u, v), or of τ_b, over all target words, in per cent

A reference is the number of updates at which A does best on the part, by accuracy or by BLEU. The pairs (u, v) are

    attention   α of A, α̂(τ)                 of B … F and frozen
    chance      α of A, α̂(τ) shuffled        of B … F and frozen
    probe       α of A, β(τ)                  of B, and of uniform, where it is β^uf
    saliency    Δ of A, β^uf(τ)               of uniform;   negated   −Δ of A, β^uf(τ)
    proxy       β^px, β^uf(τ)                 of uniform, with the proxy that the authors trained
    equation    β^uf(τ), β^px                 of uniform, with the proxy of eq. 5

and, of A itself at each reference, own: α, β. Memory holds the scores of A at its references, a number for each
measured target and source position, and one batch of any other model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.analysis.agreement import agreement, kendall, shuffle_rows
from attnlab.counting.proxy import Proxy, train_proxy
from attnlab.models.model import Model
from attnlab.recording.probe import beta, saliency
from attnlab.recording.watch import record
from attnlab.studies.snell2021.performance import Performance
from attnlab.studies.snell2021.trials import PARTS, Curves, Field, Trial, extend_curves
from attnlab.tasks.task import PAD, Batch

ROWS = 8192  # pairs (target, position) for which β is computed at once
PROXY_WIDTH = 256

Scores = dict[str, Tensor]  # (words,positions) each: a row for every target word of a batch
Pairs = dict[str, tuple[Tensor, Tensor]]
References = dict[int, list[Scores]]  # by updates of A, for each batch


def measure_agreement(trial: Trial, role: str) -> Curves:
    """Measure a role at all its checkpoints."""
    performance = Performance(trial.field)
    if role == "A":
        return _measure_gold(trial, performance)
    references = {part: _read_references(trial, part) for part in PARTS}
    if role == "uniform":
        _add_probes(trial, references)
    curves: Curves = {}
    for _, model in trial.iterate_checkpoints(role):
        values = performance(model) if role != "uniform" else {}
        for part in PARTS:
            values |= _compare_scores(trial, role, part, model, references[part])
        extend_curves(curves, values)
    return curves


def find_reference(trial: Trial, part: str, judged_by: str) -> int:
    """Return the first number of updates at which A does best on a part, by accuracy or BLEU."""
    return _find_best(trial, dict(trial.curves["A"]), part, judged_by)


def make_mask(batch: Batch) -> Tensor:
    """Return where neither target nor source position is padding, (b,t,l); a text has one target, its class."""
    source = (batch.inputs[0] != PAD).unsqueeze(1)
    return source if batch.targets.dim() == 1 else source & (batch.targets != PAD).unsqueeze(-1)


def select_words(scores: Tensor, batch: Batch) -> Tensor:
    """Return the rows of scores (b,t,l) that belong to target words, (words,l)."""
    return scores[make_mask(batch).any(-1)]


def read_attention(model: Model, batch: Batch) -> Tensor:
    """Return α, (words,l)."""
    return select_words(record(model, batch.inputs).kind("cross")[-1].weights.mean(1), batch)


def read_probe(model: Model, batch: Batch) -> Tensor:
    """Return β, (words,l)."""
    return select_words(beta(model, batch.inputs, batch.targets, rows=ROWS), batch)


@dataclass
class AgreementMeans:
    """The means of A over words and, if kendall, of τ_b, which takes l² comparisons per word; added batch by batch."""

    kendall: bool
    agreeing: int = 0
    words: int = 0
    tau: float = 0.0
    ordered: int = 0  # words of which neither score is constant

    def add(self, u: Tensor, v: Tensor, mask: Tensor) -> None:
        """Add a batch; u, v, mask (words,l)."""
        self.agreeing += int(agreement(u, v, mask=mask).sum())
        self.words += len(u)
        if self.kendall:
            tau = kendall(u, v, mask)
            self.tau += float(tau.nansum())
            self.ordered += int((~tau.isnan()).sum())

    def compute(self) -> dict[str, float]:
        """Return the means in per cent; τ_b is 0 if no word can be ordered."""
        means = {"agreement": 100.0 * self.agreeing / self.words}
        return means | ({"kendall": 100.0 * self.tau / max(1, self.ordered)} if self.kendall else {})


def _measure_gold(trial: Trial, performance: Performance) -> Curves:
    """Measure the performance of A, its references, and the agreement of its probe and attention there."""
    curves: Curves = {}
    for _, model in trial.iterate_checkpoints("A"):
        extend_curves(curves, performance(model))
    chosen = {part: {_find_best(trial, curves, part, by) for by in performance.names} for part in PARTS}
    for part, steps in chosen.items():
        for step in sorted(steps):
            means, model = AgreementMeans(part == "valid"), trial.load_model("A", step)
            for batch in trial.field.batches[part]:
                means.add(read_attention(model, batch), read_probe(model, batch), select_words(make_mask(batch), batch))
            curves |= {f"{part}/{step}/own/{name}": [value] for name, value in means.compute().items()}
    return curves | {"references": sorted(float(step) for step in set.union(*chosen.values()))}


def _find_best(trial: Trial, curves: Curves, part: str, judged_by: str) -> int:
    curve = curves[f"{part}/{judged_by}"]
    return trial.field.steps[curve.index(max(curve))]


def _read_references(trial: Trial, part: str) -> References:
    """Compute α of A at its references."""
    steps = {find_reference(trial, part, by) for by in Performance(trial.field).names}
    models = {step: trial.load_model("A", step) for step in sorted(steps)}
    return {
        step: [{"attention": read_attention(model, batch)} for batch in trial.field.batches[part]]
        for step, model in models.items()
    }


def _add_probes(trial: Trial, references: dict[str, References]) -> None:
    """Add Δ of A, and β^px of both proxies, to its α."""
    printed, equation = (_train_proxy(trial.field, trial.seed, authors=authors) for authors in (True, False))
    for part, steps in references.items():
        for step, scores in steps.items():
            model = trial.load_model("A", step)
            for batch, own in zip(trial.field.batches[part], scores, strict=True):
                own["saliency"] = select_words(saliency(model, batch.inputs, batch.targets), batch)
                own["proxy"], own["equation"] = (_read_proxy_probe(proxy, batch) for proxy in (printed, equation))


def _compare_scores(trial: Trial, role: str, part: str, model: Model, references: References) -> dict[str, float]:
    """Return the agreements of one checkpoint of a role with A."""
    means: dict[str, AgreementMeans] = {}
    for number, batch in enumerate(trial.field.batches[part]):
        mask = select_words(make_mask(batch), batch)
        own = _read_scores(role, model, batch)
        for step, scores in references.items():
            for name, (u, v) in _pair_scores(own, scores[number], mask, seed=trial.seed + number).items():
                means.setdefault(f"{part}/{step}/{name}", AgreementMeans(part == "valid")).add(u, v, mask)
    return {f"{name}/{metric}": x for name, mean in means.items() for metric, x in mean.compute().items()}


def _read_scores(role: str, model: Model, batch: Batch) -> Scores:
    scores = {} if role == "uniform" else {"attention": read_attention(model, batch)}
    return scores | {"probe": read_probe(model, batch)} if role in ("B", "uniform") else scores


def _pair_scores(own: Scores, gold: Scores, mask: Tensor, *, seed: int) -> Pairs:
    """Pair the scores of a model with those of A."""
    pairs: Pairs = {}
    if "attention" in own:
        pairs["attention"] = (gold["attention"], own["attention"])
        pairs["chance"] = (gold["attention"], shuffle_rows(own["attention"], mask, seed=seed))
    if "probe" in own:
        pairs["probe"] = (gold["attention"], own["probe"])
    if "saliency" in gold:
        pairs |= {"saliency": (gold["saliency"], own["probe"]), "negated": (-gold["saliency"], own["probe"])}
        pairs |= {"proxy": (gold["proxy"], own["probe"]), "equation": (own["probe"], gold["equation"])}
    return pairs


def _train_proxy(field: Field, seed: int, *, authors: bool) -> Proxy:
    """Train the bag-of-words proxy on a field's training part, in the authors' form or that of eq. 5."""
    task, size = field.task, field.size
    whole = {part: task.make_batch(part, list(range(task.count_examples(part)))) for part in PARTS}
    sides = {part: tuple(x.to(field.device) for x in (b.inputs[0], b.targets)) for part, b in whole.items()}
    sizes = task.get_sizes()
    assert size.proxy_epochs is not None
    return train_proxy(
        *sides["train"],
        source_types=sizes.get("source_vocabulary", sizes["vocabulary"]),
        outputs=sizes["vocabulary"] if field.corpus.translates else 1,
        width=size.width or PROXY_WIDTH,
        epochs=size.proxy_epochs,
        lr=field.corpus.proxy[0],
        seed=seed,
        authors=authors,
        valid=(sides["valid"][0], sides["valid"][1]),
    )


@torch.no_grad()
def _read_proxy_probe(proxy: Proxy, batch: Batch) -> Tensor:
    scores = proxy.beta(batch.inputs[0], batch.targets)
    return select_words(scores if scores.dim() == 3 else scores.unsqueeze(1), batch)
