"""BLEU and chrF of decoded text, by sacrebleu, with its signature and a bootstrap interval."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Texts = Sequence[str]


@dataclass(frozen=True)
class TextScore:
    name: str
    value: float
    signature: str  # sacrebleu's: how it was computed, so that others can compare
    mean: float | None = None  # over the bootstrap's samples
    margin: float | None = None  # 95 % of them lie within mean ± margin

    def __str__(self) -> str:
        spread = "" if self.mean is None else f" (mean {self.mean:.2f} ± {self.margin:.2f})"
        return f"{self.name} {self.value:.2f}{spread}  {self.signature}"


def compute_bleu(hypotheses: Texts, references: Texts | Sequence[Texts], *, bootstrap: int = 0, **options: Any) -> TextScore:
    """sacrebleu's BLEU of plain text, against one reference each or several sets of them.

    bootstrap   how many resamplings the interval is from; 0: no interval
    options     sacrebleu's own: lowercase=, tokenize=, …
    """
    return _run_sacrebleu("BLEU", hypotheses, references, bootstrap, options)


def compute_chrf(hypotheses: Texts, references: Texts | Sequence[Texts], *, bootstrap: int = 0, **options: Any) -> TextScore:
    """sacrebleu's chrF of plain text; word_order=2 makes it chrF++."""
    return _run_sacrebleu("CHRF", hypotheses, references, bootstrap, options)


def compute_split_bleu(hypotheses: Texts, references: Texts, *, bootstrap: int = 0) -> TextScore:
    """BLEU of tokenised text with hyphenated words split: what the CODA scripts report.

    Not to be compared with BLEU elsewhere: it depends on the tokeniser. No smoothing, as in fairseq's scorer.
    """
    ours, theirs = ([split_compounds(line) for line in lines] for lines in (hypotheses, references))
    options = {"tokenize": "none", "smooth_method": "none", "force": True}
    made = _run_sacrebleu("BLEU", ours, theirs, bootstrap, options)
    return TextScore("compound-split BLEU", made.value, made.signature, made.mean, made.margin)


def split_compounds(line: str) -> str:
    """Put the hyphen of well-known between spaces, marked; of two around one letter only the first, as the script."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line, flags=re.ASCII)


def _run_sacrebleu(
    kind: str, hypotheses: Texts, references: Texts | Sequence[Texts], bootstrap: int, options: dict[str, Any]
) -> TextScore:
    try:
        from sacrebleu import metrics
    except ImportError as reason:
        raise ImportError("BLEU and chrF are sacrebleu's; install it: pip install sacrebleu") from reason
    sets = [references] if len(references) and isinstance(references[0], str) else list(references)
    if isinstance(hypotheses, str) or not len(hypotheses):
        raise ValueError("hypotheses must be a list of lines, one or more")
    for lines in sets:
        if len(lines) != len(hypotheses):
            raise ValueError(f"{len(hypotheses)} hypotheses but {len(lines)} references; give one for each")
    if bootstrap < 0 or bootstrap == 1:
        raise ValueError(f"bootstrap={bootstrap} must be 0, for no interval, or a number of resamplings such as 1000")
    metric = getattr(metrics, kind)(**options)
    texts = list(hypotheses), [list(lines) for lines in sets]
    try:
        made = metric.corpus_score(*texts, n_bootstrap=max(bootstrap, 1))
    except TypeError as error:  # sacrebleu cannot average resamplings of which some are exactly 0: too little text
        if "coerce" not in str(error):
            raise
        made, bootstrap = metric.corpus_score(*texts, n_bootstrap=1), 0  # without an interval, as the score then shows
    mean, margin = (float(made._mean), float(made._ci)) if bootstrap else (None, None)
    return TextScore(made.name, made.score, str(metric.get_signature()), mean, margin)
