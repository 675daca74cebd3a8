"""Soft maps, decisions, the choice without gold links, and the loss of a trained aligner, by definition."""

import numpy as np
import pytest
import torch

from attnlab.aligning.aligner_training import compute_loss
from attnlab.aligning.choice import Candidate
from attnlab.aligning.deciding import DECISIONS, DecisionRule, decide_links
from attnlab.aligning.extraction import PairBatch, project_contributions
from attnlab.aligning.map_choice import AgreedChoice, choose_by_agreement
from attnlab.aligning.soft_maps import join_maps, normalise_similarity, read_soft_map
from attnlab.analysis.alignment import NOWHERE, CorpusAlignment
from attnlab.records.record import Layer


def make_layer(weights, values, projection):
    context = weights @ values
    empty = context.new_empty(0)
    return Layer(
        kind="cross", index=0, name="x", attended=weights, grouped_values=values, context=context, mixed=context,
        output_weight=projection, output_bias=None, inputs=empty, outputs=empty, mask=torch.ones(1, dtype=torch.bool),
    )  # fmt: skip


def make_batch():
    """Two pairs: 3 rows and 4 keys, the last key special; the first source word has two pieces."""
    torch.manual_seed(0)
    weights = torch.rand(2, 3, 3, 4, dtype=torch.float64)
    layer = make_layer(
        weights / weights.sum(-1, keepdim=True), torch.randn(2, 3, 4, 5).double(), torch.randn(3, 5, 7).double()
    )
    labels = torch.tensor([[0, 1, NOWHERE], [0, 0, 1]])
    keys = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2]])
    return PairBatch({0: layer}, labels, keys, 2, torch.ones(2, 3, 4, dtype=torch.bool))


@pytest.mark.parametrize("pieces", ["mean", "max"])
def test_a_soft_map_is_a_share_of_each_row(pieces):
    batch = make_batch()
    made = read_soft_map(batch, Candidate("weight", "awo", 0, "mean"), pieces)
    alpha = batch.layers[0].weights.mean(1)
    for b, (rows, keys) in enumerate(zip(batch.labels.tolist(), batch.keys.tolist(), strict=True)):
        for t in range(2):
            cells = []
            for s in range(3):
                part = alpha[b][[i for i, r in enumerate(rows) if r == t]][:, [j for j, k in enumerate(keys) if k == s]]
                cells.append(float(part.max() if pieces == "max" else part.sum(1).mean()))
            assert made[b, t].tolist() == pytest.approx([c / sum(cells) for c in cells[:2]], rel=1e-5)


def test_signed_contributions_sum_to_the_norm_of_the_output():
    layer = make_batch().layers[0]
    made = project_contributions(layer)
    vectors = torch.einsum("bhij,bhjd,hde->bije", layer.weights, layer.values, layer.output_weight)
    output = vectors.sum(2)
    slow = (vectors * (output / output.norm(dim=-1, keepdim=True)).unsqueeze(2)).sum(-1)
    assert torch.allclose(made, slow)
    assert torch.allclose(made.sum(-1), output.norm(dim=-1))


def test_maps_are_joined_and_similarities_become_shares():
    a, b = torch.tensor([[[0.9, 0.1]]]), torch.tensor([[[0.4, 0.4]]])
    assert join_maps([a, b]).flatten().tolist() == pytest.approx([0.65, 0.25])
    assert join_maps([a, b], "geometric").flatten().tolist() == pytest.approx([0.6, 0.2])
    live = torch.ones(1, 2, 3, dtype=torch.bool)
    live[:, :, 2] = False
    forward, backward = normalise_similarity(torch.randn(1, 2, 3), live, 0.5)
    assert forward.sum(1)[0].tolist() == pytest.approx([1, 1, 0])
    assert backward.sum(2)[0].tolist() == pytest.approx([1, 1])


MAP = torch.tensor([[0.9, 0.3, 0.0], [0.1, 0.6, 0.35], [0.0, 0.02, 0.05]])


@pytest.mark.parametrize(
    ("rule", "links"),
    [
        (DecisionRule("argmax", null=0.0), {(0, 0), (1, 1), (1, 2)}),
        (DecisionRule("mutual", null=0.1), {(0, 0), (1, 1)}),
        (DecisionRule("grow", null=0.1, grow=0.2), {(0, 0), (1, 1), (1, 2)}),
        (DecisionRule("grow", null=0.1, grow=0.4), {(0, 0), (1, 1)}),
        (DecisionRule("threshold", threshold=0.3), {(0, 0), (0, 1), (1, 1), (1, 2)}),
        (DecisionRule("grow-diag-final-and", null=0.1), {(0, 0), (1, 1), (1, 2)}),
        (DecisionRule("itermax", null=0.04), {(0, 0), (1, 1), (1, 2), (2, 2)}),
        (DecisionRule("transport", null=0.0), {(0, 0), (1, 1), (2, 2)}),
    ],
    ids=lambda x: x.decide if isinstance(x, DecisionRule) else "",
)
def test_decisions_on_a_small_map(rule, links):
    padded = torch.zeros(2, 4, 5)
    padded[0, :3, :3] = MAP
    first, second = decide_links(padded, [(3, 3), (0, 2)], rule)
    assert set(first) == links
    assert second == {}
    assert all(value == pytest.approx(float(MAP[link])) for link, value in first.items())
    assert rule.decide in DECISIONS


def test_the_layers_that_agree_are_chosen_and_a_clear_agreement_beats_the_order():
    words = [6, 5]
    right = CorpusAlignment.empty(words)
    wrong = CorpusAlignment.empty(words)
    for links, choice in ((right, lambda n: np.arange(n)), (wrong, lambda n: np.zeros(n, int))):
        for pair, count in enumerate(words):
            links.set_links(pair, choice(count), np.ones(count))
    norm, weight = Candidate("norm", "awi", 0, "mean"), Candidate("weight", "awi", 1, "mean")
    other = Candidate("norm", "awi", 2, "mean")
    chosen = choose_by_agreement({norm: right, other: wrong}, {norm: right, other: wrong}, 22)
    assert (chosen.forward, chosen.backward, chosen.agreement) == (norm, norm, 1.0)
    assert "100 %" in chosen.explain(2)
    clear = choose_by_agreement({norm: wrong, weight: right}, {norm: wrong, weight: right}, 22)
    assert clear.forward == weight
    equal = choose_by_agreement({weight: right, norm: right}, {weight: right, norm: right}, 22)
    assert equal.forward == norm
    for share, named in ((0.65, True), (0.63, False)):
        text = AgreedChoice(norm, norm, 0.64, AgreedChoice(weight, weight, share)).explain(45)
        assert ("so norm comes first" in text) == named


def test_the_loss_is_the_mean_surprise_of_the_links_both_ways():
    logits = torch.tensor([[[1.0, 2.0], [0.5, -1.0]]])
    links = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    made = compute_loss(logits, links, torch.ones_like(links, dtype=torch.bool))
    wanted = 0.0
    for s, t in ((0, 0), (1, 1)):
        column, row = logits[0, :, t].exp(), logits[0, s].exp()
        wanted -= float((column[s] / column.sum()).log() + (row[t] / row.sum()).log()) / 4
    assert float(made) == pytest.approx(wanted)
