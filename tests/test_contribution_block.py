"""Contributions with residual, norm and feed-forward: equal to vectors made of the models' own modules."""

from dataclasses import replace
from itertools import pairwise

import pytest
import scipy.integrate
import tiny_models
import torch
from materialised import Parts, ratio
from small_models import LM, TRANSLATOR, made
from test_contribution import exact, padded
from torch import nn
from torch.nn import functional as F
from turnings import TURNINGS, made_turning

import attnlab
from attnlab.analysis import feed_forward, vectors
from attnlab.analysis.mixing import MAPS, mixing
from attnlab.huggingface import pretrained
from attnlab.recording import around
from attnlab.records.record import AROUND, Record

PLACES = ("attention", "residual", "norm", "feed-forward", "feed-forward-residual", "block")


def hugging_face(name: str, **options) -> tuple[Record, list[Parts]]:
    """A record, and by the names of its modules what stands around each attention that a feed-forward follows."""
    model = getattr(tiny_models, name)(**options).double()
    batch = tiny_models.padded_batch(model)
    states = []
    blocks = {
        "bert": lambda: model.encoder.layer,
        "gpt2": lambda: model.transformer.h,
        "llama": lambda: model.model.layers,
        "gemma": lambda: model.model.layers,
    }[name]()
    for block in blocks:
        block.register_forward_pre_hook(lambda _, args, named: states.append(args[0]), with_kwargs=True)
    record = pretrained.record(model, batch, feed_forward=True)  # proved first: the last states are the record's
    states = states[-len(blocks) :]
    return record, [_parts(name, block, state) for block, state in zip(blocks, states, strict=True)]


def _parts(name: str, block: nn.Module, state: torch.Tensor) -> Parts:
    if name == "bert":
        inner, output = block.intermediate, block.output
        norms = block.attention.output.LayerNorm, output.LayerNorm
        return Parts(state, norms[0], inner.dense, inner.intermediate_act_fn, output.dense, closing=norms[1])
    if name == "gpt2":
        return Parts(state, block.ln_2, block.mlp.c_fc, block.mlp.act, block.mlp.c_proj)
    mlp = block.mlp
    return Parts(state, block.post_attention_layernorm, mlp.gate_proj, mlp.act_fn, mlp.down_proj, factor=mlp.up_proj)


def ours(config, norm: str, **changes) -> tuple[Record, list[Parts | None]]:
    """The same for a Transformer of ours; None where no feed-forward follows."""
    model = changes.pop("model", None) or made(config, changes.pop("name", "softmax"), norm=norm, **changes)
    batch = (padded(), padded(length=5)) if config is TRANSLATOR else padded()
    read: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("attention_residual.norm" if norm == "pre" else "attention"):
            module.register_forward_hook(lambda _, args, __, key=name: read.update({key: args[0]}))
        if name.endswith("cross_residual.norm" if norm == "pre" else "cross"):
            module.register_forward_hook(lambda _, args, __, key=name: read.update({key: args[0]}))
    record = attnlab.record(model, batch, feed_forward=True)
    found: list[Parts | None] = []
    for layer in record.layers:
        block = model.get_submodule(layer.name.rpartition(".")[0])
        part = layer.name.rpartition(".")[2]
        residual = read[f"{layer.name}_residual.norm" if norm == "pre" else layer.name]
        if block.cross is not None and part == "attention":
            found.append(None)
            continue
        feed, closing = block.feed_forward, block.feed_forward_residual.norm
        first = closing if norm == "pre" else getattr(block, f"{part}_residual").norm
        closing = None if norm == "pre" else closing
        found.append(Parts(residual, first, feed.inner, feed.activation, feed.output, feed.factor, closing))
    return record, found


def check(record: Record, blocks: list[Parts | None], places=PLACES) -> None:
    for layer, parts in zip(record.layers, blocks, strict=True):
        if parts is None:
            continue
        with torch.no_grad():
            expected = parts.follow(layer)
        cross = layer.kind == "cross"
        for place in places:
            found, c = mixing(layer, place), expected[place].detach()
            size = c.norm(dim=-1)
            if cross and place != "attention":
                torch.testing.assert_close(found.own, size[..., -1], **exact)
                size = size[..., :-1]
            torch.testing.assert_close(found.map, size, **exact)
            if not cross or place != "attention":
                torch.testing.assert_close(found.ratio, ratio(c, cross=cross), **exact)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma"])
def test_hugging_face_blocks(name, monkeypatch):
    monkeypatch.setattr(vectors, "HELD", 3 * 11 * 18 * 4)  # four queries at a time
    check(*hugging_face(name))


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_activations(activation):
    check(*hugging_face("bert", hidden_act=activation), places=["feed-forward", "block"])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("config", [LM, TRANSLATOR], ids=["language-model", "translator"])
def test_blocks_of_ours(config, norm):
    check(*ours(config, norm))


MODERN = {"norm_type": "rms", "activation": "swiglu", "positions": "rope", "query_key_norm": True, "head_dim": 6}


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_modern_blocks_of_ours(norm):
    check(*ours(LM, norm, **MODERN, residual_scale=0.5))


@pytest.mark.parametrize("changes", [{"name": "dagpam"}, {"key_value_heads": 1, "activation": "gelu"}], ids=str)
def test_signed_weights_and_grouped_heads(changes):
    check(*ours(LM, "post", **changes))


@pytest.mark.parametrize("which", TURNINGS)
@pytest.mark.parametrize("config", [LM, TRANSLATOR], ids=["language-model", "translator"])
def test_a_turning_is_followed_through_the_block(config, which, monkeypatch):
    monkeypatch.setattr(vectors, "HELD", 3 * 7 * 13 * 2)  # two queries at a time
    check(*ours(config, config.norm, model=made_turning(which, config)))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_biases_the_contributions_add_up_to_the_blocks_output(norm):
    model = made(LM, norm=norm, layers=3, activation="gelu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    layers = attnlab.record(model, padded(), feed_forward=True).layers
    for layer, following in pairwise(layers):
        total = layer.around["residual"] + layer.outputs  # Σ_j c_ij
        made_of_them = feed_forward.pass_through(layer, total[:, :, None], slice(None), "block")[:, :, 0]
        torch.testing.assert_close(made_of_them, following.around["residual"], **exact)


def test_weights_and_their_residual():
    record = attnlab.record(made(TRANSLATOR), (padded(), padded(length=5)))
    for layer in record.layers:
        mean, plain, mixed = layer.weights.mean(1), mixing(layer, "weight"), mixing(layer, "weight-residual")
        torch.testing.assert_close(plain.map, mean, **exact)
        if layer.kind == "cross":
            torch.testing.assert_close(mixed.map, mean / 2, **exact)
            assert (mixed.own == 0.5).all()
            torch.testing.assert_close(mixed.ratio, torch.full_like(mixed.ratio, 0.5), **exact)
        else:
            eye = torch.eye(mean.shape[1], dtype=mean.dtype)
            torch.testing.assert_close(mixed.map, 0.5 * mean + 0.5 * eye, **exact)
            torch.testing.assert_close(plain.ratio, 1 - mean.diagonal(dim1=1, dim2=2), **exact)
            torch.testing.assert_close(mixed.ratio, plain.ratio / 2, **exact)


def test_a_lazy_record_has_the_same_maps():
    model = tiny_models.llama().double()
    batch = tiny_models.padded_batch(model)
    lazy, held = (pretrained.record(model, batch, lazy=lazy, feed_forward=True) for lazy in (True, False))
    for one, other in zip(lazy.layers, held.layers, strict=True):
        for by in MAPS.keys() - {"zeroing"}:
            torch.testing.assert_close(mixing(one, by).map, mixing(other, by).map, rtol=0, atol=1e-5)


# slopes


@pytest.mark.parametrize("g", [F.silu, F.gelu, F.relu], ids=lambda g: g.__name__)
def test_gated_slopes_against_scipy(g):
    s = torch.tensor([-50.0, -7.0, -0.3, 0.0, 1e-9, 0.02, 1.0, 13.0, 50.0], dtype=torch.float64)
    u = torch.linspace(-2, 3, len(s), dtype=torch.float64)

    def at(x: float) -> float:
        return float(g(torch.tensor(x, dtype=torch.float64)))

    slope, mean = around.compute_gated_slopes(g, s, u)
    for n, x in enumerate(s.tolist()):
        expected, _ = scipy.integrate.quad(lambda t, x=x: at(t * x), 0, 1, epsabs=1e-13, epsrel=1e-13, limit=200)
        assert abs(float(mean[n]) - expected) < 1e-12 * (1 + abs(x)) + 1e-6 * (x == 0)
    torch.testing.assert_close(s * slope + u * mean, g(s) * u, rtol=1e-12, atol=1e-5)


def test_a_slope_at_zero_is_its_limit():
    zero = torch.zeros(1, dtype=torch.float64)
    assert abs(float(around.compute_slope(F.gelu, zero)) - 0.5) < 1e-5
    assert float(around.compute_slope(torch.tanh, zero)) == pytest.approx(1.0, abs=1e-6)


# what a record holds of a block


def test_what_is_found_is_named_and_kept(tmp_path):
    record, _ = hugging_face("llama")
    record.save(tmp_path / "record")
    loaded = Record.load(tmp_path / "record")
    for one, other in zip(record.layers, loaded.layers, strict=True):
        assert set(one.around) <= set(AROUND)
        assert {n: x.tolist() for n, x in one.around.items()} == {n: x.tolist() for n, x in other.around.items()}
    cut = record[1:]
    for place in PLACES:
        torch.testing.assert_close(mixing(cut.layers[0], place).map, mixing(record.layers[0], place).map[1:], **exact)
        torch.testing.assert_close(mixing(loaded.layers[0], place).map, mixing(record.layers[0], place).map, **exact)
    moved = record.to("meta")
    assert all(x.is_meta for x in moved.layers[0].around.values())


def test_weights_of_the_feed_forward_only_where_asked_for():
    model = tiny_models.gpt2()
    batch = tiny_models.padded_batch(model)
    plain, with_it = (pretrained.record(model, batch, feed_forward=asked) for asked in (False, True))
    assert set(plain.layers[0].around) == {"residual", "norm.gain", "norm.centred", "norm.scale"}
    assert "feed_forward.inner" in with_it.layers[0].around
    with pytest.raises(ValueError, match=r"h\.0\.attn: .* feed_forward=True"):
        mixing(plain.layers[0], "block")


def test_training_on_does_not_change_a_record():
    model = made(LM, norm="post")
    record = attnlab.record(model, padded(), feed_forward=True)
    before = mixing(record.layers[0], "block").map
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(mixing(record.layers[0], "block").map, before)


@pytest.mark.parametrize(
    ("name", "by", "message"),
    [
        ("gemma2", "residual", r"self_attn: .* not supported: .*post_attention_layernorm"),
        ("gpt_oss", "block", "not supported: no feed-forward"),
        ("modernbert", "feed-forward", "not supported: no feed-forward"),
    ],
)
def test_blocks_that_are_not_understood_say_so(name, by, message):
    model = getattr(tiny_models, name)()
    record = pretrained.record(model, tiny_models.padded_batch(model), feed_forward=True)
    mixing(record.layers[0], "attention")
    with pytest.raises(ValueError, match=message):
        mixing(record.layers[0], by)


def test_a_parallel_block_is_not_understood():
    import transformers as hf

    sizes = {"hidden_size": 18, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 17}
    model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes, vocab_size=97, use_parallel_residual=True)).eval()
    layer = pretrained.record(model, {"input_ids": torch.arange(3, 10)[None]}).layers[0]
    with pytest.raises(ValueError, match="post_attention_layernorm does not read"):
        mixing(layer, "norm")


@pytest.mark.parametrize(
    ("activation", "message"), [(nn.Sigmoid(), "is 0.5 at 0"), (nn.Tanhshrink(), ""), (nn.Softmax(-1), "is 1 at 0")]
)
def test_activations_that_cannot_be_shared_out(activation, message):
    model = made(LM)
    for block in model.decoder.blocks:
        block.feed_forward.activation = activation
    layer = attnlab.record(model.eval(), padded(), feed_forward=True).layers[0]
    if not message:
        assert mixing(layer, "block").map.isfinite().all()
        return
    with pytest.raises(ValueError, match=rf"feed_forward\.activation {message}"):
        mixing(layer, "block")


class Sorted(nn.Module):
    def forward(self, x):
        return x.sort(-1).values


class Bent(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x).tanh()


def test_parts_that_are_not_what_they_look_like():
    model = made(LM)
    model.decoder.blocks[0].feed_forward.activation = Sorted()
    model.decoder.blocks[1].feed_forward_residual.norm = Bent(12).double()
    first, second = attnlab.record(model.eval(), padded(), feed_forward=True).layers
    with pytest.raises(ValueError, match=r"feed_forward\.activation .*elementwise"):
        mixing(first, "block")
    with pytest.raises(ValueError, match=r"residual\.norm \(Bent\)"):
        mixing(second, "norm")
    assert mixing(second, "residual").map.isfinite().all()


def test_a_pre_norm_model_without_a_last_norm():
    record = attnlab.record(made(LM, final_norm=False), padded(), feed_forward=True)
    mixing(record.layers[1], "feed-forward")
    with pytest.raises(ValueError, match="no norm reads"):
        mixing(record.layers[1], "block")


def test_wrong_names_and_shapes():
    layer = attnlab.record(made(LM), padded()).layers[0]
    with pytest.raises(ValueError, match=r"'norms'; .* weight, weight-residual, attention"):
        mixing(layer, "norms")
    with pytest.raises(ValueError, match="record it again"):
        mixing(replace(layer, around={}), "norm")
    short = replace(
        layer, attended=layer.weights[:, :, :3], context=layer.context[:, :, :3], mixed=layer.mixed[:, :, :3]
    )
    with pytest.raises(ValueError, match="3 queries and 7 keys"):
        mixing(short, "weight")
