"""What a mechanism that reads more than q, k and v is told when it is used or written wrongly."""

import pytest
import torch
from small_models import LM, made
from test_laws import Broken

from attnlab.mechanisms import MECHANISMS, attention, find_mechanisms
from attnlab.mechanisms.fox import FoX
from attnlab.mechanisms.law_trial import make_trial
from attnlab.mechanisms.laws import LAWS, judge_law
from attnlab.mechanisms.mechanism import ALL
from attnlab.models.attention import MultiHead
from attnlab.recording.watch import record


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind(2, 4).has_sides])
def test_without_sides_it_says_how_to_pass_them(name):
    mechanism = attention(name, heads=2, head_dim=4)
    with pytest.raises(ValueError, match="sides="):
        mechanism(torch.randn(1, mechanism.query_heads, 3, 4), *torch.randn(2, 1, 2, 3, 4))


class MayGate(Broken):
    def query_side(self, x):
        return None


def test_a_side_that_an_option_leaves_out_is_not_asked_for():
    assert MayGate(2, 4)(*torch.randn(3, 1, 2, 3, 4))[0].shape == (1, 2, 3, 4)


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind.self_only])
def test_self_attention_refuses_more_queries_than_keys(name):
    trial = make_trial(lambda layer: attention(name, heads=2, head_dim=4, layer=layer), queries=7, keys=7)
    with pytest.raises(ValueError, match="self-attention"):
        trial.select_keys(slice(5)).output()


class DoublesValues(Broken):
    def values(self, v, carry):
        return 2 * v, None


def test_values_without_a_carry_of_keys_are_refused():
    with pytest.raises(ValueError, match="carry_of"):
        DoublesValues(2, 4)


class PassesOn(FoX):
    def weights(self, *given, **named):
        return super().weights(*given, **named)


def test_a_subclass_that_passes_arguments_on_gets_the_sides():
    for law in LAWS:
        assert judge_law(law, lambda layer: PassesOn(3, 6, layer=layer)).holds is not False


class ReadsAllQueries(Broken):
    lookback = ALL


def test_a_cross_attention_keeps_no_queries():
    with pytest.raises(ValueError, match="former queries"):
        MultiHead(ReadsAllQueries(2, 4), 8, kind="cross")


def test_what_the_model_decides_is_no_option():
    with pytest.raises(ValueError, match="dropout"):
        made(LM, attention_options={"dropout": 0.1})


@pytest.mark.parametrize("wrong", [["softmax"] * 2, {0: "softmax"}, None, 3])
def test_an_attention_is_a_text_or_a_class(wrong):
    with pytest.raises(TypeError, match=type(wrong).__name__):
        find_mechanisms(wrong)


def test_a_matrix_that_all_queries_share_is_stored_once():
    layer = record(made(LM, "knocking-heads"), (torch.randint(1, 23, (2, 7)),)).layers[0]
    assert layer.turning.shape[-2:] == (4, 4)
    assert layer.turning.untyped_storage().nbytes() == layer.turning[0, :, 0].numel() * 8
