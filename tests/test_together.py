"""Runs that train as one are the runs that train alone: weights, metrics, best and last checkpoints."""

import json
from dataclasses import replace

import pytest
import torch
from small_models import LM, TRANSLATOR, every_mechanism, made

from attnlab.models.members import Crew, stack_members, unstack_member
from attnlab.tasks import find_task
from attnlab.training import together
from attnlab.training.loop import TrainConfig
from attnlab.training.member_step import EagerMembers, MemberFlat, MemberObjective, RowOptimisers
from attnlab.training.optimisers import build_optimiser, compute_learning_rate, set_learning_rate
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_folder import read_checkpoint
from attnlab.training.runs import start_run
from attnlab.training.step import Eager, Flat, Objective

UPDATES = 20
OWN = [  # numbers that differ between members
    {"seed": 3, "lr": 1e-2, "label_smoothing": 0.1, "clip": 0.5},
    {"seed": 5, "lr": 3e-3, "weight_decay": 0.1, "z_loss": 1e-3},
]


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw_batches(member):
    torch.manual_seed(200 + member)
    return [torch.randint(1, 19, (3, 5)) for _ in range(UPDATES)], [torch.randint(1, 19, (3, 5)) for _ in range(UPDATES)]


def train_alone(model, config, batches):
    flat = Flat(model, torch.float64)
    objective = Objective(model, smoothing=config.label_smoothing, z_loss=config.z_loss)
    stepper = Eager(objective, flat, build_optimiser(flat, config), clip=config.clip)
    torch.manual_seed(config.seed)
    for step, (tokens, targets) in enumerate(zip(*batches, strict=True)):
        stepper.accumulate([tokens], targets, 1 / targets.numel())
        set_learning_rate(stepper.optimizer, compute_learning_rate(config, step))
        stepper.apply()
    return dict(model.named_parameters())


@every_mechanism
def test_twenty_updates_leave_the_weights_of_training_alone(double, name):
    configs = [TrainConfig(steps=UPDATES, warmup=5, eps=1e-3, optimiser="adamw", **own) for own in OWN]
    options = {"dropout": 0.2, "attention_dropout": 0.1}
    models = [made(LM, name, **options).train() for _ in configs]
    batches = [draw_batches(member) for member in range(len(configs))]
    crew = Crew([config.seed for config in configs])
    stacked = stack_members(models, crew)
    flat = MemberFlat(stacked, len(configs), torch.float64)
    stepper = EagerMembers(
        MemberObjective(stacked, configs), flat, RowOptimisers(flat, configs), clips=[c.clip for c in configs]
    )
    for step in range(UPDATES):
        crew.sizes = {"decoder": [(3, 5)] * len(configs)}
        tokens, targets = (torch.cat([batch[side][step] for batch in batches]) for side in range(2))
        stepper.accumulate([tokens], targets, torch.full((len(configs),), 1 / 15))
        stepper.optimizer.set_rates([compute_learning_rate(config, step) for config in configs])
        stepper.apply()
    for member, (model, config) in enumerate(zip(models, configs, strict=True)):
        alone, among = train_alone(model, config, batches[member]), unstack_member(stacked, member)
        for at, weight in alone.items():
            torch.testing.assert_close(among[at], weight, rtol=1e-8, atol=1e-8)
