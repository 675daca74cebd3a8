"""Rollout and flow: products and cuts of shares, by hand, by slow transcription and by another library."""

from dataclasses import replace

import networkx
import pytest
import tiny_models
import torch
from small_models import CLASSIFIER, LM, TRANSLATOR, made
from test_contribution import exact, padded

import attnlab
from attnlab.analysis.mixing import MAPS, mixing
from attnlab.analysis.rollout import flow, rollout
from attnlab.huggingface import pretrained
from attnlab.records.record import Layer, Record


def layer_of(weights: list, kind: str = "encoder-self") -> Layer:
    """One head with these weights, its values 0."""
    attended = torch.tensor(weights, dtype=torch.float64)[None, None]
    _, _, i, j = attended.shape
    nothing = torch.zeros(1, 1, i, 1, dtype=torch.float64)
    values, states = torch.zeros(1, 1, j, 1, dtype=torch.float64), torch.zeros(1, i, 1, dtype=torch.float64)
    projection, mask = torch.zeros(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, j, dtype=torch.bool)
    return Layer(kind, 0, kind, attended, values, nothing, nothing, projection, None, states, states, mask)


def test_rollout_by_hand():
    """(½A + ½I) of both layers, the later on the left: A₁ = [[0,1],[1,0]], A₂ = [[1,0],[½,½]]."""
    record = Record([layer_of([[0, 1], [1, 0]]), layer_of([[1, 0], [0.5, 0.5]])])
    assert rollout(record, "weight-residual")["encoder-self"].tolist() == [[[0.5, 0.5], [0.5, 0.5]]]
    assert rollout(record, "weight")["encoder-self"].tolist() == [[[0.0, 1.0], [0.5, 0.5]]]


def test_a_token_without_shares_is_refused():
    """Of a token, not of padding: its rows would sum to 0."""
    record = Record([layer_of([[1, 0], [0, 0]])])
    for by in ("weight", {"encoder-self": "weight"}):
        with pytest.raises(ValueError, match=r"token 1 of example 0 takes nothing from any token by 'weight'"):
            rollout(record, by)
    padded_record = replace(record, masks={"source": torch.tensor([[True, False]])})
    assert rollout(padded_record, "weight")["encoder-self"].tolist() == [[[1.0, 0.0], [0.0, 0.0]]]


def test_flow_by_hand():
    """Capacities [[½,½],[0,1]], then [[1,0],[¼,¾]]: from output 1 to input 0 all goes over the edge of ¼."""
    record = Record([layer_of([[0, 1], [0, 1]]), layer_of([[1, 0], [0.5, 0.5]])])
    found = flow(record, "weight-residual")["encoder-self"][0]
    assert found.tolist() == [[0.5, 0.5], [0.25, 1.0]]


def test_encoder_decoder_by_hand():
    """A target token keeps half and takes half from the encoder's two, whose second took half of the first."""
    parts = [layer_of([[1, 0], [1, 0]]), layer_of([[1]], "decoder-self"), layer_of([[0.25, 0.75]], "cross")]
    found = rollout(Record(parts), "weight-residual")
    assert found["encoder-self"].tolist() == [[[1, 0], [0.5, 0.5]]]
    assert found["decoder-self"].tolist() == [[[0.5]]]
    assert found["cross"].tolist() == [[[0.125 + 0.375 / 2, 0.375 / 2]]]
    assert flow(Record(parts))["cross"].tolist() == [[[0.125 + 0.375, 0.375]]]  # edges of ½ and 1 are no narrower


@pytest.mark.parametrize("by", [by for by in MAPS if by != "zeroing"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_rollout_is_the_product_of_shares(name, by):
    model = getattr(tiny_models, name)().double()
    record = pretrained.record(model, tiny_models.padded_batch(model), feed_forward=True)
    (found,) = rollout(record, by).values()
    for example in range(3):
        expected = torch.eye(11, dtype=torch.float64)
        for layer in record.layers:
            shares = mixing(layer, by).map[example]
            expected = shares / shares.sum(-1, keepdim=True) @ expected
        torch.testing.assert_close(found[example], expected, **exact)


def shared(layer: Layer, by: str) -> torch.Tensor:
    """The shares of queries (b,i,…) in [target | source], of one decoder layer."""
    found = mixing(layer, by)
    if layer.kind != "cross":
        return found.map / found.map.sum(-1, keepdim=True)
    both = torch.cat([torch.diag_embed(found.own), found.map], dim=-1)
    return both / both.sum(-1, keepdim=True)


@pytest.mark.parametrize("by", ["weight-residual", "attention", "residual", "norm"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_translator_as_one_matrix_over_both_sequences(norm, by):
    """Source and target tokens together as one sequence of 7 + 5: every layer is a square matrix of shares."""
    record = attnlab.record(made(TRANSLATOR, norm=norm), (padded(), padded(length=5)))
    found = rollout(record, by)
    expected = torch.eye(12, dtype=torch.float64).expand(3, 12, 12)  # 5 target tokens, then 7 of the source
    for layer in record.layers:
        step = torch.eye(12, dtype=torch.float64).repeat(3, 1, 1)
        shares = shared(layer, by)
        if layer.kind == "encoder-self":
            step[:, 5:, 5:] = shares
        else:
            step[:, :5, : shares.shape[-1]] = shares
        expected = step @ expected
    torch.testing.assert_close(found["decoder-self"], expected[:, :5, :5], **exact)
    torch.testing.assert_close(found["cross"], expected[:, :5, 5:], **exact)
    torch.testing.assert_close(found["encoder-self"], expected[:, 5:, 5:], **exact)
    total = found["decoder-self"].sum(-1) + found["cross"].sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), **exact)


def test_every_kind_may_have_its_own_map():
    record = attnlab.record(made(TRANSLATOR, norm="post"), (padded(), padded(length=5)), feed_forward=True)
    by = {"encoder-self": "block", "decoder-self": "norm", "cross": "block"}
    assert not torch.allclose(rollout(record, by)["cross"], rollout(record, "norm")["cross"])
    with pytest.raises(ValueError, match=r"blocks\.0\.attention: .* not supported: no feed-forward"):
        rollout(record, "block")
    with pytest.raises(ValueError, match="no map for cross, encoder-self"):
        rollout(record, {"decoder-self": "norm"})


@pytest.mark.parametrize("config", [CLASSIFIER, LM, TRANSLATOR], ids=lambda config: config.model)
def test_flow_is_networkx_s(config):
    batch = torch.randint(1, 19, (1, 5))
    record = attnlab.record(made(config), (batch, batch[:, :3]) if config is TRANSLATOR else batch)
    found = flow(record, "weight-residual")
    graph, top, made_of = networkx.DiGraph(), {}, {}
    for number, layer in enumerate(record.layers):
        query, key = {"encoder-self": "ss", "decoder-self": "tt", "cross": "ts"}[layer.kind]
        i, j = layer.weights.shape[2:]
        below = top.get(key, -1)
        for q in range(i):
            edges = {(key, below, k): float(layer.weights[0, :, q, k].mean()) / 2 for k in range(j)}
            own = (query, top.get(query, -1), q)
            edges[own] = edges.get(own, 0.0) + 0.5
            for node, capacity in edges.items():
                graph.add_edge((query, number, q), node, capacity=capacity)
        top[query] = number
    for kind, flows in found.items():
        query, key = {"encoder-self": "ss", "decoder-self": "tt", "cross": "ts"}[kind]
        for q in range(flows.shape[1]):
            for k in range(flows.shape[2]):
                made_of[q, k] = networkx.maximum_flow_value(graph, (query, top[query], q), (key, -1, k))
                assert float(flows[0, q, k]) == pytest.approx(made_of[q, k], abs=1e-7)


def test_the_future_has_no_share():
    found = rollout(attnlab.record(made(LM), padded()))["decoder-self"]
    assert not found.triu(1).any()
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 7, dtype=torch.float64), **exact)


def test_padding_has_no_share_in_tokens():
    tokens = padded()
    found = rollout(attnlab.record(made(CLASSIFIER), tokens))["encoder-self"]
    assert not found[1, :4, 4:].any()
    alone = rollout(attnlab.record(made_again := made(CLASSIFIER), tokens[1:2, :4]))["encoder-self"]
    both = rollout(attnlab.record(made_again, tokens))["encoder-self"]
    torch.testing.assert_close(both[1, :4, :4], alone[0], **exact)


def test_layers_are_read_one_at_a_time(tmp_path):
    record = attnlab.record(made(TRANSLATOR, "dagpam"), (padded(), padded(length=5)))
    record.save(tmp_path / "record")
    for kind, found in rollout(Record.load(tmp_path / "record")).items():
        torch.testing.assert_close(found, rollout(record)[kind], **exact)


def test_negative_weights_are_rolled_out_by_their_norms():
    record = attnlab.record(made(LM, "dagpam"), padded())
    with pytest.raises(ValueError, match=r"negative .*by='norm'"):
        rollout(record, "weight")
    found = rollout(record)["decoder-self"]
    assert (found >= 0).all()


def test_nothing_to_roll_out():
    with pytest.raises(ValueError, match="no layers"):
        rollout(Record([]))
