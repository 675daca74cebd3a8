"""torch.compile(fullgraph=True): every mechanism is one graph, alone and in models, and has its gradients."""

import threading
from dataclasses import replace

import pytest
import tiny_models
import torch
from adapted_models import CARRYING, shake
from representatives import every_kind_and_slowly_all
from small_models import TRANSLATOR, made

from attnlab.huggingface import pretrained
from attnlab.mechanisms import attention
from attnlab.mechanisms.law_trial import make_trial


@pytest.fixture(autouse=True)
def _forget_programs():
    torch._dynamo.reset()


def assert_whole(call, parameters):
    """call() is one graph. Its output and the gradients of the parameters are those without torch.compile."""
    found, trained = [], [p for p in parameters if p.requires_grad]
    for each in (call, torch.compile(call, fullgraph=True, backend="eager")):
        output = each()
        found.append([output.detach(), *torch.autograd.grad(output.square().mean(), trained, allow_unused=True)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@every_kind_and_slowly_all
def test_a_mechanism_is_one_graph(name):
    trial = make_trial(lambda layer: attention(name, heads=2, head_dim=4, layer=layer))
    trial = replace(trial, q=trial.q.requires_grad_(), carry=None if trial.carry is None else trial.carry.detach())
    assert_whole(lambda: trial.output(causal=True), [trial.q, *trial.mechanism.parameters()])


def test_a_translator_that_learns_is_one_graph():
    model = made(TRANSLATOR, "realformer", dropout=0.1).train()
    call = torch.compile(model, fullgraph=True, backend="eager")
    call(torch.randint(1, 23, (2, 5)), torch.randint(1, 19, (2, 4))).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["coda", "resformer", "fox"])  # a carry, carried values, a side of the keys
def test_an_adapted_model_is_one_graph(name):
    model = pretrained.adapt(tiny_models.gpt2(n_embd=12, n_layer=2), name)
    shake(model)
    batch = tiny_models.padded_batch(model)
    assert_whole(lambda: model(**batch, use_cache=False).logits, list(model.parameters()))


@pytest.mark.parametrize("name", CARRYING)
def test_threads_do_not_share_what_is_carried(name):
    """Another thread runs the same model between two layers of a pass."""
    model = pretrained.adapt(tiny_models.llama(num_hidden_layers=2), name)
    batch, shorter = tiny_models.padded_batch(model), {"input_ids": torch.tensor([[3, 4, 5]])}
    expected, other = model(**batch).logits, []

    def run_other(*_):
        handle.remove()
        thread = threading.Thread(target=lambda: other.append(model(**shorter).logits))
        thread.start()
        thread.join()

    handle = model.model.layers[1].register_forward_pre_hook(run_other)
    torch.testing.assert_close(model(**batch).logits, expected)
    torch.testing.assert_close(other[0], model(**shorter).logits)
