"""Putting a mechanism into every attention module of a Hugging Face model, and keeping it with the model.

The attention modules are found by a dry run on a few tokens, through the door that their mechanisms will use. There the
eager attention of each must be plain softmax of the same q, k, v, and the model must return what it returns by itself:
whatever it does to its logits, masks or scale that this door would lose is found so. Nothing here imports transformers.
"""

import inspect
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from attnlab.config import suggest_nearest
from attnlab.huggingface import dispatch, inputs, native, proof
from attnlab.huggingface.capture import Surroundings
from attnlab.huggingface.carries import Cascade, Place
from attnlab.mechanisms import MECHANISMS, Mechanism, attention, check_options, find, own
from attnlab.mechanisms.softmax import Softmax
from attnlab.records.record import KINDS

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
        try:
            about = json.loads((folder / FILE).read_text())
            if (form := about["format"]) == FORMAT:
                options = {name: tuple(x) if isinstance(x, list) else x for name, x in about["options"].items()}
                return cls(about["attention"], options, tuple(about["kinds"]))
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            what = f"{folder / FILE} is not as save_pretrained wrote it ({type(error).__name__}: {error})"
            raise ValueError(f"{what}; save the adapted model again") from None
        raise ValueError(f"{folder / FILE} is of format {form!r}; this version reads {FORMAT}")

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
    if kinds is not None and not kinds:
        raise ValueError(f"kinds is empty: name some of {', '.join(KINDS)}, or leave it out to adapt all")
    for asked in kinds or ():
        if asked not in KINDS:
            close = suggest_nearest(str(asked), KINDS)
            raise ValueError(f"no kind of attention is called {asked!r}{close}; there are {', '.join(KINDS)}")
    return Adaptation(_written(name) if isinstance(name, str) else kind, dict(options), tuple(kinds or ()))


@dataclass
class AttentionModules:
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


def dry_run(model: Any, *, prove: bool = True) -> list[AttentionModules]:
    """The attention modules of a model, in the order they run; refuses a model that plain softmax would change.

    prove=False only finds them, in a model that was proved before.
    """
    base, batch, probe = model.base_model, inputs.dummy(model), Probe(model, prove)
    training = [module for module in base.modules() if module.training]
    try:
        base.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with dispatch.switched(model, dispatch.WATCHED_BOOL, probe.attend), probe.surroundings.watched():
                output = dispatch.call(base, batch)[0]
            if not probe.found:
                raise ValueError(dispatch.by_itself(model))
            if prove:
                with dispatch.switched(model, "eager"):
                    own = dispatch.call(base, batch)[0]
                proof.compare(f"{probe.refusal}: through this door, its output", output, own)
    finally:
        for module in training:
            module.training = True
    return list(probe.found.values())


class Probe:
    """The attention function of a dry run: the module's own eager one, noted and, if asked, proved to be softmax.

    It repeats the eager pass operation for operation, so that even a deep model in half precision does not drift.
    """

    def __init__(self, model: nn.Module, prove: bool) -> None:
        self.surroundings, self.prove = Surroundings(model), prove
        self.refusal = f"{type(model).__name__} cannot be adapted faithfully"
        self.found: dict[nn.Module, AttentionModules] = {}

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
        given = dispatch.understood(name, attention_mask, options)
        _, heads, _, head_dim = query.shape
        scale = head_dim**-0.5 if options.get("scaling") is None else float(options["scaling"])
        if module in self.found:
            self.found[module].times += 1
        else:
            self.found[module] = AttentionModules(module, name, kind, heads, head_dim, scale, query.dtype, query.device)
        seen = native.visible(module, query, key, attention_mask, options)
        if self.prove:
            given["causal"] = native.causal(module, attention_mask, options)
            self._check_softmax(self.found[module], (query, key, value), seen, given, options)
        hidden = native.additive(seen, query.dtype)
        return native.eager(module)(module, query, key, value, hidden, **options)[0], None

    def _check_softmax(
        self,
        found: AttentionModules,
        qkv: tuple[Tensor, ...],
        seen: Tensor,
        given: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """softmax(scale·qkᵀ + bias) v is what the module's eager function makes of the same q, k, v, where it sees any.

        In wide numbers, so that only the functions can differ. Many models take their softmax in float32 all the same,
        where logits of size s are rounded by s·ε.
        """
        wide = torch.float32 if found.device.type == "mps" else torch.float64
        q, k, v = (x.to(wide) for x in qkv)
        largest = found.scale * q.norm(dim=-1).max() * k.norm(dim=-1).max()
        if given["bias"] is not None:
            options = options | {"position_bias": given["bias"].to(wide)}
            given = given | {"bias": given["bias"].to(wide)}
            largest = largest + given["bias"].abs().max()
        own = native.eager(found.module)(found.module, q, k, v, native.additive(seen, wide), **options)[0]  # (b,i,h,d)
        context = Softmax(found.heads, found.head_dim, scale=found.scale)(q, k, v, **given)[0].transpose(1, 2)
        sighted = seen.any(-1)[:, 0].expand(own.shape[:2])
        rounding = 4 * torch.finfo(torch.float32).eps * largest.item()
        what = f"{self.refusal}: in {found.name}, plain softmax"
        proof.compare(what, context[sighted], own[sighted], rounding)


def choose(adaptation: Adaptation, found: Collection[AttentionModules]) -> Adaptation:
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


def install(adaptation: Adaptation, found: Collection[AttentionModules]) -> None:
    """Give each attention module of the chosen kinds its mechanism and its place."""
    cascades: dict[str, list[AttentionModules]] = {}
    for one in found:
        if one.kind in adaptation.kinds:
            cascades.setdefault(re.sub(r"\.\d+(?=\.|$)|^\d+\.", "", one.name), []).append(one)
    made: list[tuple[AttentionModules, Mechanism, Place]] = []
    for name, members in cascades.items():
        cascade = Cascade(name)
        for layer, one in enumerate(members):
            sizes = {"heads": one.heads, "head_dim": one.head_dim}
            mechanism = attention(adaptation.attention, **sizes, layer=layer, **adaptation.options)
            mechanism.scale *= one.scale / one.head_dim**-0.5  # as the model scales otherwise than 1/√d, if it does
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
                ours, saved = missing.pop(name), file.get_tensor(name)
                if ours.shape != saved.shape:
                    raise ValueError(
                        f"{path} has {name} of shape {tuple(saved.shape)}, and the options in {FILE} "
                        f"make it {tuple(ours.shape)}: they do not belong together"
                    )
                ours.copy_(saved)
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
