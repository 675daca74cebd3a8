"""The Record: saved and loaded bit for bit, sliced, moved, read layer by layer."""

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnlab.records.record import FORMAT, KINDS, Layer, LazyLayers, Record

B, H, Q, J, D, E = 3, 4, 5, 7, 2, 11


def layer(kind: str = "cross", index: int = 0, groups: int = H, dtype: torch.dtype = torch.float32, **changes) -> Layer:
    weights = torch.rand(B, H, Q, J, dtype=torch.float64).softmax(-1).to(dtype)
    values = torch.randn(B, groups, J, D).to(dtype)
    context = (weights.double() @ values.double().repeat_interleave(H // groups, 1)).to(dtype)
    parts = {
        "kind": kind,
        "index": index,
        "name": f"decoder.{index}",
        "attended": weights,
        "grouped_values": values,
        "context": context,
        "mixed": context,
        "output_weight": torch.randn(H, D, E).to(dtype),
        "output_bias": torch.randn(E).to(dtype),
        "inputs": torch.randn(B, Q, E).to(dtype),
        "outputs": torch.randn(B, Q, E).to(dtype),
        "mask": torch.rand(B, 1, 1, J) > 0.3,
    }
    return Layer(**parts | changes)


def example(layers: list[Layer] | None = None) -> Record:
    return Record(
        layers if layers is not None else [layer(kind, k) for k in range(2) for kind in KINDS],
        tokens={"source": torch.arange(B * J).view(B, J), "target": torch.arange(B * Q).view(B, Q)},
        masks={"source": torch.rand(B, J) > 0.3, "target": torch.ones(B, Q, dtype=torch.bool)},
        words={"source": [[f"w{b}{n}" for n in range(J)] for b in range(B)]},
        readout={"hidden": torch.randn(B, Q, E), "weight": torch.randn(13, E)},
        meta={"model": "Translator", "noise": None},
    )


def assert_same(ours: Record, theirs: Record) -> None:
    """Equal bit for bit: names, shapes, types and values."""
    assert len(ours.layers) == len(theirs.layers)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert (a.kind, a.index, a.name) == (b.kind, b.index, b.name)
        assert_same_tensors(a.tensors(), b.tensors())
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.values, b.values)
    for part in ("tokens", "masks", "readout"):
        assert_same_tensors(getattr(ours, part), getattr(theirs, part))
    assert (ours.words, ours.meta) == (theirs.words, theirs.meta)


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, x in ours.items():
        y = theirs[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert torch.equal(x, y), name


# saving and loading


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_saved_record_is_loaded_bit_for_bit(tmp_path, dtype):
    extras = {"probes": torch.randn(B, Q, J), "logits": torch.randn(B, H, Q, J)}
    layers = [layer(dtype=dtype, groups=2), layer("decoder-self", output_bias=None, extras=extras)]
    (record := example(layers)).save(tmp_path / "deep" / "record.safetensors")
    loaded = Record.load(tmp_path / "deep" / "record.safetensors")
    assert_same(record, loaded)
    assert loaded.layers[1].output_bias is None
    assert set(loaded.layers[1].extras) == {"probes", "logits"}
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "deep" / "record.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("shape", [(1,), (D,), (D, D)], ids=["head", "element", "matrix"])
def test_a_turning_is_saved_and_goes_with_its_examples(tmp_path, shape):
    turned = layer(turning=torch.randn(B, H, Q, *shape))
    example([turned, layer(index=1)]).save(tmp_path / "record")
    loaded = Record.load(tmp_path / "record")
    assert torch.equal(loaded.layers[0].turning, turned.turning)
    assert loaded.layers[1].turning is None
    for record in (loaded, example([turned])):
        part = record[1:].layers[0]
        assert torch.equal(part.turning, turned.turning[1:])
        torch.testing.assert_close(part.turned_context, turned.turned_context[1:])


@pytest.mark.parametrize("shape", [(B, H, Q, D + 1), (B, H, D, D), (B, H, Q, D, 1), (H, Q, D)], ids=str)
def test_a_turning_that_does_not_fit_is_refused(tmp_path, shape):
    example([layer(turning=torch.randn(shape))]).save(tmp_path / "record")
    with pytest.raises(ValueError, match="turning"):
        Record.load(tmp_path / "record")


def test_shared_and_expanded_tensors_are_stored_once(tmp_path):
    mask = torch.rand(B, 1, Q, 1) > 0.5
    shared = [layer(index=k, mask=mask.expand(B, 1, Q, 1009)) for k in range(5)]
    shared = [replace(part, output_weight=shared[0].output_weight, attended=shared[0].attended) for part in shared]
    apart = [part.map(lambda _, x: x.contiguous().clone()) for part in shared]
    sizes = {}
    for name, layers in (("shared", shared), ("apart", apart)):
        example(layers).save(tmp_path / name)
        assert_same(Record(layers), Record(Record.load(tmp_path / name).layers))
        sizes[name] = (tmp_path / name).stat().st_size
    once = {"mask": B * Q, "weights": 4 * B * H * Q * J, "output_weight": 4 * H * D * E, "context": 4 * B * H * Q * D}
    saved = 4 * once["weights"] + 4 * once["output_weight"] + 5 * once["context"] + once["mask"] * (5 * 1009 - 1)
    header = 5000  # names of tensors
    assert abs(sizes["apart"] - sizes["shared"] - saved) < header


def test_views_are_stored_without_what_they_are_views_of(tmp_path):
    long = torch.randn(B, H, 10_007, D)
    example([layer(grouped_values=long[:, :, :J])]).save(tmp_path / "record")
    assert (tmp_path / "record").stat().st_size < 20_000
    assert torch.equal(Record.load(tmp_path / "record").layers[0].values, long[:, :, :J])


def test_a_failed_save_leaves_the_old_file_and_no_scrap(tmp_path, monkeypatch):
    path = tmp_path / "record"
    example().save(path)
    old = path.read_bytes()
    monkeypatch.setattr("attnlab.records.record.save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        example().save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_record_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no record at .*nowhere"):
        Record.load(tmp_path / "nowhere")
    (tmp_path / "text").write_text("this is not a record, whatever it is called")
    with pytest.raises(ValueError, match=r"text .* damaged"):
        Record.load(tmp_path / "text")
    save_file({"x": torch.ones(3)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"foreign .* not a Record"):
        Record.load(tmp_path / "foreign")
    example().save(tmp_path / "whole")
    for kept in (0.5, 0.999):
        whole = (tmp_path / "whole").read_bytes()
        (tmp_path / "cut").write_bytes(whole[: int(kept * len(whole))])
        with pytest.raises(ValueError, match=r"cut .* damaged"):
            Record.load(tmp_path / "cut")


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["layers"][0]["tensors"].pop("mask"),
        lambda index: index["layers"][0]["tensors"]["mask"].update(key="nowhere"),
        lambda index: index["layers"][0]["tensors"]["mask"].update(shape=[B, 1, 1, J + 1]),
        lambda index: index["layers"][0].update(kind="sideways"),
        lambda index: index["layers"][0].pop("name"),
        lambda index: index["tokens"].update(source={"key": "nowhere", "shape": [1]}),
        lambda index: index.pop("readout"),
        lambda index: index.update(layers=None),
        lambda index: index.update(words=3),
    ],
)
def test_a_record_with_a_damaged_index_is_refused(tmp_path, change):
    example().save(tmp_path / "record")
    with safe_open(tmp_path / "record", "pt") as file:
        index = json.loads(file.metadata()[FORMAT])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    change(index)
    save_file(tensors, tmp_path / "record", metadata={FORMAT: json.dumps(index)})
    with pytest.raises(ValueError, match="record is a damaged Record"):
        Record.load(tmp_path / "record")


# layer by layer


def test_loaded_layers_are_made_when_asked_for_and_not_kept(tmp_path):
    example().save(tmp_path / "record")
    loaded = Record.load(tmp_path / "record")
    seen = []
    gc.freeze()  # collect only what comes from here on: all else takes seconds
    for part in loaded.layers:
        gc.collect()
        assert sum(old() is not None for old in seen) <= 1, "only the layer before may still be held, by the loop"
        seen.append(weakref.ref(part.attended))
    del part
    gc.collect()
    gc.unfreeze()
    assert all(old() is None for old in seen)


def test_kinds_are_known_without_making_a_layer():
    def refuse(k: int) -> Layer:
        raise AssertionError("a layer was made")

    record = replace(example(), layers=LazyLayers([(kind, 0) for kind in KINDS], refuse))
    assert record.kinds == list(KINDS)
    assert len(record.kind("cross")) == 1
    assert len(record.layers[1:]) == 2
    assert repr(record).startswith("Record(3 examples; layers: 1 encoder-self, 1 decoder-self, 1 cross; {'model'")
    assert len(record[0].to("cpu").layers) == 3


def test_layers_of_one_kind_in_order(tmp_path):
    example().save(tmp_path / "record")
    for record in (example(), Record.load(tmp_path / "record")):
        assert [(part.kind, part.index) for part in record.kind("cross")] == [("cross", 0), ("cross", 1)]
        assert [part.kind for part in record.layers[-2:]] == ["decoder-self", "cross"]
        assert record.layers[-1].index == 1
    with pytest.raises(ValueError, match=r"'self'; .* encoder-self, decoder-self"):
        record.kind("self")
    with pytest.raises(IndexError, match=r"layer 6 .* 6 layers"):
        record.layers[6]


def test_weights_can_be_made_late():
    held = layer()
    calls = []

    def weigh(start: int, stop: int) -> Tensor:
        calls.append((start, stop))
        return held.attended[:, :, start:stop]

    late = replace(held, attended=weigh)
    assert (late.lazy, held.lazy) == (True, False)
    assert "attended" not in late.tensors()
    assert torch.equal(torch.cat([rows for _, rows in late.chunks(2)], dim=2), held.weights)
    assert calls == [(0, 2), (2, 4), (4, 5)]
    assert [part for part, _ in held.chunks(2)] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert torch.equal(example([late])[1].layers[0].weights, held.weights[1:2])


def test_late_weights_are_made_when_saved(tmp_path):
    held = layer()
    example([replace(held, attended=lambda start, stop: held.attended[:, :, start:stop].clone())]).save(tmp_path / "r")
    assert torch.equal(Record.load(tmp_path / "r").layers[0].weights, held.weights)


# examples and devices


@pytest.mark.parametrize("examples", [1, -1, slice(1, 3), slice(0, 3, 2)])
def test_some_examples(tmp_path, examples):
    one = torch.ones(1, 1, Q, J, dtype=torch.bool)
    record = example(
        [layer(groups=2), layer(mask=one), layer(mask=one[0, 0]), layer(extras={"probes": torch.rand(B, Q)})]
    )
    record.save(tmp_path / "record")
    rows = torch.arange(B)[examples].reshape(-1)
    for whole in (record, Record.load(tmp_path / "record")):
        part = whole[examples]
        assert len(part) == len(rows)
        for some, every in zip(part.layers, record.layers, strict=True):
            for name in ("weights", "values", "context", "mixed", "inputs", "outputs"):
                assert torch.equal(getattr(some, name), getattr(every, name)[rows]), name
            assert torch.equal(some.output_weight, every.output_weight)
            assert torch.equal(some.output_bias, every.output_bias)
            expanded = every.mask.expand(B, 1, Q, J)[rows]
            assert torch.equal(some.mask.expand(len(rows), 1, Q, J), expanded)
        assert torch.equal(part.layers[3].extras["probes"], record.layers[3].extras["probes"][rows])
        assert torch.equal(part.tokens["source"], record.tokens["source"][rows])
        assert torch.equal(part.readout["weight"], record.readout["weight"])
        assert torch.equal(part.readout["hidden"], record.readout["hidden"][rows])
        assert part.words["source"] == [record.words["source"][row] for row in rows]


def test_an_example_that_is_not_there():
    with pytest.raises(IndexError, match=r"example 3 .* 3 examples"):
        example()[3]


def test_records_move_between_devices(tmp_path):
    mask = torch.rand(B, 1, Q, J) > 0.5
    record = example([layer(index=k, mask=mask) for k in range(3)])
    moved = record.to("meta")
    assert all(x.is_meta for part in moved.layers for x in part.tensors().values())
    assert all(x.is_meta for part in (moved.tokens, moved.masks, moved.readout) for x in part.values())
    assert moved.layers[0].mask is moved.layers[2].mask
    assert moved.layers[0].context is moved.layers[0].mixed
    assert_same(record.to("cpu"), record)
    record.save(tmp_path / "record")
    assert Record.load(tmp_path / "record").to("meta").layers[2].weights.is_meta


def test_lazy_layers_keep_their_own_masks_when_moved(tmp_path):
    record = example([layer(index=k) for k in range(7)])
    record.save(tmp_path / "record")
    moved = Record.load(tmp_path / "record").to("cpu")
    assert all(torch.equal(moved.layers[k].mask, record.layers[k].mask) for k in range(7))


def test_grouped_values_are_repeated_in_a_row():
    part = layer(groups=2)
    assert part.grouped_values.shape == (B, 2, J, D)
    assert torch.equal(part.values, part.grouped_values[:, [0, 0, 1, 1]])
    torch.testing.assert_close(part.weights @ part.values, part.context)


def test_a_loaded_record_keeps_its_numbers_when_its_file_is_replaced(tmp_path):
    one, other = example(), example()
    path = tmp_path / "r.safetensors"
    one.save(path)
    loaded = Record.load(path)
    other.save(path)
    assert_same(loaded, one)
    loaded[:1].save(path)
    assert_same(loaded, one)


def test_a_tensor_that_belongs_to_no_layer_is_refused(tmp_path):
    path = tmp_path / "record"
    example().save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(path) | {"other": torch.ones(2)}, path, metadata=metadata)
    with pytest.raises(ValueError, match="record is a damaged Record: tensor other"):
        Record.load(path)


def test_chunks_must_hold_something():
    with pytest.raises(ValueError, match="got 0"):
        list(layer().chunks(0))
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(IndexError, match=f"rows must start at 0 or later.*got {start} to {stop}"):
            layer().rows(start, stop)
