"""The small Multi30k translator of benchmarks/learning.py, many seeds at once: as one population, or as processes.

Times are taken only if runs of a small population first have the losses that they have alone, dropout and noise on.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from attnlab.experiments.joint_recipes import train_jointly
from attnlab.experiments.recipes import MULTI30K
from attnlab.models.transformer import build
from attnlab.tasks import find_task
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_folder import RunFolder
from attnlab.training.runs import start_run
from attnlab.training.together import JointRun, JointTraining

SMALL = {"data": "lexicon", "width": "32", "layers": "2", "heads": "4", "feed_forward": "48", "steps": "20",
         "batch_tokens": "500", "evaluate_every": "10", "log_every": "5", "dropout": "0.2", "precision": "fp32",
         "compile": "no"}  # fmt: skip
WARM = 300  # updates before speeds are read: every width has been captured by then


def check_equal(attention, device, folder):
    """Raise ValueError unless two runs of a population have the losses that they have alone."""
    recipes = [resolve_recipe("synthetic", SMALL | {"attention": attention, "seed": str(seed)}) for seed in (1, 2)]
    (vocabulary := folder / "check").mkdir(exist_ok=True)
    task = find_task("synthetic").prepare(recipes[0].data, vocabulary)
    among = [RunFolder(folder / f"among-{attention}-{seed}") for seed in (1, 2)]
    train_jointly(task, recipes, among, vocabulary, device)
    for recipe, own in zip(recipes, among, strict=True):
        out, quiet = folder / f"alone-{own.path.name}", lambda *_: None
        alone, _ = start_run(recipe, out=out, device=device.type, report=quiet, note=quiet, task=task)
        for row, other in zip(own.metrics(), alone.metrics(), strict=True):
            for key in {"loss", "valid_loss"} & row.keys():
                if not abs(row[key] - other[key]) <= 1e-3 * other[key]:
                    raise ValueError(f"{attention}: {key} is {row[key]} in a population and {other[key]} alone")


def prepare_together(attention, members, device, folder, *, tiny=False):
    """Return the joint training of many seeds, before its first update."""
    sizes, kind = (SMALL, "synthetic") if tiny else (MULTI30K, "translation")
    more = {"attention": attention, "evaluate_every": "100000", "steps": "100000", "log_every": "100000"}
    recipes = [resolve_recipe(kind, sizes | more | {"seed": str(seed)}) for seed in range(1, members + 1)]
    (vocabulary := folder / kind).mkdir(exist_ok=True)
    task = find_task(kind).prepare(recipes[0].data, vocabulary)
    models, runs = [], []
    for recipe in recipes:
        torch.manual_seed(recipe.training.seed)
        models.append(build(recipe.resolve_model(task)))
        runs.append(JointRun(recipe.training, RunFolder(Path(tempfile.mkdtemp(dir=folder)))))
    return JointTraining(
        task, models, runs, device=device, file=folder / "together", report=lambda number, values: None
    )


def measure_together(attention, members, device, folder, *, tiny=False, updates=200):
    """Train a population for a while. Return the target tokens per second of all members."""
    began, (warm, updates) = time.perf_counter(), (5, 5) if tiny else (WARM, updates)
    training = prepare_together(attention, members, device, folder, tiny=tiny)
    for number in range(warm):
        training._update()
        if number == 29:
            wait(device)
            start = time.perf_counter() - began
    wait(device)
    clock, before = time.perf_counter(), sum(run.position.targets for run in training.runs)
    for _ in range(updates):
        training._update()
    wait(device)
    seconds = time.perf_counter() - clock
    tokens = sum(run.position.targets for run in training.runs) - before
    row = {"way": "population", "attention": attention, "runs": members, "tokens_per_s": tokens / seconds}
    return row | {"ms_per_update": 1e3 * seconds / updates} | ({} if tiny else {"start_s": start})


def measure_memory(attention, members, device, folder, *, tiny=False):
    """Train a population until every width has been met. Return the memory of the device, and what it holds."""
    training = prepare_together(attention, members, device, folder, tiny=tiny)
    for _ in range(5 if tiny else WARM):
        training._update()
    row = {"attention": attention, "runs": members}
    row |= {"reserved_gib": torch.cuda.max_memory_reserved() / 2**30} if device.type == "cuda" else {}
    row |= {"state_gib": count_state(training) / 2**30, "activations_gib": count_activations(training) / 2**30}
    if device.type == "cuda":
        row["beyond_share"] = row["reserved_gib"] / (row["state_gib"] + row["activations_gib"]) - 1
    return row


def list_state(training):
    """Return the tensors of parameters, gradients and the optimiser of a population."""
    flat, optimiser = training.stepper.flat, training.stepper.optimizer
    moments = getattr(optimiser, "moments", None)
    if moments is None:
        rows = range(len(training.runs))
        moments = [x for row in rows for x in optimiser.read_state(row).values()]
    return [flat.master, flat.work, flat.fresh, flat.grad, *moments]


def count_state(training):
    """Return the bytes of parameters, gradients and the optimiser."""
    return sum({x.data_ptr(): x.nbytes for x in list_state(training)}.values())


def count_activations(training, updates=20):
    """Return the most bytes that a pass keeps for its gradient, over the batches of some updates."""
    training.model.train()
    return max(
        count_saved(training, *training._join(batches)) for _ in range(updates) for batches in training._make_passes()
    )


def count_saved(training, inputs, goals):
    """Return the bytes that the loss of one pass keeps for its gradient, without parameters."""
    parameters = {x.untyped_storage().data_ptr() for x in (*list_state(training), *training.model.parameters())}
    saved = {}

    def note(x):
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return x

    inputs, goals = [x.to(training.device) for x in inputs], goals.to(training.device)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        losses = training.stepper.objective(inputs, goals)
    assert losses.requires_grad
    return sum(size for place, size in saved.items() if place not in parameters)


def measure_processes(attention, count, folder, *, mps, updates=900):
    """Train runs side by side in processes of their own. Return the target tokens per second of all of them."""
    settings = MULTI30K | {"attention": attention, "steps": str(updates), "evaluate_every": "100000", "log_every": "20"}
    shared = [f"{key}={value}" for key, value in settings.items()]
    with start_mps() if mps else no_mps() as started:
        outs = [Path(tempfile.mkdtemp(dir=folder)) / "run" for _ in range(count)]
        command = [sys.executable, "-m", "attnlab", "train", "translation", *shared]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        runs = [
            subprocess.Popen([*command, f"seed={seed}", "--out", str(out)], **pipes)
            for seed, out in enumerate(outs, start=1)
        ]
        failed = [run.wait() for run in runs if run.wait()]
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} processes failed")
    way = "processes under MPS" if started else "processes, time-sliced" if count > 1 else "one run"
    return {"way": way, "attention": attention, "runs": count, "tokens_per_s": sum(map(read_speed, outs))}


def read_speed(out):
    """Return the median tokens per second of the last half of a run, when all processes train."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    return statistics.median(speeds[len(speeds) // 2 :])


def measure_command(seeds, folder, attention="softmax"):
    """Return the seconds that benchmarks/learning.py takes: train these seeds to the end and score them by BLEU."""
    out, numbers = tempfile.mkdtemp(dir=folder), ",".join(map(str, range(1, seeds + 1)))
    command = [sys.executable, "benchmarks/learning.py", "multi30k", "--attention", attention]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--seeds", numbers, "--jobs", str(seeds), "--out", out], text=True, capture_output=True, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    scores = json.loads((Path(out) / "multi30k" / "gpu.json").read_text())["rows"]
    bleu = statistics.mean(row["bleu"] for row in scores)
    return {"way": "from the command to the last BLEU", "attention": attention, "runs": seeds, "seconds": seconds,
            "mean_bleu": bleu, "updates": int(MULTI30K["steps"])}  # fmt: skip


def measure_start(attention, folder, caches):
    """Return the seconds from the command to the thirtieth update of one run; caches: folder of compiled kernels."""
    out, settings = Path(tempfile.mkdtemp(dir=folder)) / "run", MULTI30K | {"attention": attention}
    settings |= {"steps": "60", "evaluate_every": "100000", "log_every": "30"}
    command = [sys.executable, "-m", "attnlab", "train", "translation", *(f"{k}={x}" for k, x in settings.items())]
    places = {"TRITON_CACHE_DIR": str(caches / "triton"), "XDG_CACHE_HOME": str(caches / "home")}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    began = time.perf_counter()
    run = subprocess.Popen([*command, "--out", str(out)], env=os.environ | places, **pipes)
    while not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n")):
        if run.poll() is not None:
            raise RuntimeError(f"attnlab train ended with status {run.returncode} before its thirtieth update")
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    run.wait()
    return seconds


@contextmanager
def no_mps():
    yield False


@contextmanager
def start_mps():
    """Start CUDA's multi-process service if it can be started; yield whether it runs."""
    control = shutil.which("nvidia-cuda-mps-control")
    started = control is not None and subprocess.run([control, "-d"], check=False, capture_output=True).returncode == 0
    try:
        yield started
    finally:
        if started:
            subprocess.run([control], input="quit\n", text=True, check=False, capture_output=True)


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
