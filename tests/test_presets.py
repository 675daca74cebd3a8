"""The presets reproduce the published parameter counts, on models without memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from attnlab.models.presets import PRESETS, build_on_meta, configure_model, parameter_table
from attnlab.models.transformer import build

PUBLISHED = [
    ("iwslt14", {}, 39_469_056),
    ("iwslt14", {"attention": "coda"}, 39_476_616),
    ("iwslt14", {"attention": "coda", "heads": 8}, 39_498_000),
    ("iwslt14", {"attention": "coda", "heads": 16}, 39_582_240),
    ("iwslt14", {"attention": "coda", "heads": 32}, 39_916_608),
    ("wmt14", {}, 60_915_712),
    ("wmt14", {"attention": "coda"}, 60_944_656),
    ("wikitext103", {}, 246_933_504),
    ("wikitext103", {"attention": "coda"}, 246_959_232),
]


@pytest.mark.parametrize(("name", "changes", "count"), PUBLISHED)
def test_published_counts(name, changes, count):
    model = build_on_meta(replace(PRESETS[name], **changes))
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == count
    assert sum(parameters for _, parameters in parameter_table(model)) == count


def test_parameters_by_block():
    table = dict(parameter_table(build_on_meta(replace(PRESETS["iwslt14"], attention="coda"))))
    assert table["encoder embedding: words"] == 8848 * 512
    assert table["decoder embedding: words"] == 6632 * 512
    for block in (
        "encoder layer 5: self-attention",
        "decoder layer 0: self-attention",
        "decoder layer 5: cross-attention",
    ):
        assert table[block] == 4 * (512 * 512 + 512)
        assert table[f"{block} mechanism"] == 24 * 4**2 + 9 * 4  # the σ net
    assert table["encoder layer 3: feed-forward"] == 2 * 512 * 1024 + 1024 + 512
    assert (table["encoder layer 3: norms"], table["decoder layer 3: norms"]) == (2 * 1024, 3 * 1024)
    assert not any("final norm" in block or "readout" in block for block in table)


def test_parameters_of_other_forms():
    config = replace(PRESETS["tiny"], positions="learned", max_length=101, tie="none")
    table = dict(parameter_table(build_on_meta(config)))
    assert table["decoder embedding: positions"] == 101 * 64
    assert table["decoder final norm"] == 2 * 64
    assert table["readout"] == 256 * 64
    assert (
        dict(parameter_table(build_on_meta(PRESETS["wikitext103"])))["readout"] == 2 * 1024
    )  # the classes of two bands


def test_shared_embeddings_are_counted_once():
    table = dict(parameter_table(build_on_meta(PRESETS["wmt14"])))
    assert table["encoder embedding: words"] == 32768 * 512
    assert "decoder embedding: words" not in table


def test_settings_are_read_as_text():
    config = configure_model("iwslt14", {"attention": "coda", "alpha": "8", "heads": "16", "tie": "none"})
    expected = replace(PRESETS["iwslt14"], attention="coda", attention_options={"alpha": 8}, heads=16, tie="none")
    assert config == expected
    assert configure_model("tiny", {"dropout": "0.5"}).dropout == 0.5
    assert configure_model("tiny", {"scale": "0.5"}).attention_options == {"scale": 0.5}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("iwslt", {}, "did you mean 'iwslt14'"),
        ("tiny", {"head": "2"}, "did you mean 'heads'"),
        ("tiny", {"attention": "coda", "alfa": "2"}, "did you mean 'alpha'"),
        ("tiny", {"alpha": "2"}, "unknown key 'alpha'"),
        ("tiny", {"layer": "2"}, "did you mean 'layers'"),
        ("tiny", {"heads": "two"}, "heads"),
        ("tiny", {"heads": "5"}, "width"),
        ("tiny", {"attention": "sofmax"}, "sofmax"),
    ],
)
def test_settings_that_are_refused(name, values, message):
    with pytest.raises(ValueError, match=message):
        configure_model(name, values)


def test_only_our_models_have_a_table():
    with pytest.raises(TypeError, match="Linear"):
        parameter_table(nn.Linear(2, 3))


def test_tiny_runs_on_a_laptop():
    model = build(PRESETS["tiny"])
    assert sum(p.numel() for p in model.parameters()) < 200_000
    assert model(torch.randint(256, (2, 7))).shape == (2, 7, 256)
