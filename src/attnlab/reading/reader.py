"""Models that read text: a Hugging Face model with its tokenizer, or an attnlab run with its vocabulary."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from attnlab.decoding.evaluation import open_search, search_lines
from attnlab.files.user_files import read_json
from attnlab.huggingface import dispatch, inputs
from attnlab.huggingface.effects import rank_heads
from attnlab.huggingface.pretrained import open_model, open_tokenizer
from attnlab.huggingface.recorder import record
from attnlab.reading.maps import name_model
from attnlab.reading.predictions import Prediction, predict_label, predict_masked, predict_next
from attnlab.reading.text_stream import TextExample
from attnlab.recording.probe import record_probes
from attnlab.records.pieces import show_pieces
from attnlab.records.record import Record
from attnlab.tasks.batching import Sequences
from attnlab.tasks.task import EOS, PAD, SPECIALS
from attnlab.tasks.vocabulary import Vocabulary, is_byte_level
from attnlab.training.run_list import find_folder, refuse_missing_run, suggest_runs
from attnlab.training.runs import Run, choose_device, open_run

TWO_SIDED = ("encode_target", "source_vocabulary", "target_vocabulary")  # attributes that a task of pairs needs
KINDS_OF_MODEL = {"language": "language model", "translation": "translator", "classification": "classifier"}
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


@dataclass(frozen=True, eq=False)
class SideTokens:
    """The vocabulary of one side: pieces as the tokenizer writes them, as they are shown, and special tokens."""

    pieces: list[str]
    texts: list[str]
    special: frozenset[int]


class TextReader(ABC):
    """A model that encodes and records texts."""

    name: str
    title: str  # its name for readers
    model: Any  # a module
    device: torch.device
    sides: Mapping[str, SideTokens]  # "source" and/or "target"

    def check_pairs(self, examples: Sequence[TextExample], *, wanted: bool) -> None:
        """Raise ValueError for a single text if pairs are wanted, else for a pair."""
        for example in examples:
            if (example.second is not None) != wanted:
                reads = "pairs: use --pair SRC TGT, a .tsv file, or --text SRC" if wanted else "single texts, not pairs"
                raise ValueError(f"{example.where}: {self.name} reads {reads}")

    def complete(self, example: TextExample) -> TextExample:
        """Return the example as the model reads it: a translator adds its own translation to a single text."""
        return example

    @abstractmethod
    def encode_examples(self, examples: Sequence[TextExample]) -> dict[str, list[list[int]]]:
        """Return the ids of each side of each example, with special tokens. Raises ValueError if one is too long."""

    @abstractmethod
    def record(self, examples: Sequence[TextExample], *, probes: bool = False) -> Record:
        """Record what the model attends to on the examples, with the tokens as text.

        probes   also record β and Δ (`attnlab.recording.probe`) of each target word, or of the predicted class; for
                 runs of translators and LSTM classifiers
        """

    @abstractmethod
    def rank_heads(self, examples: Sequence[TextExample], **how: Any) -> pd.DataFrame:
        """Return the effect of knocking out each head on the examples.

        how   layers, heads and progress of `attnlab.huggingface.effects.rank_heads`
        """

    @abstractmethod
    def predict(self, example: TextExample) -> list[Prediction]:
        """Return what the model predicts for one example; nothing if it has no outputs that can be named."""


def open_reader(
    model: str, *, device: str = "auto", dtype: str | None = None, max_length: int | None = None, **how: Any
) -> TextReader:
    """Open the reader of a run (its folder, or its name in runs/) or of a Hugging Face model (its folder or id).

    how   allow_code; for Hugging Face models also allow_pickle, trust_remote_code, revision and gguf_file
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    place = choose_local_device(device)
    folder = find_folder(model, "model.json")
    where = {name: how.get(name) for name in ("revision", "gguf_file")}
    if folder is not None and any(where.values()):
        raise ValueError(f"--revision and --gguf-file are for Hugging Face models, but {model} is a run")
    if folder is not None and not (folder / "hugging_face").is_dir():
        run = open_run(folder, device=str(place), allow_code=how.get("allow_code", False))
        return RunReader(run, dtype, max_length)
    if folder is None:
        refuse_missing_run(model)
    name = os.path.expanduser(model if folder is None else str(folder / "hugging_face"))
    with suggest_runs(model):
        loaded = open_model(name, device=place, dtype=DTYPES.get(dtype or ""), **how)
    tokenizer = open_tokenizer(name, how.get("trust_remote_code", False), **where)
    return PretrainedReader(name, loaded, tokenizer, max_length)


def choose_local_device(name: str) -> torch.device:
    """Return the device of that name. With several processes on one machine, each gets its own GPU."""
    chosen = choose_device(name)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return chosen


class PretrainedReader(TextReader):
    """Reads text with a Hugging Face model.

    A pair is the source and target of an encoder-decoder, or two segments of one input of an encoder.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, max_length: int | None = None) -> None:
        self.name, self.model, self.tokenizer, self.max_length = name, model, tokenizer, max_length
        self.title = _name_pretrained(name, model)
        self.device, self.two_sided = model.device, bool(model.config.is_encoder_decoder)
        least = 1 + tokenizer.num_special_tokens_to_add()
        if max_length is not None and max_length < least:
            raise ValueError(f"max_length must be at least {least} with this tokenizer, got {max_length}")
        limit = inputs.count_positions(model)
        if max_length is not None and limit is not None and max_length > limit:
            raise ValueError(f"max_length must be at most {limit}, the positions of {name}, got {max_length}")
        self.sides = dict.fromkeys(("source", "target"), self._build_side())

    def complete(self, example: TextExample) -> TextExample:
        if not self.two_sided or example.second is not None or not self.model.can_generate():
            return example
        encoded = self._tokenize(text=[example.text], return_tensors="pt").to(self.device)
        self._check_lengths([example], {"source": encoded["input_ids"].tolist()})
        room = 2 * encoded["input_ids"].shape[1] + 20  # as our own translators
        longest = min(room, (inputs.count_positions(self.model) or room + 1) - 1)
        (ids,) = self.model.generate(**encoded, max_new_tokens=longest, do_sample=False)
        return replace(example, second=self.tokenizer.decode(ids, skip_special_tokens=True))

    def encode_examples(self, examples: Sequence[TextExample]) -> dict[str, list[list[int]]]:
        if not self.two_sided:
            ids = {"source": self._encode(examples)["input_ids"]}
        else:
            self.check_pairs(examples, wanted=True)
            ids = {"source": self._tokenize(text=[example.text for example in examples])["input_ids"]}
            ids["target"] = self._tokenize(text_target=[example.second for example in examples])["input_ids"]
        self._check_lengths(examples, ids)
        return ids

    def record(self, examples: Sequence[TextExample], *, probes: bool = False) -> Record:
        if probes:
            raise ValueError(f"{self.name}: probes need a run of attnlab; record it with probes=False")
        lazy = dispatch.find_adaptation(self.model) is None  # compute weights a few rows at a time
        how = {"tokenizer": self.tokenizer, "lazy": lazy}
        if any(example.second is not None for example in examples) and not self.two_sided:
            return record(self.model, inputs.pad_ids(self.tokenizer, self._encode(examples)), **how)
        if self.two_sided:
            how["target"] = [example.second for example in examples]
        return record(self.model, [example.text for example in examples], max_length=self.max_length, **how)

    def rank_heads(self, examples: Sequence[TextExample], **how: Any) -> pd.DataFrame:
        return rank_heads(self.model, self._build_batch(examples), **how)

    def _build_batch(self, examples: Sequence[TextExample]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model's forward."""
        if any(example.second is not None for example in examples) and not self.two_sided:
            return inputs.pad_ids(self.tokenizer, self._encode(examples))
        target = [example.second for example in examples] if self.two_sided else None
        texts = [example.text for example in examples]
        return inputs.build_batch(self.model, self.tokenizer, texts, target, self.max_length)

    @torch.no_grad()
    def predict(self, example: TextExample) -> list[Prediction]:
        batch = self._build_batch([example])
        output = dispatch.run_forward(self.model, {name: x.to(self.device) for name, x in batch.items()})
        logits = getattr(output, "logits", None)
        if logits is None:
            return []
        kind, log_prob = type(self.model).__name__, logits[0].float().log_softmax(-1).cpu()
        if kind.endswith("ForSequenceClassification") and len(log_prob) > 1:
            return [predict_label(log_prob, [self.model.config.id2label[k] for k in range(len(log_prob))])]
        names = self.sides["target"].texts
        if self.model.get_output_embeddings() is None or log_prob.dim() != 2 or log_prob.shape[-1] > len(names):
            return []
        tokens = batch["decoder_input_ids" if self.two_sided else "input_ids"][0].tolist()
        if kind.endswith("ForMaskedLM"):
            return predict_masked(log_prob, tokens, names, self.tokenizer.mask_token_id)
        return predict_next(log_prob, tokens, names)

    def _encode(self, examples: Sequence[TextExample]) -> dict[str, list[list[int]]]:
        second = [example.second for example in examples if example.second is not None]
        if not second:
            return dict(self._tokenize(text=[example.text for example in examples]))
        self.check_pairs(examples, wanted=self.tokenizer.num_special_tokens_to_add(pair=True) > 0)
        return dict(self._tokenize(text=[example.text for example in examples], text_pair=second))

    def _tokenize(self, **texts: Any) -> Any:
        truncate = self.max_length is not None
        return self.tokenizer(**texts, truncation=truncate, max_length=self.max_length, verbose=False)

    def _check_lengths(self, examples: Sequence[TextExample], ids: Mapping[str, list[list[int]]]) -> None:
        limit = inputs.count_positions(self.model)
        for rows in ids.values():
            for example, row in zip(examples, rows, strict=True):
                if not row:
                    raise ValueError(f"{example.where}: the tokenizer returns no tokens for this text")
                if limit is not None and len(row) > limit:
                    raise ValueError(
                        f"{example.where}: {len(row):,} tokens, but {self.name} has {limit:,} positions; "
                        f"--max-length {limit} truncates texts"
                    )

    def _build_side(self) -> SideTokens:
        size = max(len(self.tokenizer), self.model.get_input_embeddings().num_embeddings)
        known = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        pieces = [piece or "" for piece in known] + [""] * (size - len(known))
        plain = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        byte_level = is_byte_level(self.tokenizer)
        texts = [show_pieces([piece], byte_level=byte_level, plain=plain)[0] for piece in pieces]
        return SideTokens(pieces, texts, frozenset(self.tokenizer.all_special_ids))


class RunReader(TextReader):
    """Reads text with an attnlab run: pairs if its task is translation, else single texts."""

    def __init__(self, run: Run, dtype: str | None = None, max_length: int | None = None) -> None:
        if max_length is not None:
            raise ValueError("--max-length is for Hugging Face models only; omit it for a run")
        self.run = run
        self.name, self.task, self.two_sided = str(run.folder.path), run.task, run.task.architecture == "translation"
        self.model = run.model if dtype is None else run.model.to(DTYPES[dtype])
        self.device = next(run.model.parameters()).device
        needs = ("encode", *(TWO_SIDED if self.two_sided else ("vocabulary",)))
        if missing := [name for name in needs if not hasattr(run.task, name)]:
            raise ValueError(f"{self.name}: its task cannot read text; it lacks {', '.join(missing)}")
        task: Any = run.task
        both = (task.source_vocabulary, task.target_vocabulary) if self.two_sided else (task.vocabulary,) * 2
        self.vocabularies: dict[str, Vocabulary] = dict(zip(("source", "target"), both, strict=True))
        self.sides = {name: _build_side(vocabulary) for name, vocabulary in self.vocabularies.items()}
        self.title = _name_run(run)

    def complete(self, example: TextExample) -> TextExample:
        if not self.two_sided or example.second is not None:
            return example
        ((_, (best, *_)),) = search_lines(open_search(self.run), self.run.task, [example.text])
        return replace(example, second=best.text)

    def encode_examples(self, examples: Sequence[TextExample]) -> dict[str, list[list[int]]]:
        encoded = self._encode(examples)
        return {side: [rows[k].tolist() for k in range(len(rows))] for side, rows in encoded.items()}

    def record(self, examples: Sequence[TextExample], *, probes: bool = False) -> Record:
        batch = self._pad_batch(examples)
        made = record_probes(self.model, batch, self._make_targets(batch)) if probes else record(self.model, batch)
        words = {
            side: [self.vocabularies[side].show_tokens(row) for row in ids.tolist()]
            for side, ids in made.tokens.items()
        }
        if "cross" in made.kinds and "target" not in words:  # the one query of an LSTM classifier
            words["target"] = [["label"]] * len(examples)
        return replace(made, words=words, meta={**made.meta, "model": self.name, "title": self.title})

    def rank_heads(self, examples: Sequence[TextExample], **how: Any) -> pd.DataFrame:
        batch = self._pad_batch(examples)
        return rank_heads(self.model, batch, targets=self._make_targets(batch), **how)

    def _make_targets(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what the model should predict: the next word of each target, or the class that it finds likeliest."""
        if self.task.architecture == "classification":
            with torch.no_grad():
                return self.model(*batch).argmax(-1)
        tokens = batch[-1]
        following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], PAD)], dim=1)
        return following.masked_fill((following == PAD) & (tokens != PAD), EOS) if self.two_sided else following

    @torch.no_grad()
    def predict(self, example: TextExample) -> list[Prediction]:
        batch = self._pad_batch([example])
        log_prob = self.model.readout.log_prob(self.model.hidden(*batch))[0].cpu()
        task: Any = self.task
        if task.architecture == "classification":
            return [predict_label(log_prob, task.classes)]
        return predict_next(log_prob, batch[-1][0].tolist(), self.sides["target"].texts)

    def _pad_batch(self, examples: Sequence[TextExample]) -> tuple[torch.Tensor, ...]:
        """Return the inputs of the model's forward."""
        return tuple(rows.pad(range(len(rows))).to(self.device) for rows in self._encode(examples).values())

    def _encode(self, examples: Sequence[TextExample]) -> dict[str, Sequences]:
        task: Any = self.task
        self.check_pairs(examples, wanted=self.two_sided)
        encoded = task.encode([example.text for example in examples])
        if not self.two_sided:
            return {"target" if task.architecture == "language" else "source": encoded}
        return {"source": encoded, "target": task.encode_target([example.second or "" for example in examples])}


def _build_side(vocabulary: Vocabulary) -> SideTokens:
    ids = range(len(vocabulary))
    texts = [vocabulary.show_tokens([token])[0] for token in ids]
    return SideTokens(vocabulary.get_tokens(ids), texts, frozenset(range(len(SPECIALS))))


def _name_pretrained(name: str, model: Any) -> str:
    """Return the id of a model on the hub; of a folder, the model's class with what it was made from, or the folder."""
    folder, kind = Path(name), type(model).__name__
    if not folder.is_dir():
        return name
    stored = read_json(folder / "config.json").get("_name_or_path", "")
    made_from = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(stored)) and not Path(stored).exists()
    return f"{kind}, made from {stored}" if made_from else f"{kind} in {name_model(str(folder.resolve()))}"


def _name_run(run: Run) -> str:
    """Return the kind of model, its attention, its data and its folder."""
    kind = KINDS_OF_MODEL.get(run.task.architecture, run.task.architecture)
    data = getattr(run.recipe.data, "src", None) or getattr(run.recipe.data, "data", "its own data")
    return f"{kind} with {run.recipe.model.attention} attention, trained on {data} ({run.folder.path.name})"
