"""benchmarks/architectures.py in short: one model of each family that is read, turned, capped or has no tokens."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attnlab.huggingface import pretrained, readers

ROOT = Path(__file__).parent.parent
READ = ("MPNet", "DeBERTa", "DeBERTa-v2", "GPT", "GPT-Neo", "GPT-J", "CodeGen", "BLOOM", "Falcon", "MPT")
TURNED = ("Qwen3-Next", "BitNet", "DiffLlama", "MiniMax")
CAPPED = ("Gemma 2", "gpt-oss")
TOWERS = ("ViT", "CLIP", "Whisper", "Wav2Vec2")
RECORDED, ADAPTED = 56, 52  # of the sixty, the goal
ALLOWED = 2e-5


@pytest.fixture
def architectures(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import architectures

    return architectures


@contextmanager
def fail_at_the_end(module):
    def fail(*_):
        raise RuntimeError("on purpose")

    handle = module.register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # DeBERTa's file uses torch.jit.script
@pytest.mark.parametrize("name", [*READ, *TURNED, *CAPPED, *TOWERS])
def test_a_family_is_recorded_and_adapted(name, architectures):
    row = architectures.measure(name)
    assert row["reasons"] == []
    for part in architectures.PARTS:
        assert row[part] == "–" or row[part] < ALLOWED, (part, row[part])
    assert (row["decode"] == "–") == (name in ("MPNet", "DeBERTa", "DeBERTa-v2", "GPT", "ViT", "CLIP", "Wav2Vec2"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", READ)
def test_a_read_model_is_as_it_was(name, architectures):
    """Readers are gone after a record, whether it succeeds or fails, and stay in an adapted model."""
    model = architectures.build_model(name)
    batch = architectures.build_batch(model)
    before = model(**batch)[0]
    chosen = [module for module in model.modules() if readers.find_reader(module) is not None]
    assert chosen
    for lazy in (False, True):
        pretrained.record(model, batch, lazy=lazy)
    with pytest.raises(ValueError, match="cannot be recorded"), fail_at_the_end(chosen[-1]):
        pretrained.record(model, batch)
    assert not any(readers.find_reader(module).method in vars(module) for module in chosen)
    assert torch.equal(model(**batch)[0], before)
    pretrained.adapt(model, "softmax")
    assert all(readers.find_reader(module).method in vars(module) for module in chosen)


@pytest.mark.parametrize("name", ["BLOOM", "MPT"])
@pytest.mark.parametrize("mechanism", ["coda", "stick-breaking", "sigmoid"])
def test_alibi_is_the_same_with_and_without_a_cache(name, mechanism, architectures):
    """For mechanisms that do not ignore what is added to a whole row, as softmax does."""
    model = pretrained.adapt(architectures.build_model(name), mechanism)
    batch = {"input_ids": torch.arange(3, 14)[None]}
    with torch.no_grad():
        whole, steps = model(**batch).logits, architectures.decode(model, batch)
    torch.testing.assert_close(steps, whole, rtol=0, atol=ALLOWED)


@pytest.mark.parametrize("name", ["BLOOM", "GPT-J", "MPNet", "Gemma 2", "CLIP"])
def test_what_is_adapted_is_saved(name, architectures, tmp_path):
    model = pretrained.adapt(architectures.build_model(name), "dagpam", initial=0.3)
    batch = architectures.build_batch(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(pretrained.load(tmp_path)(**batch)[0], model(**batch)[0])


def test_the_committed_table_reaches_the_goal():
    content = json.loads((ROOT / "results" / "architectures" / "cpu.json").read_text(encoding="utf-8"))
    totals, rows = content["about"]["totals"], content["rows"]
    assert len(rows) == 60
    assert totals["record"] >= RECORDED
    assert totals["adapt"] >= ADAPTED
    for row in rows:
        assert all(not isinstance(row[part], float) or row[part] < 1e-4 for part in ("record", "norms", "adapt"))
        assert bool(row["reasons"]) == any(row[part] == "refused" for part in ("record", "norms", "adapt", "decode"))


def test_the_docs_show_the_committed_table(architectures):
    page = architectures.PAGE.read_text(encoding="utf-8")
    assert f"{architectures.BEGIN}\n{architectures.render_table()}\n{architectures.END}" in page


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_is_as_committed(architectures):
    rows = json.loads((ROOT / "results" / "architectures" / "cpu.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        again = architectures.measure(row["architecture"])
        for part in architectures.PARTS:
            where = (row["architecture"], part)
            assert isinstance(again[part], float) == isinstance(row[part], float), where
            assert not isinstance(again[part], float) or again[part] < 1e-4, where
