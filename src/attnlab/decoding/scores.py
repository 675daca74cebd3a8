"""BLEU and chrF of decoded text by sacrebleu, with its signature and a bootstrap interval."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Texts = Sequence[str]
References = Texts | Sequence[Texts]  # one for each hypothesis, or several sets of them


@dataclass(frozen=True)
class TextScore:
    """A score of a corpus."""

    name: str
    value: float
    signature: str  # sacrebleu's signature: how the score was computed
    mean: float | None = None  # over the bootstrap samples
    margin: float | None = None  # 95 % of the samples lie within mean ± margin

    def __str__(self) -> str:
        spread = "" if self.mean is None else f" (mean {self.mean:.2f} ± {self.margin:.2f})"
        return f"{self.name} {self.value:.2f}{spread}  {self.signature}"


def compute_bleu(hypotheses: Texts, references: References, *, bootstrap: int = 0, **options: Any) -> TextScore:
    """Compute sacrebleu's BLEU of plain text, against one reference per line or several sets of references.

    bootstrap   number of bootstrap samples for the interval; 0: no interval
    options     options of sacrebleu: lowercase=, tokenize=, …
    """
    return _run_sacrebleu("BLEU", hypotheses, references, bootstrap, options)


def compute_chrf(hypotheses: Texts, references: References, *, bootstrap: int = 0, **options: Any) -> TextScore:
    """Compute sacrebleu's chrF of plain text; word_order=2 gives chrF++."""
    return _run_sacrebleu("CHRF", hypotheses, references, bootstrap, options)


def compute_split_bleu(hypotheses: Texts, references: Texts, *, bootstrap: int = 0) -> TextScore:
    """Compute BLEU of tokenised text with hyphenated words split, as the CODA scripts do.

    It depends on the tokenizer, so do not compare it with other BLEU scores. No smoothing, as in fairseq's scorer.
    """
    ours, theirs = ([split_compounds(line) for line in lines] for lines in (hypotheses, references))
    options = {"tokenize": "none", "smooth_method": "none", "force": True}
    score = _run_sacrebleu("BLEU", ours, theirs, bootstrap, options)
    return replace(score, name="compound-split BLEU")


def check_bootstrap(bootstrap: int) -> None:
    """Raise ValueError for a number of bootstrap samples that gives no interval."""
    if bootstrap < 0 or bootstrap == 1:
        raise ValueError(f"bootstrap must be 0 (no interval) or a number of samples such as 1000, got {bootstrap}")


def split_compounds(line: str) -> str:
    """Put spaces and marks around hyphens within words; of two around one letter only the first, as in the script."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line, flags=re.ASCII)


def _run_sacrebleu(
    kind: str, hypotheses: Texts, references: References, bootstrap: int, options: dict[str, Any]
) -> TextScore:
    from sacrebleu import metrics

    sets = [references] if len(references) and isinstance(references[0], str) else list(references)
    if isinstance(hypotheses, str) or not len(hypotheses):
        raise ValueError("hypotheses must be a list of at least one line")
    for lines in sets:
        if len(lines) != len(hypotheses):
            raise ValueError(f"{len(hypotheses)} hypotheses but {len(lines)} references; give one reference for each")
    check_bootstrap(bootstrap)
    metric = getattr(metrics, kind)(**options)
    texts = list(hypotheses), [list(lines) for lines in sets]
    try:
        score = metric.corpus_score(*texts, n_bootstrap=max(bootstrap, 1))
    except TypeError as error:  # sacrebleu cannot average samples if some are exactly 0, which happens with little text
        if "coerce" not in str(error):
            raise
        score, bootstrap = metric.corpus_score(*texts, n_bootstrap=1), 0  # the result then has no interval
    mean, margin = (float(score._mean), float(score._ci)) if bootstrap else (None, None)
    return TextScore(score.name, score.score, str(metric.get_signature()), mean, margin)
