"""The performance of a model on the measured examples of each part: accuracy of targets and BLEU, in per cent."""

from attnlab.decoding.decode import BeamSearch
from attnlab.decoding.evaluation import search_lines
from attnlab.decoding.scores import compute_bleu
from attnlab.models.model import Model
from attnlab.studies.snell2021.trials import PARTS, Field
from attnlab.tasks.task import PAD
from attnlab.training.scoring import score_batches

BEAM = 5  # without length penalty, as in the authors' code


class Performance:
    """Measures one model of a field after another; the search is reused while only the weights change."""

    def __init__(self, field: Field, parts: tuple[str, ...] = PARTS) -> None:
        self.field, self.parts = field, parts
        self.search: BeamSearch | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("accuracy", "bleu") if self.field.corpus.translates else ("accuracy",)

    def __call__(self, model: Model) -> dict[str, float]:
        """Return PART/accuracy and, for a translator, PART/bleu."""
        values = {f"{part}/accuracy": self._compute_accuracy(model, part) for part in self.parts}
        if "bleu" in self.names:
            values |= {f"{part}/bleu": self._compute_bleu(model, part) for part in self.parts}
        return values

    def _compute_accuracy(self, model: Model, part: str) -> float:
        """Return the accuracy of each target, given the true words before it."""
        padding = PAD if self.field.corpus.translates else None
        batches = ((batch.inputs, batch.targets) for batch in self.field.batches[part])
        return 100.0 * score_batches(model, batches, padding=padding).accuracy

    def _compute_bleu(self, model: Model, part: str) -> float:
        if self.search is None or self.search.model is not model:
            self.search = BeamSearch(model, beam=BEAM, length_penalty=0.0, max_length=self.field.size.output)  # type: ignore[arg-type]
        sources, references = self.field.texts[part]
        texts = {number: best[0].text for number, best in search_lines(self.search, self.field.task, sources)}
        return compute_bleu([texts[number] for number in range(len(sources))], references).value
