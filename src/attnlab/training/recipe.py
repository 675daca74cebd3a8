"""Recipes: the configuration of one run, in four parts: task, model, training, decoding.

    attnlab train translation data=multi30k attention=coda heads=8 lr=1e-3 alpha=8

Here `data` belongs to the task, `heads` to the model, `lr` to the training, and `alpha` is an option of the attention.
A preset (model=iwslt14) sets all published values and its data; every other key changes that value alone.
"""

import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from attnlab.config import LengthPenalty, Natural, check_fields, compute_digest, replace_values, suggest_nearest
from attnlab.huggingface.adaptation import FROM_MODEL
from attnlab.huggingface.fine_tuning import TunedConfig
from attnlab.mechanisms import DECIDED_BY_MODEL, describe_owner, own, parse_options, read_option_types
from attnlab.mechanisms.per_layer import list_names
from attnlab.models.lstm_config import LSTMConfig
from attnlab.models.presets import PRESETS, Config, resize_model
from attnlab.models.transformer_config import TransformerConfig
from attnlab.registry.own_files import hash_files
from attnlab.tasks import find_task
from attnlab.tasks.hub import is_path
from attnlab.tasks.task import Task, TaskConfig
from attnlab.tasks.translation import TranslationConfig
from attnlab.training.loop import TrainConfig

MODELS: dict[str, Any] = {"translation": "translator", "language": "language-model", "classification": "classifier"}
# fields of a model that the user does not set: they come from the task or from model=
FROM_TASK = ("model", "path", "vocabulary", "target_vocabulary", "classes", "padding", "max_length")
PARTS = ("data", "model", "training", "decoding")
SMALL: dict[str, Any] = {"layers": 3, "width": 256, "heads": 4, "feed_forward": 1024}


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to decode a trained translator."""

    beam: int = 5  # number of hypotheses of the beam search
    length_penalty: LengthPenalty = 1.0  # power of the length by which the score of a hypothesis is divided
    average: Natural = 0  # number of kept checkpoints whose mean decodes; 0: the best checkpoint

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Recipe:
    """The configuration of one run."""

    task: str
    data: TaskConfig
    model: Config | TunedConfig  # without the sizes that the task decides
    training: TrainConfig = field(default_factory=TrainConfig)
    decoding: DecodeConfig = field(default_factory=DecodeConfig)

    def values(self) -> dict[str, Any]:
        """Return every value, as it is stored with the run."""
        parts = {part: asdict(getattr(self, part)) for part in PARTS}
        return {"task": self.task, **parts} | ({"code": code} if (code := self.code()) else {})

    def defaults(self) -> dict[str, Any]:
        """Return the default of every field that has one, by part: the value of a key that an older run lacks."""
        parts = {part: fields(getattr(self, part)) for part in PARTS}
        return {part: {f.name: f.default for f in some if f.default is not MISSING} for part, some in parts.items()}

    def code(self) -> dict[str, str]:
        """Return a hash of each file of the user's attentions and task, so that an edited file makes another run."""
        return own.hash_files(self.attentions) | hash_files([self.task])

    @property
    def attentions(self) -> tuple[str | None, ...]:
        """The names of the model's attentions; those of files run code."""
        return (self.model.attention, getattr(self.model, "cross_attention", None))

    def name(self) -> str:
        codes = "".join(f"-{code}" for code in self.code().values())
        attention = "_".join(name.rpartition(":")[2] for name in list_names(self.model.attention))
        return f"{self.task.rpartition(':')[2]}-{attention[:100]}-{compute_digest(self)}{codes}"

    def resolve_model(self, task: Task) -> Config | TunedConfig:
        """Return the model's configuration with the sizes that the task decides."""
        sizes: dict[str, Any] = self._get_sizes(task)
        if isinstance(self.model, TunedConfig):
            return replace(self.model, max_length=_longest(task), **sizes)
        shares = isinstance(self.model, LSTMConfig) and self.model.share_embeddings
        if shares and task.architecture == "translation" and not getattr(self.data, "joint", True):
            raise ValueError("share_embeddings needs one vocabulary: set share_embeddings=false or joint=true")
        if isinstance(self.model, TransformerConfig) and self.model.positions == "learned":
            longest = _longest(task)
            decodes = task.architecture == "translation"
            sizes["max_length"] = 2 * longest + 21 if decodes else longest  # decoding may go this far
        return replace(self.model, model=MODELS[task.architecture], **sizes)

    def check_sizes(self, task: Task, folder: Path) -> None:
        """Raise ValueError if a stored model was not built for the stored vocabulary, as in a damaged folder."""
        for name, size in self._get_sizes(task).items():
            if (expected := getattr(self.model, name)) != size:
                problem = f"model.json has {name}={expected}, but the files beside it have {size}"
                raise ValueError(f"{folder} is damaged: {problem}; restore it from a copy, or train the run again")

    def _get_sizes(self, task: Task) -> dict[str, int]:
        """Return the sizes that the task decides, under the names of the model's fields."""
        sizes = dict(task.get_sizes())
        if task.architecture != "translation":
            return sizes
        source, target = sizes["source_vocabulary"], sizes["vocabulary"]
        tied = isinstance(self.model, TransformerConfig) and self.model.tie == "all"
        return {"vocabulary": source} if tied else {"vocabulary": source, "target_vocabulary": target}


SNELL = TrainConfig(lr=1e-3, betas=(0.9, 0.999), schedule="constant", warmup=0, precision="fp32")
COPYING = replace(SNELL, steps=200, batch_examples=128, evaluate_every=10, checkpoint_every=50, log_every=10)
MODERN = TrainConfig(
    optimiser="muon", betas=(0.9, 0.95), weight_decay=0.1, lr=3e-3, muon_lr=0.02, schedule="wsd", clip=1.0,
)  # fmt: skip
TRAINING: dict[str | None, TrainConfig] = {  # by preset
    "iwslt14": TrainConfig(
        steps=25_000, batch_tokens=4096, accumulate=4, optimiser="adamw", weight_decay=1e-4, lr=5e-4, warmup=4000,
        label_smoothing=0.1, evaluate_every=250, checkpoint_every=250,
    ),
    "wmt14": TrainConfig(
        steps=275_000, batch_tokens=4096, accumulate=8, optimiser="adam", lr=7e-4, warmup=4000, label_smoothing=0.1,
        evaluate_every=1000, checkpoint_every=1000, keep_last=10, seed=2,
    ),
    "wikitext103": TrainConfig(
        steps=286_000, batch_tokens=4096, accumulate=16, optimiser="nag", lr=1.0, schedule="cosine", warmup=16_000,
        period=270_000, period_multiply=2.0, period_shrink=0.75, min_lr=1e-4, clip=0.1, evaluate_every=5000,
        checkpoint_every=1000,
    ),
    "modern-25m": replace(MODERN, steps=300, batch_tokens=2048, evaluate_every=100, checkpoint_every=100),
    "modern-125m": replace(MODERN, batch_tokens=16_384, accumulate=4),
    "lstm": replace(SNELL, steps=36_260, batch_examples=16, evaluate_every=2000, checkpoint_every=2000),
    "lstm-copy": COPYING,
    "lstm-multi-head": COPYING,
    "lstm-classifier": replace(SNELL, steps=4000, batch_examples=32, evaluate_every=250, checkpoint_every=250),
}  # fmt: skip
DECODING: dict[str | None, DecodeConfig] = {"wmt14": DecodeConfig(beam=4, length_penalty=0.6, average=10)}
DECODING |= dict.fromkeys(("lstm", "lstm-copy", "lstm-multi-head"), DecodeConfig(beam=5, length_penalty=0.0))
DATA: dict[tuple[str, str | None], dict[str, Any]] = {  # a preset's data; given keys replace them
    ("translation", "iwslt14"): {"data": "iwslt14", "subwords": "bpe", "joint": False},
    ("translation", "wmt14"): {"data": "wmt14", "subwords": "bpe", "vocabulary": 32_768},
    ("language", "wikitext103"): {"data": "wikitext-103"},
    ("language", "modern-25m"): {"block": 256},
    ("language", "modern-125m"): {"block": 1024},
}
TUNING = TrainConfig(lr=5e-5, clip=1.0, capture="no")  # for pretrained models


def resolve_recipe(task: str, values: Mapping[str, str]) -> Recipe:
    """Return the recipe that command-line keys describe. An unknown key is an error that names the nearest key."""
    find_task(task)
    given = dict(values)
    preset = given.pop("model", None)
    if preset in PRESETS and isinstance(PRESETS[preset], LSTMConfig):
        preset = _choose_lstm_preset(task, preset, given)
    if preset is None or preset in PRESETS:
        parts = _new_model_parts(task, preset, crossing=bool(given.keys() & {"cross_attention", "decoder_layers"}))
    else:
        parts = _fine_tuning_parts(task, preset, given)
    owner = _map_keys(parts)
    if "adaptive_cutoffs" in given and not getattr(parts["model"], "adaptive_cutoffs", ()):
        raise ValueError("adaptive_cutoffs= changes a model that has an adaptive softmax: say model=wikitext103 too")
    attention = given.get("attention", parts["model"].attention)
    options = {key: text for key, text in given.items() if key not in owner}
    decided = FROM_MODEL if isinstance(parts["model"], TunedConfig) else DECIDED_BY_MODEL
    known = [option for option in read_option_types(attention) if option not in decided]
    for key in options:
        if key not in known:
            if problem := describe_owner(attention, key):
                raise ValueError(problem)
            nearest = suggest_nearest(key, [*owner, *known])
            raise ValueError(f"unknown key {key!r}{nearest}; attnlab list {task} lists all keys")
    changed: dict[str, Any] = {}
    for part, config in parts.items():
        change = replace_values if isinstance(config, TunedConfig) or part != "model" else resize_model
        changed[part] = change(config, {key: text for key, text in given.items() if owner.get(key) == part})
    changed["data"] = changed["data"].resolve()
    changed["model"] = replace(changed["model"], attention_options=parse_options(attention, options))
    if isinstance(changed["model"], TransformerConfig):
        changed["model"].check_attention()
    changed["decoding"] = _limit_average(changed["training"], changed["decoding"], asked="average" in given)
    return Recipe(task, **changed)


def restore_recipe(values: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """Return the recipe whose values a run's folder holds; `where` names its files in errors."""
    kinds: dict[str, Any] = {"path": TunedConfig, "embedding_width": LSTMConfig}
    try:
        task, values = values["task"], {part: _tuples(values[part]) for part in PARTS}
        kind = next((kinds[key] for key in kinds if key in values["model"]), TransformerConfig)
        types = dict(zip(PARTS, (find_task(task).config_type, kind, TrainConfig, DecodeConfig), strict=True))
        return Recipe(task, **{part: config_type(**values[part]) for part, config_type in types.items()})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{where} is damaged: {problem}; restore it from a copy, or train the run again") from None


def _new_model_parts(task: str, preset: str | None, *, crossing: bool) -> dict[str, Any]:
    """Return the default parts of a recipe for a new model; the task decides the kind of model later.

    crossing: the user sets cross_attention= or decoder_layers=, which only a translator accepts
    """
    kind: Literal["translator", "classifier"] = "translator" if crossing else "classifier"
    model = PRESETS[preset] if preset else TransformerConfig(model=kind, vocabulary=4, **SMALL)
    training, decoding = TRAINING.get(preset, TrainConfig()), DECODING.get(preset, DecodeConfig())
    data = replace(find_task(task).config_type(), **DATA.get((task, preset), {}))
    if isinstance(model, LSTMConfig) and isinstance(data, TranslationConfig):
        data = replace(data, source_begin=True)
    return {"data": data, "model": model, "training": training, "decoding": decoding}


def _choose_lstm_preset(task: str, preset: str, given: Mapping[str, str]) -> str:
    """Return the preset; for model=lstm, the LSTM preset that fits the task."""
    if task == "language":
        raise ValueError(f"model={preset} translates or classifies; it is not a language model")
    if preset != "lstm" or task == "translation":
        return preset
    classifies = task == "classification" or given.get("data") == "keyword"
    return "lstm-classifier" if classifies else "lstm-copy"


def _fine_tuning_parts(task: str, path: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the default parts of a recipe that fine-tunes a Hugging Face model."""
    if is_path(path) and not Path(path).expanduser().is_dir():
        raise FileNotFoundError(f"model={path}: no such folder")
    if "/" not in path and not Path(path).is_dir():
        known = f"use {', '.join(PRESETS)}, or the folder of a Hugging Face model"
        raise ValueError(f"unknown model {path!r}{suggest_nearest(path, PRESETS)}; {known}")
    if task != "language":
        raise ValueError(f"model={path} can only be fine-tuned by attnlab train language, not for {task}")
    data = find_task(task).config_type(tokenizer=path)
    parts = {"data": data, "model": TunedConfig(path=path), "training": TUNING, "decoding": DecodeConfig()}
    ours = {f.name for f in fields(TransformerConfig)} - {f.name for part in parts.values() for f in fields(part)}
    for key in given:
        if key in ours:
            raise ValueError(f"{key}= configures a new model, but model={path} is pretrained: leave {key}= out")
    if given.get("capture", "no") != "no":
        raise ValueError("capture= does not support Hugging Face models: leave it out")
    if given.get("tokenizer", path).lower() in ("none", ""):
        raise ValueError(f"model={path} needs its own tokenizer: leave tokenizer= out")
    if Path(given.get("tokenizer", path)).expanduser().is_file():
        raise ValueError(f"tokenizer={given['tokenizer']} is a file: model={path} needs the folder of a tokenizer")
    return parts


def _limit_average(training: TrainConfig, decoding: DecodeConfig, *, asked: bool) -> DecodeConfig:
    """Lower a preset's average= to the checkpoints that the run will keep. Raises ValueError if the user set it."""
    kept = min(training.keep_last, -(-training.steps // training.checkpoint_every))
    if decoding.average <= kept:
        return decoding
    settings = f"keep_last={training.keep_last} steps={training.steps} checkpoint_every={training.checkpoint_every}"
    problem = f"average={decoding.average} is more than {kept}, the checkpoints that {settings} keep"
    if asked:
        raise ValueError(f"{problem}; lower average=")
    warnings.warn(f"{problem}; average={kept} is used instead", stacklevel=2)
    return replace(decoding, average=kept)


def _longest(task: Task) -> int:
    return max(int(n.max()) for part in ("train", "valid") for n in task.get_lengths(part))


def _map_keys(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the part that each key of the user belongs to: the first part that has a field of that name."""
    owner: dict[str, str] = {}
    for part, config in parts.items():
        for f in fields(config):
            if part != "model" or (f.name not in FROM_TASK and not f.name.endswith("_options")):
                owner.setdefault(f.name, part)
    return owner


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists, the only sequences of JSON, into tuples."""

    def convert(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else _tuples(value) if isinstance(value, dict) else value

    return {key: convert(value) for key, value in values.items()}
