"""What every benchmark needs: honest clocks, peak memory, and where the numbers were taken."""

import ctypes
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPEATS = 5


def surroundings(seed: int) -> dict[str, Any]:
    """Hardware, versions, commit and seed: what a number in results/ must carry."""
    import attnlab

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    triton = __import__("importlib.util").util.find_spec("triton")
    return {
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "threads": torch.get_num_threads(),
        "attnlab": attnlab.__version__,
        "torch": torch.__version__,
        "triton": __import__("triton").__version__ if triton else None,
        "python": platform.python_version(),
        "commit": os.environ.get("ATTNLAB_COMMIT") or git("rev-parse", "--short", "HEAD") or "unknown",
        "seed": seed,
    }


def device_milliseconds(step: Callable[[], Any]) -> float:
    """The time of one step on the GPU alone: several steps in one CUDA graph, the median of its replays.

    Everything the step touches must have been made on the current stream, and that must not be the default one.
    """
    calls = _calls(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            step()
    return _median_of_events(graph.replay) / calls


def eager_milliseconds(step: Callable[[], Any]) -> float:
    """The time of one step as a Python program runs it, launches included."""
    if torch.cuda.is_available():
        calls = _calls(step)
        return _median_of_events(lambda: [step() for _ in range(calls)]) / calls
    step()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def device_peak_mebibytes(step: Callable[[], Any]) -> float:
    """What one step allocates beyond what was there, at its peak."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def process_peak_mebibytes() -> float:
    """The largest resident size this process has had: ask it in a process of its own."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def grown_mebibytes(step: Callable[[], Any]) -> float:
    """By how much the resident size grows while one step runs, at its peak; what was freed before is given back first.

    Linux with glibc, which alone can do that.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present size
    before = _resident("VmRSS")
    step()
    return max(0.0, _resident("VmHWM") - before)


def table(columns: list[str], rows: list[list[Any]]) -> str:
    cells = [columns, *([f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(w) if n else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write(out: str | None, name: str, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if out:
        path = Path(out) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"about": about, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
        print(f"written: {path}")


def _calls(step: Callable[[], Any]) -> int:
    """How many steps take about 20 ms, after two to warm up; at most 20."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return max(1, min(20, int(0.02 / (time.perf_counter() - start))))


def _median_of_events(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _resident(name: str) -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 2**10


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
