"""The models of the paper, by the names that attention= and its tables give them."""

from collections.abc import Sequence

from attnlab.experiments.corpora import Ground
from attnlab.experiments.variants import Value, Variant, Variants
from attnlab.studies.zheng2021.measures import QUALITY_AND_HEADS

LABELS = {"coda": "CODA", "coda-cs": "CODA-CS", "realformer": "RealFormer", "softmax": "Transformer"}
ALL = tuple(Variant(name, label, {"attention": name}) for name, label in LABELS.items())
CODA, CODA_CS, REALFORMER, TRANSFORMER = ALL
PAIR = (TRANSFORMER, CODA)
OPTIONS = ("data", "attention")  # data=multi30k attention=coda,softmax selects these only


def set_heads(variant: Variant, heads: int) -> Variant:
    return Variant(variant.name, variant.label, {**variant.values, "heads": str(heads)}, at=f"{heads} heads")


def read_models(item: str, ground: Ground, variants: Sequence[Variant]) -> Variants:
    return Variants(item, ground, variants, QUALITY_AND_HEADS, tuple(LABELS))


def choose_bleu(ground: Ground) -> tuple[str, Value]:
    """Return the name and value of a corpus's BLEU: the authors' on their data, else sacrebleu's."""
    name = "compound-split BLEU" if ground.corpus.of_paper else "BLEU"
    return name, lambda values: values["scores"][name]
