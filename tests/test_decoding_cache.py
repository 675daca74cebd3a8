"""Step by step equals the full pass: every mechanism, both caches, padded sources, chunks of any size."""

import pytest
import torch
from representatives import every_kind
from small_models import LM, TRANSLATOR, made

from attnlab.mechanisms import MECHANISMS
from attnlab.mechanisms.noise import seed_noise
from attnlab.models.cache import BeamDecoding, StaticCache

both_caches = pytest.mark.parametrize("static", [None, 11], ids=["growing", "static"])
close = {"rtol": 0.0, "atol": 1e-11}


def padded_source() -> torch.Tensor:
    source = torch.randint(1, 23, (3, 7))
    source[1, 4:], source[2, 6:] = 0, 0
    return source


@every_kind
@both_caches
@pytest.mark.parametrize("sizes", [[1] * 7, [3, 1, 2, 1]], ids=["one by one", "uneven chunks"])
def test_language_model(name, static, sizes):
    model, tokens = made(LM, name), torch.randint(1, 23, (2, 7))
    state = model.start(static=static)
    logits = [model.step(chunk, state) for chunk in tokens.split(sizes, dim=1)]
    assert state.length == 7
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens), **close)


@every_kind
@both_caches
def test_translator_with_padded_sources(name, static):
    model, source, target = made(TRANSLATOR, name), padded_source(), torch.randint(1, 19, (3, 5))
    state = model.start(source, static=static)
    logits = [model.step(target[:, t : t + 1], state) for t in range(5)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(source, target), **close)


@both_caches
@pytest.mark.parametrize("changes", [{"key_value_heads": 1}, {"positions": "learned"}, {"norm": "post"}])
def test_other_forms_of_the_model(changes, static):
    model, tokens = made(LM, "dagpam", **changes), torch.randint(1, 23, (2, 7))
    state = model.start(static=static)
    logits = [model.step(chunk, state) for chunk in tokens.split([2, 5], dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens), **close)


@both_caches
def test_adaptive_softmax(static):
    model, tokens = made(LM, width=48, adaptive_cutoffs=(5, 11)), torch.randint(1, 23, (2, 7))
    state = model.start(static=static)
    logits = [model.step(tokens[:, t : t + 1], state) for t in range(7)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens), **close)


@both_caches
@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind.stochastic])
def test_noise_is_the_same_step_by_step(name, static):
    model, tokens = made(LM, name), torch.randint(1, 23, (2, 7))
    with seed_noise(model, 5):
        full, state = model(tokens), model.start(static=static)
        logits = torch.cat([model.step(chunk, state) for chunk in tokens.split([1, 4, 2], dim=1)], dim=1)
    torch.testing.assert_close(logits, full, **close)
    assert not torch.allclose(full, model(tokens))


@both_caches
@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind.stochastic])
def test_noise_is_the_same_step_by_step_in_cross_attention_too(name, static):
    model, source, target = made(TRANSLATOR, name), padded_source(), torch.randint(1, 19, (3, 5))
    with seed_noise(model, 5):
        full, state = model(source, target), model.start(source, static=static)
        logits = torch.cat([model.step(target[:, t : t + 1], state) for t in range(5)], dim=1)
    torch.testing.assert_close(logits, full, **close)


@every_kind
@both_caches
def test_beams_are_reordered_repeated_and_dropped(name, static):
    model, source, target = made(TRANSLATOR, name), padded_source(), torch.randint(1, 19, (3, 5))
    state = model.start(source, static=static).select(torch.tensor([2, 1, 1, 0, 1]))  # before the first token
    order = torch.tensor([2, 1, 1, 0, 1])
    model.step(target[order, :2], state)
    chosen = torch.tensor([3, 1])
    before = state
    state = state.select(chosen)
    logits = model.step(target[order[chosen], 2:], state)
    expected = model(source[order[chosen]], target[order[chosen]])[:, 2:]
    torch.testing.assert_close(logits, expected, **close)
    assert (before.length, state.length) == (2, 5)  # selecting leaves the old state as it was
    torch.testing.assert_close(model.step(target[order, 2:], before)[chosen], expected, **close)


@torch.no_grad()
@both_caches
@pytest.mark.parametrize("name", MECHANISMS)
def test_hypotheses_that_share_caches_equal_those_that_do_not(name, static):
    model, source = made(TRANSLATOR, name), padded_source()
    shared = model.start(source, static=static).repeat(4, 3, source.device)
    assert isinstance(shared, BeamDecoding) == (not MECHANISMS[name].positional and not MECHANISMS[name].lookback)
    apart = model.start(source, static=static).select(torch.arange(12) // 4)
    for _ in range(3):
        tokens = torch.randint(1, 19, (len(source) * 4, 1))
        torch.testing.assert_close(model.step(tokens, shared), model.step(tokens, apart), **close)
        rows = (torch.randint(4, (len(source), 4)) + 4 * torch.arange(len(source))[:, None]).flatten()
        for state in (shared, apart):
            state.reorder_(rows)
    rows = torch.tensor([9, 9, 8, 11, 1, 3, 0, 0])  # without the second sentence
    tokens = torch.randint(1, 19, (8, 1))
    torch.testing.assert_close(model.step(tokens, shared.select(rows)), model.step(tokens, apart.select(rows)), **close)


def test_keys_and_values_of_the_source_are_computed_once():
    model, calls = made(TRANSLATOR), []
    for block in model.decoder.blocks:
        block.cross.key.register_forward_hook(lambda *_: calls.append(1))
    state = model.start(padded_source())
    for _ in range(4):
        model.step(torch.ones(3, 1, dtype=torch.long), state)
    assert len(calls) == 2


def test_no_gradient_is_kept():
    model = made(TRANSLATOR)
    state = model.start(padded_source(), static=3)
    assert not model.step(torch.ones(3, 1, dtype=torch.long), state).requires_grad
    assert not any(x.requires_grad for caches in state.caches for cache in caches for x in cache.tensors)


def test_a_static_cache_is_allocated_once():
    model, state = made(LM), made(LM).start(static=11)
    model.step(torch.ones(2, 3, dtype=torch.long), state)
    places = [x.data_ptr() for cache, _ in state.caches for x in cache.tensors]
    assert all(x.shape == (2, 3, 11, 4) for cache, _ in state.caches for x in cache.tensors)
    model.step(torch.ones(2, 5, dtype=torch.long), state)
    assert places == [x.data_ptr() for cache, _ in state.caches for x in cache.tensors]


def test_what_is_refused():
    model = made(LM)
    state = model.start(static=5)
    model.step(torch.ones(2, 3, dtype=torch.long), state)
    with pytest.raises(ValueError, match="static cache"):
        model.step(torch.ones(2, 3, dtype=torch.long), state)
    for state in (model.start(static=5), model.start()):
        model.step(torch.ones(2, 1, dtype=torch.long), state)
        with pytest.raises(ValueError, match=r"state\.select"):
            model.step(torch.ones(3, 1, dtype=torch.long), state)
    with pytest.raises(ValueError, match="needs at"):
        StaticCache(5).extend(lambda: (torch.ones(1, 1, 1, 1),) * 2, None)
    shared = model.start().repeat(2, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="one token"):
        model.step(torch.ones(4, 2, dtype=torch.long), shared)
    shared = model.start(static=1).repeat(2, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="first step"):
        shared.share_prefix(1)
    model.step(torch.ones(4, 1, dtype=torch.long), shared)
    with pytest.raises(ValueError, match="static cache"):
        model.step(torch.ones(4, 1, dtype=torch.long), shared)
