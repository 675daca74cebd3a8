"""The modern backbone: Llama and Qwen3 of transformers as oracles, and laws of RoPE, QK-norm, RMSNorm and gates."""

import math
from dataclasses import replace

import pytest
import torch
import transformers as hf
from representatives import CROSS, every_kind
from small_models import LM, SMALL, TRANSLATOR, made
from torch import nn

from attnlab.analysis.rollout import rollout
from attnlab.huggingface.conversion import fill_weights
from attnlab.huggingface.skeletons import find_skeleton
from attnlab.models.presets import PRESETS, build_on_meta, configure_model
from attnlab.models.rotary import Rotary, rotate
from attnlab.models.transformer import TransformerConfig, build
from attnlab.recording.gradients import batch_gradient_norms, projections
from attnlab.recording.probe import beta
from attnlab.recording.watch import record
from attnlab.training.recipe import resolve_recipe

MODERN = {
    "positions": "rope", "norm_type": "rms", "norm_epsilon": 1e-6, "activation": "swiglu", "attention_bias": False,
    "feed_forward_bias": False, "embedding_scale": False, "head_dim": 8,
}  # fmt: skip
GROUPED = MODERN | {"heads": 4, "key_value_heads": 2, "query_key_norm": True}
SCALINGS = {
    "none": {},
    "linear": {"rope_scaling": "linear", "rope_factor": 3.0},
    "llama3": {"rope_scaling": "llama3", "rope_factor": 5.0, "rope_length": 19, "rope_theta": 100.0},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_length": 190, "rope_theta": 300.0},
}
close = {"rtol": 0.0, "atol": 1e-12}


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, 19, (batch, length))


def twin(config: TransformerConfig) -> tuple[nn.Module, hf.PreTrainedModel]:
    """A random model of ours, and one of transformers with its weights."""
    skeleton, ours = find_skeleton(config, length=64), build(config).eval()
    kind = getattr(hf, skeleton.kind)
    theirs = kind(kind.config_class(**skeleton.config)).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    fill_weights(theirs, ours, skeleton)
    return ours, theirs


# transformers as oracle


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("tie", ["output", "none"])
def test_logits_are_those_of_llama(scaling, tie):
    changes = MODERN | {"heads": 4, "key_value_heads": 2, "tie": tie} | SCALINGS[scaling]
    ours, theirs = twin(replace(LM, **changes))
    words = tokens(2, 41)
    with torch.no_grad():
        torch.testing.assert_close(ours(words), theirs(words).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_logits_are_those_of_qwen3(activation):
    ours, theirs = twin(replace(LM, **GROUPED | {"activation": activation, "head_dim": 10}))
    words = tokens(2, 41)
    with torch.no_grad():
        torch.testing.assert_close(ours(words), theirs(words).logits, rtol=0, atol=1e-5)


def test_biases_are_those_of_llama():
    ours, theirs = twin(replace(LM, **MODERN | {"attention_bias": True, "feed_forward_bias": True}))
    words = tokens(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(ours(words), theirs(words).logits, rtol=0, atol=1e-5)


# RoPE


def test_a_rotation_by_hand():
    """Position 3, size 4, θ = 100: the pairs (0, 2) and (1, 3) are turned by 3 and by 3/10."""
    rotary, x = Rotary(4, theta=100.0).double(), torch.tensor([2.0, 3.0, 5.0, 7.0]).double()
    turned = rotate(x.view(1, 1, 1, 4), rotary(x.new_zeros(1, 1, 4), 3))
    expected = [
        2 * math.cos(3) - 5 * math.sin(3), 3 * math.cos(0.3) - 7 * math.sin(0.3),
        5 * math.cos(3) + 2 * math.sin(3), 7 * math.cos(0.3) + 3 * math.sin(0.3),
    ]  # fmt: skip
    torch.testing.assert_close(turned.flatten(), x.new_tensor(expected), **close)


@pytest.mark.parametrize("parts", [1, 2])
def test_products_depend_on_distance_alone_in_each_part(parts):
    q, k = torch.randn(2, 1, 3, 5, 12, dtype=torch.double)
    rotary = Rotary(12).double()

    def products(start):
        turned = [rotate(x, rotary(x.new_zeros(1, 5, 1), start), parts).unflatten(-1, (parts, -1)) for x in (q, k)]
        return torch.einsum("bhipd,bhjpd->bhpij", *turned)

    torch.testing.assert_close(products(0), products(17), **close)
    assert not torch.allclose(products(0), products(17).flip(-1))


@every_kind
@pytest.mark.parametrize("static", [None, 11], ids=["growing", "static"])
def test_step_by_step_equals_the_full_pass(name, static):
    model, words = made(replace(LM, **GROUPED), name), tokens(2, 7)
    state = model.start(static=static)
    logits = [model.step(chunk, state) for chunk in words.split([3, 1, 2, 1], dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(words), **close)


def test_positions_on_the_device():
    model, words = made(replace(LM, **GROUPED)), tokens(2, 7)
    state = model.start(static=11)
    state.pin(torch.device("cpu"))
    logits = torch.cat([model.step(words[:, t : t + 1], state) for t in range(7)], dim=1)
    torch.testing.assert_close(logits, model(words), **close)


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("static", [None, 11], ids=["growing", "static"])
def test_a_translator_step_by_step(name, static):
    model, target = made(replace(TRANSLATOR, **GROUPED), name), tokens(3, 5)
    source = tokens(3, 7)
    source[1, 4:] = 0
    state = model.start(source, static=static)
    logits = [model.step(target[:, t : t + 1], state) for t in range(5)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(source, target), **close)


@pytest.mark.parametrize("name", [name for name in CROSS if name != "dagpam"])  # its W⁻ reads turned queries
def test_padding_on_the_left_changes_nothing(name):
    model, words = made(replace(LM, **GROUPED), name), tokens(2, 7)
    padded = torch.cat([words.new_zeros(2, 4), words], dim=1)
    torch.testing.assert_close(model(padded, padded != 0)[:, 4:], model(words), **close)


def test_order_matters_to_self_attention_and_not_to_cross_attention():
    """Cross attention reads the memory without positions of its own: those of the encoder are in the states."""
    model, words = made(replace(LM, **GROUPED)), tokens(1, 7)
    words[0, 0] = words[0, 3] + 1
    swapped = words[:, [3, 1, 2, 0, 4, 5, 6]]
    assert not torch.allclose(model(words)[:, -1], model(swapped)[:, -1])
    block = made(replace(TRANSLATOR, **GROUPED)).decoder.blocks[0]
    x, memory = torch.randn(1, 3, 12).double(), torch.randn(1, 5, 12).double()
    same = block.cross(x, memory)[0] - block.cross(x, memory.flip(1))[0]
    torch.testing.assert_close(same, torch.zeros_like(same), **close)


# the other parts


def test_a_norm_a_gate_and_scales_by_hand():
    config = replace(
        LM, **MODERN | {"activation": "geglu", "residual_scale": 0.5, "layers": 1, "feed_forward_bias": True}
    )
    model, x = made(config), torch.randn(2, 3, 12).double()
    norm, feed = model.decoder.blocks[0].feed_forward_residual.norm, model.decoder.blocks[0].feed_forward
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, **close)
    inner, factor = x @ feed.inner.weight.T + feed.inner.bias, x @ feed.factor.weight.T + feed.factor.bias
    gate = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    torch.testing.assert_close(feed(x), 0.5 * ((gate * factor) @ feed.output.weight.T + feed.output.bias), **close)


def test_the_scale_of_embeddings_and_the_cap_of_logits():
    words, model = tokens(2, 7), made(replace(LM, **MODERN | {"embedding_scale": 2.5, "logit_cap": 3.0}))
    embedding = model.decoder.embedding
    torch.testing.assert_close(embedding(words), 2.5 * embedding.words.weight[words], **close)
    raw = model.hidden(words) @ model.readout.weight.T
    torch.testing.assert_close(model(words), 3 * torch.tanh(raw / 3), **close)
    assert model(10 * words // 10).abs().max() < 3
    nll = -model(words).log_softmax(-1).gather(-1, words.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model.readout.nll(model.hidden(words), words), nll, **close)


def test_queries_and_keys_are_normalised_in_each_head():
    model = made(replace(LM, **GROUPED))
    attention, seen = model.decoder.blocks[0].attention, []
    attention.mechanism.register_forward_hook(lambda _, args, __: seen.append(args[:2]))
    attention.query_norm.weight.data.fill_(1.0)
    model(tokens(2, 5))
    size = seen[0][0].square().mean(-1)  # turning leaves lengths alone
    torch.testing.assert_close(size, torch.ones_like(size), rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_queries_keys_and_values_have_one_type_in_half_precision(precision):
    """Fused attention needs that, and a norm of mixed types is slow and warns."""
    model, seen = build(replace(LM, **GROUPED)).eval(), []
    model = model.bfloat16() if precision == "bfloat16" else model
    model.decoder.blocks[0].attention.mechanism.register_forward_hook(lambda _, args, __: seen.extend(args[:3]))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        model(tokens(2, 5))
    assert {x.dtype for x in seen} == {torch.bfloat16}


def test_no_value_is_read_back_from_the_device():
    """On the meta device there are no values: reading one, as a wait for a GPU would, is an error."""
    words = tokens(2, 7).to("meta")
    with torch.device("meta"):
        model = build(replace(LM, **GROUPED | SCALINGS["yarn"]))
    model(words).sum().backward()
    for state in (model.start(), model.start(static=7)):
        model.step(words, state)


# presets and refusals


@pytest.mark.parametrize(("name", "count"), [("modern-25m", 25_173_376), ("modern-125m", 125_856_512)])
def test_parameters_of_the_presets(name, count):
    model = build_on_meta(PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == count
    assert not any("bias" in key for key, _ in model.named_parameters())


def test_sizes_follow_the_width():
    config = configure_model("modern-25m", {"width": "128", "layers": "4"})
    assert (config.heads, config.key_value_heads, config.head_size, config.feed_forward) == (2, 1, 64, 352)
    recipe = resolve_recipe("language", {"model": "modern-25m", "width": "192", "feed_forward": "100"})
    assert (recipe.model.heads, recipe.model.key_value_heads, recipe.model.feed_forward) == (3, 1, 100)
    wider = configure_model("modern-125m", {"head_dim": "32"})
    assert (wider.heads, wider.key_value_heads, wider.feed_forward) == (24, 8, 2048)
    assert configure_model("iwslt14", {"width": "256"}).feed_forward == PRESETS["iwslt14"].feed_forward


@pytest.mark.parametrize(
    ("values", "keyword"),
    [
        ({"width": "100"}, "head_dim=64"),
        ({"width": "0"}, "width"),
        ({"head_dim": "7", "heads": "3"}, "even"),
        ({"rope_factor": "2"}, "rope_scaling"),
        ({"rope_scaling": "linear", "rope_length": "5"}, "rope_length"),
        ({"rope_scaling": "llama3", "rope_low": "4"}, "rope_low"),
        ({"positions": "none", "rope_theta": "5"}, "rope_theta"),
        ({"logit_cap": "0"}, "logit_cap"),
        ({"embedding_scale": "0"}, "embedding_scale"),
        ({"attention": "differential", "head_dim": "6", "heads": "2"}, "differential"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(values, keyword):
    with pytest.raises(ValueError, match=keyword):
        build_on_meta(configure_model("modern-25m", values))


def test_heads_of_any_size():
    model = made(TransformerConfig(model="language-model", **SMALL | {"head_dim": 7}), layers=1)
    assert model.decoder.blocks[0].attention.query.weight.shape == (21, 12)
    assert model(tokens(2, 5)).shape == (2, 5, 23)


# what reads models


def test_gradients_of_a_modern_model_and_what_its_projections_are_not():
    model, words = made(replace(LM, **GROUPED)), tokens(2, 5)
    rows = batch_gradient_norms(model, words, words)
    assert len(rows) == 2 * 4
    assert all(row["norm"] > 0 for row in rows)
    with pytest.raises(ValueError, match="RoPE"):
        projections(model)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_contributions_add_up_to_the_output_of_each_attention(scale):
    model, words = made(replace(LM, **GROUPED | {"residual_scale": scale})), tokens(2, 5)
    recorded = record(model, words, feed_forward=True)
    for layer in recorded.layers:
        f = torch.einsum("bhjd,hde->bhje", layer.values, layer.output_weight)
        torch.testing.assert_close(torch.einsum("bhij,bhje->bie", layer.weights, f), layer.outputs, **close)
        assert layer.strange == ""
    (shares,) = rollout(recorded, "norm").values()
    assert shares.isfinite().all()


def test_probes_of_a_modern_translator():
    model, source, target = made(replace(TRANSLATOR, **GROUPED)), tokens(2, 7), tokens(2, 5)
    assert beta(model, (source, target), target).shape == (2, 5, 7)
