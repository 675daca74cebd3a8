"""What the paper of each mechanism says about the quality of models with it, beside softmax.

`is_better` is True if the paper claims a lower loss or better scores than softmax attention, else None: it claims equal
quality, something else (length, speed, stability), or nothing. The statements are ours, in short; models and data of
the papers differ from anyone's comparison. To add one, add a line when you add a mechanism.
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
    "realformer": _better("lower loss in masked language modelling"),
    "coda": _better("lower perplexity, higher BLEU"),
    "coda-cs": _better("higher BLEU by the noise alone"),
    "dagpam": _better("lower perplexity, higher BLEU"),
    "coda+dagpam": PaperClaim("no paper"),
    "realformer+dagpam": PaperClaim("no paper"),
    "nap": PaperClaim("learns tasks that convex weights exclude; Heo & Choi 2024 find it much worse"),
    "non": PaperClaim("an ablation of NAP; Heo & Choi 2024 find it much worse"),
    "de-attention": _better("better in translation and classification; Heo & Choi 2024 find it much worse"),
    "differential": _better("lower loss with the same size"),
    "cog": _better("better language models"),
    "shaped": PaperClaim("trains very deep models; as good as softmax"),
    "sigmoid": PaperClaim("as good as softmax, and faster"),
    "softmax1": PaperClaim("fewer outliers"),
    "talking-heads": _better("lower perplexity in masked language modelling"),
    "entmax15": _better("better translation and inflection"),
    "sparsemax": PaperClaim("as good as softmax, with sparse weights"),
    "softpick": PaperClaim("as good as softmax, without sinks"),
    "stick-breaking": PaperClaim("as good as softmax, and holds at longer texts"),
    "ssmax": _better("lower loss, and better retrieval in long texts"),
    "sink": PaperClaim("used in gpt-oss; no comparison"),
    "sliding-window": PaperClaim("linear in the length"),
    "alibi": PaperClaim("as good as position embeddings, and holds at longer texts"),
    "cosine": _better("stable training; higher BLEU on small sets (Henry et al. 2020)"),
    "gated": _better("lower loss, more stable training"),
    "fox": _better("lower loss on long texts"),
    "resformer": _better("lower loss with the same size"),
    "differential-v2": _better("lower loss with the same size"),
    "xsa": _better("lower loss, the more the longer the text"),
    "value-gated": _better("lower loss, though less than with a gate on the output"),
    "knocking-heads": _better("lower loss, more stable training"),
    "dcmha": _better("lower loss, as of a larger model"),
    "multi-token": _better("lower perplexity, better retrieval"),
    "selective": _better("lower perplexity, as of twice the heads"),
    "dot": PaperClaim("softmax without its scale"),
    "uniform": PaperClaim("reads all positions alike: what models reach without learnt attention"),
}
