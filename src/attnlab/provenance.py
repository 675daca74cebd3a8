"""Provenance of a measured number: hardware, versions, commit."""

import os
import platform
import subprocess
from importlib.util import find_spec
from pathlib import Path

import torch

from attnlab import __version__

HAS_TRITON = find_spec("triton") is not None  # Linux has it


def collect_provenance(device: torch.device) -> dict[str, str | int]:
    """Return the hardware, the number of threads, the versions and the commit of this process."""
    return {
        "hardware": name_hardware(device),
        "threads": torch.get_num_threads(),
        "attnlab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": find_commit(),
    }


def find_commit() -> str:
    """Return the commit of the running source, with a + if files differ from it; "unknown" outside a repository.

    The environment variable ATTNLAB_COMMIT overrides it.
    """
    if commit := os.environ.get("ATTNLAB_COMMIT"):
        return commit
    package = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, check=False).stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):  # installed, perhaps inside another repository
            return "unknown"
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except OSError:  # git is not installed
        return "unknown"


def name_hardware(device: torch.device) -> str:
    """Return the name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
