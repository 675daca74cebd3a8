"""The one door to transformers: Hugging Face models are recorded, and get other attention, here.

    record(model or its name, text)   what it attended to, proved on load against the model's own eager attention
    adapt(model, name, …)             another mechanism in place of its attention, its weights kept
    load(folder)                      an adapted model as it was saved

No other file imports transformers; what needs a model but not the library is in the rooms around.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
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
from transformers.pytorch_utils import Conv1D

from attnlab.mechanisms import Mechanism
from attnlab.mechanisms.noise import sampled
from attnlab.models import adapted, adapting, batch, proof
from attnlab.models.capture import Capture, Surroundings
from attnlab.recording import Record

WATCHED = "attnlab-watched"  # with additive masks, as the eager implementation has them
WATCHED_BOOL = "attnlab-watched-bool"

_attend: ContextVar[Callable[..., tuple[Tensor, Tensor | None]]] = ContextVar("attnlab_attend")
_proved: WeakKeyDictionary[nn.Module, set[bool]] = WeakKeyDictionary()  # the modes (lazy?) that a model has passed


def record(
    model: PreTrainedModel | str | Path,
    text: str | Sequence[str] | Mapping[str, Tensor],
    *,
    tokenizer: Any = None,
    target: str | Sequence[str] | None = None,
    lazy: bool = False,
    noise: int | None = None,
    max_length: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Record:
    """What a Hugging Face model in evaluation mode attends to.

    model       a loaded one, or an id or a folder to load it from (allow_pickle … dtype say how)
    text        one text, several, or the model's own inputs as a mapping of tensors
    tokenizer   for texts, where the model is already loaded
    target      for encoder-decoder models, what the decoder reads (teacher forcing)
    lazy        run on torch's fused attention, and make weights only when they are asked for
    noise       a seed: one sampled pass of a stochastic mechanism, in an adapted model
    max_length  cut texts off after so many tokens
    """
    if isinstance(model, str | Path):
        name, trust = os.path.expanduser(model), trust_remote_code
        model = _load_model(name, allow_pickle=allow_pickle, trust_remote_code=trust, device=device, dtype=dtype)
        if tokenizer is None and not isinstance(text, Mapping):
            tokenizer = _load_tokenizer(name, trust)
    elif device is not None or dtype is not None:
        raise ValueError("device= and dtype= say how to load a model; this one is loaded: move it with model.to(…)")
    model = _inside(model)
    if lazy and _adaptation(model) is not None:
        raise ValueError("lazy=True recomputes a model's own attention; this model was adapted: record it without lazy")
    if isinstance(text, Mapping):
        inputs = batch.check_tensors(model, text)
    elif tokenizer is None:
        raise ValueError("text needs a tokenizer=, or give the model's inputs as a mapping of tensors")
    else:
        inputs = batch.encode(model, tokenizer, text, target, max_length)
    batch.check_positions(model, inputs)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # hooks never fire in compiled code
        if lazy not in _proved.setdefault(model, set()):
            _prove(model, batch.sample(model, inputs, None if isinstance(text, Mapping) else tokenizer), lazy)
            _proved[model].add(lazy)
        with _sampling(model, noise):
            return _watch(model, inputs, tokenizer, lazy, noise)[0]


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
    adaptation = adapting.plan(name, options, kinds)
    found = _dry_run(model)
    adaptation = adapting.choose(adaptation, found)
    adapting.install(adaptation, found)
    _set_implementation(model, adapted.IMPLEMENTATION)
    carries = any(isinstance(module, Mechanism) and module.carries for module in model.modules())
    for part in [module for module in model.modules() if isinstance(module, PreTrainedModel)]:
        part.register_forward_pre_hook(adapted.guard, with_kwargs=True)
        if carries:
            part.register_forward_pre_hook(adapted.begin)
            part.register_forward_hook(adapted.end, always_call=True)
    model.attnlab_adaptation = adaptation  # type: ignore[assignment]
    model.save_pretrained = MethodType(_save, model)  # type: ignore[method-assign]
    _proved.pop(model, None)
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
    adaptation = adapting.Adaptation.read(folder)
    if adaptation.runs_code and not allow_code:
        raise ValueError(
            f"loading {folder} would run {adaptation.label}: attnlab.load(folder, allow_code=True) allows it"
        )
    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "device": device, "dtype": dtype}
    model, _ = _load_plain(str(folder), allow_pickle=False, **how)
    adapt(model, adaptation.attention, kinds=adaptation.kinds, **adaptation.options)
    adapting.restore(model, folder)
    return model


def _watch(
    model: PreTrainedModel, inputs: dict[str, Tensor], tokenizer: Any, lazy: bool, noise: int | None
) -> tuple[Record, Tensor]:
    """The record of one forward pass, and the model's first output."""
    adaptation = _adaptation(model)
    capture = Capture(model, _encoder(model), (nn.Linear, Conv1D), lazy=lazy, fused=model._supports_sdpa)
    additive = adaptation is None and not lazy
    with (
        _switched(model, WATCHED if additive else WATCHED_BOOL, capture.attend),
        capture.watched(),
        _readout(model) as read,
    ):
        output = _call(model, inputs)[0]
    if not capture.layers:
        raise ValueError(_by_itself(model))
    tokens, masks = batch.sequences(model, inputs, {layer.kind for layer in capture.layers})
    words = {} if tokenizer is None else {side: batch.words(tokenizer, ids) for side, ids in tokens.items()}
    meta = {
        "model": model.name_or_path or type(model).__name__,
        "model_type": model.config.model_type,
        "mechanism": "softmax" if adaptation is None else adaptation.label,
        "noise": noise,
        "implementation": ", ".join(sorted(capture.ran)) or adapted.IMPLEMENTATION,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    return Record(capture.layers, tokens, masks, words, read, meta | _versions()), output


def _prove(model: PreTrainedModel, inputs: dict[str, Tensor], lazy: bool) -> None:
    """Refuse a model whose watched pass is not its own."""
    made, output = _watch(model, inputs, None, False, None)
    if _adaptation(model) is not None:
        proof.check(made, output, _call(model, inputs)[0])
        return
    with _switched(model, "eager"):
        own = _call(model, inputs, output_attentions=True)
    proof.check(made, output, own[0], proof.attentions(own, made))
    if lazy:
        proof.check_lazy(_watch(model, inputs, None, True, None)[0], made)


def _dry_run(model: PreTrainedModel) -> list[adapting.Found]:
    """The attention modules of a model, in the order they run; refuses a model that plain softmax would change."""
    base: Any = model.base_model
    inputs = batch.dummy(model)
    training = [module for module in base.modules() if module.training]
    probe = adapting.Probe(Surroundings(model, _encoder(model)))
    try:
        base.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with _switched(model, "eager"):
                expected = _call(base, inputs)[0]
            with _switched(model, WATCHED_BOOL, probe.attend), probe.surroundings.watched():
                output = _call(base, inputs)[0]
    finally:
        for module in training:
            module.training = True
    if not probe.found:
        raise ValueError(_by_itself(model))
    proof.compare(
        f"{type(model).__name__} cannot be adapted faithfully: with plain softmax its output", output, expected
    )
    return list(probe.found.values())


def _save(
    model: PreTrainedModel, save_directory: str | Path, is_main_process: bool = True, *arguments: Any, **options: Any
) -> None:
    """save_pretrained of an adapted model."""
    if options.get("push_to_hub"):
        raise ValueError(f"save the adapted model first and upload the folder then, so that {adapting.FILE} is in it")
    about = _adaptation(model).written(_versions())
    type(model).save_pretrained(model, save_directory, is_main_process, *arguments, **options)
    if is_main_process:
        (Path(save_directory) / adapting.FILE).write_text(about)


def _load_model(name: str, *, allow_pickle: bool, **how: Any) -> PreTrainedModel:
    """A model by id or folder, adapted if it was saved so."""
    if (Path(name) / adapting.FILE).is_file():
        return load(name, **how)
    model, unexpected = _load_plain(name, allow_pickle=allow_pickle, **how)
    if any(".attnlab." in key for key in unexpected):
        raise ValueError(f"{name} was adapted, but its {adapting.FILE} is missing: attnlab.load a folder that has it")
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
    except OSError as error:
        if allow_pickle or "connect" in str(error):
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
    except ValueError as error:
        if "trust_remote_code" in str(error):
            flag = "--trust-remote-code (trust_remote_code=True)"
            raise ValueError(f"{name} brings its own code, which is not run by default: {flag} runs it") from None
        raise ValueError(f"transformers {transformers.__version__} cannot read {name}: {_first_line(error)}") from None
    except OSError as error:
        if "connect" in str(error) or "offline" in str(error):
            raise FileNotFoundError(
                f"{name} is no folder here and not in the local cache, and the Hugging Face hub cannot be reached: "
                "check the name, or go online"
            ) from None
        raise FileNotFoundError(f"there is no model {name}, neither here nor on the Hugging Face hub") from None


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ValueError(f"no tokenizer comes with {name} ({_first_line(error)}); give one with tokenizer=") from None
    if len(tokenizer) - len(set(tokenizer.all_special_tokens)) < 2:  # transformers makes an empty one out of nothing
        raise ValueError(f"no tokenizer comes with {name}; give one with tokenizer=")
    return tokenizer


def _inside(model: Any) -> PreTrainedModel:
    """The model inside a compiled or distributed one, in evaluation mode."""
    while not isinstance(model, PreTrainedModel) and isinstance(model, nn.Module):
        model = getattr(model, "_orig_mod", getattr(model, "module", None))
    _check_model(model)
    if any(module.training for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} is in training mode; call model.eval() before recording it")
    if wrapped := [name for name, _ in model.named_modules() if name.endswith(".base_layer")]:  # as PEFT calls it
        raise ValueError(f"{wrapped[0]} is wrapped in an adapter, whose part would go unseen: merge the adapters first")
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"not a Hugging Face model but a {type(model).__name__}; load it with transformers first")
    if not model._can_set_attn_implementation():
        raise ValueError(_by_itself(model))


def _by_itself(model: PreTrainedModel) -> str:
    return (
        f"{type(model).__name__} computes its attention by itself, not through transformers' AttentionInterface, "
        "so it can neither be recorded nor adapted: not supported"
    )


def _adaptation(model: PreTrainedModel) -> Any:
    """What was put into the model, or a model in it; None if nothing was."""
    return next((vars(m)["attnlab_adaptation"] for m in model.modules() if "attnlab_adaptation" in vars(m)), None)


def _encoder(model: PreTrainedModel) -> nn.Module | None:
    return model.get_encoder() if model.config.is_encoder_decoder else None


def _call(model: PreTrainedModel, inputs: Mapping[str, Tensor], **options: Any) -> Any:
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    return model(**inputs, **options, return_dict=True)


def _set_implementation(model: PreTrainedModel, implementation: str) -> None:
    """Of the model and all models in it: older transformers pass over those with a config of the same class (T5)."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != implementation:
            part.set_attn_implementation(implementation)


@contextmanager
def _switched(model: PreTrainedModel, implementation: str, attend: Callable[..., Any] | None = None) -> Iterator[None]:
    """Within, the model's attention is of this implementation; a watched one calls attend."""
    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    for config in configs:  # and those inside them, which join the list
        configs += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
    before = [(config, config._attn_implementation) for config in configs]
    token = None if attend is None else _attend.set(attend)
    try:
        _set_implementation(model, implementation)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own  # the property would hand it down to other configs
        if token is not None:
            _attend.reset(token)


@contextmanager
def _readout(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Within, the last hidden states are noted: what the output embedding reads, where there is one."""
    read: dict[str, Tensor] = {}
    embedding = model.get_output_embeddings()

    def before(module: nn.Module, args: tuple) -> None:
        read["hidden"] = args[0]

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if (hidden := getattr(output, "last_hidden_state", None)) is not None:
            read.setdefault("hidden", hidden)

    if embedding is None:
        handle = model.base_model.register_forward_hook(after)
    else:
        handle = embedding.register_forward_pre_hook(before)
        for name in ("weight", "bias"):
            if isinstance(x := getattr(embedding, name, None), Tensor):
                read[name] = x.detach().clone()
    try:
        yield read
    finally:
        handle.remove()


def _sampling(model: PreTrainedModel, noise: int | None) -> Any:
    if noise is None:
        return nullcontext()
    if not any(isinstance(module, Mechanism) and module.stochastic for module in model.modules()):
        raise ValueError(f"noise={noise} was asked for, but this model draws none; leave noise out")
    return sampled(model, noise)


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


def _watched_attention(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    return _attend.get()(module, *tensors, **options)


def _bool_mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **arguments: Any) -> Tensor | None:
    """Bool, True = may attend; None where nothing is hidden, or only the future with as many queries as keys."""
    skip = allow_is_causal_skip and q_length == kv_length
    return sdpa_mask(q_length=q_length, kv_length=kv_length, allow_is_causal_skip=skip, **arguments)


for _name, _function, _mask in (
    (WATCHED, _watched_attention, eager_mask),
    (WATCHED_BOOL, _watched_attention, _bool_mask),
    (adapted.IMPLEMENTATION, adapted.attend, _bool_mask),
):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _mask)  # without it a model would get no mask at all, and say nothing
