"""Runs that train as one are the runs that train alone: weights, metrics, best and last checkpoints."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from representatives import every_kind_and_slowly_all, mark_others_slow
from small_models import LM, made

from attnlab.experiments.engine import make_jobs, train_runs
from attnlab.experiments.joint_recipes import name_group, train_jointly
from attnlab.experiments.plan import Measure, TrainedRun, Workplace
from attnlab.experiments.single_run import is_finished
from attnlab.mechanisms import MECHANISMS
from attnlab.models.crew import Crew
from attnlab.models.members import stack_members, unstack_member
from attnlab.tasks import find_task
from attnlab.training import together
from attnlab.training.loop import TrainConfig
from attnlab.training.member_step import EagerMembers, MemberFlat, RowOptimisers
from attnlab.training.objective import Objective
from attnlab.training.optimisers import build_optimiser, compute_learning_rate, set_learning_rate
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_folder import RunFolder, read_checkpoint
from attnlab.training.runs import start_run
from attnlab.training.step import Eager, Flat

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
    return [torch.randint(1, 19, (3, 5)) for _ in range(UPDATES)], [
        torch.randint(1, 19, (3, 5)) for _ in range(UPDATES)
    ]


def train_alone(model, config, batches):
    flat = Flat(model, torch.float64)
    objective = Objective(model, smoothing=[config.label_smoothing], z_loss=[config.z_loss])
    stepper = Eager(objective, flat, build_optimiser(flat, config), clip=config.clip)
    torch.manual_seed(config.seed)
    for step, (tokens, targets) in enumerate(zip(*batches, strict=True)):
        stepper.accumulate([tokens], targets, 1 / targets.numel())
        set_learning_rate(stepper.optimizer, compute_learning_rate(config, step))
        stepper.apply()
    return dict(model.named_parameters())


@every_kind_and_slowly_all
def test_twenty_updates_leave_the_weights_of_training_alone(double, name):
    configs = [TrainConfig(steps=UPDATES, warmup=5, eps=1e-3, optimiser="adamw", **own) for own in OWN]
    options = {"dropout": 0.2, "attention_dropout": 0.1}
    models = [made(LM, name, **options).train() for _ in configs]
    batches = [draw_batches(member) for member in range(len(configs))]
    crew = Crew([config.seed for config in configs])
    stacked = stack_members(models, crew)
    flat = MemberFlat(stacked, len(configs), torch.float64)
    numbers = {"smoothing": [c.label_smoothing for c in configs], "z_loss": [c.z_loss for c in configs]}
    clips = [config.clip for config in configs]
    stepper = EagerMembers(Objective(stacked, **numbers), flat, RowOptimisers(flat, configs), clips=clips)
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


# Runs in their folders

SMALL = {"data": "lexicon", "examples": "700", "held_out": "70", "width": "16", "layers": "2", "heads": "2",
         "feed_forward": "20", "steps": "16", "batch_tokens": "120", "evaluate_every": "8", "log_every": "4",
         "dropout": "0.1", "warmup": "4", "label_smoothing": "0.1", "clip": "1.0", "eps": "1e-3"}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder, recipe = tmp_path_factory.mktemp("vocabulary"), resolve_recipe("synthetic", SMALL)
    return folder, find_task("synthetic").prepare(recipe.data, folder)


def make_recipes(*own, **shared):
    return [resolve_recipe("synthetic", SMALL | shared | more) for more in own]


def train_in(folder, vocabulary, recipes, device="cpu"):
    folders = [RunFolder(folder / str(number)) for number in range(len(recipes))]
    source, task = vocabulary
    return folders, train_jointly(task, recipes, folders, source, torch.device(device))


FIRST = ["softmax", "coda", "dagpam", "sink", "talking-heads", "resformer"]
first_and_slowly_all = pytest.mark.parametrize("name", mark_others_slow(FIRST))


@pytest.mark.gpu
@pytest.mark.parametrize("capture", ["yes", "no"])
@first_and_slowly_all
def test_on_a_gpu_dropout_and_noise_are_those_of_training_alone(tmp_path, vocabulary, name, capture):
    shared = {"attention": name, "attention_dropout": "0.1", "precision": "fp32", "compile": "no"}
    shared |= {"cross_attention": "softmax"} if MECHANISMS[name].self_only else {}
    recipes = make_recipes({"seed": "1"}, {"seed": "2", "lr": "1e-3", "dropout": "0.2"}, **shared, capture=capture)
    folders, finished = train_in(tmp_path / "among", vocabulary, recipes, "cuda")
    assert finished == [True, True]
    for number, (recipe, among) in enumerate(zip(recipes, folders, strict=True)):
        alone, _ = start_run(recipe, out=tmp_path / f"alone{number}", device="cuda", report=ignore, note=ignore)
        for row, other in zip(among.metrics(), alone.metrics(), strict=True):
            for key in row.keys() - {"tokens_per_second"}:
                assert row[key] == pytest.approx(other[key], rel=1e-3), key


@pytest.mark.parametrize("attentions", [("coda", "coda"), ("dagpam(initial=0.1)", "dagpam(initial=0.7)")], ids=str)
def test_a_run_among_others_leaves_what_it_leaves_alone(tmp_path, vocabulary, attentions):
    own = [{"seed": "1"}, {"seed": "2", "lr": "1e-3", "dropout": "0.2"}]
    given = (each | {"attention": name, "evaluate_at": "0"} for each, name in zip(own, attentions, strict=True))
    folders, finished = train_in(tmp_path / "among", vocabulary, recipes := make_recipes(*given))
    assert finished == [True, True]
    assert folders[0].metrics()[0]["step"] == 0
    for number, (recipe, among) in enumerate(zip(recipes, folders, strict=True)):
        alone, _ = start_run(recipe, out=tmp_path / f"alone{number}", device="cpu", report=ignore, note=ignore)
        assert among.config() == alone.config()
        mine, theirs = among.metrics(), alone.metrics()
        assert [row.keys() for row in mine] == [row.keys() for row in theirs]
        for row, other in zip(mine, theirs, strict=True):
            for key in row.keys() - {"tokens_per_second"}:
                assert row[key] == pytest.approx(other[key], rel=1e-4), key
        for name in ("last", "best"):
            own, other = (read_checkpoint(getattr(folder, name)) for folder in (among, alone))
            assert own.tensors.keys() == other.tensors.keys()
            assert own.state.keys() == other.state.keys()
            for at, x in own.part("model/").items():
                torch.testing.assert_close(x, other.part("model/")[at], rtol=1e-3, atol=1e-4)


def test_a_run_that_was_among_others_goes_on_alone(tmp_path, vocabulary):
    first, second = make_recipes({"seed": "1"}, {"seed": "2"})
    folders, _ = train_in(tmp_path, vocabulary, [first, second])
    longer = replace(first, training=replace(first.training, steps=20))
    folder, result = start_run(longer, out=folders[0].path, device="cpu", report=ignore, note=ignore)
    whole, _ = start_run(longer, out=tmp_path / "whole", device="cpu", report=ignore, note=ignore)
    assert result.step == 20
    assert folder.metrics()[-1]["valid_loss"] == pytest.approx(whole.metrics()[-1]["valid_loss"], rel=1e-3)


def test_nothing_is_lost_when_runs_are_stopped(tmp_path, vocabulary, monkeypatch):
    recipes = make_recipes({"seed": "1"}, {"seed": "2"}, attention="coda")
    whole, _ = train_in(tmp_path / "whole", vocabulary, recipes)
    update = together.JointTraining._update

    def stop_at_ten(self):
        update(self)
        if self.step == 10:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(together.JointTraining, "_update", stop_at_ten)
    with pytest.raises(KeyboardInterrupt):
        train_in(tmp_path / "halted", vocabulary, recipes)
    monkeypatch.setattr(together.JointTraining, "_update", update)
    file = tmp_path / "halted" / "1" / "hashes.json"
    before = file.read_text()
    file.write_text('{"vocabulary": {"vocabulary.model": "0"}, "data": {}}')
    with pytest.raises(ValueError, match=r"vocabulary\.model is missing; restore it"):
        train_in(tmp_path / "halted", vocabulary, recipes)
    file.write_text(before)
    halted, finished = train_in(tmp_path / "halted", vocabulary, recipes)
    assert finished == [True, True]
    for mine, theirs in zip(halted, whole, strict=True):
        assert [drop_clock(row) for row in mine.metrics()] == [drop_clock(row) for row in theirs.metrics()]
        own, other = (read_checkpoint(folder.last) for folder in (mine, theirs))
        assert all(torch.equal(x, other.tensors[at]) for at, x in own.tensors.items())
    assert not list((tmp_path / "halted").glob("as-one-*"))


def test_killed_runs_resume_from_a_checkpoint_that_was_asked_for(tmp_path, vocabulary, monkeypatch):
    """However the path of their folder is written."""
    monkeypatch.setattr(together, "LEAST_S", 0.0)
    monkeypatch.chdir(tmp_path)
    recipes = make_recipes({"seed": "1"}, {"seed": "2"}, checkpoint_every="4")
    update, steps = together.JointTraining._update, []

    def die_at_ten(self):
        steps.append(self.step)
        if self.step == 10 and steps.count(10) == 1:
            raise MemoryError("killed")
        update(self)

    monkeypatch.setattr(together.JointTraining, "_update", die_at_ten)
    with pytest.raises(MemoryError):
        train_in(Path("killed"), vocabulary, recipes)
    _, finished = train_in(tmp_path / "killed", vocabulary, recipes)
    assert finished == [True, True]
    assert steps == [*range(11), *range(8, 16)]
    assert not list((tmp_path / "killed").glob("as-one-*"))


def test_too_little_memory_is_one_line(tmp_path, vocabulary, monkeypatch):
    def fail(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …\nSee …")

    monkeypatch.setattr(together.JointTraining, "_update", fail)
    recipes = make_recipes({"seed": "1"}, {"seed": "2"})
    with pytest.raises(ValueError, match=r"^not enough memory for 2 runs as one; train fewer at once, or lower batch_"):
        train_in(tmp_path, vocabulary, recipes)


def test_a_population_of_nothing_is_refused(tmp_path, vocabulary):
    with pytest.raises(ValueError, match="at least one recipe"):
        train_in(tmp_path, vocabulary, [])


def test_a_member_that_diverges_leaves_the_others_as_they_are(tmp_path, vocabulary):
    good, bad = make_recipes({"seed": "1"}, {"seed": "2", "lr": "1e30", "clip": "0"})
    with pytest.warns(UserWarning, match="not finite"):
        folders, finished = train_in(tmp_path / "two", vocabulary, [good, bad])
    assert finished == [True, False]
    alone, _ = train_in(tmp_path / "one", vocabulary, [good])
    assert drop_clock(folders[0].metrics()[-1]) == pytest.approx(drop_clock(alone[0].metrics()[-1]), rel=1e-4)
    assert not is_finished(folders[1])


OTHERS = {"steps": "17", "optimiser": "muon", "width": "18", "heads": "4", "layers": "1", "tie": "none", "norm": "post",
          "attention": "cog", "logit_cap": "3", "examples": "50", "batch_tokens": "90"}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), OTHERS.items())
def test_what_cannot_train_as_one_is_said(tmp_path, vocabulary, key, value):
    recipes = make_recipes({"seed": "1"}, {"seed": "2"} | {key: value})
    with pytest.raises(ValueError, match=rf"run 1 and run 2 cannot train as one: .*{key}=\S+ and {key}={value}"):
        train_in(tmp_path, vocabulary, recipes)
    assert not list(tmp_path.iterdir())


def test_members_of_one_seed_may_differ_in_any_number_of_their_own(tmp_path, vocabulary):
    recipes = make_recipes({"dropout": "0"}, {"dropout": "0.5"}, {"lr": "1e-2"})
    assert train_in(tmp_path, vocabulary, recipes)[1] == [True] * 3
    with pytest.raises(ValueError, match="two of these runs are the same"):
        train_in(tmp_path / "same", vocabulary, make_recipes({}, {"lr": "1e-2"}, {}))


def test_recipes_share_a_group_if_they_differ_in_plain_numbers():
    first, *others = make_recipes(
        {"seed": "1"}, {"seed": "2"}, {"lr": "1e-2"}, {"dropout": "0.3"}, {"label_smoothing": "0"}, {"clip": "0"}
    )
    assert {name_group(recipe) for recipe in (first, *others)} == {name_group(first)}
    signed = make_recipes({"attention": "dagpam(initial=0.1)"}, {"attention": "dagpam", "initial": "0.7"})
    assert name_group(signed[0]) == name_group(signed[1]) != name_group(first)
    others = [{"attention": "coda"}, {"attention": "coda(alpha=2)"}, {"attention": "softmax,sigmoid"}]
    assert len({name_group(recipe) for recipe in make_recipes(*others)}) == len(others)
    apart = make_recipes({"width": "18"}, {"attention": "coda"}, {"steps": "17"}, {"heads": "4"})
    assert all(name_group(recipe) not in (None, name_group(first)) for recipe in apart)
    assert name_group(*make_recipes({"optimiser": "muon"})) is None


def drop_clock(row):
    return {key: x for key, x in row.items() if key != "tokens_per_second"}


def ignore(_):
    """Show nothing."""


def test_the_engine_groups_runs_on_a_gpu_only_and_not_if_told_otherwise(tmp_path):
    runs = [TrainedRun(recipe, Measure("loss", len)) for recipe in make_recipes({"seed": "1"}, {"lr": "1e-3"})]
    first, second = runs
    gpu = Workplace.at(tmp_path, device="cuda")
    assert first.group(gpu) == second.group(gpu) != None  # noqa: E711
    assert first.group(Workplace.at(tmp_path)) is None
    apart = Workplace.at(tmp_path, device="cuda", population=False)
    assert [len(job.arguments[0]) for job in make_jobs(runs, apart) if job.function is train_runs] == []
