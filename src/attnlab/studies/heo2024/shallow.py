"""Language modelling with 8 layers, and translation with layer norm before and after each sublayer."""

from attnlab.experiments.corpora import list_grounds
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import VALIDATION, Variant, read_perplexity
from attnlab.experiments.verdicts import Cell
from attnlab.studies.heo2024.attentions import SOFTMAX, TRAINED, read_models
from attnlab.studies.heo2024.measures import QUALITY
from attnlab.studies.heo2024.plan import LANGUAGE, NAMES, TRANSLATION
from attnlab.studies.heo2024.published import IWSLT14_PRE, WIKITEXT103

NORMS = {"Pre-LN": {"norm": "pre", "final_norm": "true"}, "Post-LN": {"norm": "post", "final_norm": "false"}}


def language(setting: Setting) -> Findings:
    """The item: perplexity of softmax and daGPAM."""
    cells: list[Cell] = []
    for ground in list_grounds(LANGUAGE, setting, NAMES):
        models = read_models("language", ground, (SOFTMAX, TRAINED), QUALITY)
        known = None if ground.corpus.name == "enwik8" else WIKITEXT103
        for part, column, printed in (("test", "test perplexity", known), ("valid", VALIDATION, None)):
            cells += models.compare_two(TRAINED, SOFTMAX, column, read_perplexity(part), printed, sign=-1)
    remark = (
        "The numbers of the 8-layer model on WikiText-103 are known, but not which part they are of. They are compared "
        "with the test part. On other text only the sign of the difference is compared. A review of the "
        "paper mentions a gain on enwik8 too; we do not know how large it is."
    )
    return Findings(cells, remarks=(remark,))


def translation(setting: Setting) -> Findings:
    """The item: BLEU of softmax and daGPAM from English to German, with Pre-LN and Post-LN."""
    cells: list[Cell] = []
    for ground in list_grounds(TRANSLATION, setting, NAMES):
        softmax, dagpam = ([_set_norm(each, norm) for norm in NORMS] for each in (SOFTMAX, TRAINED))
        models = read_models("translation", ground, [*softmax, *dagpam], QUALITY)
        for a, b in zip(dagpam, softmax, strict=True):
            printed = IWSLT14_PRE if a.at == "Pre-LN" else None
            cells += models.compare_two(a, b, "BLEU", lambda values: values["scores"]["BLEU"], printed)
            cells += models.compare_two(a, b, VALIDATION, read_perplexity("valid"))
    remark = (
        "Only the BLEU on IWSLT14 from English to German with Pre-LN is known (28.54 → 29.25), so Post-LN is compared "
        "with nothing. daGPAM is in every attention of encoder and decoder. Whether it is in the paper's cross "
        "attention is not known."
    )
    return Findings(cells, remarks=(remark,))


def _set_norm(variant: Variant, norm: str) -> Variant:
    return Variant(variant.name, variant.label, {**variant.values, **NORMS[norm]}, at=norm)
