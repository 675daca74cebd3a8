"""Clocks, peak memory, provenance and tables for all benchmarks."""

import ctypes
import gc
import json
import resource
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnlab import provenance

REPEATS = 5


def collect_provenance(seed: int) -> dict[str, Any]:
    """Return what every number in results/ is stored with: hardware, versions, commit and seed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    triton = import_module("triton").__version__ if find_spec("triton") else None
    return provenance.collect_provenance(device) | {"triton": triton, "seed": seed}


def device_milliseconds(step: Callable[[], Any]) -> float:
    """Return the time of one step on the GPU, without launches: the median over replays of a CUDA graph of steps.

    All tensors of the step must have been created on the current stream, which must not be the default stream.
    """
    calls = _count_calls(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            step()
    return _median_of_events(graph.replay) / calls


def eager_milliseconds(step: Callable[[], Any]) -> float:
    """Return the time of one step in eager mode: with launches on a GPU, processor time on a CPU."""
    if torch.cuda.is_available():
        calls = _count_calls(step)
        return _median_of_events(lambda: [step() for _ in range(calls)]) / calls
    step()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def host_milliseconds(step: Callable[[], Any], calls: int = 50) -> float:
    """Return the time that the host needs for one step, the fastest of several runs. It does not wait for the GPU."""
    times = []
    for _ in range(1 + REPEATS):  # the first warms up
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:]) / calls


def device_peak_mebibytes(step: Callable[[], Any]) -> float:
    """Return the peak of the memory that one step allocates on the GPU."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def process_peak_mebibytes() -> float:
    """Return the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def growth_mebibytes(step: Callable[[], Any]) -> float:
    """Return the peak growth of the resident size during one step. Freed memory is returned to the system first.

    Needs Linux with glibc.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present size
    before = _read_status("VmRSS")
    step()
    return max(0.0, _read_status("VmHWM") - before)


def format_table(columns: list[str], rows: list[list[Any]]) -> str:
    cells = [columns, *([f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(w) if n else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_results(out: str | None, name: str, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if out:
        path = Path(out) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_format_json(about, rows), encoding="utf-8")
        print(f"written: {path}")


class Sheet:
    """The rows of one file of results. Every row is stored when it is measured, so an interruption loses none.

    Rows of earlier runs stay until they are measured again; those of another commit say which. Nothing is stored
    without a folder. identify: returns what a row is about, so that a new row replaces the old one. resume: whether
    `lacks` is False for the rows that the file has.
    """

    def __init__(
        self, out: str | None, name: str, about: dict[str, Any], identify: Callable[[dict[str, Any]], Any],
        resume: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.about, self.identify = Path(out) / f"{name}.json" if out else None, about, identify
        self.rows: list[dict[str, Any]] = []
        if self.path and self.path.exists():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            self._check_machine(before["about"])
            self.rows = [{"commit": before["about"]["commit"]} | row for row in before["rows"]]
            for row in self.rows:
                if row["commit"] == about["commit"]:
                    del row["commit"]
        measured = (row for row in self.rows if "not_run" not in row)
        self.known = {self._name(row) for row in measured} if resume else set()

    def lacks(self, row: dict[str, Any]) -> bool:
        """Return whether such a row is to be measured."""
        return self._name(row) not in self.known

    def add(self, row: dict[str, Any]) -> None:
        """Store a row in place of an old one about the same, and write the file."""
        self.rows = [old for old in self.rows if self._name(old) != self._name(row)] + [row]
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(".part")
            draft.write_text(_format_json(self.about, self.rows), encoding="utf-8")
            draft.replace(self.path)

    def _name(self, row: dict[str, Any]) -> str:
        return json.dumps(self.identify(row))

    def _check_machine(self, before: dict[str, Any]) -> None:
        for key in ("hardware", "torch", "triton"):
            if key in before and before[key] != self.about[key]:
                told = f"{self.path} was measured with {key} {before[key]}, and this is {self.about[key]}"
                raise SystemExit(f"{told}: move the file, or choose another --out")


def _format_json(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    return json.dumps({"about": about, "rows": rows}, indent=1, ensure_ascii=False) + "\n"


def _count_calls(step: Callable[[], Any]) -> int:
    """Return the number of steps that take about 20 ms, at most 20, after two warm-up steps."""
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


def _read_status(name: str) -> float:
    """Return a value of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 2**10
