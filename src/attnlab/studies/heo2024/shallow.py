"""Language modelling with 8 layers, and translation with the norm before and after each part."""

from attnlab.experiments.corpora import list_grounds
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.variants import Variant
from attnlab.experiments.verdicts import Cell
from attnlab.studies.heo2024.attentions import SOFTMAX, TRAINED, read_models
from attnlab.studies.heo2024.measures import QUALITY
from attnlab.studies.heo2024.plan import LANGUAGE, NAMES, TRANSLATION
from attnlab.studies.heo2024.published import IWSLT14_PRE, WIKITEXT103

NORMS = {
    "Pre-LN": {"norm": "pre", "final_norm": "true"},
    "Post-LN": {"norm": "post", "final_norm": "false"},
}


def language(setting: Setting) -> Findings:
    """The item: perplexity of softmax and daGPAM."""
    cells: list[Cell] = []
    for ground in list_grounds(LANGUAGE, setting, NAMES):
        models = read_models("language", ground, (SOFTMAX, TRAINED), QUALITY)
        for part, column in (("test", "test perplexity"), ("valid", "validation perplexity")):
            value = lambda found, part=part: found["perplexity"][part]  # noqa: E731
            printed = WIKITEXT103 if part == "test" else {}
            cells += [models.make_level(each, column, value, printed.get(each.name)) for each in (SOFTMAX, TRAINED)]
            gap = printed["dagpam"] - printed["softmax"] if printed else None
            cells.append(models.make_contrast(TRAINED, SOFTMAX, column, value, gap, sign=-1))
    remark = (
        "Of WikiText-103 the figures of the 8-layer model are known, but not of which part: they are held against the "
        "test part. On other text only the sign of the difference is held against the paper."
    )
    return Findings(cells, remarks=(remark,))


def translation(setting: Setting) -> Findings:
    """The item: BLEU of softmax and daGPAM from English to German, with the norm before and after each part."""
    cells: list[Cell] = []
    for ground in list_grounds(TRANSLATION, setting, NAMES):
        softmax, dagpam = ([_set_norm(each, norm) for norm in NORMS] for each in (SOFTMAX, TRAINED))
        models = read_models("translation", ground, [*softmax, *dagpam], QUALITY)
        for a, b in zip(dagpam, softmax, strict=True):
            printed = IWSLT14_PRE if a.at == "Pre-LN" else {}
            value = lambda found: found["scores"]["BLEU"]  # noqa: E731
            cells += [models.make_level(each, "BLEU", value, printed.get(each.name)) for each in (b, a)]
            gap = printed["dagpam"] - printed["softmax"] if printed else None
            cells.append(models.make_contrast(a, b, "BLEU", value, gap))
            perplexity = lambda found: found["perplexity"]["valid"]  # noqa: E731
            cells += [models.make_level(each, "validation perplexity", perplexity) for each in (b, a)]
            cells.append(models.make_contrast(a, b, "validation perplexity", perplexity))
    remark = (
        "Only IWSLT14 from English to German with Pre-LN is known (28.54 → 29.25): Post-LN has no side to be held "
        "against. daGPAM is in every attention of encoder and decoder; whether the paper's cross attention has it is "
        "not known."
    )
    return Findings(cells, remarks=(remark,))


def _set_norm(variant: Variant, norm: str) -> Variant:
    return Variant(variant.name, variant.label, {**variant.values, **NORMS[norm]}, at=norm)
