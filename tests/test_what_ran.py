"""A run says what computed it: the device, the way of updating, and the fused kernels that were launched."""

import json

import pytest
import torch

from attnlab.mechanisms import attention
from attnlab.mechanisms.kernels.launch import LAUNCHED, note_launch
from attnlab.training.recipe import resolve_recipe
from attnlab.training.runs import start_run

SIZES = {"data": "lexicon", "examples": "300", "held_out": "40", "width": "32", "layers": "2", "heads": "2"}


def ran(out, device, **words):
    values = SIZES | {"feed_forward": "32", "batch_tokens": "400", "evaluate_every": "100"} | words
    recipe = resolve_recipe("synthetic", values)
    start_run(recipe, out=str(out), device=device, report=lambda values: None, note=lambda line: None)
    return json.loads((out / "ran.json").read_text())[-1]


def test_on_a_cpu_nothing_is_fused(tmp_path):
    """Once, however often a finished run is started again."""
    for _ in range(2):
        found = ran(tmp_path / "run", "cpu", steps="3", attention="coda")
        expected = {"after": 0, "to": 3, "steps": 3, "device": "cpu", "torch": torch.__version__}
        expected |= {"stepper": "eager", "kernels": []}
        assert found == expected
    assert len(json.loads((tmp_path / "run/ran.json").read_text())) == 1


def test_a_note_is_what_the_compiler_takes_for_constant():
    assert vars(note_launch) == vars(torch.compiler.assume_constant_result(lambda: True))


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("name", "impl", "kernels"),
    [
        ("softmax", "fused", {"softmax"}),
        ("softmax", "reference", set()),
        ("dagpam", "reference", set()),
        ("coda", "fused", {"cascade", "coda"}),
        ("coda-cs", "fused", {"one_pass"}),
        ("realformer", "fused", {"cascade"}),
        ("realformer", "reference", set()),
    ],
)
def test_a_launch_is_noted(name, impl, kernels):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = attention(name, heads=2, head_dim=16, layer=1, impl=impl).to(device).eval()
    q, carry = torch.randn(1, 2, 5, 16, device=device), torch.randn(1, 2, 5, 5, device=device)
    layer.sample_seed = 3  # without noise coda-cs has no kernel of its own
    LAUNCHED.clear()
    layer(q, q, q, None, carry if layer.carries else None)
    assert kernels == LAUNCHED


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["auto", "no", "static", "dynamic"])
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("softmax", ["softmax"]),
        ("dagpam", ["dagpam"]),
        ("coda", ["cascade", "coda"]),
        ("coda-cs", ["one_pass", "softmax"]),
        ("realformer", ["cascade"]),
    ],
)
def test_on_a_gpu_the_kernels_of_a_mechanism_are_named(name, kernels, compile, tmp_path):
    found = ran(tmp_path / "run", "cuda", steps="3", attention=name, compile=compile)
    assert (found["stepper"], found["kernels"]) == ("captured", kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "dagpam", "coda", "realformer"])
def test_a_population_maps_over_a_mechanism_that_has_kernels(name):
    layer = attention(name, heads=2, head_dim=16, layer=1).cuda().eval()
    q = torch.randn(3, 1, 2, 5, 16, device="cuda")
    together = torch.vmap(lambda x: layer(x, x, x)[0])(q)
    torch.testing.assert_close(together, torch.stack([layer(x, x, x)[0] for x in q]), atol=1e-4, rtol=1e-4)
