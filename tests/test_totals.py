"""Totals of attention without maps: equal to sums over whole maps, from rows, blocks of q and k, and the kernel."""

from dataclasses import replace

import pytest
import torch
from gpu_compile import assert_compiles, some_and_all
from tiny_models import llama

import attnlab
from attnlab.analysis.sinks import measure_activations, tabulate_sinks
from attnlab.analysis.totals import totals
from attnlab.huggingface.streaming import check_rows, stream_layers
from attnlab.records.record import Layer, apply_turning
from attnlab.records.visibility import CausalMask, SoftmaxScores

pytest.importorskip("triton")
from attnlab.analysis import totals_kernel as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [  # b, h, g, i, j, d, e, causal
    (2, 4, 2, 37, 37, 19, 23, True), (1, 3, 3, 131, 150, 16, 7, True), (1, 2, 1, 70, 45, 24, 31, False),
    (1, 1, 1, 257, 257, 64, 5, True), (1, 2, 2, 1, 1, 3, 2, True),
]  # fmt: skip
NAMES = ("vector", "received_weight", "received_norm", "taken_norm", "entropy", "peak")


def made(b, h, g, i, j, d, e, causal, *, dtype=torch.float32) -> Layer:
    """A layer with lazy softmax weights, whose q and k are slices of other tensors."""
    torch.manual_seed(i * j)
    q = torch.randn(b, i, h, d + 1, device=DEVICE)[..., 1:].transpose(1, 2).to(dtype)
    k = (2 * torch.randn(b, j, g, d, device=DEVICE)).transpose(1, 2).to(dtype)
    values = torch.randn(b, g, j, d, device=DEVICE, dtype=dtype)
    weights = dense(q, k, d**-0.5, causal)
    context = (weights @ values.double().repeat_interleave(h // g, 1)).to(dtype)
    states, projection = torch.zeros(b, i, e, device=DEVICE), torch.randn(h, d, e, device=DEVICE)
    mask = CausalMask(i, j, torch.device(DEVICE)) if causal else torch.ones(1, 1, 1, j, dtype=torch.bool, device=DEVICE)
    scores = SoftmaxScores(lambda start, stop: weights[:, :, start:stop].float(), q, k, d**-0.5, causal)
    return Layer("decoder-self", 0, "layer", scores, values, context, context, projection, None, states, states, mask)


def dense(q, k, scale, causal):
    """Softmax over whole rows, in float64."""
    s = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    i, j = s.shape[2:]
    hidden = ~torch.ones(i, j, device=s.device).tril(j - i).bool() if causal else torch.zeros(i, j, device=s.device) > 0
    return s.masked_fill(hidden, -torch.inf).softmax(-1)


def expected(layer) -> dict[str, torch.Tensor]:
    """The totals as sums over the vectors themselves, (b,h,i,j,e)."""
    scores = layer.attended
    weights = dense(scores.query, scores.key, scores.scale, scores.causal)
    f = torch.einsum("bhjd,hde->bhje", layer.values.double(), layer.output_weight.double())
    norms = torch.einsum("bhij,bhje->bhije", weights, f).norm(dim=-1)
    return {
        "vector": f.norm(dim=-1), "received_weight": weights.sum(2), "received_norm": norms.sum(2),
        "taken_norm": norms.sum(3), "entropy": torch.special.entr(weights).sum(-1), "peak": others(norms).amax(3),
    }  # fmt: skip


def others(norms):
    """Maps (…,i,j) without pairs of a token with itself; the last query is the last key."""
    i, j = norms.shape[-2:]
    own = torch.arange(j - i, j, device=norms.device)[:, None] == torch.arange(j, device=norms.device)
    return norms.masked_fill(own, 0.0)


@pytest.mark.kernel
@pytest.mark.parametrize("impl", ["reference", "auto", "fused"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_equal_sums_over_the_vectors(shape, impl):
    layer = made(*shape)
    found = totals(layer, impl=impl, links=3)
    for name, x in expected(layer).items():
        torch.testing.assert_close(getattr(found, name).double(), x, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.kernel
def test_half_precision_and_a_known_logsumexp():
    layer = made(1, 4, 2, 70, 70, 16, 8, True, dtype=torch.float16)
    scores = layer.attended
    weights = dense(scores.query, scores.key, scores.scale, True)
    logits = scores.query.double() @ scores.key.double().repeat_interleave(2, 1).mT * scores.scale
    known = logits.masked_fill(weights == 0, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(kernel.compute_logsumexp(scores).double(), known, rtol=1e-5, atol=1e-5)
    for name, x in expected(layer).items():
        for held in (None, known.float()):
            found = totals(replace(layer, attended=replace(scores, logsumexp=held)), impl="fused", links=1)
            torch.testing.assert_close(getattr(found, name).double(), x, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.kernel
def test_every_element_is_written_and_runs_are_equal(monkeypatch):
    layer, empty = made(2, 2, 1, 67, 67, 16, 8, True), torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: empty(*a, **o).fill_(float("nan")))
    monkeypatch.setattr(kernel, "PARTS", 2 * 67 * 3)  # one head at a time
    first, second = (totals(layer, impl="fused", links=2) for _ in range(2))
    for name in NAMES:
        assert bool(getattr(first, name).isfinite().all())
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.kernel
@pytest.mark.parametrize("impl", ["reference", "auto", "fused"])
@pytest.mark.parametrize("kind", ["decoder-self", "cross"])
def test_links_are_the_largest_of_all_pairs_of_different_tokens(impl, kind):
    """Keys are the queries, so most tokens take most from themselves."""
    layer = made(2, 3, 3, 41, 41, 8, 5, True)
    q, scale = layer.attended.query, layer.attended.scale
    weights = dense(q, q, scale, True)
    scores = SoftmaxScores(lambda start, stop: weights[:, :, start:stop].float(), q, q, scale, True)
    layer = replace(layer, kind=kind, attended=scores)
    norms = layer.weights.double() * totals(layer).vector[:, :, None]
    best, place = (norms if kind == "cross" else others(norms)).flatten(2).topk(7, dim=2)
    links = totals(layer, impl=impl, links=7).links
    torch.testing.assert_close(links.norm.double(), best, rtol=1e-4, atol=1e-6)
    assert torch.equal(links.query * 41 + links.key, place)
    picked = layer.weights.flatten(2).gather(2, place)
    torch.testing.assert_close(links.weight, picked, rtol=1e-4, atol=1e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("impl", ["reference", "auto", "fused"])
@pytest.mark.parametrize("block", [16, 128, 256])
def test_a_level_is_the_mean_of_its_pairs(impl, block):
    layer = made(1, 4, 2, 300, 300, 8, 5, True)
    found = totals(layer, block=block, impl=impl)
    weights, count = layer.weights.double(), -(-300 // block)
    for level, x in ((found.level.weight, weights), (found.level.norm, weights * found.vector[:, :, None].double())):
        assert level.shape == (1, 4, count, count)
        rows = torch.stack([part.mean(2) for part in x.split(block, dim=2)], dim=2)
        means = torch.stack([part.sum(3) for part in rows.split(block, dim=3)], dim=3)
        torch.testing.assert_close(level.double(), means, rtol=1e-4, atol=1e-6)
    for wrong in (100, 8):
        with pytest.raises(ValueError, match=f"block must be a power of 2 of at least 16, got {wrong}"):
            totals(layer, block=wrong)


def test_a_head_with_fewer_pairs_than_links_says_so():
    links = totals(made(1, 1, 1, 2, 2, 4, 3, True), links=9).links
    pairs = list(zip(links.query.flatten().tolist(), links.key.flatten().tolist(), strict=True))
    assert pairs == [(1, 0), *[(-1, -1)] * 3]  # a link joins different tokens


def test_a_gate_of_each_query_joins_the_norms():
    layer = made(1, 2, 2, 19, 19, 4, 3, True)
    gate = torch.randn(1, 2, 19, 1)
    turned = replace(layer, turning=gate, mixed=layer.context * gate)
    found = totals(turned)
    weights = layer.weights.double() * gate.double().abs()
    assert found.how == "rows"
    torch.testing.assert_close(
        found.taken_norm.double(), (weights * found.vector[:, :, None]).sum(-1), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("shape", [(1, 2, 19, 4), (1, 2, 19, 4, 4)], ids=["element", "matrix"])
def test_a_turning_of_vectors_joins_the_norms(shape):
    layer = made(1, 2, 2, 19, 19, 4, 3, True)
    turning = torch.randn(shape)
    turned = replace(layer, turning=turning, mixed=apply_turning(turning, layer.context))
    matrix = turning if len(shape) == 5 else torch.diag_embed(turning)
    vectors = torch.einsum("bhij,bhjd,bhidc,hce->bhije", layer.weights, layer.values, matrix, layer.output_weight)
    norms = vectors.double().norm(dim=-1)
    found = totals(turned, links=5, block=128)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.taken_norm.double(), norms.sum(-1), **close)
    torch.testing.assert_close(found.received_norm.double(), norms.sum(-2), **close)
    best, place = others(norms).flatten(2).topk(5, dim=2)
    torch.testing.assert_close(found.links.norm.double(), best, **close)
    assert torch.equal(found.links.query * 19 + found.links.key, place)
    torch.testing.assert_close(found.level.norm[..., 0, 0].double(), norms.sum((-1, -2)) / 19, **close)


def test_bad_arguments_are_refused_in_one_line():
    layer = made(1, 1, 1, 3, 3, 4, 3, True)
    with pytest.raises(ValueError, match="links must be at least 0, got -1"):
        totals(layer, links=-1)
    with pytest.raises(ValueError, match="impl must be one of"):
        totals(layer, impl="fast")
    with pytest.raises(ValueError, match="not a plain softmax"):
        totals(replace(layer, attended=layer.weights), impl="fused")


def test_a_streamed_model_gives_the_totals_of_its_record():
    model = llama()
    ids = torch.randint(50, (1, 23), generator=torch.Generator().manual_seed(1))
    visited = []
    output = stream_layers(model, {"input_ids": ids}, visited.append, links=4)
    record = attnlab.record(model, {"input_ids": ids})
    assert len(visited) == len(record.layers)
    torch.testing.assert_close(output, model(ids)[0], rtol=1e-4, atol=1e-5)
    for streamed, layer in zip(visited, record.layers, strict=True):
        exact = totals(layer, links=4)
        assert (streamed.totals.how, exact.how) == ("blocks", "rows")
        for name in NAMES:
            torch.testing.assert_close(getattr(streamed.totals, name), getattr(exact, name), rtol=1e-3, atol=1e-5)
        sizes = layer.around["residual"].abs()
        assert streamed.activations.largest == pytest.approx(float(sizes.max()))
        place = streamed.activations.token, streamed.activations.channel
        assert float(sizes[0][place]) == float(sizes.max())


def test_a_wrong_total_does_not_pass():
    layer = made(1, 2, 2, 29, 29, 8, 5, True)
    found = totals(layer)
    check_rows(layer, found)
    entropy = found.entropy.clone()
    entropy[..., 28] += 0.1
    with pytest.raises(ValueError, match="the streamed entropy of query 28 differs"):
        check_rows(layer, replace(found, entropy=entropy))


def test_sinks_by_hand():
    """Two queries: weights (1, 0) and (0.6, 0.4), vectors of length 1 and 3."""
    layer = made(1, 1, 1, 2, 2, 1, 1, True)
    weights = torch.tensor([[[[1.0, 0.0], [0.6, 0.4]]]])
    values, projection = torch.tensor([[[[1.0], [3.0]]]]), torch.ones(1, 1, 1)
    context = weights @ values
    layer = replace(
        layer, attended=weights, grouped_values=values, context=context, mixed=context, output_weight=projection
    )
    row = tabulate_sinks([totals(layer)]).iloc[0]
    assert row["first_weight"] == pytest.approx(0.8)
    assert row["first_norm"] == pytest.approx(1.6 / 2.8)
    assert row["first_uniform"] == pytest.approx((1 + 1 / 2) / 2)
    assert (row["top_key"], row["top_weight"], row["is_sink"]) == (0, pytest.approx(0.8), True)


def test_massive_activations_by_hand():
    states = torch.ones(1, 5, 7)
    states[0, 3, 2] = -2000.0
    found = measure_activations(states)
    assert (found.largest, found.median, found.token, found.channel, found.massive) == (2000.0, 1.0, 3, 2, 1)
    assert measure_activations(states * 0.04).massive == 0  # 80 is not above 100


def test_a_causal_mask_is_a_rule():
    mask = CausalMask(5, 7, torch.device("cpu"))
    whole = torch.ones(5, 7, dtype=torch.bool).tril(2)[None, None]
    assert torch.equal(mask.build(), whole)
    assert torch.equal(mask.rows(2, 4), whole[:, :, 2:4])
    assert torch.equal(mask.expand(3, 1, 5, 7), whole.expand(3, 1, 5, 7))


def test_a_lazy_record_keeps_the_rule_when_it_is_cut_moved_and_saved(tmp_path):
    record = attnlab.record(llama(), {"input_ids": torch.randint(3, 50, (2, 9))}, lazy=True)
    mask = record.layers[0].mask
    assert mask == CausalMask(9, 9, torch.device("cpu"))
    assert all(layer.mask is mask for layer in record.layers)
    for some in (record[1], record.to("cpu")):
        assert some.layers[2].mask == mask
        assert torch.equal(some.layers[2].weights, record.layers[2].weights[-len(some) :])
    record.save(tmp_path / "record.safetensors")
    loaded = attnlab.Record.load(tmp_path / "record.safetensors").layers[1]
    assert torch.equal(loaded.mask, mask.build())
    assert torch.equal(loaded.weights, record.layers[1].weights)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.analysis import totals_kernel as kernel
small = kernel.TILES | {"ROWS": 16}  # as with a level of the finest blocks
kinds = (("bf16", 128, kernel.TILES), ("bf16", 64, small), ("fp32", 64, kernel.WIDE_TILES), ("fp16", 64, kernel.TILES))
for kind, d, tiles in kinds if EVERY else kinds[:1]:
    for function in (kernel._normalise, kernel._stream):
        fixed = {"CAUSAL": True, "SHARED": 4, "D": d, "WIDE": d, "ROWS": tiles["ROWS"], "KEYS": tiles["KEYS"]}
        fixed |= {"PEAKS": True, "OWN": True} if function is kernel._stream else {}
        types = {"query": f"*{kind}", "key": f"*{kind}", "scale": "fp32"} | dict.fromkeys(fixed, "constexpr")
        types |= dict.fromkeys(("size", "lse", "taken_out", "entropy_out", "peak_out", "parts"), "*fp32")
        signature = {name: types.get(name, "i32") for name in function.arg_names}
        options = {"num_warps": tiles["num_warps"], "num_stages": tiles["num_stages"]}
        made = triton.compile(ASTSource(function, signature, fixed), target=GPUTarget("cuda", 86, 32), options=options)
        assert made.metadata.shared <= 99 * 1024, (fixed, made.metadata.shared)
"""


@pytest.mark.kernel
@some_and_all
def test_the_kernels_compile_for_a_gpu_that_is_not_here(every):
    assert_compiles(COMPILE, every)
