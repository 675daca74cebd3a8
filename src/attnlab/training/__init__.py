"""Training one model: recipe, loop, checkpoints and the run folder."""

from collections.abc import Iterator
from pathlib import Path

FILES = (".lock", "model.json", "metrics.jsonl", "last.safetensors")  # that only runs have; each can be missing


def iterate_runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs inside a folder, sorted by name. A Hugging Face model is none."""
    yield from sorted({file.parent for name in FILES for file in root.glob(f"*/{name}")})
