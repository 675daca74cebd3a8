"""Positions of interventions count from the first token of the text: steps with a cache equal one pass without."""

from dataclasses import replace

import pytest
import tiny_models
import torch
import transformers as hf
from small_models import LM, TRANSLATOR, made

import attnlab
from attnlab.decoding.decode import decode_beam
from attnlab.models.lstm import build
from attnlab.models.lstm_config import TRANSLATION
from attnlab.recording.interventions import KnockOutEdge, KnockOutHead, KnockOutValue, PatchHead, Steer

IDS = torch.tensor([[5, 7, 11, 13, 17, 2, 3, 14, 12, 16]])  # longer than the windows of 5 of gemma3 and gpt_oss
LSTM = replace(TRANSLATION, vocabulary=23, width=5, embedding_width=7, dropout=0.0)
PRETRAINED = ["gpt2", "gemma3", "marian", "gpt_oss static", "gpt_oss adapted", "fox", "multi-token"]
CHANGES = {
    "an edge of the prompt": lambda record: KnockOutEdge(kind=record.kinds[-1], layer=1, query=2, key=1),
    "an edge of a later token": lambda record: KnockOutEdge(kind=record.kinds[-1], query=7, key=2, renormalize=True),
    "a late edge to a late token": lambda record: KnockOutEdge(kind=record.kinds[-1], query=8, key=6),
    "a value of the prompt": lambda record: KnockOutValue(kind=record.kinds[-1], token=3),
    "a value of a later token": lambda record: KnockOutValue(kind=record.kinds[-1], token=6),
    "a steered later token": lambda record: steer(record, 6),
    "a steered token of the prompt": lambda record: steer(record, 1),
    "a patched later token": lambda record: PatchHead(kind=record.kinds[-1], record=record, head=0, query=6),
}


def steer(record, query):
    width = record.layers[-1].outputs.shape[-1]
    return Steer(kind=record.kinds[-1], layer=1, query=query, vector=torch.arange(width).double().cos())


def read_steps(run, length):
    """The logits of a prompt of four tokens and of further steps."""
    return torch.cat(
        [run(slice(*ends)) for ends in [(0, 4), (4, 5), (5, 7), *((n, n + 1) for n in range(7, length))]], 1
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PRETRAINED)
@torch.no_grad()
def test_steps_of_a_hugging_face_model_equal_one_pass(name, change):
    torch.manual_seed(0)
    own, _, how = name.partition(" ")
    model = getattr(tiny_models, own if hasattr(tiny_models, own) else "gpt2")().double().eval()
    if how == "adapted" or not hasattr(tiny_models, own):
        attnlab.adapt(model, "softmax" if how == "adapted" else name)
    decoder, given = ("", {}) if own != "marian" else ("decoder_", {"input_ids": IDS[:, :8] + 3})
    record = attnlab.record(model, given | {f"{decoder}input_ids": (IDS + 1)})
    caches = {"config": model.config, "max_cache_len": 16} if how == "static" else {"config": model.config}
    cache = hf.StaticCache(**caches) if how == "static" else hf.DynamicCache(**caches)
    cache = hf.EncoderDecoderCache(cache, hf.DynamicCache()) if decoder else cache
    with attnlab.intervene(model, CHANGES[change](record)):
        whole = model(**given, **{f"{decoder}input_ids": IDS}, use_cache=False).logits
        steps = read_steps(
            lambda part: model(**given, **{f"{decoder}input_ids": IDS[:, part]}, past_key_values=cache).logits, 10
        )
    torch.testing.assert_close(steps, whole, rtol=1e-5, atol=1e-5)  # some norms compute in float32
    assert not torch.allclose(whole, model(**given, **{f"{decoder}input_ids": IDS}, use_cache=False).logits, atol=1e-4)


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_keys_beside_a_sink_have_their_own_positions(change):
    """Oracle: the model before it was adapted, whose eager attention has the sink outside of the weights."""
    model = tiny_models.gpt_oss().double().eval()
    chosen = CHANGES[change](attnlab.record(model, {"input_ids": IDS + 1}))
    with attnlab.intervene(model, chosen):
        expected = model(IDS).logits
    attnlab.adapt(model, "softmax")
    if isinstance(chosen, PatchHead):
        chosen = CHANGES[change](attnlab.record(model, {"input_ids": IDS + 1}))
    with attnlab.intervene(model, chosen):
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)  # its norms compute in float32


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "static"),
    [("softmax", None), ("softmax", 12), ("multi-token", None), ("selective", 12), ("translator", 12), ("lstm", None)],
)
@torch.no_grad()
def test_steps_of_our_models_equal_one_pass(name, change, static):
    torch.manual_seed(0)
    if name == "lstm":
        model, source = build(LSTM).double().eval(), (IDS + 1,)
    else:
        model = made(TRANSLATOR) if name == "translator" else made(LM, name)
        source = (IDS + 2,) if name == "translator" else ()
    record = attnlab.record(model, (*source, IDS + 1) if source else IDS + 1)
    chosen = CHANGES[change](record)
    if name == "lstm" and chosen.layer == 1:
        chosen = type(chosen)(**{**vars(chosen), "layer": 0})
    with attnlab.intervene(model, chosen):
        whole, state = model(*source, IDS), model.start(*source, static=static)
        steps = read_steps(lambda part: model.step(IDS[:, part], state), 10)
    torch.testing.assert_close(steps, whole)
    assert not torch.allclose(whole, model(*source, IDS), atol=1e-6)


@torch.no_grad()
def test_generation_with_a_cache_is_generation_without():
    model = tiny_models.gpt2().double().eval()
    for change in (KnockOutEdge(query=3, key=0), KnockOutValue(token=1), KnockOutEdge(query=2, key=None)):
        with attnlab.intervene(model, change):
            cached, plain = (model.generate(IDS, max_new_tokens=5, do_sample=False, use_cache=c) for c in (True, False))
        assert torch.equal(cached, plain)
    vector = 30 * torch.arange(15).double().cos()
    with attnlab.intervene(model, Steer(layer=2, query=12, vector=vector)):
        steered = model.generate(IDS, max_new_tokens=5, do_sample=False)
    plain = model.generate(IDS, max_new_tokens=5, do_sample=False)
    with attnlab.intervene(model, Steer(layer=2, query=12, vector=vector)):
        expected = model(plain[:, :13]).logits[:, -1].argmax(-1)
    assert torch.equal(steered[:, :13], plain[:, :13])
    assert torch.equal(steered[:, 13], expected)


@torch.no_grad()
def test_a_position_that_no_pass_reached_is_an_error():
    model, ours = tiny_models.gpt2().eval(), made(LM)
    late = pytest.raises(ValueError, match=r"Steer: query 99 is out of range: the text has 13 tokens, numbered 0 … 12")
    with late, attnlab.intervene(model, Steer(query=99, vector=torch.ones(15))):
        model.generate(IDS, max_new_tokens=4, do_sample=False)
    late, state = pytest.raises(ValueError, match=r"token 10 is out of range: the text has 10 tokens"), ours.start()
    with late, attnlab.intervene(ours, KnockOutValue(token=10)):
        read_steps(lambda part: ours.step(IDS[:, part], state), 10)
    with pytest.raises(ValueError, match=r"token -1 is out of range"), attnlab.intervene(ours, KnockOutValue(token=-1)):
        ours.step(IDS, ours.start())


@torch.no_grad()
def test_a_patch_of_a_prompt_leaves_the_tokens_after_it():
    model = tiny_models.gpt2().double().eval()
    record, longer = (attnlab.record(model, {"input_ids": IDS[:, :n] + 1}) for n in (4, 10))
    with attnlab.intervene(model, *(PatchHead(record=longer, layer=0, head=1, query=query) for query in range(4))):
        expected = model(IDS).logits
    cache = hf.DynamicCache(config=model.config)
    with attnlab.intervene(model, PatchHead(record=record, layer=0, head=1)):
        steps = read_steps(lambda part: model(IDS[:, part], past_key_values=cache).logits, 10)
        torch.testing.assert_close(steps, expected)
        generated = model.generate(IDS[:, :4], max_new_tokens=1, do_sample=False)
        with pytest.raises(ValueError, match="use texts as long"):
            model.generate(IDS[:, :5], max_new_tokens=1, do_sample=False)
        with pytest.raises(ValueError, match="use texts as long"):
            model(IDS[:, :3])
        assert torch.equal(model(IDS[:, :4]).logits[:, -1].argmax(-1), generated[:, 4])


@torch.no_grad()
def test_an_encoder_alone_is_changed_in_every_pass():
    model = tiny_models.marian().double().eval()
    with attnlab.intervene(model, KnockOutHead(kind="encoder-self", layer=0, head=1)):
        first, second = (model.get_encoder()(IDS)[0] for _ in range(2))
    torch.testing.assert_close(second, first)
    assert not torch.allclose(first, model.get_encoder()(IDS)[0])


@torch.no_grad()
def test_positions_of_hypotheses_that_share_a_cache_or_of_a_captured_step_are_refused():
    model, ours = made(TRANSLATOR), made(LM)
    state = ours.start(static=12)
    state.pin(torch.device("cpu"))
    with pytest.raises(ValueError, match="or a step is captured"), attnlab.intervene(ours, KnockOutValue(token=0)):
        ours.step(IDS[:, :1], state)
    source = IDS[:, :5]
    refused = pytest.raises(ValueError, match="hypotheses share a cache")
    with refused, attnlab.intervene(model, KnockOutEdge(kind="cross", query=1, key=0)):
        decode_beam(model, source, beam=2, max_length=4)
    with attnlab.intervene(model, KnockOutValue(kind="cross", token=0), KnockOutHead(kind="decoder-self", head=0)):
        decode_beam(model, source, beam=2, max_length=4)
