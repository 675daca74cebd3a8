"""hashes.json of a run: the SHA-256 of each vocabulary file, so that a changed or missing one is noticed.

It is written when the run begins. Runs of versions that wrote none are not checked.
"""

import json
from pathlib import Path

from attnlab.files import write_text
from attnlab.files.user_files import read_json
from attnlab.tasks.fetch import compute_checksum

FILE = "hashes.json"
VOCABULARIES = ("vocabulary.*", "*_vocabulary.*", "classes.txt")  # files that tasks write in a run folder


def write_hashes(folder: Path) -> None:
    """Store the hashes of a run that begins; a run that has begun keeps its own, or stays without."""
    if (folder / FILE).exists() or (folder / "last.safetensors").exists():
        return
    files = sorted(file for pattern in VOCABULARIES for file in folder.glob(pattern))
    hashes = {"vocabulary": {file.name: compute_checksum(file, "sha256") for file in files}}
    write_text(folder / FILE, json.dumps(hashes, indent=1) + "\n")


def check_vocabulary(folder: Path) -> None:
    """Raise ValueError if a vocabulary file is missing or is not the one that the run was trained with."""
    for name, stored in _read_part(folder, "vocabulary").items():
        file, advice = folder / name, "restore it from a copy, or delete the folder and train again"
        if not file.is_file():
            raise ValueError(f"{folder} is damaged: {name} is missing; {advice}")
        if compute_checksum(file, "sha256") != stored:
            raise ValueError(f"{folder} is damaged: {name} has changed since the run began; {advice}")


def _read_part(folder: Path, part: str) -> dict[str, str]:
    if not (folder / FILE).exists():
        return {}
    values = read_json(folder / FILE).get(part, {})
    if not isinstance(values, dict):
        raise ValueError(f"{folder / FILE} is damaged: {part} must be an object; delete it to skip the check")
    return values
