"""Put a mechanism into every attention module of a Hugging Face model, and save it with the model.

A dry run on a few tokens finds the attention modules. It calls them through the same interface as their mechanisms
later. The eager attention of each must equal plain softmax of the same q, k, v, and the model's output must not change.
This reveals any change to logits, masks or scale that a mechanism would not see. Nothing here imports transformers.
"""

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from attnlab.config import describe_error, suggest_nearest
from attnlab.files import write_text
from attnlab.files.user_files import read_json
from attnlab.huggingface import dispatch, dummy_inputs, native, proof, support
from attnlab.huggingface.caps_and_sinks import add_cap_and_sink, has_cap, has_sink
from attnlab.huggingface.capture import ModuleCalls
from attnlab.huggingface.native import AttentionCall
from attnlab.mechanisms import MECHANISMS, Mechanism, check_options, find_mechanisms, own
from attnlab.mechanisms.per_layer import replace_names
from attnlab.mechanisms.softmax import Softmax
from attnlab.records.record import KINDS
from attnlab.registry.own_files import is_own

FILE, FORMAT = "attnlab.json", "attnlab-adapted-1"
MARK = "attnlab"  # the key of config.json that says that a model is adapted, even where FILE is missing
FROM_MODEL = ("layer", "scale", "dropout", "model_size")  # options of a mechanism that are taken from the model


@dataclass(frozen=True)
class Adaptation:
    """The mechanism that a model was adapted with: enough to adapt the model again."""

    attention: str | type[Mechanism]
    options: Mapping[str, Any]
    kinds: tuple[str, ...]
    code: Mapping[str, str] = field(default_factory=dict)  # the stored hash of its file, by path
    parent: str = ""  # id or folder of the model that was adapted, if it has one

    @property
    def label(self) -> str:
        return self.attention if isinstance(self.attention, str) else self.attention.__name__

    @property
    def is_users_own(self) -> bool:
        """Whether a mechanism is a class in a user's file."""
        return bool(own.hash_files([_name_mechanism(self.attention)]))

    def to_json(self, versions: Mapping[str, str]) -> str:
        """Return the contents of attnlab.json."""
        name = _name_mechanism(self.attention)
        about: dict[str, Any] = {"format": FORMAT, "attention": name, "options": dict(self.options)}
        about |= {"kinds": list(self.kinds), "code": own.hash_files([name]), "versions": dict(versions)}
        about |= {"parent": self.parent}
        return json.dumps(about, indent=2) + "\n"

    @classmethod
    def from_folder(cls, folder: Path) -> "Adaptation":
        """Read attnlab.json. Raise ValueError if it is damaged."""
        try:
            about = read_json(folder / FILE)
            if (form := about["format"]) == FORMAT:
                options = {name: tuple(x) if isinstance(x, list) else x for name, x in about["options"].items()}
                rest = about.get("code", {}), str(about.get("parent", ""))
                return cls(about["attention"], options, tuple(about["kinds"]), *rest)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            what = f"{folder / FILE} is damaged ({type(error).__name__}: {error})"
            raise ValueError(f"{what}; save the adapted model again") from None
        raise ValueError(f"{folder / FILE} has format {form!r}; this version reads {FORMAT}")


def plan_adaptation(
    name: str | type[Mechanism], options: Mapping[str, Any], kinds: Collection[str] | None
) -> Adaptation:
    """Check the arguments of `adapt` before any model is changed."""
    find_mechanisms(name)
    check_options(name, options)
    if given := [option for option in FROM_MODEL if option in options]:
        raise ValueError(f"{', '.join(given)} cannot be set: an adapted model takes them from the original model")
    try:
        json.dumps(dict(options))
    except TypeError as error:
        raise TypeError(f"an option of {name} cannot be saved with the model: {error}") from None
    if isinstance(kinds, str):
        kinds = (kinds,)
    if kinds is not None and not kinds:
        raise ValueError(f"kinds is empty: name some of {', '.join(KINDS)}, or omit it to adapt all")
    for asked in kinds or ():
        if asked not in KINDS:
            close = suggest_nearest(str(asked), KINDS)
            raise ValueError(f"unknown kind of attention {asked!r}{close}; choose from {', '.join(KINDS)}")
    return Adaptation(_name_mechanism(name) if isinstance(name, str) else name, dict(options), tuple(kinds or ()))


@dataclass
class AttentionModule:
    """An attention module that the dry run found."""

    module: nn.Module
    name: str
    kind: str
    heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    window: str  # what layers must have in common to see the same keys
    values: tuple[int, int]  # number and size of the heads of values
    widths: tuple[int, int]  # of the inputs of queries and of keys
    has_bias: bool  # adds a bias to the logits
    rotates: bool  # rotates queries and keys by their positions (RoPE)
    caps: bool  # caps its logits (Gemma 2)
    sinks: bool  # has an attention sink (gpt-oss)
    times: int = 1  # calls in one forward pass


def dry_run(model: Any, *, prove: bool = True) -> list[AttentionModule]:
    """Return the attention modules of a model in the order they run.

    Raises ValueError if plain softmax would change the model's output. prove=False skips this check, for models that
    passed it before.
    """
    base, batch, probe = model.base_model, dummy_inputs.build_dummy_batch(model), DryRunAttention(model, prove)
    training = [module for module in base.modules() if module.training]
    try:
        base.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with dispatch.switch_attention(model, dispatch.WATCHED_BOOL, probe.attend), probe.calls.watch_modules():
                output = run_on_tokens(model, batch)
            if not probe.found:
                raise ValueError(support.explain_refusal(type(model)))
            if prove:
                with dispatch.switch_attention(model, "eager"):
                    own = dispatch.run_forward(base, batch)[0]
                proof.check_close(f"{probe.refusal}: through attnlab, its output", output, own)
    finally:
        for module in training:
            module.training = True
    return list(probe.found.values())


def run_on_tokens(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the first output of the model on a dummy batch. Raises ValueError if it needs more than that."""
    try:
        return dispatch.run_forward(model.base_model, batch)[0]
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of many types, from the model's own code
        what = f"{type(model).__name__} cannot be adapted: it fails on {', '.join(batch)} ({describe_error(error)})"
        raise ValueError(f"{what}; if it reads more than that, adapt the part that reads text") from error


class DryRunAttention:
    """The attention function of a dry run: notes each module, runs its eager function, and checks that it is softmax.

    It repeats the operations of the eager pass exactly, so that even a deep model in half precision does not drift.
    """

    def __init__(self, model: nn.Module, prove: bool) -> None:
        self.calls, self.prove = ModuleCalls(model), prove
        self.refusal = f"{type(model).__name__} cannot be adapted faithfully"
        self.found: dict[nn.Module, AttentionModule] = {}

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        module, query, scaling = call.module, call.query, call.options.get("scaling")
        name, kind = self.calls.names[module], self.calls.find_kind(call)
        given = dispatch.read_mask_and_bias(name, call)
        _, heads, _, head_dim = query.shape
        scale = head_dim**-0.5 if scaling is None else float(scaling)
        if module in self.found:
            self.found[module].times += 1
        else:
            sizes = (heads, head_dim, scale, query.dtype, query.device)
            values = (call.value.shape[1], call.value.shape[3])
            read = (call.describe_window(), values, self.calls.find_widths(module))
            has_bias = given["bias"] is not None or has_cap(call) or has_sink(call)
            about = (has_bias, self.calls.has_rotation(module), has_cap(call), has_sink(call))
            self.found[module] = AttentionModule(module, name, kind, *sizes, *read, *about)
        seen = call.build_bool_mask()
        if self.prove:
            self._check_softmax(self.found[module], call, seen, given)
        return call.run_eager(native.to_additive(seen, query.dtype))[0], None

    def _check_softmax(
        self, found: AttentionModule, call: AttentionCall, seen: Tensor, given: Mapping[str, Any]
    ) -> None:
        """Check that the module's eager function computes softmax(scale·qkᵀ + bias) v, for queries that see any key.

        Compares in float64, so that only the functions can differ. Many models still compute their softmax in float32,
        which rounds logits of size s by s·ε.
        """
        wide = torch.float32 if found.device.type == "mps" else torch.float64
        q, k, v = (x.to(wide) for x in (call.query, call.key, call.value))
        largest = found.scale * q.norm(dim=-1).max() * k.norm(dim=-1).max()
        call = replace(call, query=q, key=k, value=v)
        if (bias := given["bias"]) is not None:
            bias = bias.to(wide)
            call = replace(call, options={**call.options, "position_bias": bias})
            largest = largest + bias.abs().max()
        own, _ = call.run_eager(native.to_additive(seen, wide))  # (b,i,h,d)
        softmax = Softmax(found.heads, found.head_dim, scale=found.scale)
        given = {**given, "bias": bias}
        k, v = add_cap_and_sink(call, given)
        context = softmax(q, k, v, **given)[0].transpose(1, 2)
        sighted = seen.any(-1)[:, 0].expand(own.shape[:2])
        rounding = 4 * torch.finfo(torch.float32).eps * largest.item()
        what = f"{self.refusal}: in {found.name}, plain softmax"
        proof.check_close(what, context[sighted], own[sighted], rounding)


def choose_kinds(adaptation: Adaptation, found: Collection[AttentionModule]) -> Adaptation:
    """Return the adaptation with its kinds, by default all. Raises ValueError for a missing or unsupported kind."""
    available = tuple(kind for kind in KINDS if any(one.kind == kind for one in found))
    mechanisms = find_mechanisms(adaptation.attention)
    if absent := [kind for kind in adaptation.kinds if kind not in available]:
        raise ValueError(f"this model has no {', '.join(absent)} attention; it has {', '.join(available)}")
    kinds = adaptation.kinds or available
    if any(one.self_only for one in mechanisms) and "cross" in kinds:
        rest = tuple(kind for kind in available if kind != "cross")
        raise ValueError(f"{adaptation.label} does not support the cross attention of this model; pass kinds={rest}")
    shared = [one.name for one in found if one.times > 1 and one.kind in kinds]
    if any(one.carries for one in mechanisms) and shared:
        raise ValueError(f"{shared[0]} is shared by several layers; {adaptation.label} needs one module for each layer")
    return replace(adaptation, kinds=kinds, code={})


def mark_config(folder: Path) -> None:
    """Note in the config.json of a saved model that it is adapted."""
    path = folder / "config.json"
    write_text(path, json.dumps({**read_json(path), MARK: FORMAT}, indent=2, sort_keys=True) + "\n")


def collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights as `restore_parameters` expects them: those of compiled mechanisms without a wrapper.

    Raises ValueError if a mechanism is in another wrapper, whose weights would not be found again.
    """
    weights = {name.replace(".attnlab._orig_mod.", ".attnlab."): x for name, x in model.state_dict().items()}
    for module in model.modules():
        held = getattr(module, "attnlab", None)
        if hasattr(module, "attnlab_place") and not isinstance(getattr(held, "_orig_mod", held), Mechanism):
            what = f"the mechanism of {dispatch.get_place(module).name} is wrapped in {type(held).__name__}"
            raise ValueError(f"{what}: merge or remove the wrapper, then save")
    return weights


def is_added(name: str) -> bool:
    """Return whether a weight of this name belongs to what `install_mechanisms` adds to a model."""
    return ".attnlab." in f".{name}" or ".attnlab_queries." in f".{name}"


def restore_parameters(model: nn.Module, folder: Path, rename: Callable[[str], str]) -> None:
    """Load the mechanisms' parameters from the weights in the folder. rename maps a saved name to that in the model."""
    missing = {name: x for name, x in model.state_dict().items() if is_added(name)}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in filter(is_added, file.keys()):
                name = key if key in missing else rename(key)
                if name not in missing:
                    continue
                ours, saved = missing.pop(name), file.get_tensor(key)
                if ours.shape != saved.shape:
                    raise ValueError(
                        f"{path} has {name} of shape {tuple(saved.shape)}, but the options in {FILE} "
                        f"need shape {tuple(ours.shape)}: the two files do not belong together"
                    )
                ours.copy_(saved)
    if missing:
        raise ValueError(f"{folder} has {FILE}, but its weights lack {', '.join(sorted(missing))}")


def _resolve_path(name: str) -> str:
    file, colon, wanted = name.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{wanted}" if is_own(name) and colon else name


def _name_mechanism(name: str | type[Mechanism]) -> str:
    """Return a name that finds the mechanism again: its key, or its file and class."""
    if isinstance(name, str):
        return replace_names(name, _resolve_path)
    for key, kind in MECHANISMS.items():
        if kind is name:
            return key
    try:
        file = inspect.getfile(name)
    except (OSError, TypeError):
        file = ""
    if not file or "." in name.__qualname__:
        raise ValueError(f"a saved model cannot find {name.__qualname__} again: put it at the top level of a file")
    return f"{Path(file).resolve()}:{name.__name__}"
