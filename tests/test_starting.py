"""`attnlab train` starts fast: it imports, learns and compiles only what it needs."""

import re
import subprocess
import sys
import time

import pytest
import torch
from gpu_compile import assert_compiles

from attnlab.tasks import vocabulary_cache
from attnlab.training import plain_optimisers, starting
from attnlab.training.processes import SingleProcess
from attnlab.training.recipe import resolve_recipe
from attnlab.training.runs import start_run
from attnlab.training.step import Captured, Eager

SLOW = ("accelerate", "transformers", "datasets", "matplotlib", "pandas", "scipy", "sympy", "torch._dynamo",
        "torch._inductor.compile_fx", "torch.distributed.fsdp")  # fmt: skip
IMPORTS = f"""
import sys
from attnlab.cli import main
sys.argv = ["attnlab", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("imported:", *(name for name in {SLOW!r} if name in sys.modules))
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optimiser", ["adam", "muon"])
def test_a_short_training_imports_nothing_slow(tmp_path, device, optimiser):
    words = ["train", "synthetic", "steps=2", "width=16", "layers=1", f"optimiser={optimiser}", "--device", device]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *words, "--out", str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "finished at step 2" in done.stdout
    assert len(re.findall(r"^full speed after \d+ updates?, \d+\.\d s$", done.stderr, re.M)) == 1
    assert done.stdout.splitlines()[-1].split() == ["imported:"]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_plain_optimisers_update_as_those_of_torch(name):
    how = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {"betas": (0.9, 0.98)}
    ends = []
    for module in (torch.optim, plain_optimisers):
        x = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimiser = getattr(module, name)([x], lr=torch.tensor(0.1), fused=True, weight_decay=0.1, **how)
        for _ in range(3):
            (x**3).sum().backward()
            optimiser.step()
        assert not x.grad.requires_grad
        ends.append(x.detach())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], torch.linspace(-1, 1, 7))


def test_full_speed_is_noted_once_with_the_time_since_the_command(tmp_path, monkeypatch):
    answers, graphs = iter([False, True]), iter([1, 1, 1, 2, 2, 2, 2])  # counted again where it has changed
    monkeypatch.setattr(Eager, "has_full_speed", lambda self, *_: next(answers))
    monkeypatch.setattr(Eager, "count_graphs", lambda self: next(graphs))
    recipe = resolve_recipe("synthetic", {"steps": "5", "width": "16", "layers": "1"})
    lines, began = [], time.perf_counter() - 1000
    start_run(recipe, out=tmp_path, device="cpu", report=lambda _: None, note=lines.append, began=began)
    (line,) = [line for line in lines if line.startswith("full speed")]
    assert re.fullmatch(r"full speed after 3 updates, 10\d\d\.\d s", line)


def test_captured_updates_have_full_speed_with_a_graph_for_every_width():
    stepper = object.__new__(Captured)  # which needs a GPU
    translation, classification = ((5, 8), (5, 8), (5, 8)), ((3, 16), (3,))
    stepper.graphs = {(True, *translation): None, (False, *translation): None}
    assert stepper.has_full_speed([8], 1)
    assert not stepper.has_full_speed([8, 16], 1)
    stepper.graphs[True, *classification] = None
    assert stepper.has_full_speed([8, 16], 1)
    assert stepper.count_graphs() == 3


def test_accumulated_batches_need_graphs_of_their_own():
    stepper = object.__new__(Captured)
    stepper.graphs = {(True, (5, 8)): None, (True, (3, 16)): None, (False, (5, 8)): None}
    assert not stepper.has_full_speed([8, 16], 3)
    stepper.graphs[False, (3, 16)] = None
    assert stepper.has_full_speed([8, 16], 3)


EARLY = """
from contextlib import nullcontext
from unittest.mock import patch

import torch

from attnlab.mechanisms.kernels import launch
from attnlab.mechanisms.seeding import Seeds
from attnlab.models.presets import build
from attnlab.training import starting
from attnlab.training.loop import make_objective
from attnlab.training.recipe import resolve_recipe

device = torch.device("cpu")


def make_pass(recipe, width):
    "A pass of the model that the recipe trains, with another vocabulary and padded sentences."
    foreseen = starting.ForeseenTask(recipe.data)
    foreseen.size = 7984
    model = build(recipe.resolve_model(foreseen)).bfloat16()
    objective, seeds = make_objective(model, recipe.training), Seeds(model, 1, device)
    tokens = torch.full((recipe.training.batch_tokens // width, width), 5)
    tokens[:, width // 2 :] = 0
    seeds.set_batch([3], 7, 0)
    objective((tokens, tokens), tokens).backward()


def collect(function, *arguments):
    launch._collected = {}
    try:
        function(*arguments)
        return set(launch._collected)
    finally:
        launch._collected = None


def check(attention):
    small = {"precision": "bf16", "dropout": "0.3", "layers": "2", "feed_forward": "16", "batch_tokens": "1000"}
    recipe = resolve_recipe("translation", {"attention": attention} | small)
    with patch.object(starting, "compile_ahead", nullcontext):
        early = collect(starting.compile_early, recipe, device)
    for width in (16, 24, 40, 56):
        needed = collect(make_pass, recipe, width)
        missing = [(variant[0].fn.__name__, *variant[1:]) for variant in needed - early]
        assert len(needed) > 6 and not missing, (attention, width, len(needed), missing)


with (
    patch.object(torch.Tensor, "is_cuda", property(lambda x: True), create=True),
    patch.object(torch.Tensor, "pin_memory", lambda x: x),
    patch.object(torch._C, "_cuda_getDevice", lambda: -1, create=True),
):
    for attention in ("softmax", "coda"):
        check(attention)
"""


def test_early_kernels_are_those_of_the_first_batches():
    assert_compiles(EARLY)


def test_kernels_are_compiled_early_in_a_thread_that_ends_before_training(tmp_path, monkeypatch):
    done, recipe = [], resolve_recipe("translation", {"data": "multi30k"})

    def fail(device):
        time.sleep(0.1)
        done.append(device.type)
        raise RuntimeError("no device")

    def prepare():
        with starting.Preparation(recipe, SingleProcess(torch.device("cuda"))):
            for lines in (["short"], ["a longer text"], ["its longer translation"]):
                assert vocabulary_cache.recall_or_learn(lines, {}, lambda: b"learned") == b"learned"
            raise KeyError

    monkeypatch.setattr(starting, "start_device", fail)
    monkeypatch.setattr(starting, "compile_early", lambda recipe, device: done.append(recipe))
    monkeypatch.setattr(vocabulary_cache, "LEAST_TEXT", 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KeyError):
        prepare()
    assert done == ["cuda", recipe]
    with pytest.raises(KeyError):
        prepare()  # the vocabulary is known now
    assert done == ["cuda", recipe, "cuda"]
    vocabulary_cache.recall_or_learn(["another longer text"], {}, lambda: b"learned")
    assert len(done) == 3
