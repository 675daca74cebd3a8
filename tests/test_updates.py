"""The batches of an update: one that is too large for a pass is the sum of several, of the same examples."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from attnlab.tasks.classification import Classification, ClassificationConfig
from attnlab.training import batches as updates
from attnlab.training.batches import Batches
from attnlab.training.checkpoints import Position
from attnlab.training.loop import TrainConfig
from attnlab.training.recipe import resolve_recipe
from attnlab.training.runs import start_run

LENGTHS = (90, 3, 7, 5, 2, 4, 1, 6, 9, 3, 2)
ALONE = SimpleNamespace(num_processes=1, process_index=0)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Labelled texts of these lengths, and a few to validate on."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [f"{' '.join('abcde'[(k + n) % 5] for k in range(n))}\t{'yes' if n % 2 else 'no'}" for n in LENGTHS]
    for name, some in (("train.tsv", rows), ("valid.tsv", rows[1:5])):
        (folder / name).write_text("\n".join(["text\tlabel", *some]) + "\n")
    config = ClassificationConfig(data=str(folder / "train.tsv"), valid=str(folder / "valid.tsv"))
    return Classification.prepare(config, folder / "vocabulary")


def passes(task, rows, *, padded=False, **more):
    made = Batches(task, TrainConfig(batch_examples=rows, **more), ALONE, padded=padded)
    position, found = Position(processes=1), []
    while position.epoch == 0:
        found.append(made(position))
    return found


@pytest.fixture
def unpinned(monkeypatch):
    """Batches as for a GPU, without one."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@pytest.mark.parametrize("room", [1, 17, 40, 64, 10_000])
def test_no_pass_is_larger_than_there_is_room_unless_one_example_is(texts, room, monkeypatch):
    monkeypatch.setattr(updates, "ROOM", room)
    for update in passes(texts, 8):
        for batch in update:
            rows, width = batch.inputs[0].shape
            assert rows * width <= room or rows == 1
        widths = [batch.inputs[0].shape[1] for batch in update]
        assert widths == sorted(widths, reverse=True)
        assert len(update) == 1 or max(widths) * 8 > room


@pytest.mark.parametrize("room", [1, 17, 10_000])
def test_every_example_is_in_one_pass(texts, room, monkeypatch):
    plan = texts.plan_batches("train", examples=4, seed=1, epoch=0)
    monkeypatch.setattr(updates, "ROOM", room)
    parts = passes(texts, 4)
    assert [sorted(k for batch in update for k in batch.indices) for update in parts] == [sorted(x) for x in plan]
    assert sum(batch.count for update in parts for batch in update) == len(LENGTHS)
    assert any(len(update) > 1 for update in parts) is (room < 10_000)


def test_examples_of_one_length_need_no_more_passes_than_twice_what_they_fill(monkeypatch):
    made = object.__new__(Batches)
    made.widths = None
    for rows, width in ((32, 2100), (64, 1100), (2000, 100), (3, 65_537)):
        first = made._rows([width] * rows, rows)
        assert first * width <= updates.ROOM or first == 1
        assert 2 * first * width > updates.ROOM or first == rows


@pytest.mark.usefixtures("unpinned")
def test_one_long_example_is_captured_before_the_others_and_those_of_about_one_length_together(texts):
    (update,) = passes(texts, 11, padded=True, rungs=30)
    longest, others = update
    assert (longest.inputs[0].shape, len(longest.indices)) == ((2, 92), 2)  # 90 words, <s> and </s>
    assert (others.inputs[0].shape[0], len(others.indices)) == (11, 9)
    assert 2 * sum(batch.inputs[0].numel() for batch in update) <= 11 * 92
    assert [len(update) for update in passes(texts, 2, padded=True, rungs=30)] == [1] * 6
    assert len(passes(texts, 11)[0]) == 1  # nothing is captured on a CPU


TRAINED = {
    "classifier": ["classification", {"model": "lstm-classifier", "width": "6", "embedding_width": "6"}],
    "translator": ["translation", {"width": "8", "heads": "2", "layers": "1", "feed_forward": "8", "dropout": "0"}],
}


@pytest.mark.parametrize("smoothing", ["0", "0.1"])
@pytest.mark.parametrize("kind", TRAINED)
def test_an_update_in_several_passes_is_the_update(texts, tmp_path, monkeypatch, kind, smoothing):
    """One of plain momentum, so that a gradient's rounding stays as small as it is."""
    task, model = TRAINED[kind]
    data = {"data": texts.config.data, "valid": texts.config.valid}
    if kind == "translator":
        for name in ("train", "valid"):
            lines = [" ".join("abcdefg"[(k * n) % 7] for k in range(n)) for n in LENGTHS]
            (tmp_path / f"{name}.src").write_text("\n".join(lines) + "\n")
            (tmp_path / f"{name}.tgt").write_text("\n".join(line[::-2] for line in lines) + "\n")
        data = {side: str(tmp_path / f"train.{side}") for side in ("src", "tgt")}
        data |= {f"valid_{side}": str(tmp_path / f"valid.{side}") for side in ("src", "tgt")} | {"vocabulary": "20"}
    said = {"steps": "3", "batch_examples": "8", "optimiser": "nag", "lr": "0.1", "label_smoothing": smoothing}
    recipe, found = resolve_recipe(task, data | model | said), []
    for room in (10_000, 20):
        monkeypatch.setattr(updates, "ROOM", room)
        silent = {"report": lambda values: None, "note": lambda line: None}
        folder, _ = start_run(recipe, out=str(tmp_path / str(room)), device="cpu", **silent)
        found.append([*folder.metrics(), load_file(folder.last)])
    (*losses, whole), (*again, parts) = found
    assert [x["loss"] for x in losses if "loss" in x] == pytest.approx([x["loss"] for x in again if "loss" in x])
    trained = [name for name in whole if name.startswith("model/")]
    assert trained
    for name in trained:
        torch.testing.assert_close(parts[name], whole[name], atol=1e-6, rtol=1e-5, msg=name)
