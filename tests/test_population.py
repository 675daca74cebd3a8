"""A population is its members: each seed ends as it would alone, whatever happens to the others."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attnlab.experiments.population import IGNORED, Experiment, Population
from attnlab.experiments.population_training import FILE, train_population
from attnlab.experiments.population_updates import Updates
from attnlab.models.lstm import build
from attnlab.models.lstm_config import SETTINGS
from attnlab.studies.snell2021.copying import CopyExperiment, attend
from attnlab.studies.snell2021.keyword import KeywordExperiment
from attnlab.studies.snell2021.prediction import list_distributions

CPU = torch.device("cpu")
SMALL = CopyExperiment(data="subset", length=5, types=7, width=13, steps=6, examples=11, held_out=17, every=3)


def alone(experiment, seed):
    """Plain PyTorch: the ordinary model, Adam, one seed."""
    model, feed = experiment.model(seed).train(), experiment.feed([seed], CPU)
    adam = torch.optim.Adam(model.parameters(), lr=experiment.lr)
    for step in range(experiment.steps):
        *inputs, targets = (x[0] for x in feed(step)[0])
        loss = F.cross_entropy(model(*inputs).flatten(0, -2), targets.flatten())
        adam.zero_grad()
        loss.backward()
        if experiment.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), experiment.clip)
        adam.step()
    return dict(model.named_parameters())


def together(experiment, seeds):
    """All seeds in one stack, as on a GPU."""
    population = Population([experiment.model(seed) for seed in seeds], CPU)
    updates = Updates(population, seeds=seeds, lr=experiment.lr, clip=experiment.clip)
    feed = experiment.feed(seeds, CPU)
    for step in range(experiment.steps):
        updates(*feed(step))
    return population, updates


@pytest.mark.parametrize("cut", [2, 4, 9])
def test_a_batch_passed_in_two_is_one_batch(cut):
    case, seeds = Clipped(data="subset", length=5, types=7, width=13, steps=6, examples=11), [3, 8]
    feed, whole, parted = case.feed(seeds, CPU), *(Population([case.model(s) for s in seeds], CPU) for _ in range(2))
    by_whole, by_parts = (Updates(each, seeds=seeds, lr=case.lr, clip=case.clip) for each in (whole, parted))
    for step in range(case.steps):
        ((source, given, targets),) = feed(step)
        targets[1, cut:] = IGNORED  # of the second seed, the second part has nothing to score
        targets[0, 0, 2:] = IGNORED  # of the first, the parts have unlike numbers
        if step == 2:
            targets[1] = IGNORED  # nothing at all
        batch = source, given, targets
        by_whole(batch)
        by_parts(tuple(x[:, :cut] for x in batch), tuple(x[:, cut:] for x in batch))
    assert by_parts.finite.all()
    for name, x in whole.weights.items():
        torch.testing.assert_close(parted.weights[name], x, atol=2e-6, rtol=2e-5, msg=name)


def test_an_update_is_made_from_batches_not_tensors():
    population = Population([SMALL.model(0)], CPU)
    (batch,) = SMALL.feed([0], CPU)(0)
    with pytest.raises(TypeError, match="each a tuple of inputs and targets"):
        Updates(population, seeds=[0], lr=1e-3, clip=0.0)(*batch)


@dataclass(frozen=True, kw_only=True)
class Clipped(CopyExperiment):
    clip: float = 0.05


@pytest.mark.parametrize(
    "experiment",
    [
        SMALL,
        replace(SMALL, data="mixture", types=5),
        replace(SMALL, heads=3),
        Clipped(data="permutations", length=5, types=5, width=13, steps=6, examples=11),
        KeywordExperiment(length=7, types=5, width=11, steps=5, examples=13),
        KeywordExperiment(length=7, types=5, width=11, steps=5, examples=13, bidirectional=False),
    ],
    ids=["copy", "mixture", "heads", "clipped", "keyword", "keyword-one-way"],
)
def test_each_seed_ends_as_it_would_alone(experiment):
    seeds = [3, 0, 8]
    population, _ = together(experiment, seeds)
    for index, seed in enumerate(seeds):
        for name, expected in alone(experiment, seed).items():
            if (
                name != "attention.score.bias"
            ):  # it shifts all logits alike: its gradient is rounding, which Adam blows up
                torch.testing.assert_close(population.weights[name][index], expected, atol=2e-6, rtol=2e-5, msg=name)


@pytest.mark.parametrize("changes", [{}, {"bidirectional": True, "layers": 2, "heads": 2}, {"combine": "add"}])
def test_in_float64_weights_are_those_of_training_alone(changes):
    """To 1e-8 after 20 updates, also where the projection of the context is folded into the hidden layer."""
    config = replace(SETTINGS["copy"], vocabulary=9, width=12, embedding_width=10, **changes)
    models, batches = [], torch.randint(1, 9, (20, 3, 2, 5, 6), generator=torch.Generator().manual_seed(1))
    for seed in (4, 7):
        torch.manual_seed(seed)
        models.append(build(config).double().train())
    population = Population(models, CPU)
    updates = Updates(population, seeds=(4, 7), lr=1e-2, clip=1.0)
    adams = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    for source, given, targets in batches:
        updates((source, given, targets))
        for k, (model, adam) in enumerate(zip(models, adams, strict=True)):
            adam.zero_grad()
            F.cross_entropy(model(source[k], given[k]).flatten(0, 1), targets[k].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
    for k, model in enumerate(models):
        for name, expected in model.named_parameters():
            torch.testing.assert_close(population.weights[name][k], expected, atol=1e-8, rtol=0, msg=name)


class Sizes(TorchDispatchMode):
    """How many numbers each result has."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        owned = not func.is_view and isinstance(made, torch.Tensor)
        self.found += [(func.__name__, made.numel())] * owned
        return made


def test_weights_are_not_repeated_for_every_example():
    """Of 3 models with 7 × 64 weights a map of 6 × 5 tokens needs no more than its weights and its results."""
    torch.manual_seed(1)
    models = [torch.nn.Linear(64, 7) for _ in range(3)]
    population = Population(models, CPU)
    x = torch.randn(3, 6, 5, 64)
    with Sizes() as sizes:
        made = population.map(lambda model, x: model(x), x)
        grads = torch.autograd.grad(made.square().sum(), list(population.weights.values()))
    assert max(numel for _, numel in sizes.found) <= x.numel()
    expected = torch.stack([model(each) for model, each in zip(models, x, strict=True)])
    torch.testing.assert_close(made, expected)
    wanted = torch.autograd.grad(expected.square().sum(), [model.weight for model in models])
    torch.testing.assert_close(grads[0], torch.stack(wanted))


def test_a_map_without_bias_or_of_one_vector_is_the_same_in_a_population():
    for bias, shape in ((False, (4, 5)), (True, (5,)), (True, (2, 3, 5))):
        models = [torch.nn.Linear(5, 7, bias=bias) for _ in range(3)]
        x = torch.randn(3, *shape)
        made = Population(models, CPU).map(lambda model, x: model(x), x)
        torch.testing.assert_close(made, torch.stack([model(each) for model, each in zip(models, x, strict=True)]))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"data": "subst"}, "did you mean 'subset'"), ({"length": 9}, "length"), ({"length": 0}, "length")],
)
def test_a_distribution_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        replace(SMALL, **wrong)


def test_a_seed_that_fails_is_marked_keeps_its_weights_and_the_others_go_on():
    seeds, experiment = [1, 2], SMALL
    population = Population([experiment.model(seed) for seed in seeds], CPU)
    updates, feed = Updates(population, seeds=seeds, lr=experiment.lr, clip=0.0), experiment.feed(seeds, CPU)
    for step in range(experiment.steps):
        if step == 3:  # when its momentum would carry it on
            with torch.no_grad():
                population.weights["readout.bias"][0, 3] = torch.nan
            before = {name: x[0].detach().clone() for name, x in population.weights.items()}
        updates(*feed(step))
    assert updates.finite.tolist() == [False, True]
    for name, expected in alone(experiment, 2).items():
        torch.testing.assert_close(population.weights[name][0], before[name], atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(population.weights[name][1], expected, atol=2e-6, rtol=2e-5)


def test_a_member_is_an_ordinary_model_with_its_weights():
    population, _ = together(SMALL, [4, 5])
    source, given, _ = SMALL.draw([4, 5], 77, 3, CPU)
    logits, weights = population.map(attend, source, given)
    member = population.get_member(1)
    torch.testing.assert_close(member(source[1], given[1]), logits[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_a_killed_run_goes_on_where_it_stood(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Stopping(CopyExperiment):
        checkpoint_every: int = 2

    values = {"data": "subset", "length": 5, "types": 7, "width": 13, "steps": 6, "examples": 11, "every": 3}
    whole = train_population(Stopping(**values), [0, 1], device=CPU)

    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_population(Stopping(**values), [0, 1], device=CPU, folder=tmp_path, progress=stop)
    assert (tmp_path / FILE).exists()
    steps = []
    again = train_population(
        Stopping(**values), [0, 1], device=CPU, folder=tmp_path, progress=lambda d, _: steps.append(d)
    )
    assert steps[0] == 4  # the last checkpoint, not the start
    assert again.steps == whole.steps == (0, 3, 6)
    for name in whole.weights:
        assert torch.equal(again.weights[name], whole.weights[name])
    for name in whole.measures:
        assert torch.equal(again.measures[name], whole.measures[name])


@dataclass(frozen=True, kw_only=True)
class Dropping(CopyExperiment):
    """Two layers with dropout between them."""

    checkpoint_every: int = 2

    def model(self, seed):
        torch.manual_seed(seed)
        sizes = {"vocabulary": self.words, "width": self.width, "embedding_width": self.width, "layers": 2}
        return build(replace(SETTINGS["translation"], dropout=0.4, **sizes))


def test_dropout_is_each_seed_s_own_whatever_its_company(tmp_path):
    values = {"data": "subset", "length": 5, "types": 7, "width": 13, "steps": 6, "examples": 11, "every": 3}
    both, _ = together(Dropping(**values), [3, 8])
    for index, seed in enumerate((3, 8)):
        one, updates = together(Dropping(**values), [seed])
        for name, x in one.weights.items():
            torch.testing.assert_close(both.weights[name][index], x[0], atol=2e-6, rtol=2e-5, msg=name)
    (batch,) = Dropping(**values).feed([8], CPU)(0)
    masks = updates.masks.draw(batch)
    assert set(masks) == {"encoder.dropout.mask", "decoder.dropout.mask"}
    assert masks["encoder.dropout.mask"].shape == (1, 11, 6, 26)
    for mask in masks.values():
        assert set(mask.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - 0.4))}
        assert abs(float((mask > 0).float().mean()) - 0.6) < 0.06
    *inputs, targets = batch
    assert not torch.equal(one.losses(inputs, targets, masks), one.losses(inputs, targets))


def test_dropout_goes_on_where_it_stood(tmp_path):
    values = {"data": "subset", "length": 5, "types": 7, "width": 13, "steps": 6, "examples": 11, "every": 3}
    whole = train_population(Dropping(**values), [0], device=CPU)

    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_population(Dropping(**values), [0], device=CPU, folder=tmp_path, progress=stop)
    again = train_population(Dropping(**values), [0], device=CPU, folder=tmp_path)
    for name in whole.weights:
        assert torch.equal(again.weights[name], whole.weights[name])


def test_seeds_trained_as_one_end_as_those_trained_by_themselves(tmp_path):
    together = train_population(SMALL, [0, 1, 2], device=CPU)
    assert together.seeds == (0, 1, 2)
    assert together.measures["accuracy"].shape == (3, 3)
    for index, seed in enumerate(together.seeds):
        by_itself = train_population(SMALL, [seed], device=CPU)
        for name, x in by_itself.weights.items():
            torch.testing.assert_close(together.weights[name][index], x[0], msg=name)
        for name, x in by_itself.measures.items():
            torch.testing.assert_close(together.measures[name][index], x[0], msg=name)
    for _ in range(2):  # the second time from what the first has left
        again = train_population(SMALL, [0, 1, 2], device=CPU, folder=tmp_path)
        assert all(torch.equal(again.weights[name], x) for name, x in together.weights.items())


def test_a_damaged_checkpoint_is_said_and_the_seeds_restart(tmp_path):
    whole = train_population(SMALL, [0], device=CPU, folder=tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:100])
    with pytest.warns(UserWarning, match="restart"):
        again = train_population(SMALL, [0], device=CPU, folder=tmp_path)
    assert all(torch.equal(again.weights[name], x) for name, x in whole.weights.items())


@dataclass(frozen=True, kw_only=True)
class MeasuredLate(CopyExperiment):
    @property
    def measured_at(self):
        return (self.steps + 1,)


def test_too_little_memory_is_one_line(monkeypatch):
    monkeypatch.setattr(Updates, "__call__", lambda *_: torch.empty(2**60))
    with pytest.raises(ValueError, match=r"^not enough memory for 2 seeds as one; train fewer at once"):
        train_population(SMALL, [0, 1], device="cpu")


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="seeds must be different"):
        train_population(SMALL, [1, 1], device=CPU)
    with pytest.raises(ValueError, match="at least one model"):
        Population([], CPU)
    with pytest.raises(ValueError, match="measured_at=7"):
        train_population(MeasuredLate(**vars(SMALL)), [0], device=CPU)
    train_population(SMALL, [0], device=CPU, folder=tmp_path)
    with pytest.raises(ValueError, match="holds seeds"):
        train_population(SMALL, [1], device=CPU, folder=tmp_path)
    with pytest.raises(ValueError, match="holds experiment"):
        train_population(replace(SMALL, lr=0.5), [0], device=CPU, folder=tmp_path)


def test_data_of_a_seed_do_not_depend_on_its_company():
    for case in (SMALL, KeywordExperiment(length=7, types=5)):
        both, one = case.draw([5, 9], 3, 19, CPU), case.draw([9], 3, 19, CPU)
        for x, y in zip(both, one, strict=True):
            assert torch.equal(x[1:], y)


def test_the_distributions_are_what_they_say():
    source, given, targets = SMALL.draw([0], 1, 101, CPU)
    assert (source[..., -1] == 1).all()
    assert (given[..., 0] == 0).all()
    assert torch.equal(source, targets)
    assert all(len(set(row[:-1])) == 5 for row in source[0].tolist())
    function = replace(SMALL, data="function")
    source, _, targets = function.draw([0], 1, 101, CPU)
    assert torch.equal(targets[..., :-1], source[..., function.find_order()])
    assert sorted(function.find_order().tolist()) == list(range(5))
    mixed = replace(SMALL, data="mixture", types=5, mix=0.2)
    sets = (mixed.draw([0], 1, 5000, CPU)[0][0, :, :-1] - 2) // 5
    assert (sets == sets[:, :1]).all()
    assert abs(float((sets[:, 0] == 0).float().mean()) - 0.2) < 0.03
    alike = replace(SMALL, data="mixture", types=5, shared=3)
    drawn = {tuple(sorted(row)) for row in (alike.draw([0], 1, 500, CPU)[0][0, :, :-1] - 2).tolist()}
    assert drawn == {(0, 1, 2, 3, 4), (2, 3, 4, 5, 6)}
    assert alike.words == 9
    for wrong in ({"shared": 5}, {"shared": -1}, {"shared": 1, "data": "subset"}):
        with pytest.raises(ValueError, match="shared"):
            replace(alike, **wrong)
    tokens, labels, places = KeywordExperiment(length=7, types=5).draw([0], 1, 500, CPU)
    assert torch.equal((tokens == 1).sum(-1), labels)
    at = tokens.gather(2, places[..., None])[..., 0]
    assert (at[labels == 1] == 1).all()
    assert labels.float().mean() == 0.5


def test_diagnose_is_tried_on_distributions_between_those_of_figure_3():
    """As the paper's length has them, no two alike, from permutations of 40 to 40 of 60."""
    families = list_distributions(CopyExperiment(length=40, types=40))
    assert {name: len(family) for name, family in families.items()} == {
        "k of n": 9, "two sets": 30, "sets that overlap": 8
    }  # fmt: skip
    cases = [case for family in families.values() for case in family.values()]
    assert len(set(cases)) == len(cases)
    assert [*families["k of n"]][::8] == ["40 of 40", "40 of 60"]
    assert families["two sets"]["40 of 44 of two sets, 0.95"] == CopyExperiment(
        data="mixture", length=40, types=44, mix=0.95
    )
    assert families["sets that overlap"]["permutations of two sets, 16 types in both"].words == 40 + 24 + 2


@pytest.mark.gpu
def test_a_captured_population_learns_as_one_on_the_cpu():
    experiment, seeds, device = replace(SMALL, steps=20), [3, 0, 8], torch.device("cuda")

    class Same(Experiment):
        steps, lr, measured_at = 20, experiment.lr, ()
        model = staticmethod(experiment.model)

        def feed(self, seeds, device):
            batches = experiment.feed(seeds, CPU)
            return lambda step: tuple(tuple(x.to(device) for x in batch) for batch in batches(step))

        def measure(self, population, seeds, step):
            return {}

    grown = train_population(Same(), seeds, device=device)
    assert grown.finite.all()
    for index, seed in enumerate(seeds):
        for name, expected in alone(experiment, seed).items():
            torch.testing.assert_close(grown.weights[name][index], expected, atol=2e-3, rtol=2e-2, msg=name)


@pytest.mark.gpu
def test_batches_of_many_shapes_are_learnt_as_without_graphs_in_the_memory_of_the_largest():
    device, widths = torch.device("cuda"), (30, 200, 50, 100, 400, 30, 800, 200)
    case = replace(SMALL, width=64)
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 16, width) for width in (*widths, *widths)]
    batches = [tuple(torch.randint(2, 9, shape, generator=draw).to(device) for _ in range(3)) for shape in shapes]
    passed = [(batch,) for batch in batches] + [(batches[0], batches[6]), (batches[4], batches[1])] * 2

    def trained(captured, passed):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        population = Population([case.model(seed) for seed in range(3)], device)
        updates = Updates(population, seeds=range(3), lr=1e-3, clip=1.0)
        updates.captured = captured
        for batches in passed:
            updates(*batches) if captured else updates._update(*batches)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return {name: x.detach().cpu() for name, x in population.weights.items()}, torch.cuda.memory_reserved() - before

    (weights, taken), (expected, _) = trained(True, passed), trained(False, passed)
    for name, x in expected.items():
        torch.testing.assert_close(weights[name], x, atol=2e-3, rtol=2e-2, msg=name)  # Adam's first steps go by signs
    _, largest = trained(True, [(max(batches, key=lambda batch: batch[0].numel()),)])
    assert taken <= 1.3 * largest
