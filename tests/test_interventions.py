"""Interventions against weights changed by hand: a head without its rows of W_O, a steered layer with another bias."""

import copy
from dataclasses import dataclass

import pandas as pd
import pytest
import tiny_models
import torch
from small_models import CLASSIFIER, LM, TRANSLATOR, made

import attnlab
from attnlab.huggingface.effects import measure_effect, rank_heads
from attnlab.huggingface.intervening import find_sites
from attnlab.recording.interventions import (
    Intervention,
    KnockOutEdge,
    KnockOutHead,
    KnockOutValue,
    PatchHead,
    Steer,
)

SOURCE = torch.tensor([[3, 5, 7, 11, 13], [4, 6, 8, 0, 0]])
TARGET = torch.tensor([[2, 9, 4, 17], [1, 3, 0, 0]])
OURS = {"lm": (LM, TARGET, "decoder-self"), "classifier": (CLASSIFIER, SOURCE, "encoder-self")}
OURS["translator"] = (TRANSLATOR, (SOURCE, TARGET), "cross")
PRETRAINED = {"gpt2": "decoder-self", "llama": "decoder-self", "bert": "encoder-self", "marian": "cross", "t5": "cross"}


def make(name):
    """A model in float64, a function that runs it, its batch and one of its kinds of attention."""
    torch.manual_seed(0)
    if name in OURS:
        config, batch, kind = OURS[name]
        model = made(config)
        return model, lambda m: m(*batch) if isinstance(batch, tuple) else m(batch), batch, kind
    model = getattr(tiny_models, name)().double().eval()
    batch = tiny_models.padded_batch(model)
    return model, lambda m: m(**batch, use_cache=False)[0] if name != "bert" else m(**batch)[0], batch, PRETRAINED[name]


def find_projection(model, layer):
    """The linear map whose weight a Record shows as the output projection of a layer."""
    flat = layer.output_weight.flatten(0, 1)  # (h·d,e)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        for matrix in (weight, weight.T) if weight is not None and weight.dim() == 2 else ():
            if matrix.shape == flat.shape and torch.equal(matrix, flat):
                return module, weight if matrix is weight else weight.T
    raise AssertionError(layer.name)


@pytest.mark.parametrize("name", [*OURS, *PRETRAINED])
@torch.no_grad()
def test_a_head_knocked_out_is_a_projection_without_its_rows(name):
    model, run, batch, kind = make(name)
    layer = attnlab.record(model, batch).kind(kind)[1]
    rows = slice(layer.output_weight.shape[1], 2 * layer.output_weight.shape[1])
    cut = copy.deepcopy(model)
    find_projection(cut, layer)[1][rows] = 0.0
    whole = run(model)
    with attnlab.intervene(model, KnockOutHead(kind=kind, layer=1, head=1)):
        torch.testing.assert_close(run(model), run(cut))
        assert not torch.allclose(run(model), whole)
    torch.testing.assert_close(run(model), whole, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["lm", "translator", "gpt2", "marian"])
@torch.no_grad()
def test_steering_is_another_bias(name):
    model, run, batch, kind = make(name)
    layer = attnlab.record(model, batch).kind(kind)[0]
    vector = torch.randn(layer.outputs.shape[-1], dtype=torch.float64)
    other = copy.deepcopy(model)
    find_projection(other, layer)[0].bias += 0.5 * vector
    with attnlab.intervene(model, Steer(kind=kind, layer=0, vector=vector, scale=0.5)):
        torch.testing.assert_close(run(model), run(other))


@pytest.mark.parametrize("name", [*OURS, *PRETRAINED])
@torch.no_grad()
def test_an_edge_and_a_value_take_their_part_of_the_output_away(name):
    model, run, batch, kind = make(name)
    layer = attnlab.record(model, batch).kind(kind)[1]
    parts = torch.einsum("bhij,bhjd,hde->bije", layer.weights, layer.values, layer.output_weight)
    close = {"rtol": 1e-5, "atol": 1e-5 if name == "llama" else 1e-8}  # its norms compute in float32
    steers = [Steer(kind=kind, layer=1, query=1, vector=-parts[0, 1, 0])]
    with attnlab.intervene(model, KnockOutEdge(kind=kind, layer=1, query=1, key=0)):
        changed = run(model)
    with attnlab.intervene(model, *steers):
        torch.testing.assert_close(changed[0], run(model)[0], **close)
    with attnlab.intervene(model, KnockOutValue(kind=kind, layer=1, token=0)):
        changed = run(model)
    everyone = [Steer(kind=kind, layer=1, query=i, vector=-parts[0, i, 0]) for i in range(parts.shape[1])]
    with attnlab.intervene(model, *everyone):
        torch.testing.assert_close(changed[0], run(model)[0], **close)


@torch.no_grad()
def test_a_renormalized_edge_is_a_masked_key():
    """In one head of one query, by hand; in a whole model, a mask that hides the token from every query."""
    model = made(LM, layers=1)
    mask = torch.tensor([[True, False, True, True]])
    hidden = model.readout(model.hidden(TARGET[:1], mask))
    edges = [KnockOutEdge(query=i, key=1, renormalize=True) for i in (2, 3)]
    with attnlab.intervene(model, *edges):
        torch.testing.assert_close(model(TARGET[:1])[:, 2:], hidden[:, 2:])


@pytest.mark.parametrize("name", ["lm", "gpt2"])
@torch.no_grad()
def test_a_patch_moves_the_context_of_another_run(name):
    model, run, batch, _ = make(name)
    own = attnlab.record(model, batch)
    ids = batch if name == "lm" else batch["input_ids"]
    other = attnlab.record(model, (ids + 1).clamp_max(18) if name == "lm" else {**batch, "input_ids": (ids + 5) % 90})
    with attnlab.intervene(model, PatchHead(record=own, layer=1)):
        patched = run(model)
    torch.testing.assert_close(patched, run(model))
    gap = (other.layers[1].mixed - own.layers[1].mixed)[0, 2, 1] @ own.layers[1].output_weight[2]
    with attnlab.intervene(model, PatchHead(record=other, layer=1, head=2, query=1)):
        patched = run(model)
    with attnlab.intervene(model, Steer(layer=1, query=1, vector=gap)):
        torch.testing.assert_close(patched[0], run(model)[0])


@pytest.mark.parametrize("mechanism", ["coda", "dagpam", "gated", "xsa", "resformer", "differential"])
@torch.no_grad()
def test_every_kind_of_mechanism_loses_an_edge_that_never_was(mechanism):
    """The future has no weight, so cutting an edge to it changes nothing; cutting one to the past does."""
    model = made(LM, mechanism)
    whole = model(TARGET[:1])
    with attnlab.intervene(model, KnockOutEdge(query=1, key=3)):
        torch.testing.assert_close(model(TARGET[:1]), whole)
    with attnlab.intervene(model, KnockOutEdge(query=3, key=1)):
        assert not torch.allclose(model(TARGET[:1]), whole)


@torch.no_grad()
def test_an_adapted_model_is_changed_too():
    model = attnlab.adapt(tiny_models.gpt2().double().eval(), "sigmoid")
    batch = tiny_models.padded_batch(model)
    layer = attnlab.record(model, batch).layers[1]
    part = torch.einsum("hj,hjd,hde->je", layer.weights[0, :, 3], layer.values[0], layer.output_weight)[2]
    with attnlab.intervene(model, KnockOutEdge(layer=1, query=3, key=2)):
        changed = model(**batch).logits
    with attnlab.intervene(model, Steer(layer=1, query=3, vector=-part)):
        torch.testing.assert_close(changed[0], model(**batch).logits[0])


@pytest.mark.parametrize("name", ["lm", "gpt2"])
@torch.no_grad()
def test_the_model_is_whole_after_an_error(name):
    model, run, batch, _ = make(name)
    whole = run(model)
    for wrong in (KnockOutEdge(layer=0, query=99, key=0), Steer(layer=0, vector=torch.ones(1))):
        with pytest.raises(ValueError, match=r"query 99 is out|shape"), attnlab.intervene(model, wrong):
            run(model)
    with pytest.raises(KeyboardInterrupt), attnlab.intervene(model, KnockOutHead(layer=0)):
        raise KeyboardInterrupt
    torch.testing.assert_close(run(model), whole, rtol=0, atol=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    attnlab.record(model, batch)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (KnockOutHead(layer=7, head=0), r"no layer 7; the decoder-self layers are 0-2"),
        (KnockOutHead(layer=0, head=3), r"no head 3; the heads of decoder-self layer 0 are 0 … 2"),
        (KnockOutHead(layer=0, head=-1), r"no head -1"),
        (KnockOutHead(kind="cross", layer=0), r"this model has no 'cross' attention: pass kind='decoder-self'"),
        (KnockOutValue(token=11), r"KnockOutValue: token 11 is out of range: the text has 11 tokens, numbered 0 … 10"),
        (KnockOutEdge(query=-1, key=0), r"query -1 is out of range"),
        (KnockOutEdge(query=0, key=torch.tensor([0, 1])), r"key must be an integer, or a tensor .* 3 examples, got"),
        (KnockOutValue(token="cat"), r"token must be an integer, or a tensor .* 3 examples, got 'cat'"),
        (KnockOutValue(token=1.0), r"token must be an integer, .* got 1.0"),
        (Steer(layer=0, vector=torch.ones(4)), r"vector must have the shape \(15,\), got \(4,\)"),
    ],
)
def test_what_an_intervention_refuses(wrong, message):
    model, run, _, _ = make("gpt2")
    with pytest.raises(ValueError, match=message), attnlab.intervene(model, wrong):
        run(model)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KnockOutHead(layer=0, head=1.5), r"KnockOutHead: head must be an integer or None, got 1.5"),
        (lambda: KnockOutHead(layer="0"), r"layer must be an integer or None, got '0'"),
        (lambda: KnockOutHead(head=True), r"head must be an integer or None, got True"),
        (lambda: Steer(layer=0, head=1, vector=torch.ones(15)), r"head= has no meaning"),
        (lambda: Steer(layer=0, vector=[1.0]), r"vector must be a tensor of finite numbers"),
        (lambda: Steer(layer=0, vector=torch.tensor([torch.nan])), r"vector must be a tensor of finite numbers"),
        (lambda: Steer(layer=0, vector=torch.ones(1), scale="2"), r"scale must be a finite number, got '2'"),
        (lambda: PatchHead(record="gpt2"), r"record must be a Record, as of attnlab.record, got 'gpt2'"),
    ],
)
def test_what_an_intervention_cannot_be_made_of(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


def test_an_intervention_takes_the_numbers_of_a_table():
    model, _, batch, _ = make("gpt2")
    row = rank_heads(model, batch).iloc[0]
    assert not isinstance(row["head"], int)  # numpy's
    effect = measure_effect(model, batch, KnockOutHead(layer=row["layer"], head=row["head"]))
    assert effect.loss_change == pytest.approx(row["loss_change_nats"])


@dataclass(frozen=True, kw_only=True, eq=False)
class DoubleOutput(Intervention):
    """An intervention of a user."""

    def change_outputs(self, outputs, site):
        return 2 * outputs


@pytest.mark.parametrize("name", ["gpt2", "lm"])
@torch.no_grad()
def test_an_own_intervention_changes_outputs(name):
    """Oracle: the output projection with twice its weight and bias."""
    model, run, batch, kind = make(name)
    projection, _ = find_projection(model, attnlab.record(model, batch).kind(kind)[0])
    with attnlab.intervene(model, DoubleOutput(kind=kind, layer=0)):
        found = run(model)
    for x in projection.parameters():
        x.mul_(2)
    torch.testing.assert_close(found, run(model))


@pytest.mark.parametrize("name", ["minimax", "qwen3_next", "diffllama"])
@torch.no_grad()
def test_layers_are_those_of_the_record_also_with_gates_and_linear_attention(name):
    """A patch of every head from the model's own record changes nothing; layers behind a gate can be steered."""
    torch.manual_seed(0)
    model = getattr(tiny_models, name)().eval()
    batch = tiny_models.padded_batch(model)
    seen = batch["attention_mask"].bool()
    record = attnlab.record(model, batch)
    assert [(site.layer, site.heads) for site in find_sites(model)] == [
        (layer.index, layer.context.shape[1]) for layer in record.layers
    ]
    whole = model(**batch, use_cache=False).logits
    with attnlab.intervene(model, PatchHead(record=record)):
        torch.testing.assert_close(model(**batch, use_cache=False).logits[seen], whole[seen], rtol=1e-4, atol=1e-4)
    for layer in record.layers:
        with attnlab.intervene(model, KnockOutHead(layer=layer.index, head=1)):
            assert not torch.allclose(model(**batch, use_cache=False).logits, whole)
        vector = torch.ones(layer.outputs.shape[-1])
        with attnlab.intervene(model, Steer(layer=layer.index, vector=vector)):
            steered = model(**batch, use_cache=False).logits
        module = model.get_submodule(layer.name)
        with module.register_forward_hook(lambda _, args, output: (output[0] + vector, *output[1:])):  # noqa: B023
            torch.testing.assert_close(steered, model(**batch, use_cache=False).logits)
        assert not torch.allclose(steered, whole)


def test_a_context_is_not_patched_between_a_mechanism_and_a_gate_of_the_model():
    model = attnlab.adapt(tiny_models.qwen3_next(), "softmax").eval()
    batch = tiny_models.padded_batch(model)
    record = attnlab.record(model, batch)
    patch = attnlab.intervene(model, PatchHead(record=record))
    with torch.no_grad(), patch, pytest.raises(ValueError, match="comes between the context"):
        model(**batch, use_cache=False)


def test_what_intervene_refuses():
    model, _, batch, _ = make("marian")
    with pytest.raises(ValueError, match="3 kinds of attention: pass kind='encoder-self', 'decoder-self' or 'cross'"):
        attnlab.intervene(model, KnockOutHead(layer=0)).__enter__()
    with pytest.raises(TypeError, match="must be one of KnockOutHead"):
        attnlab.intervene(model, "head 3").__enter__()
    with pytest.raises(ValueError, match="needs an intervention"):
        attnlab.intervene(model).__enter__()
    with pytest.raises(ValueError, match="training mode"):
        attnlab.intervene(model.train(), KnockOutHead(kind="cross")).__enter__()
    model.eval()
    with pytest.raises(TypeError, match="needs a loaded model, got 'gpt2'"):
        attnlab.intervene("gpt2", KnockOutHead(layer=0)).__enter__()
    with attnlab.intervene(model, KnockOutHead(kind="cross")), pytest.raises(ValueError, match="to one call"):
        attnlab.intervene(model, KnockOutHead(kind="cross")).__enter__()
    with attnlab.intervene(model, KnockOutHead(kind="cross")), pytest.raises(ValueError, match="record it outside"):
        attnlab.record(model, batch)
    ours = made(LM)
    with attnlab.intervene(ours, KnockOutHead(layer=0)), pytest.raises(ValueError, match="record it outside"):
        attnlab.record(ours, TARGET)


@torch.no_grad()
def test_nested_changes_of_our_model_add_up():
    model, run, _, _ = make("lm")
    with attnlab.intervene(model, KnockOutHead(layer=0, head=0), KnockOutHead(layer=1, head=2)):
        both = run(model)
    with (
        attnlab.intervene(model, KnockOutHead(layer=0, head=0)),
        attnlab.intervene(model, KnockOutHead(layer=1, head=2)),
    ):
        torch.testing.assert_close(run(model), both)


@torch.no_grad()
def test_a_changed_model_generates_with_a_cache():
    model, _, batch, _ = make("gpt2")
    ids = batch["input_ids"][:1]
    with attnlab.intervene(model, KnockOutHead(layer=1, head=1)):
        cached, plain = (model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=c) for c in (True, False))
    assert torch.equal(cached, plain)


@torch.no_grad()
def test_the_effect_is_what_the_logits_say():
    model, run, batch, _ = make("lm")
    effect = measure_effect(model, batch, KnockOutHead(layer=1, head=0))
    logits = run(model).log_softmax(-1)
    right = [logits[0, 0, 9], logits[0, 1, 4], logits[0, 2, 17], logits[1, 0, 3]]  # TARGET without its padding
    assert effect.loss == pytest.approx(-sum(map(float, right)) / 4)
    with attnlab.intervene(model, KnockOutHead(layer=1, head=0)):
        torch.testing.assert_close(effect.changed_logits, run(model))
    assert effect.loss_change == pytest.approx(effect.changed_loss - effect.loss)
    assert effect.kl > 0


@torch.no_grad()
def test_the_effect_on_the_last_prediction_is_seen():
    model, _, batch, _ = make("gpt2")
    ids = batch["input_ids"][:1]
    last = ids.shape[1] - 1
    effect = measure_effect(model, {"input_ids": ids}, KnockOutEdge(query=last, key=0))
    p, q = (x.log_softmax(-1) for x in (effect.logits, effect.changed_logits))
    moved = (p.exp() * (p - q)).sum(-1)[0]
    assert effect.loss_change == pytest.approx(0.0, abs=1e-6)  # nothing follows the last token
    assert moved[last] > 1e-6
    assert effect.kl == pytest.approx(float(moved.mean()), abs=1e-7)


def test_heads_are_ranked_by_what_they_cost():
    model, _, batch, _ = make("gpt2")
    table = rank_heads(model, batch)
    assert len(table) == sum(site.heads for site in find_sites(model)) == 9
    assert table["loss_change_nats"].is_monotonic_decreasing
    row = table.iloc[4]
    effect = measure_effect(model, batch, KnockOutHead(layer=int(row["layer"]), head=int(row["head"])))
    assert effect.loss_change == pytest.approx(row["loss_change_nats"])
    assert list(rank_heads(make("bert")[0], make("bert")[2]).columns) == ["kind", "layer", "head", "distance"]
    some = rank_heads(model, batch, layers=[2], heads=[1, 0])
    every = table[(table["layer"] == 2) & (table["head"] < 2)].reset_index(drop=True)
    pd.testing.assert_frame_equal(some, every)
    with pytest.raises(ValueError, match="the model has no layer 3; its layers are 0-2"):
        rank_heads(model, batch, layers=[1, 3])
    with pytest.raises(ValueError, match="the model has no head 3; its heads are 0-2"):
        rank_heads(model, batch, heads=[3])
    with pytest.raises(ValueError, match="none of the chosen layers has one of the chosen heads"):
        rank_heads(model, batch, layers=[])


def test_a_single_token_has_no_loss_but_moves_the_prediction():
    model, _, batch, _ = make("gpt2")
    one = {name: x[:1, :1] for name, x in batch.items()}
    effect = measure_effect(model, one, KnockOutHead(layer=0, head=0))
    assert (effect.loss, effect.loss_change) == (None, None)
    assert effect.kl > 0
    assert "no next token to predict" in repr(effect)
    table = rank_heads(model, one)
    assert list(table.columns) == ["kind", "layer", "head", "kl_nats", "distance"]
    assert table["kl_nats"].is_monotonic_decreasing
