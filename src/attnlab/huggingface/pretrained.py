"""The one door to transformers: Hugging Face models are recorded, and get other attention, here.

    record(model or its name, text)   what it attended to, proved on load against the model's own eager attention
    adapt(model, name, …)             another mechanism in place of its attention, its weights kept
    load(folder)                      an adapted model as it was saved

No other file imports transformers; what needs a model but not the library is in the rooms around.
"""

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask, sdpa_mask

from attnlab.huggingface import adaptation, dispatch, inputs, proof
from attnlab.huggingface import carries as cascade
from attnlab.huggingface.adaptation import Adaptation
from attnlab.huggingface.capture import watch
from attnlab.mechanisms import Mechanism
from attnlab.recording.watch import sampling, unwrapped
from attnlab.records.record import Record

_proved: WeakKeyDictionary[nn.Module, set[bool]] = WeakKeyDictionary()  # the modes (lazy?) that a model has passed


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
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Record:
    """What a Hugging Face model in evaluation mode attends to.

    model         a loaded one, or an id or a folder to load it from (allow_pickle … dtype say how)
    text          one text, several, or the model's own inputs as a mapping of tensors
    tokenizer     for texts, where the model is already loaded
    target        for encoder-decoder models, what the decoder reads (teacher forcing)
    lazy          run on torch's fused attention, and make weights only when they are asked for
    feed_forward  also what the feed-forward after each attention does with it; its weights take room
    noise         a seed: one sampled pass of a stochastic mechanism, in an adapted model
    max_length    cut texts off after so many tokens
    """
    if isinstance(model, str | Path):
        name = os.path.expanduser(model)
        how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "device": device, "dtype": dtype}
        model = open_model(name, allow_pickle=allow_pickle, allow_code=allow_code, **how)
        if tokenizer is None and not isinstance(text, Mapping):
            tokenizer = open_tokenizer(name, trust_remote_code)
    elif device is not None or dtype is not None:
        raise ValueError("device= and dtype= say how to load a model; this one is loaded: move it with model.to(…)")
    inside: PreTrainedModel = unwrapped(model)
    _check_model(inside)
    _check_recordable(inside)
    if lazy and dispatch.adaptation_of(inside) is not None:
        raise ValueError("lazy=True recomputes a model's own attention; this model was adapted: record it without lazy")
    batch = inputs.read(inside, tokenizer, text, target, max_length)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # hooks never fire in compiled code
        if lazy not in _proved.setdefault(inside, set()):
            proof.prove(inside, inputs.sample(inside, batch, None if isinstance(text, Mapping) else tokenizer), lazy)
            _proved[inside].add(lazy)
        with sampling(inside, noise):
            made, _ = watch(inside, batch, tokenizer=tokenizer, lazy=lazy, feed_forward=feed_forward)
    return replace(made, meta={**made.meta, "noise": noise, **_versions()})


def adapt(
    model: PreTrainedModel, name: str | type[Mechanism], *, kinds: Collection[str] | None = None, **options: Any
) -> PreTrainedModel:
    """Replace the attention of a model by a mechanism, in place, keeping its weights; returns the model.

    kinds     only these of "encoder-self", "decoder-self", "cross"; by default all that the model has
    options   the mechanism's own
    Each attention module gets the mechanism as its submodule `attnlab`. model.save_pretrained(folder) saves it all, and
    attnlab.load(folder) brings it back; from_pretrained would bring back the model without its mechanisms.
    """
    _check_model(model)
    if any(isinstance(module, Mechanism) for module in model.modules()):
        raise ValueError("this model is adapted already; load the original again to adapt it otherwise")
    _replace_attention(model, adaptation.plan(name, options, kinds), prove=True)
    return model


def load(
    folder: str | Path,
    *,
    allow_code: bool = False,
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """An adapted model as model.save_pretrained(folder) saved it, in evaluation mode.

    allow_code   also where its mechanism is a class in a file of the user's own, which loading runs
    """
    folder = Path(folder).expanduser()
    saved = Adaptation.read(folder)
    if saved.runs_code and not allow_code:
        raise ValueError(f"loading {folder} would run {saved.label}: allow_code=True allows it")
    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "device": device, "dtype": dtype}
    model, _ = _load_plain(str(folder), allow_pickle=False, **how)
    _check_model(model)
    _replace_attention(model, adaptation.plan(saved.attention, saved.options, saved.kinds), prove=False)
    adaptation.restore(model, folder)
    return model


def _replace_attention(model: PreTrainedModel, wanted: Adaptation, *, prove: bool) -> None:
    found = adaptation.dry_run(model, prove=prove)
    chosen = adaptation.choose(wanted, found)
    adaptation.install(chosen, found)
    dispatch.set_implementation(model, dispatch.ADAPTED)
    carries = any(isinstance(module, Mechanism) and module.carries for module in model.modules())
    for part in dispatch.parts(model):
        part.register_forward_pre_hook(dispatch.guard, with_kwargs=True)
        part.save_pretrained = partial(_save if part is model else _save_part, part)  # can be pickled
        if carries:
            part.register_forward_pre_hook(cascade.begin)
            part.register_forward_hook(cascade.end, always_call=True)
    model.attnlab_adaptation = chosen  # type: ignore[assignment]
    _proved.pop(model, None)


def _save(
    model: PreTrainedModel, save_directory: str | Path, is_main_process: bool = True, *arguments: Any, **options: Any
) -> None:
    """save_pretrained of an adapted model."""
    if options.get("push_to_hub"):
        raise ValueError(f"save the adapted model first and upload the folder then, so that {adaptation.FILE} is in it")
    about = dispatch.adaptation_of(model).written(_versions())
    type(model).save_pretrained(model, save_directory, is_main_process, *arguments, **options)
    if is_main_process:
        (Path(save_directory) / adaptation.FILE).write_text(about)


def _save_part(part: PreTrainedModel, *_arguments: Any, **_options: Any) -> None:
    """save_pretrained of a model inside an adapted one."""
    raise ValueError(
        f"this {type(part).__name__} is a part of an adapted model, and alone it would be saved without "
        f"{adaptation.FILE}: call save_pretrained of the whole model"
    )


def open_model(name: str, *, allow_pickle: bool, allow_code: bool, **how: Any) -> PreTrainedModel:
    """A model by id or folder, adapted if it was saved so."""
    if (Path(name) / adaptation.FILE).is_file():
        return load(name, allow_code=allow_code, **how)
    model, unexpected = _load_plain(name, allow_pickle=allow_pickle, **how)
    if any(".attnlab." in key for key in unexpected):
        raise ValueError(f"{name} was adapted, but its {adaptation.FILE} is missing: attnlab.load a folder that has it")
    return model


def _load_plain(
    name: str, *, allow_pickle: bool, trust_remote_code: bool, device: Any, dtype: Any
) -> tuple[PreTrainedModel, Collection[str]]:
    """The model as transformers loads it, and the names of weights that it had no place for."""
    config = _load_config(name, trust_remote_code)
    kind = next((getattr(transformers, a) for a in config.architectures or () if hasattr(transformers, a)), AutoModel)
    how: dict[str, Any] = {"dtype": dtype or "auto", "use_safetensors": None if allow_pickle else True}
    if trust_remote_code and getattr(config, "auto_map", None):
        kind = next((getattr(transformers, a) for a in config.auto_map if a.startswith("AutoModel")), kind)
        how["trust_remote_code"] = True
    # the very commit of the config: weights converted by someone in a pull request are not taken instead
    how["revision"] = getattr(config, "_commit_hash", None) or "main"
    try:
        with _quietly():
            model, about = kind.from_pretrained(name, config=config, output_loading_info=True, **how)
    except (OSError, SafetensorError) as error:
        folder = Path(name)
        pickled, safe = (any(folder.glob(files)) for files in ("pytorch_model*.bin", "*.safetensors"))
        if folder.is_dir() and not pickled and not safe:
            raise ValueError(f"{name} has a config.json but no weights: no .safetensors file is there") from None
        if allow_pickle or safe or "connect" in str(error):
            raise OSError(f"the weights of {name} cannot be loaded: {_first_line(error)}") from None
        raise ValueError(
            f"{name} has no safetensors weights, and pickled ones can run code when they are read: "
            "--allow-pickle (allow_pickle=True) loads them"
        ) from None
    if about["missing_keys"]:
        lacking = ", ".join(sorted(about["missing_keys"]))
        warnings.warn(f"{name} has no weights for {lacking}: they are random", stacklevel=2)
    return model.eval() if device is None else model.eval().to(device), about["unexpected_keys"]


def _load_config(name: str, trust_remote_code: bool) -> Any:
    """The config of a model, or one sentence on why there is none."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{name} is not a model: the folder has no config.json")
    if path.is_file():
        raise ValueError(f"{name} is a file; a model is a folder with a config.json, or an id on the Hugging Face hub")
    if not path.exists() and (name.startswith((".", "/")) or name.count("/") > 1):
        raise FileNotFoundError(f"there is no model at {name}")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError) as error:
        if "trust_remote_code" in str(error):
            flag = "--trust-remote-code (trust_remote_code=True)"
            raise ValueError(f"{name} brings its own code, which is not run by default: {flag} runs it") from None
        raise ValueError(f"transformers {transformers.__version__} cannot read {name}: {_first_line(error)}") from None
    except OSError as error:
        if path.is_dir():
            raise ValueError(f"the config.json of {name} cannot be read: {_first_line(error)}") from None
        if "connect" in str(error) or "offline" in str(error):
            raise FileNotFoundError(
                f"{name} is no folder here and not in the local cache, and the Hugging Face hub cannot be reached: "
                "check the name, or go online"
            ) from None
        raise FileNotFoundError(f"there is no model {name}, neither here nor on the Hugging Face hub") from None


def open_tokenizer(name: str, trust_remote_code: bool) -> Any:
    """The tokenizer that comes with a model."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ValueError(f"no tokenizer comes with {name} ({_first_line(error)}); give one with tokenizer=") from None
    if len(tokenizer) - len(set(tokenizer.all_special_tokens)) < 2:  # transformers makes an empty one out of nothing
        raise ValueError(f"no tokenizer comes with {name}; give one with tokenizer=")
    return tokenizer


def _check_recordable(model: PreTrainedModel) -> None:
    if any(module.training for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} is in training mode; call model.eval() before recording it")
    if wrapped := [name for name, _ in model.named_modules() if name.endswith(".base_layer")]:  # as PEFT calls it
        raise ValueError(f"{wrapped[0]} is wrapped in an adapter, whose part would go unseen: merge the adapters first")


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"not a Hugging Face model but a {type(model).__name__}; load it with transformers first")
    if not model._can_set_attn_implementation():
        raise ValueError(dispatch.by_itself(model))


@contextmanager
def _quietly() -> Iterator[None]:
    """Within, transformers neither shows progress nor reports on weights: what matters of it is checked."""
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


def _versions() -> dict[str, str]:
    from attnlab import __version__

    return {"attnlab": __version__, "transformers": transformers.__version__, "torch": str(torch.__version__)}


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _bool_mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **arguments: Any) -> Tensor | None:
    """Bool, True = may attend; None where nothing is hidden, or only the future with as many queries as keys."""
    skip = allow_is_causal_skip and q_length == kv_length
    return sdpa_mask(q_length=q_length, kv_length=kv_length, allow_is_causal_skip=skip, **arguments)


for _name, _function, _mask in (
    (dispatch.WATCHED, dispatch.watched, eager_mask),
    (dispatch.WATCHED_BOOL, dispatch.watched, _bool_mask),
    (dispatch.ADAPTED, dispatch.attend, _bool_mask),
):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _mask)  # without it a model would get no mask at all, and say nothing
