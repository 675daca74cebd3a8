"""A run's folder: what was asked, what was measured, and checkpoints that survive being killed at any moment.

    config.json       the resolved configuration: every value, none left to a default
    metrics.jsonl     one line a measurement; cut back on resume to what the checkpoint knew
    last.safetensors  the newest checkpoint         previous.safetensors  the one before
    best.safetensors  the best weights              steps/N.safetensors   weights kept at chosen steps

A file is written beside its place and renamed into it, so a name never holds half a file. Each checkpoint carries a
SHA-256 of its tensors and state; one that does not agree with it is named, and the previous one is used.
"""

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnlab.config import FREE_KEYS
from attnlab.files import write_text


class DamagedError(ValueError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and what else must be known to go on."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with the prefix, without it."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path

    @property
    def last(self) -> Path:
        return self.path / "last.safetensors"

    @property
    def previous(self) -> Path:
        return self.path / "previous.safetensors"

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def hugging_face(self) -> Path:
        return self.path / "hugging_face"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def step_file(self, step: int) -> Path:
        return self.path / "steps" / f"{step:08d}.safetensors"

    def config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{self.path} is not a run: it has no config.json")
        return json.loads(file.read_text(encoding="utf-8"))

    def claim(self, config: Mapping[str, Any]) -> None:
        """Write the configuration, or make sure that it is the one already there."""
        file = self.path / "config.json"
        text = json.dumps(config, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        if not file.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
            return
        there = json.loads(file.read_text(encoding="utf-8"))
        found = _differences(there, json.loads(text))
        if differing := [each for each in found if each[0].split(".")[-1] not in FREE_KEYS]:
            shown = "; ".join(f"{key}: {old!r} there, {new!r} now" for key, old, new in differing[:4])
            raise ValueError(f"{self.path} holds another run ({shown}); choose another out=, or delete it")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a process trains here; a second one is refused."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"{self.path} is being trained by another process") from None
            for scratch in (*self.path.glob(".*.safetensors.*"), *self.path.glob("steps/.*.safetensors.*")):
                scratch.unlink(missing_ok=True)  # of a process that was killed while it wrote
            yield

    def is_locked(self) -> bool:
        if not (self.path / ".lock").exists():
            return False
        with open(self.path / ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def save(self, checkpoint: Checkpoint) -> None:
        """Make this the last checkpoint; the one that was last becomes the previous."""
        scratch = write_checkpoint(checkpoint, self.last, place=False)
        if self.last.exists():
            os.replace(self.last, self.previous)
        os.replace(scratch, self.last)
        _sync_folder(self.path)

    def resume(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None where there never was one."""
        damaged: list[str] = []
        for path in (self.last, self.previous):
            if path.exists():
                try:
                    found = read_checkpoint(path)
                    if damaged:  # so that the next save does not put it in the place of the one that is whole
                        with suppress(FileNotFoundError):  # another process was first
                            self.last.rename(self.last.with_suffix(".damaged"))
                    return found
                except DamagedError as error:
                    damaged.append(str(error))
                    warnings.warn(f"{error}; trying the checkpoint before it", stacklevel=2)
        if damaged:
            raise DamagedError("no checkpoint is whole: " + "; ".join(damaged))
        return None

    def position(self) -> dict[str, Any]:
        """Where the run stands, as its newest checkpoint says; empty where there is none. Tensors are not read."""
        for path in (self.last, self.previous):
            try:
                with safe_open(path, "pt") as file:
                    return json.loads((file.metadata() or {})["state"])
            except (OSError, RuntimeError, SafetensorError, KeyError):  # not there, damaged, or just being replaced
                continue
        return {}

    def metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_file.exists():
            return []
        return [
            json.loads(line)
            for line in self.metrics_file.read_text(encoding="utf-8").splitlines()
            if line.endswith("}")
        ]


class Metrics:
    """The metrics file, open for appending; cut back first to what the checkpoint knew."""

    def __init__(self, path: Path, length: int) -> None:
        self.file = open(path, "a+b")  # noqa: SIM115 (closed by close)
        there = self.file.seek(0, os.SEEK_END)
        if there < length:
            warnings.warn(f"{path} has lost its last {length - there} bytes; going on without them", stacklevel=2)
        self.file.truncate(min(there, length))
        self.file.seek(0, os.SEEK_END)

    def append(self, values: Mapping[str, Any]) -> None:
        self.file.write((json.dumps(values, ensure_ascii=False) + "\n").encode())
        self.file.flush()

    def length(self) -> int:
        return self.file.tell()

    def sync(self) -> None:
        """Have the disk hold what was measured: a checkpoint that knows of it comes next."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def write_checkpoint(checkpoint: Checkpoint, path: Path, *, place: bool = True) -> Path:
    """Write beside the path, and unless place is False rename into it; returns where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.detach().cpu().contiguous() for name, x in checkpoint.tensors.items()}
    state = json.dumps(checkpoint.state, ensure_ascii=False)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, scratch, metadata={"state": state, "sha256": _digest(tensors, state)})
    with open(scratch, "rb") as file:
        os.fsync(file.fileno())
    if not place:
        return scratch
    os.replace(scratch, path)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, checked; DamagedError, naming the file, if it is not what was written."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise FileNotFoundError(f"no checkpoint at {path}") from None
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: torch cannot map what is cut short
        raise DamagedError(f"{path} is damaged ({error})") from None
    if about.get("sha256") != _digest(tensors, about.get("state", "")):
        raise DamagedError(f"{path} is damaged (its checksum does not agree)")
    return Checkpoint(tensors, json.loads(about["state"]))


def list_run_folders(root: Path) -> list[RunFolder]:
    return [RunFolder(file.parent) for file in sorted(root.glob("*/config.json"))]


def _digest(tensors: Mapping[str, Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(set(old) | set(new))
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{key}.{k}".lstrip("."))]
    return [] if old == new else [(key, old, new)]


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
