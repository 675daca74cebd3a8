"""Damaged inputs of every kind, each with an oracle: what is accepted must be what an independent reader finds.

A kind has two methods: `prepare` writes one damaged input and describes it; `read` reads it as attnlab does, and
raises WrongError if the result is not what the oracle says, CodeRunError if code was run that nobody allowed.
"""

import gzip
import hashlib
import json
import math
import pickle
import random
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnlab
from attnlab.experiments.ledger import Ledger, Row
from attnlab.models.presets import PRESETS, build
from attnlab.recording.watch import record
from attnlab.records.record import Record
from attnlab.tasks import TASKS
from attnlab.tasks.links import read_gold
from attnlab.tasks.text import read_labelled, read_lines, read_pairs, read_parallel
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_folder import RunFolder, read_checkpoint
from attnlab.training.runs import open_run, start_run

NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e999", "1e3", "1.5", "9" * 400, "-0.0", "1_0", "0x10", "٣")
STRANGE = ("", " ", "none", "true", "a,b", "../x", "/etc/passwd", "\0", "💥", "x" * 5000, "{}", "softmax", "./no.py:No")
TEXTS = ("Das ist ein Haus .\n", "Käse\tcheese\n", "ein Wort\n", "日本語 の 文\n", '{"text": "a b", "label": "x"}\n')
TMX = '<?xml version="1.0"?><tmx><body><tu><tuv xml:lang="de"><seg>Haus</seg></tuv></tu></body></tmx>'
MARK = "this code was run"
SETTINGS = (
    "data=permutation", "types=12", "width=8", "layers=1", "heads=2", "feed_forward=8", "steps=200",
    "batch_examples=8", "examples=64", "held_out=16", "checkpoint_every=2", "evaluate_every=50", "keep_last=2",
    "compile=no",
)  # fmt: skip


class WrongError(Exception):
    """Damage was accepted, and the result is not what was written."""


class CodeRunError(Exception):
    """Code of a file was run that nobody allowed."""


def damage_bytes(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return a description of the damage, and the damaged bytes."""
    place, size = draw.randrange(max(1, len(data))), draw.choice((1, 8, 512))
    header = draw.randrange(max(1, min(len(data), 2048)))
    kinds: dict[str, Callable[[], bytes]] = {
        f"bit {place} flipped": lambda: _flip(data, place, draw),
        f"bit {header} of the header flipped": lambda: _flip(data, header, draw),
        f"truncated at {place}": lambda: data[:place],
        f"{size} zeros at {place}": lambda: data[:place] + bytes(size) + data[place + size :],
        f"{size} random bytes at {place}": lambda: data[:place] + draw.randbytes(size) + data[place + size :],
        f"{size} bytes inserted at {place}": lambda: data[:place] + draw.randbytes(size) + data[place:],
        f"{size} bytes removed at {place}": lambda: data[:place] + data[place + size :],
        "all random": lambda: draw.randbytes(max(1, len(data))),
        "doubled": lambda: data + data,
    }
    how = draw.choice(list(kinds))
    return how, kinds[how]()


def _flip(data: bytes, place: int, draw: random.Random) -> bytes:
    changed = data[place] ^ (1 << draw.randrange(8)) if data else 0
    return data[:place] + bytes([changed]) + data[place + 1 :]


def digest_tensor(x: Tensor) -> str:
    """Return a name of a tensor's content, type and shape."""
    x = x.detach().cpu().contiguous()
    content = x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode() + content).hexdigest()[:16]


def train_short_run(folder: Path) -> RunFolder:
    """Train a run of a few updates in this process."""
    recipe = resolve_recipe("synthetic", dict(word.split("=") for word in SETTINGS))
    run, _ = start_run(recipe, out=folder, device="cpu", report=lambda values: None, note=lambda line: None)
    return run


class Kind(ABC):
    """A kind of input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    @abstractmethod
    def prepare(self, draw: random.Random) -> str:
        """Write one damaged input and describe it."""

    @abstractmethod
    def read(self) -> None:
        """Read it as attnlab does, and judge the result."""


class Settings(Kind):
    """Keys and values of attnlab train. A recipe that is accepted holds no number that is not finite."""

    def prepare(self, draw: random.Random) -> str:
        self.task = draw.choice(list(TASKS))
        known = [each.name for part in self._parts() for each in fields(part)]
        keys = draw.sample([*known, "alpha", "nothing", ""], k=draw.randint(1, 3))
        self.values = {key: draw.choice((*NUMBERS, *STRANGE)) for key in keys}
        if draw.random() < 0.1:
            self.values["model"] = draw.choice((*PRESETS, *STRANGE))
        return f"train {self.task} {self.values}"[:200]

    def _parts(self) -> Iterator[Any]:
        recipe = resolve_recipe(self.task, {})
        yield from (recipe.data, recipe.model, recipe.training, recipe.decoding)

    def read(self) -> None:
        recipe = resolve_recipe(self.task, self.values)
        for name, x in _list_numbers(recipe):
            if not math.isfinite(x):
                raise WrongError(f"{name} is {x}")


def _list_numbers(value: Any, name: str = "recipe") -> Iterator[tuple[str, float]]:
    if is_dataclass(value):
        for each in fields(value):
            yield from _list_numbers(getattr(value, each.name), each.name)
    elif isinstance(value, dict):
        for key, x in value.items():
            yield from _list_numbers(x, key)
    elif isinstance(value, float):
        yield name, value


class Texts(Kind):
    """Text files, plain and packed. Accepted lines are those of an independent reader."""

    def prepare(self, draw: random.Random) -> str:
        suffix = draw.choice((".txt", ".tsv", ".csv", ".jsonl", ".tmx", ".txt.gz", ".jsonl.gz"))
        text = TMX if suffix == ".tmx" else "".join(draw.choices(TEXTS, k=draw.randint(1, 20)))
        if suffix == ".csv":
            text = "text,label\n" + text
        data = text.encode()
        packed_first = suffix.endswith(".gz") and draw.random() < 0.5
        how, data = damage_bytes(gzip.compress(data) if packed_first else data, draw)
        self.path = self.folder / f"text{suffix}"
        self.path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") and not packed_first else data)
        self.reader = draw.choice(("lines", "parallel", "pairs", "labelled"))
        return f"{self.reader} of {self.path.name}: {how}"

    def read(self) -> None:
        if self.reader == "pairs":
            read_pairs(self.path, ("de", "en"))
        elif self.reader == "labelled":
            read_labelled(self.path, "text", "label")
        elif self.reader == "parallel":
            sides = read_parallel(self.path, self.path)
            if list(sides[0]) != list(sides[1]):
                raise WrongError("both sides are one file and differ")
        else:
            lines = read_lines(self.path)
            data = self.path.read_bytes()
            data = gzip.decompress(data) if self.path.suffix == ".gz" else data
            expected = data.decode("utf-8-sig").removesuffix("\n").split("\n") if data else []
            if lines != [line.removesuffix("\r") for line in expected]:
                raise WrongError(f"{len(lines)} lines, an independent reader has {len(expected)}")


class GoldLinks(Kind):
    """Gold links. Accepted links are those that a regular expression finds, inside their sentences."""

    LENGTHS = [(5, 6)] * 12

    def prepare(self, draw: random.Random) -> str:
        form = draw.choice(("pharaoh", "naacl", "talp"))
        links = [[(draw.randint(1, 5), draw.randint(1, 6)) for _ in range(draw.randint(0, 5))] for _ in self.LENGTHS]
        if form == "naacl":
            rows = [f"{n + 1} {s} {t} {draw.choice('SP')}" for n, line in enumerate(links) for s, t in line]
        else:
            rows = [" ".join(f"{s}{draw.choice('-p')}{t}" for s, t in line) for line in links]
        how, data = damage_bytes("\n".join([*rows, ""]).encode(), draw)
        self.path = self.folder / f"gold.{form}"
        self.path.write_bytes(data)
        self.form = form
        return f"{form}: {how}"

    def read(self) -> None:
        gold = read_gold(self.path, self.LENGTHS, form=self.form, base=1)
        text = self.path.read_bytes().decode("utf-8-sig")
        if self.form == "naacl":
            return
        for line, possible in zip(
            text.replace("\r\n", "\n").removesuffix("\n").split("\n"), gold.possible, strict=True
        ):
            expected = {(int(s) - 1, int(t) - 1) for s, t in re.findall(r"(\d+)[-p?](\d+)", line)}
            if possible != expected or any(not (0 <= s < 5 and 0 <= t < 6) for s, t in possible):
                raise WrongError(f"{sorted(possible)} of the line {line!r}")


class Records(Kind):
    """Saved records. One that is accepted is the one that was saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        torch.manual_seed(0)
        model = build(PRESETS["tiny"]).eval()
        tokens = torch.randint(4, 20, (2, 7))
        self.path = folder / "record.safetensors"
        record(model, tokens).save(self.path)
        self.data, self.expected = self.path.read_bytes(), self._digest()

    def prepare(self, draw: random.Random) -> str:
        how, data = damage_bytes(self.data, draw)
        self.path.unlink()  # a record that is still open keeps its own file
        self.path.write_bytes(data)
        return f"record: {how}"

    def read(self) -> None:
        if self._digest() != self.expected:
            raise WrongError("the record has other content than was saved")

    def _digest(self) -> str:
        loaded = Record.load(self.path)
        content: list[Any] = [dict(loaded.words), dict(loaded.meta)]
        for part in (loaded.tokens, loaded.masks, loaded.readout):
            content.append({name: digest_tensor(x) for name, x in part.items()})
        for layer in loaded.layers:
            content.append([layer.kind, layer.index, layer.name, layer.strange, digest_tensor(layer.weights)])
            content.append({name: digest_tensor(x) for name, x in layer.tensors().items()})
        return json.dumps(content, default=str)


class RunFolders(Kind):
    """Folders of runs, damaged, or naming a file with code. One that opens has the weights that were trained."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.run = train_short_run(folder / "run")
        self.files = {
            p: p.read_bytes() for p in sorted(self.run.path.rglob("*")) if p.is_file() and p.suffix != ".lock"
        }
        self.weights = {name: digest_tensor(x) for name, x in read_checkpoint(self.run.best).part("model/").items()}
        self.mark = folder / "mark"
        for place in (folder / "evil.py", self.run.path / "evil.py"):
            place.write_text(_write_code(self.mark))
        self.read()  # undamaged, it opens

    def prepare(self, draw: random.Random) -> str:
        for path, data in self.files.items():
            path.write_bytes(data)
        if draw.random() < 0.4:
            name, file = f"{self._choose_place(draw)}:Evil", draw.choice(("model.json", "config.json"))
            path = self.run.path / file
            key = draw.choice(("attention", "cross_attention", "code"))
            path.write_text(json.dumps(_replace_key(json.loads(path.read_text()), key, name)))
            return f"{key} of {file} is {name}"
        path = draw.choice(
            [path for path in self.files if path.name in ("model.json", "config.json", self.run.best.name)]
        )
        how, data = damage_bytes(self.files[path], draw)
        path.write_bytes(data)
        return f"{path.name}: {how}"

    def _choose_place(self, draw: random.Random) -> str:
        return draw.choice((str(self.folder / "evil.py"), "./evil.py", "../evil.py", str(self.run.path / "evil.py")))

    def read(self) -> None:
        try:
            run = open_run(self.run.path, device="cpu")
        finally:
            _check_mark(self.mark)
        own = {name: digest_tensor(x) for name, x in [*run.model.named_parameters(), *run.model.named_buffers()]}
        if own != self.weights:
            raise WrongError("the run opens with other weights than were trained")


class Ledgers(Kind):
    """Ledgers. Rows that are accepted were written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "ledger.jsonl"
        ledger = Ledger(self.path)
        for seed in range(5):
            ledger.append(
                Row(recipe={"width": 8, "lr": 0.1 * seed}, seed=seed, measure="m", edition=1, values={"x": 1.0})
            )
        self.data = self.path.read_bytes()
        self.known = {row.as_line() for row in ledger.rows()}

    def prepare(self, draw: random.Random) -> str:
        how, data = damage_bytes(self.data, draw)
        self.path.write_bytes(data)
        return f"ledger: {how}"

    def read(self) -> None:
        for row in Ledger(self.path).rows():
            if row.as_line() not in self.known:
                raise WrongError(f"nobody wrote the row {row}"[:200])


class PretrainedFolders(Kind):
    """Hugging Face folders, damaged or hostile. Recorded weights sum to 1, and no code is run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import tokenizers
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.BertConfig(vocab_size=20, max_position_embeddings=16, **sizes)
        self.whole, self.path, self.mark = folder / "whole", folder / "model", folder / "mark"
        attnlab.adapt(transformers.BertModel(config).eval(), "realformer").save_pretrained(self.whole)
        words = {word: number for number, word in enumerate(("[UNK]", "[PAD]", "a", "b", "c"))}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        packed = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
        packed.save_pretrained(self.whole)
        attnlab.record(str(self.whole), "a b c")

    def prepare(self, draw: random.Random) -> str:
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.whole, self.path)
        if draw.random() < 0.5:
            (self.path / "attnlab.json").unlink()  # now it is a plain BERT
        hostile = draw.choice((self._point_to_pickle, self._name_code, self._name_kernel, self._damage, self._damage))
        return hostile(draw)

    def _damage(self, draw: random.Random) -> str:
        path = draw.choice(sorted(path for path in self.path.iterdir() if path.name in ("config.json", "attnlab.json")))
        how, data = damage_bytes(path.read_bytes(), draw)
        path.write_bytes(data)
        return f"{path.name}: {how}"

    def _point_to_pickle(self, draw: random.Random) -> str:
        name = draw.choice(("pytorch_model.bin", "weights.bin", "../weights.pt", "model-00001.pkl"))
        (self.path / name).write_bytes(pickle.dumps(_PlantedCode(str(self.mark))))
        from safetensors import safe_open

        with safe_open(self.path / "model.safetensors", "pt") as file:
            names = list(file.keys())
        (self.path / "model.safetensors").unlink()
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, name)}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))
        return f"the index points at {name}"

    def _name_code(self, draw: random.Random) -> str:
        (self.path / "evil.py").write_text(_write_code(self.mark))
        entry = {draw.choice(("AutoModel", "AutoConfig", "AutoTokenizer")): "evil.Evil"}
        return self._change_config(auto_map=entry, model_type=draw.choice(("bert", "evil", "")))

    def _name_kernel(self, draw: random.Random) -> str:
        key = draw.choice(("attn_implementation", "_attn_implementation", "_attn_implementation_internal"))
        return self._change_config(**{key: draw.choice(("owner/kernel", "owner/kernel:flash", "no-such"))})

    def _change_config(self, **changes: Any) -> str:
        path = self.path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return f"config.json with {changes}"

    def read(self) -> None:
        try:
            weights = attnlab.record(str(self.path), "a b c").layers[0].weights
        finally:
            _check_mark(self.mark)
        if not bool(((weights.sum(-1) - 1).abs() < 1e-5).all()):
            raise WrongError("weights that do not sum to 1")


class _PlantedCode:
    """An object whose unpickling runs code."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_write_code(Path(self.mark)),)


def _write_code(mark: Path) -> str:
    return f"open({str(mark)!r}, 'w').write({MARK!r})\nclass Evil: pass\n"


def _check_mark(mark: Path) -> None:
    if mark.exists():
        mark.unlink()
        raise CodeRunError("the planted code was run")


def _replace_key(value: Any, key: str, new: Any) -> Any:
    if isinstance(value, dict):
        return {k: new if k == key else _replace_key(x, key, new) for k, x in value.items()} | {key: new}
    return value


KINDS: dict[type[Kind], float] = {  # the share of all inputs
    Settings: 0.3, Texts: 0.3, GoldLinks: 0.15, Records: 0.1, RunFolders: 0.06, Ledgers: 0.06, PretrainedFolders: 0.03,
}  # fmt: skip
