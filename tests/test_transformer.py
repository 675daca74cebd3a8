"""The Transformer: torch's own layers as oracle, and laws that hold whatever the attention."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from representatives import every_kind, every_kind_and_slowly_all
from small_models import CLASSIFIER, LM, TRANSLATOR, every_mechanism, made
from torch import nn
from torch.nn import functional as F

from attnlab.mechanisms import MECHANISMS, Mechanism, attention
from attnlab.models.attention import MultiHead
from attnlab.models.embedding import SinusoidalPositions
from attnlab.models.transformer import TransformerConfig, build

close = {"rtol": 0.0, "atol": 1e-10}


def tokens(batch: int, length: int, vocabulary: int = 19) -> torch.Tensor:
    return torch.randint(1, vocabulary, (batch, length))


def attentions(model: nn.Module) -> list[MultiHead]:
    return [module for module in model.modules() if isinstance(module, MultiHead)]


# torch's own layers as oracle


def copy_attention(ours: MultiHead, theirs: nn.MultiheadAttention) -> None:
    projections = (ours.query, ours.key, ours.value)
    theirs.in_proj_weight.data = torch.cat([p.weight for p in projections]).detach()
    theirs.in_proj_bias.data = torch.cat([p.bias for p in projections]).detach()
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def torch_layer(block: nn.Module, config: TransformerConfig) -> nn.Module:
    kind = nn.TransformerEncoderLayer if block.cross is None else nn.TransformerDecoderLayer
    options = {"activation": config.activation, "norm_first": config.norm == "pre", "batch_first": True}
    theirs = kind(config.width, config.heads, config.feed_forward, 0.0, **options).double()
    copy_attention(block.attention, theirs.self_attn)
    norms = [block.attention_residual.norm, block.feed_forward_residual.norm]
    if block.cross is not None:
        copy_attention(block.cross, theirs.multihead_attn)
        norms.insert(1, block.cross_residual.norm)
    for number, norm in enumerate(norms, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())
    theirs.linear1.load_state_dict(block.feed_forward.inner.state_dict())
    theirs.linear2.load_state_dict(block.feed_forward.output.state_dict())
    return theirs  # in training mode with dropout 0: torch's fast path is another implementation


def embedded(stack: nn.Module, words: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    x = stack.embedding.words.weight[words] * math.sqrt(config.width)
    for t in range(words.shape[1]):
        for c in range(6):
            x[:, t, c] += math.sin(t / 10000 ** (c / 5))
            x[:, t, c + 6] += math.cos(t / 10000 ** (c / 5))
    return x


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_translator_equals_torchs_layers(norm, activation, final_norm):
    config = replace(TRANSLATOR, norm=norm, activation=activation, final_norm=final_norm)
    model = made(config)
    source, target = tokens(3, 7), tokens(3, 5)
    source[1, 4:], source[2, 6:] = 0, 0
    with torch.no_grad():
        x = embedded(model.encoder, source, config)
        for block in model.encoder.blocks:
            x = torch_layer(block, config)(x, src_key_padding_mask=source == 0)
        memory = model.encoder.norm(x) if final_norm else x
        x = embedded(model.decoder, target, config)
        future = torch.ones(5, 5, dtype=torch.bool).triu(1)
        for block in model.decoder.blocks:
            x = torch_layer(block, config)(x, memory, tgt_mask=future, memory_key_padding_mask=source == 0)
        x = model.decoder.norm(x) if final_norm else x
        torch.testing.assert_close(model(source, target), x @ model.decoder.embedding.words.weight.T, **close)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_language_model_equals_torchs_layers(norm):
    config = replace(LM, norm=norm, final_norm=False)
    model, words = made(config), tokens(2, 7)
    with torch.no_grad():
        x = embedded(model.decoder, words, config)
        for block in model.decoder.blocks:
            x = torch_layer(block, config)(x, torch.ones(7, 7, dtype=torch.bool).triu(1))
        torch.testing.assert_close(model(words), x @ model.readout.weight.T, **close)


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_classifier_equals_torchs_layers(pool):
    config = replace(CLASSIFIER, pool=pool)
    model, words = made(config), tokens(3, 7)
    words[1, 4:] = 0
    with torch.no_grad():
        x = embedded(model.encoder, words, config)
        for block in model.encoder.blocks:
            x = torch_layer(block, config)(x, src_key_padding_mask=words == 0)
        x = model.encoder.norm(x)
        lengths = (7, 4, 7)
        pooled = (
            x[:, 0] if pool == "first" else torch.stack([row[:n].mean(0) for row, n in zip(x, lengths, strict=True)])
        )
        torch.testing.assert_close(model(words), pooled @ model.readout.weight.T + model.readout.bias, **close)


# laws over the registry


@every_kind
def test_the_future_has_no_influence(name):
    model, words = made(LM, name), tokens(2, 7)
    other = words.clone()
    other[:, 4:] = tokens(2, 3)
    torch.testing.assert_close(model(words)[:, :4], model(other)[:, :4], **close)
    assert not torch.allclose(model(words)[:, 4:], model(other)[:, 4:])


@every_kind
def test_padding_has_no_influence(name):
    translator, classifier, words, target = made(TRANSLATOR, name), made(CLASSIFIER, name), tokens(2, 5), tokens(2, 5)
    padded = F.pad(words, (0, 3))
    torch.testing.assert_close(translator(padded, target), translator(words, target), **close)
    torch.testing.assert_close(classifier(padded), classifier(words), **close)


@every_kind
def test_examples_do_not_mix(name):
    model, source, target = made(TRANSLATOR, name), tokens(3, 7), tokens(3, 5)
    source[1, 4:] = 0
    torch.testing.assert_close(model(source, target)[1:2], model(source[1:2, :4], target[1:2]), **close)


@every_mechanism
def test_every_parameter_is_trained(name):
    model = made(TRANSLATOR, name).train()
    model(tokens(2, 7), tokens(2, 5)).square().mean().backward()
    dead = {parameter for parameter, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    deaf = {"uniform": r"query|key\.weight|cross_residual"}.get(name)
    unused = {p for p, x in model.named_parameters() if not x.requires_grad or (deaf and re.search(deaf, p))}
    # a shift of all logits of a row changes no softmax: for some mechanisms a key's bias has gradient 0, up to rounding
    assert {p for p in dead if not p.endswith("key.bias")} == unused
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind.carries])
def test_carries_go_from_layer_to_layer_of_one_kind(name):
    model = made(TRANSLATOR, name, layers=3)
    given, returned = {}, {}
    for part in attentions(model):

        def note(mechanism, args, output, key=(part.kind, part.index)):
            given[key], returned[key] = args[4], output[1]

        part.mechanism.register_forward_hook(note)
    model(tokens(2, 7), tokens(2, 5))
    assert set(given) == {(kind, k) for kind in ("encoder-self", "decoder-self", "cross") for k in range(3)}
    for (kind, index), carry in given.items():
        assert carry is (None if index == 0 else returned[kind, index - 1])


@every_mechanism
def test_grouped_heads_equal_repeated_heads(name):
    grouped = made(LM, name, key_value_heads=1)
    full = build(replace(LM, attention=name)).double().eval()
    state = grouped.state_dict()
    for key, value in state.items():
        if re.search(r"attention\.(key|value)\.", key):
            state[key] = value.repeat(3, *[1] * (value.dim() - 1))
    full.load_state_dict(state)
    words = tokens(2, 7)
    torch.testing.assert_close(grouped(words), full(words), **close)


@every_kind_and_slowly_all
def test_no_value_is_read_back_from_the_device(name):
    """On the meta device there are no values: reading one, as a wait for a GPU would, is an error."""
    cross = {"cross_attention": "softmax"} if MECHANISMS[name].self_only else {}
    words = tokens(2, 7).to("meta")
    with torch.device("meta"):
        translator = build(replace(TRANSLATOR, attention=name, layers=1 + MECHANISMS[name].carries, **cross))
    translator(words, words).sum().backward()
    for state in (translator.start(words), translator.start(words, static=7)):
        translator.step(words, state)


@pytest.mark.parametrize("config", [LM, CLASSIFIER, replace(LM, width=48, adaptive_cutoffs=(5, 11))])
def test_nor_by_the_other_models(config):
    with torch.device("meta"):
        model = build(config)
    model(tokens(2, 7).to("meta")).sum().backward()


# what the models are made of


def test_no_mask_tensor_is_made_for_a_causal_model(monkeypatch):
    calls = []
    fused = F.scaled_dot_product_attention

    def spy(*args, **options):
        calls.append((options.get("attn_mask"), options.get("is_causal")))
        return fused(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    made(LM)(tokens(2, 7))
    assert calls == [(None, True)] * 2


def test_a_mask_hides_tokens_of_a_language_model():
    model, words = made(LM), tokens(1, 7)
    mask = torch.ones(1, 7, dtype=torch.bool)
    mask[0, 2] = False
    other = words.clone()
    other[0, 2] = words[0, 2] % 18 + 1
    later = slice(3, None)
    torch.testing.assert_close(model(words, mask)[:, later], model(other, mask)[:, later], **close)
    assert not torch.allclose(model(words)[:, later], model(other)[:, later])


def test_tied_embeddings_are_one_parameter():
    assert (output := made(LM)).readout.weight is output.decoder.embedding.words.weight
    separate = made(TRANSLATOR)
    assert separate.readout.weight is separate.decoder.embedding.words.weight
    assert separate.encoder.embedding.words is not separate.decoder.embedding.words
    shared = made(TRANSLATOR, tie="all", target_vocabulary=None)
    assert shared.readout.weight is shared.decoder.embedding.words.weight is shared.encoder.embedding.words.weight
    untied = made(LM, tie="none")
    assert untied.readout.weight is not untied.decoder.embedding.words.weight


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_only(kind):
    words = tokens(2, 7)
    model = made(LM, **{kind: 0.5})
    assert torch.equal(model(words), model(words))
    model.train()
    assert not torch.allclose(model(words), model(words))
    assert torch.equal((without := made(LM).train())(words), without(words))


def test_positions_can_be_learned_or_absent():
    words = tokens(1, 7).expand(2, 7).clone()
    words[1] = words[0].flip(0)
    classifier = made(CLASSIFIER, positions="none")
    torch.testing.assert_close(classifier(words)[0], classifier(words)[1], **close)
    learned = made(LM, positions="learned", max_length=7, embedding_scale=False).decoder.embedding
    assert torch.equal(learned(words), learned.words.weight[words] + learned.positions.table.weight)
    with pytest.raises(ValueError, match="max_length=7"):
        learned(tokens(1, 8))


@pytest.mark.parametrize("width", [7, 2])
def test_sinusoids_by_hand(width):
    half = width // 2
    expected = torch.zeros(5, width, dtype=torch.float64)
    for t in range(5):
        for c in range(half):
            angle = (t + 3) / 10000 ** (c / max(half - 1, 1))
            expected[t, c], expected[t, c + half] = math.sin(angle), math.cos(angle)
    torch.testing.assert_close(
        SinusoidalPositions()(torch.zeros(1, 5, width, dtype=torch.float64), 3), expected, **close
    )


def test_initialisation_of_fairseq():
    config = replace(TRANSLATOR, vocabulary=997, width=96, feed_forward=211, tie="none", attention="dagpam")
    model = build(replace(config, attention_options={"negative_init": "minus-identity"}))
    words = model.encoder.embedding.words.weight
    assert not words[0].any()
    for weight in (words[1:], model.readout.weight):
        assert abs(weight.std() * 96**0.5 - 1) < 0.02
    for part in attentions(model):
        for linear, gain in ((part.query, 0.5**0.5), (part.key, 0.5**0.5), (part.value, 0.5**0.5), (part.output, 1.0)):
            bound = gain * math.sqrt(6 / (96 + 96))
            assert 0.99 * bound < linear.weight.abs().max() <= bound
        assert not part.output.bias.any()
        assert torch.equal(part.mechanism.negative[0], -torch.eye(32))  # a mechanism's own start is left alone


def test_initialisation_with_normals():
    config = replace(TRANSLATOR, vocabulary=997, width=96, feed_forward=211, init="normal", attention="coda")
    model = build(replace(config, layers=3, decoder_layers=5))
    assert not model.encoder.embedding.words.weight[0].any()
    for stack, layers in ((model.encoder, 3), (model.decoder, 5)):
        assert abs(stack.embedding.words.weight[1:].std() / 0.02 - 1) < 0.05
        for block in stack.blocks:
            assert abs(block.attention.query.weight.std() / 0.02 - 1) < 0.05
            assert abs(block.feed_forward.inner.weight.std() / 0.02 - 1) < 0.05
            for linear in (block.attention.output, block.feed_forward.output):
                assert abs(linear.weight.std() / (0.02 / math.sqrt(2 * layers)) - 1) < 0.05
                assert not linear.bias.any()
            bound = 0.5**0.5 * math.sqrt(6 / (3 + 12))
            assert 0.5 * bound < block.attention.mechanism.sigma[0].weight.abs().max() <= bound


# what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "width"),
        ({"key_value_heads": 2}, "key_value_heads"),
        ({"model": "tagger"}, "tagger"),
        ({"norm": "middle"}, "middle"),
        ({"layers": 0}, "layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"padding": 23}, "padding"),
        ({"target_vocabulary": 19}, "target_vocabulary"),
        ({"cross_attention": "softmax"}, "cross_attention"),
        ({"tie": "all"}, "encoder"),
        ({"model": "translator", "tie": "all", "target_vocabulary": 19}, "vocabularies"),
        ({"model": "translator", "cross_attention_options": {"mean": True}}, "cross_attention_options"),
        ({"adaptive_cutoffs": (11, 5)}, "increase"),
        ({"adaptive_cutoffs": (5, 23)}, "increase"),
        ({"adaptive_cutoffs": (5, 11)}, r"4\^2 = 16"),
        ({"adaptive_cutoffs": (5,), "tie": "none"}, "tie='output'"),
        ({"adaptive_dropout": 0.2}, "adaptive_dropout"),
    ],
)
def test_a_configuration_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(LM, **changes)


def test_a_configuration_is_a_value():
    assert replace(TRANSLATOR, model="language-model", target_vocabulary=None) == LM
    assert len({LM, replace(LM), replace(LM, heads=4)}) == 2


def test_building_refuses_what_the_mechanism_refuses():
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        build(replace(LM, attention="sofmax"))
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        build(replace(LM, attention="realformer", attention_options={"meen": True}))
    with pytest.raises(ValueError, match="band"):
        build(replace(LM, width=12, adaptive_cutoffs=(5,), padding=7))


def test_a_self_attention_cannot_be_a_cross_attention():
    with pytest.raises(ValueError, match=r"Shaped.*cross_attention="):
        build(replace(TRANSLATOR, attention="shaped"))


def test_multi_head_refuses():
    mechanism: Mechanism = attention("softmax", heads=3, head_dim=4)
    with pytest.raises(ValueError, match="kind"):
        MultiHead(mechanism, 12, kind="self")
    with pytest.raises(ValueError, match="key_value_heads"):
        MultiHead(mechanism, 12, kind="cross", key_value_heads=2)
    x = torch.randn(2, 7, 12)
    with pytest.raises(ValueError, match="needs a memory"):
        MultiHead(mechanism, 12, kind="cross")(x)
    with pytest.raises(ValueError, match="takes no memory"):
        MultiHead(mechanism, 12, kind="decoder-self")(x, x)


@pytest.mark.parametrize("wrong", [torch.zeros(7, dtype=torch.long), torch.zeros(2, 7)])
def test_tokens_of_a_wrong_shape_or_type(wrong):
    with pytest.raises(ValueError, match="integers"):
        made(LM)(wrong)


@pytest.mark.parametrize("wrong", [-1, 23])
def test_tokens_outside_the_vocabulary(wrong):
    words = torch.tensor([[3, 5, wrong]])
    adaptive, translator = made(LM, width=48, adaptive_cutoffs=(5, 11)), made(TRANSLATOR, target_vocabulary=23)
    lm = made(LM)
    for attempt in (
        lambda: lm(words),
        lambda: lm.step(words, lm.start()),
        lambda: adaptive(words),
        lambda: made(CLASSIFIER)(words),
        lambda: translator(words, words[:, :2]),
        lambda: translator(words[:, :2], words),
        lambda: translator.start(words),
        lambda: translator.step(words, translator.start(words[:, :2])),
    ):
        with pytest.raises(ValueError, match=f"0 to 22.*got {wrong}$"):
            attempt()


@pytest.mark.parametrize("config", [LM, CLASSIFIER])
@pytest.mark.parametrize("wrong", [torch.ones(2, 5).bool(), torch.ones(1, 7).bool(), torch.ones(2, 7)])
def test_a_mask_of_a_wrong_shape_or_type_is_reported_as_given(config, wrong):
    given = rf"got {wrong.dtype} \({len(wrong)}, {wrong.shape[1]}\)"
    with pytest.raises(ValueError, match=given):
        made(config)(tokens(2, 7), wrong)


@pytest.mark.parametrize("static", [0, -3])
def test_a_static_cache_holds_something(static):
    for attempt in (lambda: made(LM).start(static=static), lambda: made(TRANSLATOR).start(tokens(2, 7), static=static)):
        with pytest.raises(ValueError, match=f"static.*got {static}"):
            attempt()


def test_a_preset_is_built_from_its_configuration():
    with pytest.raises(TypeError, match="PRESETS"):
        build("tiny")


@pytest.mark.parametrize("page", ["transformer.md", "record.md"])
def test_the_examples_in_the_docs_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {})
