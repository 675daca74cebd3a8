"""Where a number was taken: hardware, versions, commit."""

import os
import platform
import subprocess
from pathlib import Path

import torch

from attnlab import __version__


def collect_provenance(device: torch.device) -> dict[str, str | int]:
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "attnlab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("ATTNLAB_COMMIT") or _commit(),
    }


def _commit() -> str:
    """Of the source this runs from, with a + where files differ from it; unknown where there is none."""
    package = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, check=False).stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):  # installed, perhaps below somebody else's repository
            return "unknown"
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except OSError:  # no git
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
