"""Signed contributions, ALTI, value zeroing and the split of a logit, against slow transcriptions."""

from dataclasses import replace

import pytest
import tiny_models
import torch
from small_models import CLASSIFIER, LM, TRANSLATOR, made
from torch.nn import functional as F

import attnlab
from attnlab.analysis.alti import alti_logit, alti_shares
from attnlab.analysis.mixing import mixing
from attnlab.analysis.rollout import RolloutShares, rollout
from attnlab.analysis.sharing import Sharing
from attnlab.analysis.signed import Signed, signed_shares
from attnlab.huggingface.decomposition import decompose, watch_leaves
from attnlab.huggingface.effects import measure_effect
from attnlab.huggingface.zeroing import record_zeroing
from attnlab.mechanisms import Mechanism
from attnlab.recording.freezing import freeze_blocks
from attnlab.recording.interventions import KnockOutHead
from attnlab.records.record import apply_turning, turn_values

SOURCE, TARGET = torch.tensor([[3, 5, 7, 11, 13]]), torch.tensor([[2, 9, 4, 17]])
PADDED = torch.tensor([[3, 5, 7, 11, 13], [4, 6, 8, 0, 0]])


def one(name, **options):
    torch.manual_seed(0)
    model = getattr(tiny_models, name)(**options).double().eval()
    return model, {key: x[:1] for key, x in tiny_models.padded_batch(model).items()}


def list_vectors(layer):
    """Σ over nothing: every vector α_hij (v_hj A_hi) W_h, (b,h,i,j,e)."""
    values = layer.values.unsqueeze(2) if layer.turning is None else turn_values(layer.turning, layer.values)
    return torch.einsum(
        "bhij,bhijd,hde->bhije", layer.weights, values.expand(*layer.weights.shape, -1), layer.output_weight
    )


@pytest.mark.parametrize("name", ["softmax", "dagpam", "gated", "xsa", "value-gated"])
def test_signed_contributions_are_projections_that_sum_to_one(name):
    record = attnlab.record(made(TRANSLATOR, name), (PADDED, TARGET.expand(2, 4)))
    for layer in record.layers:
        shares, y = signed_shares(layer), layer.outputs
        expected = (list_vectors(layer) * y[:, None, :, None]).sum(-1) / y.square().sum(-1)[:, None, :, None]
        torch.testing.assert_close(shares.head, expected)
        assert shares.error < 1e-12
        both = signed_shares(layer, residual=True)
        u = y + layer.around["residual"]
        torch.testing.assert_close(both.residual, (layer.around["residual"] * u).sum(-1) / u.square().sum(-1))
        assert both.error < 1e-12


def test_signed_contributions_follow_a_turning_that_is_not_symmetric():
    layer = attnlab.record(made(LM), TARGET).layers[1]
    turning = torch.randn(*layer.context.shape, layer.context.shape[-1], dtype=torch.float64)
    mixed = apply_turning(turning, layer.context)
    outputs = torch.einsum("bhid,hde->bie", mixed, layer.output_weight) + layer.output_bias
    turned = replace(layer, turning=turning, mixed=mixed, outputs=outputs)
    shares = signed_shares(turned)
    assert shares.error < 1e-12
    expected = (list_vectors(turned) * outputs[:, None, :, None]).sum(-1) / outputs.square().sum(-1)[:, None, :, None]
    torch.testing.assert_close(shares.head, expected)


def test_signed_contributions_refuse_what_is_no_sum():
    layer = attnlab.record(made(LM, "differential"), TARGET).layers[0]
    with pytest.raises(ValueError, match="not a sum over keys"):
        signed_shares(layer)


def test_the_table_of_signed_contributions():
    record = attnlab.record(made(LM), TARGET)
    sums = Signed()
    sums.add(record)
    table = sums.table()
    layer = table[table["layer"] == 1]
    bias = signed_shares(record.layers[1]).bias.mean()
    assert float(layer["share"].sum()) + float(bias) == pytest.approx(1)
    assert (table["completeness_error"] < 1e-12).all()
    first = signed_shares(record.layers[1]).head[..., 0].mean((0, 2))
    assert list(layer["first_token_share"]) == pytest.approx(first.tolist())


@pytest.mark.parametrize("name", ["gpt2", "bert", "marian"])
def test_alti_is_a_distance_that_shrinks(name):
    model, batch = one(name)
    for layer in attnlab.record(model, batch).layers:
        shares, own = alti_shares(layer)
        vectors = list_vectors(layer).sum(1)[0]  # (i,j,e)
        residual, y = layer.around["residual"][0], (layer.around["residual"] + layer.outputs)[0]
        parts = torch.cat([vectors, residual[:, None]], dim=1) if layer.kind == "cross" else vectors.clone()
        if layer.kind != "cross":
            for i in range(len(y)):
                parts[i, i] += residual[i]
        if name != "gpt2":  # post-norm
            gain, scale = layer.around["norm.gain"], layer.around["norm.scale"][0]
            parts = gain * scale[:, None] * (parts - parts.mean(-1, keepdim=True))
            y = gain * scale * (y - y.mean(-1, keepdim=True))
        near = (y.abs().sum(-1)[:, None] - (y[:, None] - parts).abs().sum(-1)).clamp_min(0)
        near = near / near.sum(-1, keepdim=True)
        torch.testing.assert_close(shares[0], near[:, : shares.shape[2]])
        torch.testing.assert_close(shares.sum(-1) + own, torch.ones_like(own))
    totals = rollout(attnlab.record(model, batch), "alti")
    totals.pop("encoder-self", None) if name == "marian" else None
    ends = sum(x.sum(-1) for x in totals.values())
    torch.testing.assert_close(ends, torch.ones_like(ends))


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo", "ours"])
def test_the_logit_form_of_alti_sums_to_the_logit(name):
    model, batch = (made(LM, norm="pre", final_norm=True), TARGET) if name == "ours" else one(name)
    record = attnlab.record(model, batch, feed_forward=True)
    tokens = record.tokens["target"]
    with torch.no_grad():
        logits = model(batch) if name == "ours" else model(**batch).logits
    shares = alti_logit(record, tokens)
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(shares.logit, chosen, rtol=1e-5, atol=1e-5)  # fused attention rounds differently
    assert shares.error < (1e-6 if name in ("llama", "olmo") else 1e-12)  # their norms compute in float32
    assert not shares.tokens.triu(1).any()


@torch.no_grad()
def test_the_logit_form_of_alti_follows_tokens_through_the_layers_below():
    model, batch = one("gpt2")
    record = attnlab.record(model, batch, feed_forward=True)
    word, last, n = 5, 10, 11
    norm, top = model.transformer.ln_f, record.layers[-1].around["closing.input"][0, last]
    deviation = (top.var(unbiased=False) + norm.eps).sqrt()
    direction = model.lm_head.weight[word]

    def read(x):
        return (norm.weight * (x - x.mean()) / deviation) @ direction

    expected, below = torch.zeros(n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    expected[last] = read(record.layers[0].around["residual"][0, last])
    for layer in record.layers:
        vectors = list_vectors(layer).sum(1)[0, last]  # (j,e)
        for j in range(n):
            expected += read(vectors[j]) * below[j]
        below = alti_shares(layer)[0][0] @ below
    shares = alti_logit(record, torch.full((1, n), word))
    torch.testing.assert_close(shares.tokens[0, last], expected)


def test_what_the_logit_form_refuses():
    with pytest.raises(ValueError, match="record with feed_forward=True"):
        alti_logit(attnlab.record(*one("gpt2")), torch.zeros(1, 11, dtype=torch.int64))
    with pytest.raises(ValueError, match="needs a pre-norm model"):
        alti_logit(attnlab.record(made(LM, norm="post"), TARGET, feed_forward=True), TARGET)
    with pytest.raises(ValueError, match="needs a language model"):
        alti_logit(attnlab.record(*one("bert")), TARGET)
    record = attnlab.record(made(LM), TARGET, feed_forward=True)
    for words in (TARGET[0], TARGET[:, :1], TARGET.double(), "cat"):
        with pytest.raises(ValueError, match=r"words must be a tensor of ids of shape \(1, 4\)"):
            alti_logit(record, words)
    with pytest.raises(ValueError, match="words must be ids from 0 to 22, got 23 to 23"):
        alti_logit(record, torch.full((1, 4), 23))


def test_value_zeroing_is_a_pass_with_values_changed_by_hand():
    model, _ = one("bert")
    batch = tiny_models.padded_batch(model)
    made_map = record_zeroing(model, batch).layers[1].extras["zeroing"]
    layer = model.encoder.layer[1]

    def erase(module, args, output):
        output = output.clone()
        output[:, 3] = 0.0
        return output

    with torch.no_grad():
        whole = model(**batch, output_hidden_states=True).hidden_states[2]
        with layer.attention.self.value.register_forward_hook(erase):
            changed = model(**batch, output_hidden_states=True).hidden_states[2]
    expected = 1 - torch.cosine_similarity(whole, changed, dim=-1)
    torch.testing.assert_close(made_map[:, :, 3], expected.clamp_min(0), rtol=1e-6, atol=1e-12)
    own = record_zeroing(made(TRANSLATOR), (PADDED, TARGET.expand(2, 4))).kind("cross")[0].extras["zeroing"]
    assert own.shape == (2, 4, 5)
    assert own[1, :, 3:].max() < 1e-15  # padding has no weight
    with pytest.raises(ValueError, match="value zeroing was not recorded"):
        rollout(attnlab.record(model, batch), "zeroing")


@pytest.mark.parametrize("name", ["gpt2", "llama", "masked_bert", "marian", "t5", "qwen3", "phi3", "olmo", "diffllama"])
def test_the_parts_of_a_logit_sum_to_it(name):
    model, batch = one(name)
    parts = decompose(model, batch)
    assert parts.error < 1e-12
    with torch.no_grad():
        logit = model(**batch)[0][0, -1, parts.word]
    assert parts.logit == pytest.approx(float(logit), rel=1e-6)
    assert decompose(model, batch, rule="gradient").error > 0.01
    assert parts.table()["logit"].sum() == pytest.approx(parts.logit)


def test_the_gated_product_before_a_norm_has_two_halves():
    """BitNet norms the product a·u of its feed-forward, in float32 only."""
    model = tiny_models.bitnet().eval()
    batch = {key: x[:1] for key, x in tiny_models.padded_batch(model).items()}
    parts = decompose(model, batch)
    assert parts.error < 1e-6
    with torch.no_grad():
        assert parts.logit == pytest.approx(float(model(**batch).logits[0, -1, parts.word]), rel=1e-5)


@pytest.mark.parametrize("name", ["softmax", "coda", "dagpam", "gated", "xsa", "resformer", "sigmoid"])
@pytest.mark.parametrize("config", [LM, TRANSLATOR, CLASSIFIER], ids=["lm", "translator", "classifier"])
def test_the_parts_of_a_logit_of_ours_sum_to_it(name, config):
    batch = {LM: TARGET, TRANSLATOR: (SOURCE, TARGET), CLASSIFIER: SOURCE}[config]
    assert decompose(made(config, name, activation="swiglu"), batch).error < 1e-12


@pytest.mark.parametrize("name", ["masked_bert", "llama", "lm", "gated"])
def test_attnlrp_divides_the_gradients_of_queries_keys_and_values(name):
    """Oracle: the authors' own form, which divides the gradients of q and k by 4 and of v by 2, and keeps the rest."""
    mechanism, ours = {"lm": "softmax"}.get(name, name), name in ("lm", "gated")
    model, batch = (made(LM, mechanism, activation="swiglu"), TARGET) if ours else one(name)
    parts, layers = decompose(model, batch, position=1, rule="attn-lrp"), attnlab.record(model, batch).layers

    def share(x, part):
        return x * part + x.detach() * (1 - part)

    def share_all(_module, args):
        half = 0.5 if name == "gated" else 1.0  # of the product of gate and context
        return tuple(share(x, part * half) for x, part in zip(args, (0.25, 0.25, 0.5), strict=False)) + args[3:]

    handles = []
    for path, module in model.named_modules():
        if isinstance(module, Mechanism):  # ours projects q, k and v jointly
            handles += 3 * [module.register_forward_pre_hook(share_all)]
            if name == "gated":
                module.gate.register_forward_hook(lambda _m, _a, y: share(y, 0.5))
        part = {"q": 0.25, "k": 0.25, "v": 0.5}.get(path.rpartition(".")[2][:1])
        if part and not ours and isinstance(module, torch.nn.Linear):
            handles.append(module.register_forward_hook(lambda _m, _a, y, part=part: share(y, part)))
    assert len(handles) == 3 * len(layers)
    biases = [x for n, x in model.named_parameters() if n.endswith("bias")]
    with freeze_blocks(model), torch.enable_grad(), watch_leaves(model) as leaves:
        output = model(batch) if ours else model(**batch)[0]
        output[0, 1, parts.word].backward(inputs=[leaf for _, leaf in leaves] + biases)
    expected = sum((leaf * leaf.grad).sum(-1).flatten() for _, leaf in leaves if leaf.grad is not None)
    torch.testing.assert_close(parts.tokens["tokens"], expected, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(expected, decompose(model, batch, position=1, word=parts.word).tokens["tokens"])
    assert decompose(model, batch, position=1, rule="attn-lrp").error > 1e-4


def test_a_token_that_cannot_be_seen_has_no_part():
    model = made(LM)
    parts = decompose(model, TARGET, position=1, word=5).tokens["tokens"]
    assert not parts[2:].any()
    assert parts[:2].all()


def test_a_mechanism_that_is_no_sum_shows_its_error():
    assert decompose(made(LM, "differential"), TARGET).error > 0.01


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_labels_in_a_batch_are_what_a_decoder_predicts(name):
    """They make a loss the first output of a model, and are the inputs of a decoder that has no others."""
    model, batch = one(name)
    labels = torch.arange(4, 4 + batch["input_ids"].shape[1])[None]
    given = {"input_ids": batch["input_ids"], "labels": labels}
    if name == "t5":
        batch = {"input_ids": batch["input_ids"], "decoder_input_ids": F.pad(labels[:, :-1], (1, 0))}
    head = KnockOutHead(kind="decoder-self", layer=0, head=0)
    assert decompose(model, given).logit == decompose(model, batch).logit
    assert measure_effect(model, given, head).loss == measure_effect(model, batch, head).loss
    places = [attnlab.record(model, each).layers[-1].weights for each in (given, batch)]
    torch.testing.assert_close(*places, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["m2m100", "marian"])
def test_labels_without_a_loss_are_read_as_padding(name):
    """Of the two, transformers has a method that shifts the labels of Marian only."""
    model, ids = getattr(tiny_models, name)(), torch.arange(4, 9)[None]
    given = {"input_ids": ids, "labels": torch.tensor([[5, 7, 1, -100, -100]])}
    shifted = {"input_ids": ids, "decoder_input_ids": torch.tensor([[0, 5, 7, 1, 0]])}
    places = [attnlab.record(model, each).layers[-1].weights for each in (given, shifted)]
    torch.testing.assert_close(*places, rtol=0, atol=0)


def test_labels_of_a_classifier_are_no_text():
    given = {"input_ids": torch.arange(4, 9)[None], "labels": torch.tensor([1])}
    with pytest.raises(ValueError, match="the batch also needs decoder_input_ids"):
        attnlab.record(tiny_models.bart_classifier(), given)


def test_a_model_without_logits_is_split_by_a_score_only():
    model, batch = one("bert")
    with pytest.raises(ValueError, match="BertModel has no logits; its first output is last_hidden_state"):
        decompose(model, batch)
    assert decompose(model, batch, score=lambda states: states[0, 0, 3]).error < 1e-5


def test_what_decompose_refuses():
    model = made(LM)
    with pytest.raises(ValueError, match="there is no position 4: this pass has 4"):
        decompose(model, TARGET, position=4)
    with pytest.raises(ValueError, match="word must be an id from 0 to 22, got 23"):
        decompose(model, TARGET, word=23)
    with pytest.raises(ValueError, match="rule must be one of frozen, attn-lrp, gradient, got 'lrp'"):
        decompose(model, TARGET, rule="lrp")
    with pytest.raises(ValueError, match=r"word must be an id from 0 to 22, got 1\.5"):
        decompose(model, TARGET, word=1.5)
    with pytest.raises(TypeError, match="score must be a function from the output, a tensor, to one number, got 3"):
        decompose(model, TARGET, score=3)
    with pytest.raises(TypeError, match=r"score must return one number as a tensor, got a tensor of shape \(23,\)"):
        decompose(model, TARGET, score=lambda logits: logits[0, -1])
    with pytest.raises(ValueError, match="one example, got 2"):
        decompose(model, TARGET.expand(2, 4))
    with pytest.raises(ValueError, match="one output for the whole text"):
        decompose(made(CLASSIFIER), SOURCE, position=1)


def test_sharing_and_rollout_over_a_corpus_are_means_of_their_maps():
    record = attnlab.record(made(TRANSLATOR), (PADDED[:1], TARGET))
    sharing, shares = Sharing(), RolloutShares()
    sharing.add(record), shares.add(record)
    table = sharing.table().set_index(["kind", "layer"])
    for layer in record.layers:
        row = table.loc[(layer.kind, layer.index)]
        assert row["norm_ratio"] == pytest.approx(float(mixing(layer, "norm").ratio.mean()))
        shares_of_keys, own = (x[0] for x in alti_shares(layer))
        kept = own if layer.kind == "cross" else shares_of_keys.diagonal()
        assert row["alti_ratio"] == pytest.approx(1 - float(kept.mean()))
        expected = -(shares_of_keys * shares_of_keys.clamp_min(1e-300).log()).sum(-1).mean()
        assert row["alti_entropy_nats"] == pytest.approx(float(expected))
    rolled, rows = rollout(record), shares.table().set_index("kind")
    assert rows.loc["encoder-self", "own_share"] == pytest.approx(float(rolled["encoder-self"][0].diagonal().mean()))
    assert rows.loc["cross", "first_token_share"] == pytest.approx(float(rolled["cross"][0, :, 0].mean()))
    assert rows.loc["cross", "own_share"] == 0


def test_value_zeroing_of_two_towers_is_refused():
    model = tiny_models.clip()
    given = {"input_ids": torch.arange(3, 9)[None], "pixel_values": torch.randn(1, 3, 8, 8)}
    with pytest.raises(ValueError, match=r"CLIPModel returns none; pass one of its towers, such as model\.text_model"):
        record_zeroing(model, given)
    assert "zeroing" in record_zeroing(model.text_model, {"input_ids": given["input_ids"]}).layers[0].extras


@torch.no_grad()
def test_value_zeroing_of_a_hybrid_model_is_a_pass_with_values_changed_by_hand():
    """Oracle: the outputs of the blocks, of which some have linear attention."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
    torch.manual_seed(0)
    model, ids = tiny_models.qwen3_next(kinds).double().eval(), torch.arange(3, 10)[None]
    blocks, states = model.model.layers, {}
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda _, args, output, number=number: states.update({number: output}))
    record = record_zeroing(model, {"input_ids": ids})
    assert [layer.index for layer in record.layers] == [1, 3]
    for layer in record.layers:
        model(ids, use_cache=False)
        whole = states[layer.index]
        for token in (0, 2, 6):
            erase = blocks[layer.index].self_attn.v_proj.register_forward_hook(
                lambda _, args, output, token=token: output.index_fill(1, torch.tensor(token), 0.0)
            )
            model(ids, use_cache=False)
            erase.remove()
            expected = 1 - torch.cosine_similarity(whole, states[layer.index], dim=-1)
            torch.testing.assert_close(layer.extras["zeroing"][..., token], expected.clamp_min(0), rtol=1e-5, atol=1e-9)
            assert expected.max() > 1e-4
    with pytest.raises(ValueError, match="a rollout needs every layer, and this record lacks 0, 2, 4"):
        rollout(record, "zeroing")
