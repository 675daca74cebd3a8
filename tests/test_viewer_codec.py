"""Records as the viewer's document, and back: what is kept, what is lost, and how large it is."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
import torch
from materialised import vectors
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy
from small_models import LM, TRANSLATOR, made
from turnings import TURNINGS, made_turning

import attnlab
from attnlab.analysis.contribution import norms
from attnlab.analysis.mixing import mixing
from attnlab.analysis.rollout import rollout
from attnlab.reading import maps as viewing
from attnlab.reading.best_head import find_best_head
from attnlab.reading.maps import build_view, join_views, show
from attnlab.recording.probe import record_probes
from attnlab.report.packing import LADDER, SIGNED_LADDER, pack_view, quantise_map, restore_map, unpack_view
from attnlab.report.view import Best, Frame, View, ViewAttention, ViewExample, ViewGold, ViewRun, ViewSide, record_of
from attnlab.report.viewer_html import Viewer, escape_script


def plain_view(maps, *, heads, **options):
    """A view of one layer with these maps (h,i,j)."""
    i, j = next(iter(maps.values())).shape[1:]
    sides = {"source": j, "target": i}
    example = ViewExample(
        "1",
        {name: ViewSide(tuple(f"{name}{n}" for n in range(size)), tuple(range(size)), ("w",) * size)
         for name, size in sides.items()},
    )  # fmt: skip
    return View(
        "t", [example], [ViewRun("r", [Frame([ViewAttention(0, "cross", 0, tuple(range(heads)), maps, **options)])])]
    )


@pytest.fixture(scope="module")
def bert_record():
    model = tiny_models.bert()
    return attnlab.record(model, tiny_models.padded_batch(model))  # 11, 7 and 2 tokens


# --- numbers ---


@pytest.mark.parametrize(("levels", "power"), LADDER)
def test_a_number_is_within_half_a_step_of_the_true_one(levels, power):
    x = torch.rand(3, 7, 11) ** 5
    shown = restore_map(*quantise_map(x, levels, power, signed=False), levels, power)
    steps = torch.arange(levels + 1, dtype=torch.float64) / levels
    nodes = steps**power
    scale = x.amax(-1, keepdim=True).double()
    above = torch.searchsorted(nodes, (x / scale).double()).clamp(1, levels)
    in_the_root = (x.double() * scale).sqrt() / levels + scale / (4 * levels**2)
    bound = scale / levels / 2 if power == 1 else in_the_root
    error = (shown - x).abs().double()
    assert bool((error <= bound * (1 + 1e-5) + 1e-9).all())
    assert bool((error <= scale * (nodes[above] - nodes[above - 1]) + 1e-7).all())  # and never beyond its two nodes


def test_with_255_levels_large_numbers_are_within_one_percent():
    x = torch.rand(5, 13, 17)
    shown = restore_map(*quantise_map(x, 255, 2, signed=False), 255, 2)
    large = x > 0.16 * x.amax(-1, keepdim=True)
    assert float(((shown - x).abs() / x)[large].max()) < 0.01


@pytest.mark.parametrize(("levels", "power"), SIGNED_LADDER)
def test_signed_numbers_keep_their_sign_and_zero_is_zero(levels, power):
    x = torch.randn(2, 5, 7)
    x[0, 0], x[1, 2, 3] = 0.0, 0.0
    codes, scales = quantise_map(x, levels, power, signed=True)
    shown = restore_map(codes, scales, levels, power)
    assert codes.dtype == np.int8
    assert bool((shown * x >= 0).all())
    assert bool((shown[x == 0] == 0).all())
    torch.testing.assert_close(shown.abs().amax(-1), x.abs().amax(-1))  # the largest of a row is exact


def test_a_row_of_equal_numbers_is_exact():
    for levels, power in LADDER:
        shown = restore_map(*quantise_map(torch.full((1, 3, 512), 1 / 512), levels, power, signed=False), levels, power)
        assert bool((shown == 1 / 512).all())


# --- documents ---


def test_a_document_comes_back_as_the_same_view(bert_record):
    before = build_view(bert_record, title="a <title>")
    after = unpack_view(json.loads(json.dumps(pack_view(before))))
    assert after.title == "a <title>"
    assert after.examples == before.examples
    pairs = zip(before.runs[0].frames[0].attentions, after.runs[0].frames[0].attentions, strict=True)
    for one, other in pairs:
        assert (one.example, one.kind, one.index, one.heads) == (other.example, other.kind, other.index, other.heads)
        assert one.maps.keys() == other.maps.keys()
        for name, x in one.maps.items():
            scale = x.abs().amax(-1, keepdim=True)
            bound = (x * scale).sqrt() / 255 + scale / (4 * 255**2)
            assert bool(((other.maps[name] - x).abs() <= bound * 1.001 + 1e-9).all()), name
        if one.vector is not None:
            torch.testing.assert_close(other.vector, one.vector)
        assert dict(one.statistics) == dict(other.statistics)


def test_a_document_comes_back_as_a_record_of_weights(bert_record):
    found = record_of(unpack_view(pack_view(build_view(bert_record))), example=1)
    assert found.kinds == ["encoder-self"] * 3
    want = bert_record[1].layers[2].weights[:, :, :7, :7]
    torch.testing.assert_close(found.layers[2].weights, want, atol=0.004, rtol=0.01)
    assert bool(norms(found.layers[2]).head.isnan().all())  # what was not kept is not made up
    assert found.words["source"] == [[str(token) for token in bert_record.tokens["source"][1, :7].tolist()]]


def test_the_best_head_comes_back_and_an_older_document_has_none():
    best = Best("encoder-self", 1, 2, "a reason")
    record = attnlab.record(made(LM), torch.randint(1, 23, (1, 7)))
    document = json.loads(
        json.dumps(pack_view(build_view({"a": record}, best={"a": replace(best, kind="decoder-self")})))
    )
    assert unpack_view(document).runs[0].best == replace(best, kind="decoder-self")
    del document["runs"][0]["best"]
    assert unpack_view(document).runs[0].best is None
    for given, message in (
        ({"a": best}, "no encoder-self layer 1, head 2"),
        ({"b": best}, "run 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            build_view({"a": record}, best=given)


@pytest.mark.parametrize(
    ("meta", "title"),
    [
        ({"model": "Translator", "mechanism": "coda"}, "Translator with coda attention"),
        ({"model": "org/name", "mechanism": "softmax"}, "org/name"),
        ({"model": "/tmp/some where/mine", "mechanism": "softmax"}, "mine"),
        ({}, ""),
    ],
)
def test_a_view_without_a_title_has_that_of_the_model(bert_record, meta, title):
    assert build_view(replace(bert_record, meta=meta)).title == title


def test_a_causal_mask_is_stored_once_and_comes_back():
    record = attnlab.record(made(LM), torch.randint(1, 23, (1, 7)))
    document = pack_view(build_view(record))
    assert len(document["masks"]) == 1
    mask = unpack_view(document).runs[0].frames[0].attentions[1].mask
    assert torch.equal(mask, torch.ones(7, 7).tril().bool())


def test_what_is_not_a_view_is_refused():
    with pytest.raises(ValueError, match=r"not a view: .* 'x'"):
        unpack_view({"format": "x"})
    with pytest.raises(ValueError, match=r"weight .* not finite"):
        pack_view(plain_view({"weight": torch.full((1, 2, 3), torch.nan)}, heads=1))
    with pytest.raises(ValueError, match=r"\(2, 2, 3\), expected 1 heads .* 2 queries and 3 keys"):
        plain_view({"weight": torch.rand(2, 2, 3)}, heads=1)
    with pytest.raises(ValueError, match="measure 'height'"):
        plain_view({"height": torch.rand(1, 2, 3)}, heads=1)
    with pytest.raises(ValueError, match="no attention"):
        View("t", [], [])
    one = plain_view({"weight": torch.rand(1, 2, 3)}, heads=1)
    with pytest.raises(ValueError, match=r"steps, got \[5, 3\]"):
        View("t", one.examples, [ViewRun("r", [Frame([], 5), Frame([], 3)])])
    with pytest.raises(ValueError, match=r"\.html .* \.json"):
        Viewer(one).save("x.txt")


def test_nothing_in_a_script_element_ends_it():
    text = json.dumps({"a": "</script><!-- & \u2028 \u2029"}, ensure_ascii=False)
    safe = escape_script(text)
    assert not set("<>&\u2028\u2029") & set(safe)
    assert json.loads(safe) == json.loads(text)


# --- size ---


def test_every_head_of_bert_base_at_128_tokens_fits_into_3_megabytes():
    layers = []
    for index in range(12):
        weights = torch.randn(12, 128, 128).mul(0.3 + 0.2 * index).softmax(-1)
        maps = {"weight": weights, "norm-layer": torch.rand(1, 128, 128), "norm-block": torch.rand(1, 128, 128)}
        layers.append(ViewAttention(0, "encoder-self", index, tuple(range(12)), maps, torch.rand(12, 128)))
    side = ViewSide(tuple(f"token{n}" for n in range(128)), tuple(range(128)), tuple(f"token{n}" for n in range(128)))
    whole = View("bert", [ViewExample("1", {"source": side})], [ViewRun("r", [Frame(layers)])])
    assert len(Viewer(whole).page().encode()) < 3_000_000


def test_a_budget_makes_maps_coarser_the_largest_first():
    x, small = torch.rand(3, 61, 67), torch.rand(3, 5, 67)
    both = plain_view({"weight": x}, heads=3)
    sizes = [len(json.dumps(pack_view(both, budget=budget))) for budget in (10**9, 14_000, 8_000)]
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[1] < 14_000 + 6_000  # the texts and all beside the maps
    levels = pack_view(both, budget=8_000)["runs"][0]["frames"][0]["attentions"][0]["maps"]["weight"]
    assert levels["levels"] < 255
    assert pack_view(plain_view({"weight": small}, heads=3))["runs"][0]["frames"][0]["attentions"][0]["maps"]["weight"][
        "levels"
    ] == 255  # fmt: skip
    pack_view(both, budget=1)  # as coarse as it gets


# --- from records ---


def test_the_view_holds_the_maps_of_the_analyses_without_padding(bert_record):
    shown = build_view(bert_record)
    own = [a for a in shown.runs[0].frames[0].attentions if a.example == 1 and a.index is not None]
    for attention, layer in zip(own, bert_record.layers, strict=True):
        found = norms(layer)
        torch.testing.assert_close(attention.maps["weight"], layer.weights[1, :, :7, :7])
        by_hand = attention.maps["weight"].abs() * attention.vector[:, None]
        torch.testing.assert_close(by_hand, found.head[1, :, :7, :7])
        torch.testing.assert_close(attention.maps["norm-layer"][0], found.layer[1, :7, :7])
        torch.testing.assert_close(attention.maps["norm-block"][0], mixing(layer, "norm").map[1, :7, :7])
    whole = next(a for a in shown.runs[0].frames[0].attentions if a.example == 1 and a.index is None)
    torch.testing.assert_close(whole.maps["rollout"][0], rollout(bert_record, "norm")["encoder-self"][1, :7, :7])


@pytest.mark.parametrize("which", TURNINGS)
def test_norms_with_a_turning_are_maps_of_their_own(which):
    record = attnlab.record(made_turning(which), torch.tensor([[3, 4, 5, 6, 9], [7, 8, 11, 0, 0]]))
    shown = unpack_view(pack_view(build_view(record), budget=10**9))
    own = [a for a in shown.runs[0].frames[0].attentions if a.example == 1 and a.index is not None]
    for attention, layer in zip(own, record.layers, strict=True):
        size = vectors(layer)[1, :, :3, :3].norm(dim=-1)
        assert attention.vector is None
        torch.testing.assert_close(attention.maps["norm"].double(), size, rtol=0.02, atol=1e-3)
        np.testing.assert_allclose(attention.statistics["norm"], size.sum(-1).mean(-1), rtol=1e-6)
    assert ["gate" in note for note in shown.notes] == [True]


def test_a_mechanism_without_contributions_is_shown_by_its_weights():
    record = attnlab.record(made(LM, "differential"), torch.tensor([[3, 4, 5]]))
    shown = build_view(record)
    assert ["finish" in note for note in shown.notes] == [True]
    assert {name for a in shown.runs[0].frames[0].attentions for name in a.maps} == {"weight"}


def test_the_statistics_of_a_head_against_scipy(bert_record):
    found = build_view(bert_record).runs[0].frames[0].attentions[0]
    weights = found.maps["weight"].double().numpy()  # (3,11,11)
    np.testing.assert_allclose(found.statistics["entropy"], entropy(weights, axis=-1).mean(-1), rtol=1e-4)
    np.testing.assert_allclose(found.statistics["sink"], weights.mean(1).max(-1), rtol=1e-4)
    apart = [[(jensenshannon(a, b, axis=-1) ** 2).mean() for b in weights] for a in weights]
    np.testing.assert_allclose(found.statistics["jsd"], np.sum(apart, 1) / 2, rtol=1e-3)
    brought = (weights * found.vector.double().numpy()[:, None]).sum(-1).mean(-1)
    np.testing.assert_allclose(found.statistics["norm"], brought, rtol=1e-4)


def test_probes_are_shown_and_beta_as_a_probability():
    source, target = torch.randint(4, 20, (2, 5)), torch.randint(4, 19, (2, 7))
    record = record_probes(made(TRANSLATOR), (source, target), target)
    shown = [a for a in build_view(record).runs[0].frames[0].attentions if a.kind == "cross" and a.index == 1]
    layer = record.kind("cross")[1]
    for attention in shown:
        want = layer.extras["beta"][attention.example].exp()
        torch.testing.assert_close(attention.maps["probe"][0].double(), want)
        torch.testing.assert_close(attention.maps["saliency"][0].double(), layer.extras["saliency"][attention.example])


def test_several_records_and_steps():
    tokens = torch.randint(1, 23, (1, 5))
    first, second = (attnlab.record(made(LM, name), tokens) for name in ("softmax", "dagpam"))
    curves = {"accuracy": ([0, 7], [0.1, 0.9])}
    steps = build_view({7: second, 0: first}, curves=curves)
    assert [frame.step for frame in steps.runs[0].frames] == [0, 7]
    assert steps.runs[0].curves == curves
    both = build_view({"softmax": first, "dagpam": {3: second}}, curves={"dagpam": curves})
    assert [(run.name, dict(run.curves)) for run in both.runs] == [("softmax", {}), ("dagpam", curves)]
    two = join_views([build_view(first), build_view(attnlab.record(made(LM), torch.randint(1, 23, (1, 3))))])
    assert [len(example.sides["target"].tokens) for example in two.examples] == [5, 3]
    assert {a.example for a in two.runs[0].frames[0].attentions} == {0, 1}


def test_what_cannot_be_shown_is_said(bert_record, monkeypatch):
    other = attnlab.record(tiny_models.bert(), {"input_ids": torch.randint(3, 97, (3, 11))})
    with pytest.raises(ValueError, match="b was recorded"):
        build_view({"a": bert_record, "b": other})
    with pytest.raises(TypeError, match="str"):
        show("record")
    with pytest.raises(TypeError, match="Records"):
        build_view({"a": {0: "x"}})
    with pytest.raises(ValueError, match="gold has 1"):
        build_view(bert_record, gold=[None])
    with pytest.raises(ValueError, match="head 5"):
        build_view(bert_record, heads=[5])
    monkeypatch.setattr(viewing, "MAX_PAIRS", 100)
    with pytest.raises(ValueError, match="browser"):
        build_view(bert_record)


def test_too_many_heads_are_shown_together(bert_record, monkeypatch):
    monkeypatch.setattr(viewing, "HEAD_CELLS", 1000)
    shown = build_view(bert_record)
    attention = shown.runs[0].frames[0].attentions[0]
    assert attention.heads == ()
    torch.testing.assert_close(attention.maps["weight"][0], bert_record.layers[0].weights[0].mean(0))
    assert "mean of the heads" in shown.notes[0]


def test_a_block_that_is_not_understood_still_shows_its_weights(bert_record):
    strange = [replace(layer, around={}, strange="odd") for layer in bert_record.layers]
    shown = build_view(replace(bert_record, layers=strange))
    assert "norm-layer" in shown.runs[0].frames[0].attentions[0].maps
    assert "norm-block" not in shown.runs[0].frames[0].attentions[0].maps
    assert any("rollout" in note for note in shown.notes)


def test_points_of_a_curve_that_are_no_number_are_left_out():
    shown = show(
        attnlab.record(made(LM), torch.randint(1, 23, (1, 5))),
        curves={"loss": ([0, 5, 10], [float("nan"), 2.0, float("inf")])},
    )
    assert json.loads(shown.json())["runs"][0]["curves"] == {"loss": [[5.0], [2.0]]}


def test_gold_that_no_head_can_be_judged_by_chooses_none():
    """No sure link, and every row of every head points at </s>: AER is 0/0, which is no reason to fail."""
    source, target = ViewSide(("un", "</s>"), (0, 1), ("un", "</s>")), ViewSide(("<s>", "a"), (0, 1), ("<s>", "a"))
    gold = ViewGold(frozenset(), frozenset({(0, 0)}), (0, -1), (0, 1), 1)
    weights = torch.tensor([[[0.1, 0.9], [0.1, 0.9]]] * 2)
    frame = Frame([ViewAttention(0, "cross", 0, (0, 1), {"weight": weights})])
    assert find_best_head([ViewExample("1", {"source": source, "target": target}, gold)], [frame]) is None
