"""How good a model is on what is measured of each part: accuracy of its targets and BLEU of its text, in per cent."""

from attnlab.decoding.decode import BeamSearch
from attnlab.decoding.evaluation import search_lines
from attnlab.decoding.scores import compute_bleu
from attnlab.models.model import Model
from attnlab.studies.snell2021.trials import PARTS, Field
from attnlab.tasks.task import PAD
from attnlab.training.scoring import Scored, score_targets

BEAM = 5  # as the authors': no length penalty


class Performance:
    """Of one model after another of a field; the search is kept where only the weights of a model change."""

    def __init__(self, field: Field, parts: tuple[str, ...] = PARTS) -> None:
        self.field, self.parts = field, parts
        self.search: BeamSearch | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("accuracy", "bleu") if self.field.corpus.translates else ("accuracy",)

    def __call__(self, model: Model) -> dict[str, float]:
        """PART/accuracy and, of a translator, PART/bleu."""
        found = {f"{part}/accuracy": self._accuracy(model, part) for part in self.parts}
        if "bleu" in self.names:
            found |= {f"{part}/bleu": self._bleu(model, part) for part in self.parts}
        return found

    def _accuracy(self, model: Model, part: str) -> float:
        """With the true words before each target."""
        padding = PAD if self.field.corpus.translates else None
        scored = (score_targets(model, b.inputs, b.targets, padding=padding) for b in self.field.batches[part])
        return 100.0 * sum(scored, start=Scored()).accuracy

    def _bleu(self, model: Model, part: str) -> float:
        if self.search is None or self.search.model is not model:
            self.search = BeamSearch(model, beam=BEAM, length_penalty=0.0, max_length=self.field.size.output)  # type: ignore[arg-type]
        sources, references = self.field.texts[part]
        texts = {number: best[0].text for number, best in search_lines(self.search, self.field.task, sources)}
        return compute_bleu([texts[number] for number in range(len(sources))], references).value
