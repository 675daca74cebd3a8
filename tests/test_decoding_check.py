"""Whether a mechanism decodes with a cache as it computes a whole sequence."""

from dataclasses import replace

import pytest
import torch
from small_models import LM, made
from torch.nn import functional as F

from attnlab.mechanisms import MECHANISMS, Mechanism, Softmax, attention
from attnlab.mechanisms.decoding_check import check_cached_decoding
from attnlab.models.attention import MultiHead
from attnlab.models.presets import PRESETS, build


class Blurred(Softmax):
    """Mixes each query with the one before it; at its initial value, not at all."""

    def __init__(self, heads: int, head_dim: int, **base) -> None:
        super().__init__(heads, head_dim, **base)
        self.share = torch.nn.Parameter(torch.zeros(()))

    def weights(self, q, k, *rest, **named):
        return super().weights(q + self.share * F.pad(q, (0, 0, 1, 0))[:, :, :-1], k, *rest, **named)

    def mix(self, q, k, v, *rest, **named):
        return Mechanism.mix(self, q, k, v, *rest, **named)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_decodes_with_a_cache(name, layer):
    mechanism = attention(name, heads=2, head_dim=6, layer=layer)
    state = {key: value.clone() for key, value in mechanism.state_dict().items()}
    generator = torch.get_rng_state()
    check_cached_decoding(mechanism)
    if not mechanism.self_only:
        check_cached_decoding(mechanism, cross=True)
    assert all(torch.equal(value, state[key]) for key, value in mechanism.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("cross", [False, True])
def test_a_mechanism_that_mixes_queries_does_not(cross):
    with pytest.raises(ValueError, match="Blurred cannot decode with a cache"):
        check_cached_decoding(Blurred(2, 6), cross=cross)


def test_our_caches_refuse_it_and_the_full_pass_does_not():
    model = made(LM)
    tokens = torch.randint(1, 23, (2, 7))
    for part in (module for module in model.modules() if isinstance(module, MultiHead)):
        part.mechanism = Blurred(part.mechanism.heads, part.mechanism.head_dim).double().eval()
    assert model(tokens).shape == (2, 7, 23)
    with pytest.raises(ValueError, match="Blurred cannot decode with a cache"):
        model.start()


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind(2, 4).needs_layer])
def test_an_lstm_refuses_what_needs_a_layer(name):
    with pytest.raises(ValueError, match="LSTM"):
        build(replace(PRESETS["lstm"], vocabulary=9, width=8, heads=2, attention=name))
