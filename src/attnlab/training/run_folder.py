"""A run's folder: configuration, metrics, and checkpoints that survive a kill at any moment.

    config.json       the resolved configuration, with every value
    hashes.json       the SHA-256 of the vocabulary and of the user's own text
    metrics.jsonl     one line per measurement; a resumed run truncates it to the length stored in the checkpoint
    last.safetensors  the newest checkpoint         previous.safetensors  the one before
    best.safetensors  the best weights              steps/N.safetensors   weights kept at chosen steps

A file is written in a scratch folder and then renamed, so no file is ever incomplete. Each checkpoint stores a
SHA-256 of its tensors and state. If it does not match, a warning names the file and the previous checkpoint is used.
"""

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
from attnlab.files import explain_errors, lock_file, refuse_link, remove_stale, replace_file, sync_tree, write_text
from attnlab.files.user_files import parse_json, read_json


class DamagedError(ValueError):
    """A checkpoint whose content differs from what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and the other state that a run needs to resume."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with the prefix, under their names without it."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path, self.metrics_file, self.hugging_face = path, path / "metrics.jsonl", path / "hugging_face"
        self.last, self.previous, self.best = (path / f"{name}.safetensors" for name in ("last", "previous", "best"))

    def step_file(self, step: int) -> Path:
        return self.path / "steps" / f"{step:08d}.safetensors"

    def config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{self.path} is not a run: it has no config.json; attnlab runs lists the runs")
        config: dict[str, Any] = read_json(file)
        return config

    def claim(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, *, extend: bool = False
    ) -> None:
        """Write the configuration, or check that the folder already has the same one.

        defaults   by part, of keys that the configuration of an older version may lack
        extend   allow more steps than the folder's configuration has; `write_config` then replaces it
        """
        if not (file := self.path / "config.json").exists():
            self.write_config(config)
            return
        stored = read_json(file)
        for part, values in (defaults or {}).items():
            if isinstance(stored.get(part), dict):
                stored[part] = json.loads(json.dumps(dict(values))) | stored[part]
        differences = _list_differences(stored, json.loads(json.dumps(config)))
        differing = [each for each in differences if each[0].split(".")[-1] not in FREE_KEYS]
        if extend and [each[0] for each in differing] == ["training.steps"] and differing[0][1] < differing[0][2]:
            return
        if differing:
            shown = "; ".join(f"{key}: {old!r} there, {new!r} now" for key, old, new in differing[:4])
            raise ValueError(f"{self.path} holds another run ({shown}); choose another --out, or delete the folder")

    def write_config(self, config: Mapping[str, Any]) -> None:
        text = json.dumps(config, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        write_text(self.path / "config.json", text)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder while training. Raises ValueError if another process holds it."""
        for name in (".lock", "steps"):
            refuse_link(self.path / name)
        with explain_errors(self.path / ".lock"):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "a")  # noqa: SIM115 (closed below)
        with lock:
            if not lock_file(lock):
                raise ValueError(f"{self.path} is in use: another process trains this run")
            for folder in (self.path, self.path / "steps"):
                remove_stale(folder)
            yield

    def is_locked(self) -> bool:
        if not (self.path / ".lock").exists():
            return False
        with open(self.path / ".lock") as lock:
            return not lock_file(lock, shared=True)

    def save(self, checkpoint: Checkpoint) -> None:
        """Save as the last checkpoint; the former last checkpoint becomes the previous one."""
        with replace_file(self.last) as new:
            _save_tensors(checkpoint, new)
            sync_tree(new)
            if self.last.exists():
                os.replace(self.last, self.previous)

    def resume(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if there is no checkpoint."""
        damaged: list[str] = []
        for path in (self.last, self.previous):
            if path.exists():
                try:
                    checkpoint = read_checkpoint(path)
                    if damaged:  # renamed, else the next save would replace the intact checkpoint by the damaged one
                        warnings.warn(f"{damaged[0]}; the previous checkpoint is used", stacklevel=2)
                        with suppress(FileNotFoundError):  # another process was faster
                            self.last.rename(self.last.with_suffix(".damaged"))
                    return checkpoint
                except DamagedError as error:
                    damaged.append(str(error))
        if damaged:
            raise DamagedError(f"{'; '.join(damaged)}; no checkpoint is left: delete {self.path} to train again")
        return None

    def position(self) -> dict[str, Any]:
        """Return the state in the newest checkpoint, without reading its tensors; empty if there is no checkpoint."""
        for path in (self.last, self.previous):
            try:
                with safe_open(path, "pt") as file:
                    metadata = file.metadata() or {}
                if metadata.get("state_sha256", digest := _digest_text(metadata["state"])) == digest:
                    return json.loads(metadata["state"])
            except (OSError, RuntimeError, SafetensorError, KeyError, ValueError):  # not there, damaged, being replaced
                continue
        return {}

    def metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_file.exists():
            return []
        rows = []
        whole, _, _ = self.metrics_file.read_bytes().rpartition(b"\n")  # the last line may be half written
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                rows.append(parse_json(line.decode("utf-8"), f"{self.metrics_file}:{number}"))
            except ValueError:
                warnings.warn(f"{self.metrics_file}:{number} is not a measurement and is ignored", stacklevel=2)
        return rows


class Metrics:
    """The metrics file, truncated to the length stored in the checkpoint and opened for appending."""

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        refuse_link(path)
        with explain_errors(path):
            self.file = open(path, "a+b")  # noqa: SIM115 (closed by close)
        size = self.file.seek(0, os.SEEK_END)
        if size < length:
            warnings.warn(f"{path} lacks its last {length - size} bytes; training continues without them", stacklevel=2)
        self.file.truncate(min(size, length))
        self.file.seek(0, os.SEEK_END)

    def append(self, values: Mapping[str, Any]) -> None:
        with explain_errors(self.path):
            self.file.write((json.dumps(values, ensure_ascii=False) + "\n").encode())
            self.file.flush()

    def length(self) -> int:
        return self.file.tell()

    def sync(self) -> None:
        """Write the measurements to disk, before the checkpoint that stores their length."""
        with explain_errors(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        with explain_errors(self.path):
            self.file.close()


def write_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint atomically."""
    with replace_file(path) as scratch:
        _save_tensors(checkpoint, scratch)


def _save_tensors(checkpoint: Checkpoint, path: Path) -> None:
    tensors = {name: x.detach().cpu().contiguous() for name, x in checkpoint.tensors.items()}
    state = json.dumps(checkpoint.state, ensure_ascii=False)
    digests = {"sha256": _compute_checksum(tensors, state), "state_sha256": _digest_text(state)}
    save_file(tensors, path, metadata={"state": state} | digests)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and compare its checksum. Raises DamagedError with the file's name if it does not match."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise FileNotFoundError(f"no checkpoint at {path}") from None
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: torch cannot map a truncated file
        raise DamagedError(f"{path} is damaged ({error})") from None
    if metadata.get("sha256") != _compute_checksum(tensors, metadata.get("state", "")):
        raise DamagedError(f"{path} is damaged (its checksum does not match)")
    return Checkpoint(tensors, json.loads(metadata["state"]))


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _compute_checksum(tensors: Mapping[str, Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _list_differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(set(old) | set(new))
        return [d for k in keys for d in _list_differences(old.get(k), new.get(k), f"{key}.{k}".lstrip("."))]
    return [] if old == new else [(key, old, new)]
