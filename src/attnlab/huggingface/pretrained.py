"""Record, adapt and load Hugging Face models. No other file imports transformers.

record(model or its name, text)   return what the model attends to; first proved against its own eager attention
adapt(model, name, …)             replace the model's attention by a mechanism and keep its weights
load(folder)                      load an adapted model
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from attnlab.config import describe_error
from attnlab.huggingface import (
    adaptation,
    auto_loading,
    dispatch,
    inputs,
    installation,
    model_card,
    proof,
    readers,
    screening,
    support,
)
from attnlab.huggingface import carries as cascade
from attnlab.huggingface.adaptation import Adaptation
from attnlab.huggingface.capture import record_pass
from attnlab.huggingface.config_errors import explain_config_errors
from attnlab.huggingface.neutral import choose_neutral_options, fill_neutral
from attnlab.huggingface.projections import describe_adapters, unwrap_adapters
from attnlab.huggingface.record_checks import check_examples, check_loaded, check_recordable, explain_failure
from attnlab.huggingface.saving import list_versions, refuse_part, save
from attnlab.huggingface.screening import forbid_pickle
from attnlab.mechanisms import Mechanism, own
from attnlab.recording.watch import check_unchanged, sample_noise, unwrap_model
from attnlab.records.record import Record
from attnlab.tasks.hub import is_path, reach_hub

_proved: WeakKeyDictionary[nn.Module, set[bool]] = WeakKeyDictionary()  # values of lazy that a model is proved for


def record(
    model: PreTrainedModel | str | Path,
    text: str | Sequence[str] | Mapping[str, Tensor],
    *,
    tokenizer: Any = None,
    target: str | Sequence[str] | None = None,
    lazy: bool = False,
    feed_forward: bool = False,
    noise: int | None = None,
    max_length: int | None = None,
    allow_pickle: bool = False,
    allow_code: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    gguf_file: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Record:
    """Record what a Hugging Face model in evaluation mode attends to; the options are those of attnlab.record.

    model   a loaded model, or an id or a folder to load from, with allow_pickle … dtype
    """
    if isinstance(model, str | Path):
        name = os.path.expanduser(model)
        where: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision, "gguf_file": gguf_file}
        how: dict[str, Any] = {"allow_pickle": allow_pickle, "allow_code": allow_code, "device": device, "dtype": dtype}
        model = open_model(name, **where, **how)
        if tokenizer is None and not isinstance(text, Mapping):
            tokenizer = open_tokenizer(name, **where)
    else:
        check_loaded({"device": device, "dtype": dtype, "revision": revision, "gguf_file": gguf_file})
    outer = unwrap_model(model)
    inside: PreTrainedModel = unwrap_adapters(outer)
    _check_model(inside)
    check_recordable(inside)
    check_unchanged(inside)
    if lazy and dispatch.find_adaptation(inside) is not None:
        raise ValueError("lazy=True supports only a model's own attention; this model is adapted: record without lazy")
    batch = inputs.build_batch(inside, tokenizer, text, target, max_length)
    eager = torch.compiler.set_stance("force_eager")  # hooks never fire in compiled code
    with torch.no_grad(), eager, explain_failure(inside):
        if lazy not in _proved.setdefault(inside, set()):
            sample = inputs.build_proof_batch(inside, batch, None if isinstance(text, Mapping) else tokenizer)
            proof.prove_model(inside, sample, lazy)
            _proved[inside].add(lazy)
        with sample_noise(inside, noise):
            result, _ = record_pass(inside, batch, tokenizer=tokenizer, lazy=lazy, feed_forward=feed_forward)
    check_examples(inside, result.layers, batch)
    origin = {"revision": revision, "gguf_file": gguf_file}
    meta = {**result.meta, "noise": noise, **{name: x for name, x in origin.items() if x is not None}}
    return replace(result, meta=meta | describe_adapters(outer) | list_versions())


def adapt(
    model: PreTrainedModel,
    name: str | type[Mechanism],
    *,
    kinds: Collection[str] | None = None,
    neutral: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Replace the attention of a model by a mechanism, in place, and return the model. The model keeps its weights.

    kinds     some of "encoder-self", "decoder-self", "cross"; by default all that the model has
    neutral   begin where the mechanism is softmax, so that the model is unchanged until it is trained
    options   the mechanism's own options

    Each attention module gets the mechanism as its submodule `attnlab`. model.save_pretrained(folder) saves the adapted
    model, and attnlab.load(folder) loads it. So does from_pretrained, where attnlab.huggingface is imported.
    """
    _check_model(model)
    if any(isinstance(module, Mechanism) for module in model.modules()):
        raise ValueError("this model is already adapted; load the original model to adapt it differently")
    options = choose_neutral_options(name, options) if neutral else options
    wanted = replace(adaptation.plan_adaptation(name, options, kinds), parent=model.name_or_path or "")
    _replace_attention(model, wanted, prove=True)
    if neutral:
        fill_neutral(model, str(name))
    model.name_or_path = ""  # it is not the parent any more, which PEFT would name as the base of an adapter
    return model


def load(
    folder: str | Path,
    *,
    allow_code: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load an adapted model that model.save_pretrained(folder) saved, in evaluation mode.

    folder       the folder, or the id on the Hugging Face hub that it was uploaded to
    allow_code   also load a model whose mechanism is a class in a user's file; loading runs that file
    revision     a branch, tag or commit of an id on the hub
    """
    name = os.path.expanduser(folder)
    how = {} if revision is None else {"revision": revision}
    if _find_adapted(name, how) is None:
        _load_config(name, trust_remote_code, revision)
        what = f"{name} is not an adapted model: it has no {adaptation.FILE}"
        raise FileNotFoundError(f"{what}; load it with from_pretrained")
    saved, place = find_saved(name, how, allow_code=allow_code)
    model, _ = _load_plain(name, trust_remote_code=trust_remote_code, revision=revision, device=device, dtype=dtype)
    restore_adaptation(model, saved, place)
    return model


def find_saved(name: str, how: Mapping[str, Any], *, allow_code: bool) -> tuple[Adaptation, Path]:
    """Return the adaptation of a saved model and its folder. Raises ValueError if it is missing or not allowed.

    how   options of transformers' cached_file, such as revision
    """
    if (place := _find_adapted(name, how)) is None:
        raise ValueError(f"{name} is an adapted model, but its {adaptation.FILE} is missing: save the model again")
    saved = Adaptation.from_folder(place)
    own.check_code([saved.attention], saved.code, place / adaptation.FILE, allow=allow_code)
    return saved, place


def restore_adaptation(model: PreTrainedModel, saved: Adaptation, place: Path) -> None:
    """Install the mechanisms of a saved adaptation in a model, with the parameters from its folder."""
    _check_model(model)
    wanted = adaptation.plan_adaptation(saved.attention, saved.options, saved.kinds)
    _replace_attention(model, replace(wanted, parent=saved.parent), prove=False)
    adaptation.restore_parameters(model, place, _build_renaming(model))


def read_config_values(name: str | os.PathLike[str] | None, how: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a config.json; none if it cannot be read, which loading explains."""
    if name is None:
        return {}
    try:
        return PreTrainedConfig.get_config_dict(name, **how)[0]
    except (OSError, ValueError):
        return {}


def _find_adapted(name: str, how: Mapping[str, Any] | None = None) -> Path | None:
    """Return the folder with the attnlab.json of a model, its own or in the cache of the hub; None if there is none."""
    how = how or {}
    if Path(name).exists() or is_path(name):
        folder = Path(name) / how.get("subfolder", "")
        return folder if (folder / adaptation.FILE).is_file() else None
    try:
        with reach_hub(name):
            file = _find_file(name, adaptation.FILE, **how)
    except OSError:  # no such model, which loading explains
        return None
    return None if file is None else file.parent


def _find_file(name: str, file: str, revision: str | None = None, **how: Any) -> Path | None:
    """Return the path of a file of a model, in its folder or in the cache of the hub, or None if there is none."""
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = transformers.utils.cached_file(name, file, revision=revision, **missing, **how)
    return None if found is None else Path(found)


def _build_renaming(model: PreTrainedModel) -> Callable[[str], str]:
    """Return a function from the name of a saved weight to its name in the model: transformers renames some."""
    conversions, names = get_model_conversion_mapping(model, add_legacy=False), model.state_dict()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    return lambda saved: rename_source_key(saved, renamings, [], model.base_model_prefix, names)[0]


def _replace_attention(model: PreTrainedModel, wanted: Adaptation, *, prove: bool) -> None:
    found = adaptation.dry_run(model, prove=prove)
    chosen = adaptation.choose_kinds(wanted, found)
    installation.install_mechanisms(model, chosen, found)
    dispatch.set_implementation(model, dispatch.ADAPTED)
    readers.install_readers(model, dispatch.attend, linear=False)
    carries = any(isinstance(module, Mechanism) and module.carries for module in model.modules())
    for part in dispatch.list_models(model):
        part.register_forward_pre_hook(dispatch.check_call, with_kwargs=True)
        part.save_pretrained = partial(save if part is model else refuse_part, part)  # a partial can be pickled
        part.push_to_hub = partial(model_card.push_to_hub if part is model else refuse_part, part)
        if carries:
            part.register_forward_pre_hook(cascade.begin_flow)
            part.register_forward_hook(cascade.end_flow, always_call=True)
    model.attnlab_adaptation = chosen  # type: ignore[assignment]
    _proved.pop(model, None)


def open_model(
    name: str, *, allow_pickle: bool = False, allow_code: bool = False, revision: str | None = None,
    gguf_file: str | None = None, **how: Any,
) -> PreTrainedModel:  # fmt: skip
    """Load a model by id or folder, with its mechanisms if it was saved as an adapted model. how: options of `load`."""
    if revision is not None and Path(name).exists():
        raise ValueError(f"revision={revision!r} is for an id on the Hugging Face hub, but {name} is a folder")
    if gguf_file is None and _find_adapted(name, {} if revision is None else {"revision": revision}) is not None:
        return load(name, allow_code=allow_code, revision=revision, **how)
    how |= {"revision": revision, "gguf_file": gguf_file}
    model, unexpected = _load_plain(name, allow_pickle=allow_pickle, **how)
    if any(map(adaptation.is_added, unexpected)) or getattr(model.config, adaptation.MARK, None):
        raise ValueError(f"{name} is an adapted model, but its {adaptation.FILE} is missing: save the model again")
    return model


def find_class(name: str) -> Any:
    """Return a class of transformers; other files do not import it."""
    return getattr(transformers, name)


def _load_plain(
    name: str, *, allow_pickle: bool = False, trust_remote_code: bool = False, revision: str | None = None,
    gguf_file: str | None = None, device: Any = None, dtype: Any = None,
) -> tuple[PreTrainedModel, Collection[str]]:  # fmt: skip
    """Load the model with transformers. Return it with the names of unexpected weights."""
    config = _load_config(name, trust_remote_code, revision, gguf_file)
    kind = _choose_class(config, name, trust_remote_code)
    if hasattr(kind, "_can_set_attn_implementation"):
        support.check_class(kind)  # before the weights are loaded, which may take a minute
    # the commit of the config: otherwise transformers may take converted weights from a pull request
    revision = getattr(config, "_commit_hash", None) or revision or "main"
    how: dict[str, Any] = {"dtype": dtype or "auto", "use_safetensors": None if allow_pickle else True}
    if gguf_file is not None:
        how |= {"gguf_file": gguf_file, "dtype": dtype, "use_safetensors": None}
    how |= {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        plain = auto_loading.load_plain()
        with plain, silence_transformers(), reach_hub(name), nullcontext() if allow_pickle else forbid_pickle(name):
            if not allow_pickle and gguf_file is None:
                _check_index(name, config, revision)
            model, about = kind.from_pretrained(name, config=config, output_loading_info=True, **how)
    except (OSError, SafetensorError) as error:
        folder = Path(name)
        pickled, safe = (any(folder.glob(files)) for files in ("pytorch_model*.bin", "*.safetensors"))
        if folder.is_dir() and not pickled and not safe:
            raise ValueError(f"{name} has a config.json but no weights: add its .safetensors file") from None
        if allow_pickle or safe or "connect" in str(error):
            raise OSError(f"cannot load the weights of {name}: {describe_error(error)}") from None
        raise ValueError(f"{name} has no safetensors weights, and {screening.PICKLE}") from None
    except (screening.RefusedError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config that does not fit its model or its weights raises many types
        what = f"transformers cannot build the model that the config.json of {name} describes"
        raise ValueError(f"{what} ({describe_error(error)})") from None
    if about["missing_keys"]:
        lacking = ", ".join(sorted(about["missing_keys"]))
        warnings.warn(f"{name} has no weights for {lacking}: they are initialized randomly", stacklevel=2)
    return model.eval() if device is None else model.eval().to(device), about["unexpected_keys"]


def _choose_class(config: Any, name: str, trust_remote_code: bool) -> Any:
    """Return the class that config.json names; AutoModel if transformers has none of that name."""
    named = [] if config.architectures is None else config.architectures
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise ValueError(f"the config.json of {name} has architectures={named!r}, but needs a list of class names")
    auto_map = getattr(config, "auto_map", None)
    if trust_remote_code and isinstance(auto_map, dict):
        kinds = [getattr(transformers, each) for each in auto_map if hasattr(transformers, each)]
        return next((each for each in kinds if each.__name__.startswith("AutoModel")), AutoModel)
    found = [getattr(transformers, each, None) for each in named]
    kinds = [each for each in found if isinstance(each, type) and issubclass(each, PreTrainedModel)]
    chosen = next((each for each in kinds if each is not PreTrainedModel), AutoModel)
    if chosen is AutoModel and type(config) in AutoModel._model_mapping:
        chosen = AutoModel._model_mapping[type(config)]
    return chosen[0] if isinstance(chosen, tuple) else chosen


def _check_index(name: str, config: Any, revision: str) -> None:
    """Check the file that lists the weights, in the folder or on the hub, if the model has one."""
    if (given := getattr(config, "transformers_weights", None)) is not None:
        screening.check_weights_file(given, name)
    for file in {screening.INDEX, given or screening.INDEX}:
        if (found := _find_file(name, file, revision)) is not None and file.endswith(".json"):
            screening.check_index(found, name)


def _load_config(name: str, trust_remote_code: bool, revision: str | None = None, gguf_file: str | None = None) -> Any:
    """Load the config of a model. Raises an error of one sentence if that fails, or if the config names code."""
    path, how = Path(name), {"revision": revision or "main"}
    if gguf_file is not None:
        support.check_gguf(name, gguf_file)
        how["gguf_file"] = gguf_file
    elif path.is_dir() and not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            both = "load both with peft.AutoPeftModel.from_pretrained and pass the loaded model"
            raise ValueError(f"{name} has adapters of PEFT, without their model: {both}")
        raise ValueError(f"{name} is not a model: the folder has no config.json")
    if path.is_file():
        raise ValueError(f"{name} is a file; pass a folder with a config.json, or an id on the Hugging Face hub")
    if not path.exists() and is_path(name):
        raise FileNotFoundError(f"no model found at {name}: no such folder")
    with reach_hub(name), explain_config_errors(name, transformers.__version__):
        values, _ = PreTrainedConfig.get_config_dict(name, **how)
    screening.check_config(values, name, trust_remote_code=trust_remote_code)
    with reach_hub(name), explain_config_errors(name, transformers.__version__):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **how)


def open_tokenizer(
    name: str, trust_remote_code: bool = False, revision: str | None = None, gguf_file: str | None = None
) -> Any:
    """Load the tokenizer of a model."""
    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    try:
        with reach_hub(name):
            tokenizer = AutoTokenizer.from_pretrained(name, **how, **({"gguf_file": gguf_file} if gguf_file else {}))
    except Exception as error:  # tokenizers raises a plain Exception
        raise ValueError(f"{name} has no tokenizer ({describe_error(error)}); pass one with tokenizer=") from None
    if len(tokenizer) - len(set(tokenizer.all_special_tokens)) < 2:  # transformers builds an empty one if none exists
        raise ValueError(f"{name} has no tokenizer; pass one with tokenizer=")
    return tokenizer


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        how = (
            "adapt the model before it gets adapters" if hasattr(model, "peft_config") else "load it with transformers"
        )
        raise TypeError(f"expected a Hugging Face model, got {type(model).__name__}; {how}")
    if model.device.type == "meta" and not hasattr(model, "hf_device_map"):  # which offloads weights
        raise ValueError(f"this {type(model).__name__} is on the device meta and has no weights: load them first")
    support.check_class(type(model))


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide progress bars and loading reports of transformers while the context is open; attnlab checks the weights."""
    logging = transformers.utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
