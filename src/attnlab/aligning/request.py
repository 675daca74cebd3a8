"""What the user asks of an aligner."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from attnlab.aligning.choice import Reading, parse_place
from attnlab.aligning.deciding import Decision, DecisionRule
from attnlab.aligning.extraction import Sentences
from attnlab.aligning.ibm1_aligner import FILE
from attnlab.aligning.model_inputs import Precision
from attnlab.aligning.soft_maps import Mean, Pieces
from attnlab.aligning.statistical import STATISTICAL, is_statistical
from attnlab.aligning.views import TEMPERATURE
from attnlab.aligning.word_tokens import Languages
from attnlab.config import Positive, Probability
from attnlab.tasks.links import Gold
from attnlab.training.run_list import find_folder

Pairs = tuple[Sentences, Sentences]
AskedBy = Literal["weight", "norm", "signed", "probe", "gradient", "encoder", "auto"]
OF_MAPS = ("decide", "null", "grow", "threshold", "combine", "pieces", "precision", "languages", "prefix")


@dataclass(frozen=True)
class SelectionGold:
    """Gold links to choose a layer or head by, and their text if it is not the text to align."""

    gold: Gold
    pairs: Pairs | None = None


@dataclass(frozen=True)
class AlignmentRequest:
    """What the user asks of a model; None stands for the defaults of `Reading` and `DecisionRule`.

    With two directions the default is by auto; with one it is by norm, of the layer of the highest norm. The default
    setting is auto: the text decides, or the gold links of best-on. For probes and gradients it is awo.
    """

    by: AskedBy | None = None
    setting: str | None = None
    layer: str | None = None
    head: str | None = None
    selection: SelectionGold | None = None
    diagonal: bool = False  # for IBM Model 1
    train_on: Pairs | None = None  # for IBM Model 1; by default the text to align
    device: str = "auto"
    allow_code: bool = False  # run the file of a user-written mechanism that the model names
    combine: Mean = "mean"  # of the maps of both directions
    decide: Decision | None = None
    null: Probability | None = None
    grow: Probability | None = None
    threshold: Probability | None = None
    pieces: Pieces = "mean"
    temperature: Positive = TEMPERATURE  # of the softmax over the similarities of encoded words
    precision: Precision = "auto"
    languages: str | None = None  # codes of the model, source-target, as eng_Latn-fra_Latn
    prefix: str = ""  # before each source line (T5)
    reverse_prefix: str = ""

    def build_reading(self, *, two: bool = False) -> Reading:
        plain = self.by is None and self.layer is None and self.head is None and self.setting is None
        by = self.by or ("auto" if two and plain else "norm")
        single = by in ("probe", "gradient")
        setting = self.setting or ("awo" if single else "auto")
        if single and (setting != "awo" or self.layer or self.head):
            always = "always reads the last layer with all heads together, setting awo"
            raise ValueError(f"--by {by} {always}: omit --setting, --layer and --head")
        places = {name: parse_place(text, name) for name in ("layer", "head") if (text := getattr(self, name))}
        if by == "auto":
            places.setdefault("layer", "agreement")
        return Reading(by, setting, **places)  # type: ignore[arg-type]

    def build_rule(self, *, single: bool = False, trained: bool = False) -> DecisionRule:
        """Return the rule of decision, with defaults for what makes the map.

        One direction of attention takes each target word's best source word. Maps of a trained aligner are sharper.
        """
        rule = DecisionRule(null=0.3, grow=0.5) if trained else DecisionRule()
        rule = DecisionRule(decide="argmax", null=0.0) if single else rule
        given = {
            name: value
            for name in ("decide", "null", "grow", "threshold")
            if (value := getattr(self, name)) is not None
        }
        return replace(rule, **given)

    def get_languages(self, direction: int) -> Languages:
        """Return the languages of the forward (0) or backward (1) direction."""
        codes: Sequence[str | None] = (self.languages or "").split("-") if self.languages else (None, None)
        if len(codes) != 2:
            raise ValueError(f"--languages must be two codes joined by -, as eng_Latn-fra_Latn, got {self.languages!r}")
        ahead = Languages(codes[0], codes[1], self.prefix)
        return ahead.reverse(self.reverse_prefix) if direction else ahead

    def for_model(self, model: str, other: str) -> "AlignmentRequest":
        """Return the request for one of two models. If only one is IBM Model 1, drop the options of the other."""
        if is_word_model(model) == is_word_model(other):
            return self
        if is_word_model(model):
            defaults: dict[str, Any] = {
                field.name: field.default for field in fields(AlignmentRequest) if field.name in OF_MAPS
            }
            return replace(self, by=None, setting=None, layer=None, head=None, selection=None, **defaults)
        return replace(self, diagonal=False, train_on=None)

    def refuse_options(self, names: Sequence[str], reason: str) -> None:
        """Raise ValueError if one of these options was given: if it differs from its default."""
        defaults = {field.name: field.default for field in fields(AlignmentRequest)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"--{name.replace('_', '-')} {reason}")

    def refuse_training(self, model: str) -> None:
        """Raise ValueError for options of statistical aligners, which train on the text."""
        self.refuse_options(["diagonal"], f"is for MODEL ibm1; omit it for {model}")
        self.refuse_options(["train_on"], f"is for MODEL fertility, hmm, ibm1 or eflomal; omit it for {model}")

    def refuse_unused(self, *, one_map: bool) -> None:
        """Raise ValueError for an option of a decision that is not taken, or for joining a single map."""
        decide = self.decide or ("argmax" if one_map else "grow")
        for name in ("grow", "threshold"):
            if decide != name:
                self.refuse_options([name], f"is for --decide {name}, but links are decided by {decide}: omit it")
        if one_map:
            self.refuse_options(["combine"], "joins two directions: pass the model of the other one with --reverse")


WORD_MODELS = ("ibm1", *STATISTICAL)


def is_word_model(model: str) -> bool:
    """Return whether the name is ibm1, hmm, fertility or eflomal, or the folder of a trained one."""
    return model == "ibm1" or is_statistical(model) or find_folder(model, FILE) is not None
