"""An update is what torch's optimisers do, captured or not; and what is not finite is never applied."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup, get_inverse_sqrt_schedule

from attnlab.models.transformer import TransformerConfig, build
from attnlab.training import optimisers as optimise
from attnlab.training.loop import TrainConfig
from attnlab.training.muon import list_matrices
from attnlab.training.objective import Objective
from attnlab.training.step import Captured, Eager, Flat, choose_widths, pad_tensors


def tiny(**changes):
    values = {"model": "translator", "vocabulary": 11, "target_vocabulary": 13, "layers": 1, "width": 8, "heads": 2}
    return build(TransformerConfig(**values | {"feed_forward": 16, "dropout": 0.0} | changes))


@pytest.mark.parametrize("kind", ["adam", "adamw", "nag"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_an_update_is_what_torch_does_parameter_by_parameter(kind, clip):
    """Against torch's plain, unfused optimisers on the mean loss; two batches accumulated, three updates."""
    model = tiny().double()
    twin = tiny().double()
    twin.load_state_dict(model.state_dict())
    model.float(), twin.float()
    plain = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, foreach=False),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, foreach=False),
        "nag": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False),
    }[kind](twin.parameters())
    flat = Flat(model, torch.float32)
    optimizer = optimise.build_optimiser(flat, TrainConfig(optimiser=kind, momentum=0.9, weight_decay=0.1))
    stepper = Eager(Objective(model, smoothing=[0.1]), flat, optimizer, clip=clip)
    for _ in range(3):
        batches = [
            (torch.randint(1, 11, (3, 5)), torch.randint(1, 13, (3, n)), torch.randint(0, 13, (3, n))) for n in (4, 7)
        ]
        total = sum(int((goal != 0).sum()) for *_, goal in batches)
        for source, target, goal in batches:
            stepper.accumulate([source, target], goal, 1 / total)
        optimise.set_learning_rate(optimizer, 0.01)
        stepper.apply()
        logits = torch.cat([twin(source, target).flatten(0, 1) for source, target, _ in batches])
        goals = torch.cat([goal.flatten() for *_, goal in batches])
        loss = nn.functional.cross_entropy(logits, goals, ignore_index=0, label_smoothing=0.1)
        plain.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(twin.parameters(), clip)
        plain.step()
        assert stepper.read_loss() / total == pytest.approx(loss.item(), rel=1e-5)
    source, target, _ = batches[0]
    torch.testing.assert_close(model(source, target), twin(source, target), atol=2e-5, rtol=1e-4)
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, which Adam blows up
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4, msg=name)


def test_what_is_not_finite_is_never_applied_and_stays_noticed():
    model = tiny()
    flat = Flat(model, torch.float32)
    optimizer = optimise.build_optimiser(flat, TrainConfig())
    stepper = Eager(Objective(model), flat, optimizer, clip=0.0)
    batch = [torch.randint(1, 11, (3, 5)), torch.randint(1, 13, (3, 4))], torch.randint(1, 13, (3, 4))
    optimise.set_learning_rate(optimizer, 0.01)
    scales = [0.1, 0.1, math.nan, 0.1]
    masters = []
    for scale in scales:
        stepper.accumulate(*batch, scale)
        stepper.apply()
        masters.append(flat.master.detach().clone())
    assert not torch.equal(masters[0], masters[1])
    assert torch.equal(masters[1], masters[2])
    assert torch.equal(masters[1], masters[3])
    assert (float(stepper.bad), int(stepper.updates)) == (1.0, 2)


def test_a_model_in_bf16_is_a_copy_of_a_float32_master():
    model = tiny()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = Flat(model, torch.bfloat16)
    for name, view in flat.views(flat.master.data).items():
        assert torch.equal(view, before[name])
        assert torch.equal(dict(model.named_parameters())[name], before[name].bfloat16())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("rungs", [1, 2, 3])
def test_the_ladder_pads_least(rungs):
    """Against every choice of widths."""
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    chosen = choose_widths(lengths, rungs, multiple=1)
    cost = chosen[np.searchsorted(chosen, lengths)].sum()
    choices = itertools.combinations(range(1, lengths.max()), rungs - 1)
    best = min(np.array([*c, lengths.max()])[np.searchsorted([*c, lengths.max()], lengths)].sum() for c in choices)
    assert cost == best


@pytest.mark.parametrize("batches", [1, 2])
def test_the_ladder_of_batches_pads_least_what_is_as_wide_as_its_longest(batches):
    """Against every choice of widths, over every batch of three, or every two of them."""
    lengths, rungs = np.array([1, 2, 3, 7, 11, 13, 20, 25, 32, 34]), 3
    longest = np.array(list(itertools.combinations(lengths, 3))).max(1)
    if batches == 2:
        longest = np.maximum(longest[:, None], longest[None, :]).flatten()

    def padded(widths):
        return widths[np.searchsorted(widths, longest)].sum()

    chosen = padded(choose_widths(lengths, rungs, multiple=1, together=3, batches=batches))
    assert chosen == min(padded(np.array([*c, 34])) for c in itertools.combinations(range(1, 34), rungs - 1))
    assert padded(choose_widths(lengths, rungs, multiple=1)) > chosen
    assert padded(choose_widths(lengths, rungs, multiple=1, together=3, batches=3 - batches)) > chosen


def test_padding_to_a_shape_changes_no_loss():
    objective = Objective(tiny(attention="coda").eval().double())
    inputs, goal = [torch.randint(1, 11, (3, 5)), torch.randint(1, 13, (3, 4))], torch.randint(0, 13, (3, 4))
    *wider, target = pad_tensors([*inputs, goal], rows=5, width=8)
    assert [tuple(x.shape) for x in (*wider, target)] == [(5, 8)] * 3
    torch.testing.assert_close(objective(wider, target), objective(inputs, goal))


def test_schedules_are_those_of_transformers():
    steps, warmup = 50, 7
    for schedule, make in (
        ("inverse-sqrt", lambda o: get_inverse_sqrt_schedule(o, warmup)),
        ("cosine", lambda o: get_cosine_schedule_with_warmup(o, warmup, steps)),
    ):
        config = TrainConfig(schedule=schedule, lr=0.5, warmup=warmup, warmup_start=0.0, steps=steps)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        theirs = make(optimizer)
        for step in range(steps):
            ours = optimise.compute_learning_rate(config, step)
            assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-6), step
            optimizer.step()
            theirs.step()


def test_the_last_update_of_a_cosine_is_its_smallest():
    """A restart belongs to the update after the last."""
    config = TrainConfig(schedule="cosine", lr=2e-3, steps=400, warmup=40)
    rates = [optimise.compute_learning_rate(config, step) for step in range(config.steps)]
    assert rates.index(min(rates[40:])) == 399
    assert rates[399] < 1e-6


def test_cosine_restarts_grow_and_shrink():
    """First period 10, then 20, at three quarters of the rate; by hand at the ends and in the middle."""
    restarts = {"period": 10, "period_multiply": 2.0, "period_shrink": 0.75}
    config = TrainConfig(schedule="cosine", lr=1.0, warmup=0, min_lr=0.1, **restarts)
    rates = [optimise.compute_learning_rate(config, step) for step in (5, 10, 20)]
    assert rates == pytest.approx([0.55, 0.75, (0.75 + 0.075) / 2])


@pytest.mark.parametrize("setting", [{"muon_lr": 0.5}, {"muon_momentum": 0.5}, {"decay": 3}])
def test_settings_without_effect_are_refused(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.*no effect"):
        TrainConfig(**setting)


def test_wsd_warms_up_stays_and_decays_to_the_lowest_rate():
    config = TrainConfig(schedule="wsd", lr=1.0, warmup=10, warmup_start=0.0, steps=100, min_lr=0.2)
    rates = [optimise.compute_learning_rate(config, step) for step in (5, 10, 79, 80, 100)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.2 + 0.8 * 20 / 21, 0.2])
    for decay, stated in ((1, [1.0, 1 / 2]), (4, [1.0, 4 / 5, 3 / 5, 2 / 5, 1 / 5])):
        short = TrainConfig(schedule="wsd", lr=1.0, warmup=0, steps=7, decay=decay)
        rates = [optimise.compute_learning_rate(short, step) for step in range(7)]
        assert rates[-len(stated) :] == pytest.approx(stated)
    longer = TrainConfig(schedule="wsd", lr=1.0, warmup=10, warmup_start=0.0, steps=1000, decay=0)
    assert optimise.compute_learning_rate(longer, 999) == 1.0
    with pytest.raises(ValueError, match="decay"):
        TrainConfig(schedule="wsd", steps=100, warmup=50, decay=51)


def test_a_z_loss_adds_the_squared_log_partition_of_scored_targets():
    model = tiny(model="language-model", target_vocabulary=None).eval()
    tokens, targets = torch.randint(1, 11, (3, 5)), torch.randint(0, 11, (3, 5))
    plain, more = (Objective(model, z_loss=[z])([tokens], targets) for z in (0.0, 0.01))
    partition = model(tokens).exp().sum(-1).log()[targets != 0]
    torch.testing.assert_close(more - plain, 0.01 * (partition**2).sum())


def test_a_first_step_that_is_skipped_leaves_no_junk_behind():
    """The fused nag allocates its momentum at the first step, and does not write it where that step is skipped."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        flat = Flat(nn.Linear(5, 1), torch.float32)
        master = flat.master
        master.data.zero_()
        nag = optimise.build_optimiser(flat, TrainConfig(optimiser="nag", momentum=0.9))
        optimise.set_learning_rate(nag, 0.1)
        nag.found_inf, nag.grad_scale = torch.ones(()), None
        flat.grad.fill_(1.0)
        nag.step()
        nag.found_inf.zero_()
        nag.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.allclose(master.detach(), torch.full_like(master, -0.1 * (1 + 0.9)))


def test_a_length_that_fits_is_not_padded_beyond_the_longest():
    assert choose_widths(np.array([100, 37, 5]), 8)[-1] == 100


def test_blocks_are_compiled_for_the_shapes_of_the_context_alone(monkeypatch):
    calls = []

    def note_call(module, **options):
        module._compiled_call_impl = lambda *args, **kwargs: (
            calls.append(type(module)) or module._call_impl(*args, **kwargs)
        )

    monkeypatch.setattr(nn.Module, "compile", note_call)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    objective = Objective(tiny().eval())
    inputs, goal = [torch.ones(2, 5, dtype=torch.long)] * 2, torch.ones(2, 5, dtype=torch.long)
    plain = objective(inputs, goal)
    for _ in range(2):
        with objective.use_compiled():
            assert torch.equal(objective(inputs, goal), plain)
        assert len(calls) == len(objective.model.all_blocks())
        calls.clear()
        assert torch.equal(objective(inputs, goal), plain)
        assert calls == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adam", "adamw", "nag", "muon"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compile_after", [None, 0, 2])
def test_captured_steps_are_eager_ones(kind, accumulate, compile_after):
    torch.manual_seed(0)
    first = tiny().cuda()
    steppers = []
    for make in (Eager, Captured):
        model = tiny().cuda()
        model.load_state_dict(first.state_dict())
        matrices = list_matrices(model) if kind == "muon" else []
        objective, flat = Objective(model, smoothing=[0.1]), Flat(model, torch.float32, first=matrices)
        options = {"compile_after": compile_after} if make is Captured else {}
        config = TrainConfig(optimiser=kind, momentum=0.9, weight_decay=0.1)
        optimizer = optimise.build_optimiser(flat, config, matrices)
        steppers.append(make(objective, flat, optimizer, clip=0.5, **options))
    for step in range(6):
        batches = [
            ([torch.randint(1, 11, (3, n)), torch.randint(1, 13, (3, n))], torch.randint(0, 13, (3, n)))
            for n in (5, 8)[step % 2 :][:1] * accumulate
        ]
        for stepper in steppers:
            optimise.set_learning_rate(stepper.optimizer, 0.01, 0.01)
            for inputs, goal in batches:
                stepper.accumulate(inputs, goal, 0.1)
            stepper.apply()
        mine, theirs = (stepper.flat.views(stepper.flat.master.data) for stepper in steppers)
        for name in mine:
            if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, which Adam blows up
                loose = 5e-3 if kind == "muon" else 2e-5  # Muon iterates in bfloat16
                torch.testing.assert_close(theirs[name], mine[name], atol=loose, rtol=1e-4)
        assert steppers[1].read_loss() == pytest.approx(steppers[0].read_loss(), rel=1e-4)
    assert int(steppers[1].updates) == 6
