"""Members of a stacked model compute what each computes alone: outputs, gradients, dropout and noise."""

import pytest
import torch
from small_models import CLASSIFIER, LM, TRANSLATOR, made

from attnlab.mechanisms.coda import Coda
from attnlab.models.crew import Crew
from attnlab.models.member_mechanism import MemberMechanism
from attnlab.models.members import stack_members, unstack_member

SEEDS = (3, 5, 8)
SIZES = [(4, 7), (2, 5), (4, 6)]  # examples and tokens of each member's batch


def draw_inputs(config, member):
    """The batch of a member: tokens of one or two sequences, padded on the right."""
    torch.manual_seed(100 + member)
    rows, width = SIZES[member]
    count = 2 if config.model == "translator" else 1
    inputs = [torch.randint(1, 19, (rows, width - n)) for n in range(count)]
    for tokens in inputs:
        tokens[-1, -2:] = 0
    return inputs


def pad(inputs):
    rows, widths = 4, [max(x.shape[1] for x in each) for each in zip(*inputs, strict=True)]
    shaped = [torch.zeros(len(inputs), rows, width, dtype=torch.long) for width in widths]
    for member, own in enumerate(inputs):
        for into, x in zip(shaped, own, strict=True):
            into[member, : len(x), : x.shape[1]] = x
    return [x.flatten(0, 1) for x in shaped]


def compare_with_alone(config, name, own=({}, {}, {}), **changes):
    """own: options of each member."""
    models = [made(config, name, **changes, **each).train() for each in own]
    inputs = [draw_inputs(config, member) for member in range(len(SEEDS))]
    crew = Crew(SEEDS)
    stacked = stack_members(models, crew)
    sides = {"encoder": 0, "decoder": -1}
    crew.sizes = {side: [tuple(own[at].shape) for own in inputs] for side, at in sides.items()}
    together = stacked(*pad(inputs)).unflatten(0, (len(SEEDS), -1))
    loss = 0.0
    for member, (model, own, seed) in enumerate(zip(models, inputs, SEEDS, strict=True)):
        torch.manual_seed(seed)
        alone = model(*own)
        real = own[-1] != 0 if alone.dim() == 3 else torch.ones(len(alone), dtype=torch.bool)
        got = together[member, : len(alone)]
        got = got[:, : alone.shape[1]] if alone.dim() == 3 else got
        torch.testing.assert_close(got[real], alone[real], rtol=1e-9, atol=1e-9)
        weight = torch.randn_like(alone[real])
        (alone[real] * weight).sum().backward()
        loss = loss + (got[real] * weight).sum()
    loss.backward()
    for member, model in enumerate(models):
        assert set(unstack_member(stacked, member)) == {name for name, _ in model.named_parameters()}
        for at, p in model.named_parameters():
            got, expected = (torch.zeros_like(p) if g is None else g for g in (find_grad(stacked, at, member), p.grad))
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def find_grad(stacked, name, member):
    named = dict(stacked.named_parameters())
    before, _, after = name.partition(".mechanism.")
    if (part := f"{before}.mechanism.parts.{member}.{after}") in named:
        return named[part].grad
    grad = named[f"{before}.mechanism.whole.{after}" if after else name].grad
    return None if grad is None else grad[member]


KINDS = ["softmax", "coda", "dagpam", "resformer", "fox"]  # no parameters, carries, noise, values carried, sides


@pytest.mark.parametrize("config", [LM, TRANSLATOR, CLASSIFIER], ids=["language", "translator", "classifier"])
@pytest.mark.parametrize("name", KINDS)
def test_members_compute_what_they_compute_alone(config, name):
    compare_with_alone(config, name, dropout=0.2, attention_dropout=0.1)


@pytest.mark.parametrize("rates", [(0.0, 0.3, 0.0), (0.1, 0.0, 0.0), (0.2, 0.3, 0.1)], ids=str)
def test_members_may_differ_in_the_dropout_of_their_attention(rates):
    compare_with_alone(LM, "softmax", [{"attention_dropout": rate} for rate in rates], dropout=0.2)


MODERN = {"positions": "rope", "activation": "swiglu", "norm_type": "rms", "query_key_norm": True, "head_dim": 4}
SHAPES = {"learned": {"positions": "learned", "max_length": 9}, "modern": MODERN, "untied": {"tie": "none"}}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_members_of_every_backbone(changes):
    compare_with_alone(LM, "softmax", dropout=0.2, **changes)


class Scaled(Coda):
    """CODA with a parameter of its own, which it reads in its own way."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.gain = torch.nn.Parameter(torch.ones(()))

    def finish(self, context):
        return self.gain * context


@pytest.mark.parametrize(
    ("kinds", "options", "stacked"),
    [(Coda, [{}, {}], True), (Scaled, [{}, {}], False), (Coda, [{}, {"alpha": 2}], False),
     (Coda, [{}, {"dropout": 0.1}], False)],
    ids=["alike", "a subclass", "sizes differ", "options differ"],
)  # fmt: skip
def test_parameters_are_stacked_only_where_one_call_can_read_them(kinds, options, stacked):
    parts = [kinds(3, 4, layer=1, **own) for own in options]
    members = MemberMechanism(parts, Crew((1, 2)), ("decoder", "decoder"))
    assert (members.whole is not None) == stacked
    assert members.heads == 3
