"""What the paper of each mechanism says about the quality of models with it, beside softmax.

`is_better` is True if the paper claims a lower loss or better scores than softmax attention, else None: it claims equal
quality, something else (length, speed, stability), or nothing. The module of each mechanism names its paper. Each text
sums up the paper's abstract, or one of its tables, in our words. Models and data of the papers differ from anyone's
comparison. To add one, read the paper and add a line when you add a mechanism.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperClaim:
    """What a paper claims in a few words, and whether this is better quality than softmax's."""

    text: str
    is_better: bool | None = None


def _better(text: str) -> PaperClaim:
    return PaperClaim(text, True)


CLAIMS = {
    "realformer": _better("better masked language models and translation"),
    "coda": _better("lower perplexity, higher BLEU"),
    "coda-cs": _better("higher BLEU, in an ablation of CODA without its cascade"),
    "dagpam": _better("lower perplexity, higher BLEU"),
    "coda+dagpam": PaperClaim("no paper"),
    "realformer+dagpam": PaperClaim("no paper"),
    "nap": PaperClaim("robust to hyperparameters; Heo & Choi 2024 report a severe degradation"),
    "non": PaperClaim("a baseline in NAP's paper; Heo & Choi 2024 report a severe degradation"),
    "de-attention": _better("better in several of six language tasks; Heo & Choi 2024 report a severe degradation"),
    "differential": _better("as low a loss with about 65 % of the parameters or tokens"),
    "cog": _better("better language and image models"),
    "shaped": PaperClaim("trains very deep models; as good as softmax in simplified blocks (He & Hofmann 2024)"),
    "sigmoid": PaperClaim("as good as softmax, and faster"),
    "softmax1": PaperClaim("proposed against outliers, without experiments (a blog post)"),
    "talking-heads": _better("lower perplexity in masked language modelling, better transfer"),
    "entmax15": _better("better translation and inflection, with entmax at the output too"),
    "sparsemax": PaperClaim("as good as softmax, with sparse weights"),
    "softpick": PaperClaim("without sinks; as good as softmax at 340 million parameters, by the paper's first version"),
    "stick-breaking": PaperClaim("as good as softmax, and holds at longer texts"),
    "ssmax": _better("faster loss reduction, and better retrieval in long texts"),
    "sink": PaperClaim("used in gpt-oss; no comparison"),
    "sliding-window": PaperClaim("cost linear in the length"),
    "alibi": _better("lower perplexity than with other positions on WikiText-103, and holds at longer texts"),
    "cosine": _better("higher BLEU on five small sets (Henry et al. 2020); stable training of vision models"),
    "gated": _better("lower perplexity, more stable training"),
    "fox": _better("lower loss on long texts"),
    "resformer": _better("as low a loss with 16 % fewer parameters or 20 % less text"),
    "differential-v2": _better("lower loss, by 0.02 to 0.03 (a blog post)"),
    "xsa": _better("lower loss, the more the longer the text"),
    "value-gated": _better("lower perplexity, though less than with a gate on the output"),
    "knocking-heads": _better("better scores, more stable training"),
    "dcmha": _better("as low a loss as with 1.7 to 2 times the compute"),
    "multi-token": _better("lower perplexity, better retrieval"),
    "selective": _better("as good as twice the heads and parameters of the attention"),
    "dot": PaperClaim("no claim; it is softmax without its scale"),
    "uniform": PaperClaim("no claim; it is the control without learnt attention"),
}
