"""The batches of an update: one that is too large for a pass is the sum of several, of the same examples."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from attnlab import updates
from attnlab.checkpointing import Position
from attnlab.recipe import resolved
from attnlab.runs import start
from attnlab.tasks.classification import Classification, ClassificationConfig
from attnlab.train import TrainConfig
from attnlab.updates import Updates

LENGTHS = (30, 3, 7, 5, 2, 4, 1, 6, 9, 3, 2)
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


def passes(task, rows, **more):
    made = Updates(task, TrainConfig(batch_examples=rows, **more), ALONE, padded=False)
    position, found = Position(processes=1), []
    while position.epoch == 0:
        found.append(made(position))
    return found


@pytest.mark.parametrize("room", [1, 17, 40, 64, 10_000])
def test_no_pass_is_larger_than_there_is_room_unless_one_example_is(texts, room, monkeypatch):
    monkeypatch.setattr(updates, "ROOM", room)
    for update in passes(texts, 8):
        for batch in update:
            rows, width = batch.inputs[0].shape
            assert rows * width <= room or rows == 1
        widths = [batch.inputs[0].shape[1] for batch in update]
        assert widths == sorted(widths, reverse=True)
        positions = sum(batch.inputs[0].numel() for batch in update)
        assert len(update) == 1 or max(widths) * 8 > room or 2 * positions <= max(widths) * 8


@pytest.mark.parametrize("room", [1, 17, 10_000])
def test_every_example_is_in_one_pass(texts, room, monkeypatch):
    plan = texts.plan("train", examples=4, seed=1, epoch=0)
    monkeypatch.setattr(updates, "ROOM", room)
    parts = passes(texts, 4)
    assert [sorted(k for batch in update for k in batch.indices) for update in parts] == [sorted(x) for x in plan]
    assert sum(batch.count for update in parts for batch in update) == len(LENGTHS)
    assert any(len(update) > 1 for update in parts) is (room < 10_000)


def test_a_long_example_goes_before_the_others_and_those_of_about_one_length_together(texts):
    (update,) = passes(texts, 11)
    longest, *others = update
    assert (len(longest.indices), longest.inputs[0].shape[1]) == (1, max(LENGTHS) + 2)  # <s> and </s>
    assert [len(batch.indices) for batch in others] == [10]
    alike = texts.batch("train", [k for k, n in enumerate(LENGTHS) if 2 < n < 8])
    made = Updates(texts, TrainConfig(batch_examples=8), ALONE, padded=False)
    assert [batch.indices for batch in made._passes(alike)] == [alike.indices]


def test_an_update_in_several_passes_is_the_update(texts, tmp_path, monkeypatch):
    """One of plain momentum, so that a gradient's rounding stays as small as it is."""
    said = {"data": texts.config.data, "valid": texts.config.valid, "model": "lstm-classifier", "width": "6"}
    said |= {"embedding_width": "6", "steps": "3", "batch_examples": "8", "optimiser": "nag", "lr": "0.1"}
    recipe, found = resolved("classification", said), []
    for room in (10_000, 20):
        monkeypatch.setattr(updates, "ROOM", room)
        folder, _ = start(
            recipe, out=str(tmp_path / str(room)), device="cpu", report=lambda v: None, note=lambda t: None
        )
        found.append([*folder.metrics(), load_file(folder.last)])
    (*losses, whole), (*again, parts) = found
    assert [x["loss"] for x in losses if "loss" in x] == pytest.approx([x["loss"] for x in again if "loss" in x])
    trained = [name for name in whole if name.startswith("model/")]
    assert trained
    for name in trained:
        torch.testing.assert_close(parts[name], whole[name], atol=1e-6, rtol=1e-5, msg=name)
