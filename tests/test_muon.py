"""Muon: its update against torch's, its iteration against singular values, its checkpoints, and what it refuses."""

import json

import pytest
import torch
from in_process import run_attnlab as run
from safetensors.torch import load_file

from attnlab.models.transformer import TransformerConfig, build
from attnlab.training import optimisers as optimise
from attnlab.training.loop import TrainConfig
from attnlab.training.muon import ITERATIONS, QUINTIC, list_matrices, orthogonalise
from attnlab.training.objective import Objective
from attnlab.training.step import Eager, Flat

SMALL = {"vocabulary": 11, "layers": 2, "width": 24, "heads": 3, "feed_forward": 40, "dropout": 0.0}
COPYING = ["synthetic", "data=permutation", "length=5", "examples=64", "held_out=20", "batch_examples=16"]
COPYING += ["optimiser=muon", "device=cpu"]


def build_small(**changes):
    torch.manual_seed(3)
    return build(TransformerConfig(model="language-model", **SMALL | changes))


def make_stepper(model, **changes):
    config = TrainConfig(optimiser="muon", betas=(0.9, 0.98), weight_decay=0.1, **changes)
    matrices = list_matrices(model)
    flat = Flat(model, torch.float32, first=matrices)
    return Eager(Objective(model), flat, optimise.build_optimiser(flat, config, matrices), clip=0.0)


def update(stepper, seed, scale=0.1):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 11, (4, 7), generator=draw)
    stepper.accumulate([tokens[:, :-1]], tokens[:, 1:], scale)
    optimise.set_learning_rate(stepper.optimizer, 0.01, 0.02)
    stepper.apply()
    return tokens


@pytest.mark.parametrize("shape", [(5, 13), (13, 5), (7, 7)])
def test_the_iteration_is_the_quintic_of_the_singular_values(shape):
    matrices = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    s = s / s.norm(dim=1, keepdim=True)
    for _ in range(ITERATIONS):
        s = QUINTIC[0] * s + QUINTIC[1] * s**3 + QUINTIC[2] * s**5
    torch.testing.assert_close(orthogonalise(matrices), u * s.unsqueeze(1) @ v, atol=1e-9, rtol=1e-9)
    assert orthogonalise(torch.zeros(1, *shape)).abs().max() == 0


def test_three_updates_are_those_of_torch(monkeypatch):
    """torch.optim.Muon iterates in bfloat16, which the patch turns into float32; torch.optim.AdamW trains the rest."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    model, twin = build_small(attention="sink"), build_small(attention="sink")
    matrices = list_matrices(model)
    named = dict(twin.named_parameters())
    muon = torch.optim.Muon([named[name] for name in matrices], lr=0.02, momentum=0.95, weight_decay=0.1)
    rest = [p for name, p in named.items() if name not in matrices]
    vectors = [p for p in rest if p.squeeze().dim() < 2]  # norm gains, biases, and b of the sinks (h,1,1)
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": [p for p in rest if p.squeeze().dim() > 1]}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, foreach=False)
    stepper, before = make_stepper(model), {name: p.detach().clone() for name, p in named.items()}
    for seed in range(3):
        tokens = update(stepper, seed)
        loss = Objective(twin)([tokens[:, :-1]], tokens[:, 1:]) * 0.1
        for optimizer in (muon, adamw):
            optimizer.zero_grad()
        loss.backward()
        muon.step()
        adamw.step()
    for name, mine in model.named_parameters():
        ours, theirs = mine - before[name], named[name] - before[name]
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, which Adam blows up
            assert (ours - theirs).norm() < 1e-4 * theirs.norm(), name


def test_matrices_of_blocks_are_trained_by_muon_and_nothing_else():
    model = build_small(attention="coda")
    names = list_matrices(model)
    assert len(names) == 2 * (4 + 2)
    assert all(name.startswith("decoder.blocks.") and name.endswith(".weight") for name in names)
    assert not any("mechanism" in name or "norm" in name for name in names)
    shapes = [tuple(dict(model.named_parameters())[name].shape) for name in names]
    assert shapes == sorted(shapes)


def test_a_gradient_that_is_not_finite_changes_nothing():
    stepper = make_stepper(build_small())
    update(stepper, 0)
    before = stepper.flat.master.detach().clone(), optimise.read_state(stepper.optimizer)["momentum_buffer"].clone()
    update(stepper, 1, scale=float("nan"))
    assert torch.equal(stepper.flat.master, before[0])
    assert torch.equal(optimise.read_state(stepper.optimizer)["momentum_buffer"], before[1])
    assert float(stepper.bad) == 1.0


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path):
    words = [*COPYING, "width=24", "layers=1", "heads=3", "feed_forward=40", "schedule=constant", "warmup=0"]
    for folder, steps in (("whole", [8]), ("halved", [4, 8])):
        for number in steps:
            done = run("train", *words, "log_every=2", f"steps={number}", f"out={tmp_path / folder}")
            assert done.returncode == 0, done.stderr
    whole, halved = (load_file(tmp_path / folder / "last.safetensors") for folder in ("whole", "halved"))
    assert whole.keys() == halved.keys()
    assert all(torch.equal(whole[name], halved[name]) for name in whole)
    assert "optimiser/momentum_buffer" in whole
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert {row.get("muon_lr") for row in map(json.loads, lines) if "lr" in row} == {0.02}
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["training"]["muon_lr"] == 0.02


def test_weight_decay_alone_shrinks_matrices_and_no_vectors():
    model = build_small(attention="sink")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    stepper = make_stepper(model)
    optimise.set_learning_rate(stepper.optimizer, 0.01, 0.02)
    stepper.flat.grad.zero_()
    stepper.optimizer.step()
    found = {name: round(p.flatten()[0].item(), 4) for name, p in model.named_parameters()}
    matrices = list_matrices(model)
    stated = {
        name: 0.998 if name in matrices else 0.999 if p.squeeze().dim() > 1 else 1.0
        for name, p in model.named_parameters()
    }
    assert found == stated
    assert set(found.values()) == {0.998, 0.999, 1.0}


def test_a_model_without_blocks_is_refused(tmp_path):
    done = run("train", *COPYING, "steps=1", "model=lstm-copy", f"out={tmp_path / 'run'}")
    assert done.returncode == 2
    assert "muon" in done.stderr
