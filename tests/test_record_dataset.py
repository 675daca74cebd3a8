"""A folder of Records as a Hugging Face dataset."""

import pytest
import tiny_models
import torch

import attnlab
from attnlab.records.record_dataset import open_dataset


@pytest.fixture
def folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bar()
    (tmp_path / "records").mkdir()
    return tmp_path / "records"


def test_a_row_is_what_a_layer_did_with_an_example(folder):
    tokenizer, model = tiny_models.tokenizer(), tiny_models.llama()
    record = attnlab.record(model, ["the cat sat", "nobody saw it on the mat"], tokenizer=tokenizer)
    record.save(folder / "one.safetensors")
    marian = tiny_models.marian()
    attnlab.record(marian, tiny_models.padded_batch(marian)).save(folder / "two.safetensors")
    data = open_dataset(folder)
    first = data.filter(lambda row: row["record"] == "one.safetensors")
    assert len(first) == 3 * 2
    row = next(row for row in first if (row["layer"], row["example"]) == (1, 0))
    assert row["query_words"] == row["key_words"] == ["the", "cat", "sat"]
    torch.testing.assert_close(torch.tensor(row["weights"]), record.layers[1].weights[0, :, :3, :3])
    torch.testing.assert_close(torch.tensor(row["norms"]), record.layers[1].mixed[0, :, :3].norm(dim=-1))
    cross = next(row for row in data if row["kind"] == "cross")
    batch = tiny_models.padded_batch(marian)
    sizes = batch["decoder_attention_mask"][0].sum().item(), batch["attention_mask"][0].sum().item()
    assert torch.tensor(cross["weights"]).shape[1:] == sizes
    assert cross["query_words"] == []


def test_a_changed_folder_is_read_again(folder):
    model = tiny_models.llama()
    batch = tiny_models.padded_batch(model)
    attnlab.record(model, batch).save(folder / "one.safetensors")
    before = open_dataset(folder)[0]["weights"]
    attnlab.record(attnlab.adapt(model, "sigmoid"), batch).save(folder / "one.safetensors")
    after = open_dataset(folder)[0]
    assert after["mechanism"] == "sigmoid"
    assert after["weights"] != before


def test_an_empty_folder_is_said(folder):
    with pytest.raises(ValueError, match=r"has no records: save some there"):
        open_dataset(folder)
