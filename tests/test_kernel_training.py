"""A model trained on the fused kernels is the one trained by the definition, with the same noise."""

import pytest
import torch

from attnlab.models.transformer import TransformerConfig, build
from attnlab.training import optimisers as optimise
from attnlab.training.loop import TrainConfig
from attnlab.training.objective import Objective
from attnlab.training.step import Eager, Flat

pytest.importorskip("triton")
pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
WORDS = 40


def losses(name, impl, *, steps, batch, dtype, device, **sizes):
    """The loss of each update of a translator that learns to turn sentences round; the same draws for every impl."""
    torch.manual_seed(0)
    shape = {"vocabulary": WORDS, "target_vocabulary": WORDS, "dropout": 0.0, "attention_options": {"impl": impl}}
    model = build(TransformerConfig(model="translator", attention=name, **shape, **sizes)).to(device).train()
    flat = Flat(model, dtype)
    stepper = Eager(Objective(model), flat, optimise.build_optimiser(flat, TrainConfig()), clip=1.0)
    draw, found = torch.Generator().manual_seed(1), []
    for step in range(steps):
        source = torch.randint(4, WORDS, (batch, 7 + step % 3), generator=draw)
        target = source.flip(1)
        begun = torch.cat([torch.ones(batch, 1, dtype=torch.long), target[:, :-1]], 1)
        stepper.accumulate([source, begun], target, 1 / target.numel())
        optimise.set_learning_rate(stepper.optimizer, 1e-3)
        stepper.apply()
        found.append(stepper.read_loss() / target.numel())
    return torch.tensor(found)


@pytest.mark.parametrize("name", ["coda", "realformer"])
def test_a_few_updates_are_those_of_the_definition(name):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"layers": 2, "width": 8, "heads": 2, "feed_forward": 16, "dtype": torch.float32, "device": device}
    fused, reference = (losses(name, impl, steps=2, batch=1, **sizes) for impl in ("fused", "reference"))
    torch.testing.assert_close(fused, reference, atol=2e-4, rtol=2e-4)
    assert not torch.equal(reference, reference[:1].expand(2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["coda", "coda-cs", "realformer"])
def test_six_layers_learn_alike_for_200_updates_in_bf16(name):
    """The means of 20 updates differ by no more than 0.05 nats, while the loss falls by more than 10 times that."""
    sizes = {"layers": 6, "width": 128, "heads": 4, "feed_forward": 256}
    sizes |= {"dtype": torch.bfloat16, "device": torch.device("cuda"), "steps": 200, "batch": 16}
    fused, reference = (losses(name, impl, **sizes).unflatten(0, (10, 20)).mean(1) for impl in ("fused", "reference"))
    print(name, [f"{a:.3f} {b:.3f}" for a, b in zip(fused.tolist(), reference.tolist(), strict=True)])
    assert reference[0] - reference[-1] > 0.5
    torch.testing.assert_close(fused, reference, atol=0.05, rtol=0.0)
