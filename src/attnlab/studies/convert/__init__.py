"""Convertibility: which mechanisms a pretrained language model can be given, and after how many tokens it is back.

There is no paper behind it: its cells have no published number and no verdict. `recovery` defines when a model is back.
"""

from attnlab.experiments.study import SCALES, Item, Study
from attnlab.studies.convert.convertibility import OPTIONS, convert

STUDY = Study(
    "convert",
    "Convertibility: a pretrained language model with other attention",
    {"conversion": Item("Tokens until a converted model is back", convert, dict.fromkeys(SCALES, 3), options=OPTIONS)},
    from_paper=False,
)
