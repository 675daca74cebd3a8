"""hashes.json of a run: the SHA-256 of its vocabulary, of the user's own text and of the model that LoRA leaves fixed.

A checkpoint of LoRA has no fixed weights, so a run is not opened on others.

It is written when the run begins. Runs of versions that wrote none are not checked.
"""

import json
from pathlib import Path
from typing import Any

from attnlab.files import write_text
from attnlab.files.user_files import read_json
from attnlab.tasks.fetch import compute_checksum
from attnlab.tasks.sources import SETS
from attnlab.tasks.synthetic import SyntheticConfig

FILE = "hashes.json"
VOCABULARIES = ("vocabulary.*", "*_vocabulary.*", "classes.txt")  # files that tasks write in a run folder
TEXTS = ("data", "src", "tgt", "valid", "valid_src", "valid_tgt")  # keys of user files that training reads


def write_hashes(folder: Path, data: Any, model: Any = None) -> None:
    """Store the hashes of a run that begins; a run that has begun keeps its own, or stays without.

    data   the configuration of its task
    model  the configuration of its model
    """
    if (folder / FILE).exists() or (folder / "last.safetensors").exists():
        return
    files = sorted(file for pattern in VOCABULARIES for file in folder.glob(pattern))
    vocabulary = {file.name: compute_checksum(file, "sha256") for file in files}
    hashes = {"vocabulary": vocabulary, "data": _hash_texts(data), "model": hash_fixed_weights(model)}
    write_text(folder / FILE, json.dumps(hashes, indent=1) + "\n")


def check_vocabulary(folder: Path) -> None:
    """Raise ValueError if a vocabulary file is missing or is not the one that the run was trained with."""
    for name, stored in _read_part(folder, "vocabulary").items():
        file, advice = folder / name, "restore it from a copy, or delete the folder and train again"
        if not file.is_file():
            raise ValueError(f"{folder} is damaged: {name} is missing; {advice}")
        if compute_checksum(file, "sha256") != stored:
            raise ValueError(f"{folder} is damaged: {name} has changed since the run began; {advice}")


def check_fixed_weights(folder: Path, model: Any) -> None:
    """Raise ValueError if the weights that LoRA left fixed are not those that the run was trained with."""
    stored = _read_part(folder, "model")
    if stored and (found := hash_fixed_weights(model)) and found != stored:
        what = f"{model.path}: the weights have changed since {folder} began, and its checkpoints have only LoRA's"
        raise ValueError(f"{what}; restore them, or train again in another folder")


def hash_fixed_weights(model: Any) -> dict[str, str]:
    """Return the hashes of a model that is trained by LoRA; {} for other models."""
    return hash_weights(model.path) if getattr(model, "lora", 0) else {}


def hash_weights(path: str) -> dict[str, str]:
    """Return the SHA-256 of each weight file of a local model; {} for an id on the hub."""
    files = sorted(Path(path).expanduser().glob("*.safetensors"))
    return {file.name: compute_checksum(file, "sha256") for file in files}


def list_changed_texts(folder: Path, data: Any) -> list[str]:
    """Return the user's text files that have changed since the run began; a file that is gone is not among them."""
    stored = _read_part(folder, "data")
    return [name for name, digest in (_hash_texts(data) if stored else {}).items() if stored.get(name) != digest]


def check_unchanged(folder: Path, data: Any, model: Any = None) -> None:
    """Raise ValueError if a run would resume with another vocabulary or model, or on other text of the user."""
    check_vocabulary(folder)
    check_fixed_weights(folder, model)
    if changed := ", ".join(list_changed_texts(folder, data)):
        advice = "restore the text, or choose another --out to train on the new one"
        raise ValueError(f"{changed}: the text has changed since {folder} began; {advice}")


def _hash_texts(data: Any) -> dict[str, str]:
    if isinstance(data, SyntheticConfig):  # whose data= names no file
        return {}
    names = [name for key in TEXTS if (name := getattr(data, key, None)) and name not in SETS]
    return {name: compute_checksum(Path(name), "sha256") for name in names if Path(name).is_file()}


def _read_part(folder: Path, part: str) -> dict[str, str]:
    if not (folder / FILE).exists():
        return {}
    values = read_json(folder / FILE).get(part, {})
    if not isinstance(values, dict):
        raise ValueError(f"{folder / FILE} is damaged: {part} must be an object; delete it to skip the check")
    return values
