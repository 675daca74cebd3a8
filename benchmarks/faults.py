"""Kill, damage and fuzz attnlab, and count what is lost, what ends in a traceback, and what is silently wrong.

python benchmarks/faults.py [--kills 200] [--damages 2000] [--inputs 10000] [--seed 0] [--jobs 2] [--out FOLDER]

    kills     a training is killed at random moments, also while Python imports and while files are written, and is
              started again until it ends; its weights and metrics must equal those of an undisturbed run, bit by bit
    damages   the newest checkpoint is damaged; resuming must give its content or that of the previous one
    inputs    settings, texts, gold links, records, run folders, ledgers and Hugging Face folders are damaged; each is
              refused in one line, or read as an independent reader reads it (fuzzing.py)

    lost        a run that cannot be resumed, or ends otherwise than the undisturbed one
    traceback   an error other than those that the command line prints in one line, or a case that takes over 30 s
    wrong       damage that is accepted, with other content than was written
    code        code of a file that nobody allowed was run
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import fuzzing
import torch
from fuzzing import CodeRunError, WrongError
from measuring import collect_provenance, format_table, write_results

from attnlab.training.run_folder import Checkpoint, RunFolder, read_checkpoint

COLUMNS = ("tried", "refused", "lost", "traceback", "wrong", "code")
PRINTED = (ValueError, OSError, ImportError)  # the command line prints these in one line
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
LONGEST = 30  # seconds that one case may take


@dataclass
class Tally:
    """The outcomes of one kind of fault, and an example of each bad one."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, outcome: str, example: str = "") -> None:
        self.counts[outcome] += 1
        if outcome in COLUMNS[2:]:
            self.examples.setdefault(outcome, example)

    def row(self) -> dict[str, str | int]:
        return {"fault": self.name} | {column: self.counts[column] for column in COLUMNS}

    def is_clean(self) -> bool:
        return not any(self.counts[column] for column in COLUMNS[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="Number of kills.")
    parser.add_argument("--damages", type=int, default=2000, help="Number of damaged checkpoints.")
    parser.add_argument("--inputs", type=int, default=10_000, help="Number of damaged inputs.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of all random choices.")
    parser.add_argument("--jobs", type=int, default=2, help="Number of trainings that are killed at the same time.")
    parser.add_argument("--out", help="Folder for the results as JSON; default: print only.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tallies: list[Tally] = []
    with TemporaryDirectory() as folder:
        tallies.append(damage_checkpoints(Path(folder) / "damages", options.damages, options.seed))
        tallies += fuzz_inputs(Path(folder) / "inputs", options.inputs, options.seed)
        tallies.append(kill_trainings(Path(folder) / "kills", options.kills, options.seed, options.jobs))
    rows = [tally.row() for tally in tallies]
    print(format_table(["fault", *COLUMNS], [list(row.values()) for row in rows]))
    for tally in tallies:
        for outcome, example in tally.examples.items():
            print(f"{tally.name}, {outcome}: {example}")
    write_results(options.out, "cpu", collect_provenance(options.seed), rows)
    sys.exit(not all(tally.is_clean() for tally in tallies))


def damage_checkpoints(folder: Path, tries: int, seed: int) -> Tally:
    """Damage the newest checkpoint of a run; resume, and compare with what was written."""
    tally, draw = Tally("checkpoint"), random.Random(seed)
    run = fuzzing.train_short_run(folder)
    last, previous = run.last.read_bytes(), run.previous.read_bytes()
    written = [digest_checkpoint(read_checkpoint(path)) for path in (run.last, run.previous)]
    for _ in range(tries):
        how, data = fuzzing.damage_bytes(last, draw)
        run.last.write_bytes(data)
        with judge(tally, how), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged file is a warning, and the previous one is used
            run.position()
            checkpoint = run.resume()
            if checkpoint is None or digest_checkpoint(checkpoint) not in written:
                raise WrongError("the checkpoint has other content than was written")
        if tally.counts["refused"]:  # the previous checkpoint is whole, so a refusal loses it
            tally.counts -= Counter(refused=1)
            tally.add("lost", how)
        run.last.with_suffix(".damaged").unlink(missing_ok=True)
        run.previous.write_bytes(previous)
    return tally


def fuzz_inputs(folder: Path, tries: int, seed: int) -> Iterator[Tally]:
    """Give damaged inputs of every kind to their readers."""
    for kind, share in fuzzing.KINDS.items():
        draw, tally = random.Random(f"{seed} {kind.__name__}"), Tally(kind.__name__)
        case = kind(folder / kind.__name__)
        for _ in range(max(1, round(share * tries))):
            description = case.prepare(draw)
            with judge(tally, description), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case.read()
        yield tally


@contextmanager
def judge(tally: Tally, example: str) -> Iterator[None]:
    """Count one case by how it ends."""
    tally.add("tried")
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.alarm(LONGEST)
    try:
        yield
    except (CodeRunError, WrongError) as error:
        tally.add("code" if isinstance(error, CodeRunError) else "wrong", f"{example}: {error}")
    except TimeoutError:
        tally.add("traceback", f"{example}: takes over {LONGEST} s")
    except PRINTED:
        tally.add("refused")
    except Exception as error:
        tally.add("traceback", f"{example}: {type(error).__name__}: {error}"[:300])
    finally:
        signal.alarm(0)


def _raise_timeout(*_: object) -> None:
    raise TimeoutError


def kill_trainings(folder: Path, kills: int, seed: int, jobs: int) -> Tally:
    """Kill trainings at random moments until there were enough kills; each training ends as if undisturbed."""
    tally = Tally("kill")
    clock = time.perf_counter()
    code, errors = run_training(folder / "undisturbed", None, signal.SIGKILL)
    seconds = time.perf_counter() - clock
    if code:
        raise SystemExit(f"the undisturbed training failed: {errors}")
    expected = describe_outcome(folder / "undisturbed")
    left = iter([True] * kills)

    def disturb(number: int) -> None:
        draw, out = random.Random(f"{seed} {number}"), folder / f"run{number}"
        while next(left, False):
            tally.add("tried")
            after, by = draw.uniform(0.0, seconds), draw.choice(SIGNALS)
            code, errors = run_training(out, after, by)
            if "Traceback" in errors:
                tally.add("traceback", f"{by.name} after {after:.2f} s: {errors[-300:]}")
            if code == 0:
                break
        code, errors = run_training(out, None, signal.SIGKILL)
        leftovers = [path.name for path in out.rglob(".*") if path.name != ".lock"] if out.exists() else []
        if code or leftovers or describe_outcome(out) != expected:
            tally.add("lost", f"run {number}: exit status {code}, left over {leftovers}, {errors[-300:]}")
        shutil.rmtree(out, ignore_errors=True)

    with ThreadPoolExecutor(jobs) as pool:
        for first in count(0, jobs):
            list(pool.map(disturb, range(first, first + jobs)))
            if not next(left, False):
                return tally
            left = iter([True, *left])


def run_training(out: Path, after: float | None, by: signal.Signals) -> tuple[int, str]:
    """Train in a process, which gets a signal after this many seconds; return its exit status and its errors."""
    command = [
        sys.executable,
        "-m",
        "attnlab",
        "train",
        "synthetic",
        *fuzzing.SETTINGS,
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        _, errors = process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        process.send_signal(by)
        _, errors = process.communicate()
    return process.returncode, errors


def describe_outcome(out: Path) -> tuple[object, ...]:
    """Return the weights, optimiser and metrics of a finished run, without times."""
    folder = RunFolder(out)
    rows = [{key: x for key, x in row.items() if "second" not in key} for row in folder.metrics()]
    kept = sorted(path.name for path in (out / "steps").iterdir())
    last = read_checkpoint(folder.last)
    del last.state["metrics_length"]  # in bytes: it depends on the digits of the speed
    return digest_checkpoint(last), json.dumps(rows), kept


def digest_checkpoint(checkpoint: Checkpoint) -> tuple[object, ...]:
    tensors = {name: fuzzing.digest_tensor(x) for name, x in sorted(checkpoint.tensors.items())}
    return json.dumps(tensors), json.dumps(checkpoint.state, sort_keys=True)


if __name__ == "__main__":
    main()
