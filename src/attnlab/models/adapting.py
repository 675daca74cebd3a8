"""Putting a mechanism into every attention module of a Hugging Face model, and keeping it with the model.

The attention modules are found by a dry run on a few tokens, in which each of them attends by plain softmax through
the door its mechanism will use. The model must then return what it returned before, or it is refused: whatever it does
to its logits, masks or scale that this door would lose is found there. Nothing here imports transformers.
"""

import inspect
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from attnlab.mechanisms import MECHANISMS, Mechanism, attention, check_options, find, own
from attnlab.mechanisms.softmax import Softmax
from attnlab.models import adapted, native
from attnlab.models.adapted import Cascade, Place
from attnlab.models.capture import Surroundings
from attnlab.recording import KINDS

FILE, FORMAT = "attnlab.json", "attnlab-adapted-1"
FROM_MODEL = ("layer", "scale", "dropout")  # options of a mechanism that the model decides


@dataclass(frozen=True)
class Adaptation:
    """What was put into a model: enough to do it again."""

    attention: str | type[Mechanism]
    options: Mapping[str, Any]
    kinds: tuple[str, ...]

    @property
    def label(self) -> str:
        return self.attention if isinstance(self.attention, str) else self.attention.__name__

    def written(self, versions: Mapping[str, str]) -> str:
        """The contents of attnlab.json."""
        about = {"format": FORMAT, "attention": _written(self.attention), "options": dict(self.options)}
        about |= {"kinds": list(self.kinds), "versions": dict(versions)}
        return json.dumps(about, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "Adaptation":
        if not (folder / FILE).is_file():
            raise FileNotFoundError(
                f"{folder} has no {FILE}: no adapted model was saved there (a plain one loads with from_pretrained)"
            )
        about = json.loads((folder / FILE).read_text())
        if about.get("format") != FORMAT:
            raise ValueError(f"{folder / FILE} is of format {about.get('format')!r}; this version reads {FORMAT}")
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in about["options"].items()}
        return cls(about["attention"], options, tuple(about["kinds"]))

    @property
    def runs_code(self) -> bool:
        return isinstance(self.attention, str) and own.is_own(self.attention)


def plan(name: str | type[Mechanism], options: Mapping[str, Any], kinds: Collection[str] | None) -> Adaptation:
    """Check what was asked for, before any model is touched."""
    kind = find(name)
    check_options(name, options)
    if given := [option for option in FROM_MODEL if option in options]:
        raise ValueError(f"{', '.join(given)}: in an adapted model these come from the model itself")
    try:
        json.dumps(dict(options))
    except TypeError as error:
        raise TypeError(f"an option of {name} could not be saved with the model: {error}") from None
    if isinstance(kinds, str):
        kinds = (kinds,)
    for asked in kinds or ():
        if asked not in KINDS:
            raise ValueError(f"no kind of attention is called {asked!r}; there are {', '.join(KINDS)}")
    return Adaptation(_written(name) if isinstance(name, str) else kind, dict(options), tuple(kinds or ()))


@dataclass
class Found:
    """An attention module as the dry run met it."""

    module: nn.Module
    name: str
    kind: str
    heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    times: int = 1


@dataclass
class Probe:
    """The attention function of a dry run: notes each attention module and attends by softmax."""

    surroundings: Surroundings
    found: dict[nn.Module, Found] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        name, kind = self.surroundings.names[module], self.surroundings.kind(module, options)
        given = adapted.understood(name, attention_mask, options)
        _, heads, _, head_dim = query.shape
        scale = head_dim**-0.5 if options.get("scaling") is None else float(options["scaling"])
        if module in self.found:
            self.found[module].times += 1
        else:
            self.found[module] = Found(module, name, kind, heads, head_dim, scale, query.dtype, query.device)
        softmax = Softmax(heads, head_dim, scale=scale)
        causal = native.causal(module, attention_mask, options)
        context, _ = softmax(query, key, value, causal=causal, **given)
        return context.transpose(1, 2).contiguous(), None


def choose(adaptation: Adaptation, found: Collection[Found]) -> Adaptation:
    """The kinds to adapt: those asked for, or all; refuses what the model or the mechanism does not have."""
    there = tuple(kind for kind in KINDS if any(one.kind == kind for one in found))
    mechanism = find(adaptation.attention)
    if absent := [kind for kind in adaptation.kinds if kind not in there]:
        raise ValueError(f"this model has no {', '.join(absent)} attention; it has {', '.join(there)}")
    kinds = adaptation.kinds or there
    if mechanism.self_only and "cross" in kinds:
        rest = tuple(kind for kind in there if kind != "cross")
        raise ValueError(
            f"{adaptation.label} is for self-attention and this model has cross attention; say kinds={rest}"
        )
    shared = [one.name for one in found if one.times > 1 and one.kind in kinds]
    if mechanism.carries and shared:
        raise ValueError(
            f"{shared[0]} is used by several layers, so it has no one place in a cascade: {adaptation.label} needs one"
        )
    return Adaptation(adaptation.attention, adaptation.options, kinds)


def install(adaptation: Adaptation, found: Collection[Found]) -> None:
    """Give each attention module of the chosen kinds its mechanism and its place."""
    cascades: dict[str, list[Found]] = {}
    for one in found:
        if one.kind in adaptation.kinds:
            cascades.setdefault(re.sub(r"\.\d+(?=\.|$)|^\d+\.", "", one.name), []).append(one)
    made: list[tuple[Found, Mechanism, Place]] = []
    for name, members in cascades.items():
        cascade = Cascade(name)
        for layer, one in enumerate(members):
            own_options = {"layer": layer, "scale": one.scale, **adaptation.options}
            mechanism = attention(adaptation.attention, heads=one.heads, head_dim=one.head_dim, **own_options)
            made.append((one, mechanism, Place(one.name, one.kind, cascade, layer)))
    for one, mechanism, place in made:  # only when all could be made
        one.module.attnlab = mechanism.to(one.device, one.dtype).train(one.module.training)
        one.module.attnlab_place = place  # type: ignore[assignment]


def restore(model: nn.Module, folder: Path) -> None:
    """Read the mechanisms' parameters back from the weights saved in the folder."""
    missing = {name: x for name, x in model.state_dict().items() if ".attnlab." in f".{name}"}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in missing.keys() & set(file.keys()):
                missing.pop(name).copy_(file.get_tensor(name))
    if missing:
        raise ValueError(f"{folder} has an {FILE}, but its weights lack {', '.join(sorted(missing))}")


def _written(name: str | type[Mechanism]) -> str:
    """A name that finds the mechanism again: its key, or the file it is in and its class."""
    if isinstance(name, str):
        file, colon, wanted = name.rpartition(":")
        return f"{Path(file).expanduser().resolve()}:{wanted}" if own.is_own(name) and colon else name
    for key, kind in MECHANISMS.items():
        if kind is name:
            return key
    try:
        file = inspect.getfile(name)
    except (OSError, TypeError):
        file = ""
    if not file or "." in name.__qualname__:
        raise ValueError(f"a saved model could not find {name.__qualname__} again: put it at the top level of a file")
    return f"{Path(file).resolve()}:{name.__name__}"
