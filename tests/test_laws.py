"""The laws, over the whole registry and its options; and, for each law, a mechanism that breaks it and is caught."""

import pytest
import torch

from attnlab.mechanisms import MECHANISMS, Mechanism, attention
from attnlab.mechanisms.laws import LAWS, judge_law
from attnlab.mechanisms.mechanism import logits, masked_softmax, position, repeat_heads

OPTIONS = {
    "realformer": [{"mean": True}],
    "coda": [{"variant": "paper"}, {"variant": "paper", "residual": False}, {"alpha": 2}, {"alpha": 8}],
    "dagpam": [
        {"initial": (3.0, 1.0), "tied": False},
        {"per_head": True},
        {"shared": True},
        {"fixed": True, "initial": 0.5},
        {"negative_init": "minus-identity"},
    ],
    "gated": [{"per": "head"}],
    "knocking-heads": [{"on": "values"}],
    "dcmha": [{"rank": 1}],
    "multi-token": [{"queries": 1, "keys": 5, "group": 1, "norm": False}],
    "resformer": [{"fixed": True}],
    "sigmoid": [{"offset": -1.5}],
    "sliding-window": [{"size": 3}, {"size": 2, "sinks": 2}],
    "softmax1": [{"n": 0.25}],
    "stick-breaking": [{"remainder": True}],
}
CASES = [(name, {}) for name in MECHANISMS] + [(name, options) for name, many in OPTIONS.items() for options in many]


def case_id(case):
    name, options = case
    return name + "".join(f",{key}={value}" for key, value in options.items())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_law(case, law):
    name, options = case
    finding = judge_law(law, lambda layer: attention(name, heads=3, head_dim=6, layer=layer, **options))
    assert finding.holds is not False, finding


def does_not_apply(mechanism):
    """The laws that say nothing of a mechanism, read from what it declares."""
    kind = type(mechanism)
    carries_logits = kind.carries and kind.carry_of == "pairs"
    turns = kind.turn is not Mechanism.turn
    sides = kind.query_side is not Mechanism.query_side or kind.key_side is not Mechanism.key_side
    laws = {
        "rows sum as declared": mechanism.row_sum is None,
        "the hidden carry is never read": not carries_logits,
        "the order of keys is irrelevant": kind.positional,
        "cross attention works": kind.self_only,
        "turning is linear": not turns,
        "a side is of its token": not sides,
    }
    return {law for law, silent in laws.items() if silent}


@pytest.mark.parametrize("name", MECHANISMS)
def test_laws_that_do_not_apply_are_the_expected_ones(name):
    def build(layer):
        return attention(name, heads=3, head_dim=6, layer=layer)

    assert {law for law in LAWS if judge_law(law, build).holds is None} == does_not_apply(build(1))


class Broken(Mechanism):
    """Softmax attention with one thing wrong."""

    row_sum = 1.0

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        return self.wrong(logits(q, k, self.scale, bias), seen), None

    def wrong(self, s, seen):
        return masked_softmax(s, seen)


class SumsToTwo(Broken):
    def wrong(self, s, seen):
        return 2 * masked_softmax(s, seen)


class ForgetsTheMask(Broken):
    def wrong(self, s, seen):
        return s.softmax(-1)


class NormalisesBeforeTheMask(Broken):
    def wrong(self, s, seen):
        return s.softmax(-1).masked_fill(~seen, 0.0)


class BlindRowsAreNaN(Broken):
    def wrong(self, s, seen):
        return s.masked_fill(~seen, float("-inf")).softmax(-1)


class NeedsAKey(Broken):
    def wrong(self, s, seen):
        return masked_softmax(s - s.detach().amax(-1, keepdim=True), seen)


class FavoursTheFirstKey(Broken):
    def wrong(self, s, seen):
        return masked_softmax(s + torch.tensor([1.0] + [0.0] * (s.shape[-1] - 1)), seen)


class CountsPadding(Broken):
    row_sum = None

    def wrong(self, s, seen):
        return s.masked_fill(~seen, 0.0) / s.shape[-1]


class MixesExamples(Broken):
    def wrong(self, s, seen):
        return masked_softmax(s + s.mean(0, keepdim=True), seen)


class CutsTheGradient(Broken):
    def wrong(self, s, seen):
        return masked_softmax(s + s.detach(), seen)


class Dice(Broken):
    def wrong(self, s, seen):
        return masked_softmax(s + torch.rand_like(s), seen)


class MixesOtherwise(Broken):
    def mix(self, q, k, v, mask=None, carry=None, **options):
        context, carry = super().mix(q, k, v, mask, carry, **options)
        return 1.001 * context, carry


class DropsTheBias(Broken):
    def mix(self, q, k, v, mask=None, carry=None, *, bias=None, **options):
        return super().mix(q, k, v, mask, carry, **options)


class AddsToTheBias(Broken):
    def weights(self, q, k, mask=None, carry=None, *, bias=None, **options):
        return super().weights(
            q, k, mask, carry, bias=None if bias is None else bias + k.norm(dim=-1)[:, :, None], **options
        )


class IgnoresTheBias(Broken):
    def weights(self, q, k, mask=None, carry=None, *, bias=None, **options):
        return super().weights(q, k, mask, carry, **options)


class ForgetsDropout(Broken):
    def mix(self, q, k, v, mask=None, carry=None, **options):
        return self.weights(q, k, mask, carry, **options)[0] @ repeat_heads(v, self.heads), None


class LeaksWhenFinishing(Broken):
    def finish(self, context):
        return context - context.mean(2, keepdim=True)


class BlindContextIsNaN(Broken):
    def mix(self, q, k, v, mask=None, carry=None, **options):
        context, carry = super().mix(q, k, v, mask, carry, **options)
        blind = ~self.visible(q, k, mask).any(-1, keepdim=True)
        return context.masked_fill(blind, float("nan")), carry


class BlindGradientIsNaN(Broken):
    def mix(self, q, k, v, mask=None, carry=None, **options):
        seen = self.visible(q, k, mask)
        z = logits(q, k, self.scale).masked_fill(~seen, float("-inf")).softmax(-1)
        return (z @ repeat_heads(v, self.heads)).masked_fill(~seen.any(-1, keepdim=True), 0.0), None


class ReturnsOneValue(Broken):
    def weights(self, *arguments, **options):
        return super().weights(*arguments, **options)[0]


class HandsOnACarry(Broken):
    def weights(self, *arguments, **options):
        weights, _ = super().weights(*arguments, **options)
        return weights, weights


class ReadsTheHiddenCarry(Broken):
    carries = True

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = logits(q, k, self.scale, bias)
        z = z if carry is None else z + carry.mean(-1, keepdim=True) * z
        return masked_softmax(z, seen), z


class LastGroupOnly(Broken):
    def mix(self, q, k, v, mask=None, carry=None, **options):
        return super().mix(q, k, v if v.shape[1] == q.shape[1] else v.roll(1, dims=2), mask, carry, **options)


class SquareOnly(Broken):
    def wrong(self, s, seen):
        return masked_softmax(s + torch.eye(s.shape[-1]), seen)


class ShiftsTheDiagonal(Broken):
    """A causal query does not see its own key; the first one does, so that rows still sum to 1."""

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        at = (position(q, k, at) - 1).clamp_min(0) if causal else at
        return super().weights(q, k, mask, causal=causal, at=at, bias=bias)


class CountsFromTheStart(Broken):
    positional = True

    def wrong(self, s, seen):
        return masked_softmax(s * torch.arange(s.shape[-1]), seen)


class ReadsTheInput(Broken):
    def query_side(self, x):
        return x.sigmoid().unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TurnsWithoutALine(ReadsTheInput):
    def turn(self, context, v, at, sides):
        return context * sides[0] + sides[0]


class TurnsByOtherQueries(ReadsTheInput):
    def turn(self, context, v, at, sides):
        return context - context.mean(2, keepdim=True)


class AveragesItsSide(ReadsTheInput):
    def query_side(self, x):
        return super().query_side(x - x.mean(1, keepdim=True))

    def turn(self, context, v, at, sides):
        return context * sides[0]


class ReadsTheFuture(ReadsTheInput):
    def query_side(self, x):
        return super().query_side(x.roll(-1, 1))

    def turn(self, context, v, at, sides):
        return context * sides[0]


class HidesWithANeighbour(Broken):
    """A key's logit is added to that of the key before it, hidden or not."""

    positional = True

    def wrong(self, s, seen):
        return masked_softmax(s + torch.cat([s[..., 1:], torch.zeros_like(s[..., :1])], -1), seen)


class MixHandsOnAnother(Broken):
    carries = True

    def weights(self, q, k, mask=None, carry=None, **options):
        return super().weights(q, k, mask, **options)[0], logits(q, k, self.scale)

    def mix(self, *arguments, **options):
        context, carry = super().mix(*arguments, **options)
        return context, 2 * carry


class ConvolvesQueries(Broken):
    """A row reads the query before it and does not say so."""

    def weights(self, q, k, mask=None, carry=None, **options):
        before = torch.cat([torch.zeros_like(q[:, :, :1]), q[:, :, :-1]], dim=2)
        return super().weights(q + before, k, mask, **options)


class ClipsTheBias(Broken):
    def weights(self, q, k, mask=None, carry=None, *, bias=None, **options):
        return super().weights(q, k, mask, carry, bias=None if bias is None else bias.clamp_min(-2.0), **options)


class IgnoresAt(Broken):
    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        return super().weights(q, k, mask, causal=causal, bias=bias)


MUTANTS = {
    "rows sum as declared": SumsToTwo,
    "mix equals weights times values": MixesOtherwise,
    "the future has no influence": NormalisesBeforeTheMask,
    "hidden keys have no influence": ForgetsTheMask,
    "left padding is absence": CountsFromTheStart,
    "the hidden carry is never read": ReadsTheHiddenCarry,
    "the order of keys is irrelevant": FavoursTheFirstKey,
    "a blind row is zero": BlindRowsAreNaN,
    "no keys give zeros": NeedsAKey,
    "causal equals a triangular mask": ShiftsTheDiagonal,
    "one query at a time equals all": IgnoresAt,
    "grouped heads equal repeated heads": LastGroupOnly,
    "cross attention works": SquareOnly,
    "examples do not mix": MixesExamples,
    "a zero bias changes nothing": AddsToTheBias,
    "a bias reaches the logits": IgnoresTheBias,
    "dropout falls in training alone": ForgetsDropout,
    "a bias of −∞ hides its key": ClipsTheBias,
    "the carry is what is declared": HandsOnACarry,
    "turning is linear": TurnsWithoutALine,
    "a side is of its token": AveragesItsSide,
    "evaluation is deterministic": Dice,
    "gradients are right": CutsTheGradient,
}


FUSED = [name for name, kind in MECHANISMS.items() if "mix" in vars(kind) and kind.kernels]
BRIEF = ["gradients are right"]  # test_impl.py compares mix with weights times values
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_laws_of_kernels(name, laws):
    def build(layer):
        return attention(name, heads=2, head_dim=16, layer=layer, impl="fused")

    findings = [judge_law(law, build, dtype=torch.float32, device=DEVICE) for law in laws]
    assert not [finding for finding in findings if finding.holds is False]
    assert {finding.law for finding in findings if finding.holds} >= set(BRIEF)


@pytest.mark.kernel
@pytest.mark.parametrize("name", FUSED)
def test_laws_hold_of_the_kernels_in_float32(name):
    assert_laws_of_kernels(name, LAWS if DEVICE == "cuda" else BRIEF)


@pytest.mark.slow  # minutes by the interpreter; on a GPU the test above has every law
@pytest.mark.parametrize("name", FUSED)
def test_every_law_holds_of_the_kernels_in_float32(name):
    assert_laws_of_kernels(name, LAWS)


@pytest.mark.parametrize("law", LAWS)
def test_every_law_catches_a_mechanism_that_breaks_it(law):
    finding = judge_law(law, lambda layer: MUTANTS[law](3, 6, layer=layer))
    assert finding.holds is False, finding


def test_only_two_laws_catch_a_shifted_diagonal():
    caught = [law for law in LAWS if judge_law(law, lambda layer: ShiftsTheDiagonal(3, 6, layer=layer)).holds is False]
    assert caught == ["left padding is absence", "causal equals a triangular mask"]


@pytest.mark.parametrize(
    ("law", "mutant"),
    [
        ("one query at a time equals all", CountsPadding),
        ("a bias reaches the logits", DropsTheBias),
        ("the future has no influence", LeaksWhenFinishing),
        ("a blind row is zero", BlindContextIsNaN),
        ("a blind row is zero", BlindGradientIsNaN),
        ("mix equals weights times values", ReturnsOneValue),
        ("mix equals weights times values", MixHandsOnAnother),
        ("hidden keys have no influence", HidesWithANeighbour),
        ("turning is linear", TurnsByOtherQueries),
        ("the future has no influence", ReadsTheFuture),
        ("one query at a time equals all", ConvolvesQueries),
    ],
)
def test_further_faults_are_caught(law, mutant):
    assert judge_law(law, lambda layer: mutant(3, 6, layer=layer)).holds is False


def test_the_mutants_are_otherwise_sound():
    """The base of the mutants passes, so what catches a mutant is its one fault."""
    for law in LAWS:
        assert judge_law(law, lambda layer: Broken(3, 6, layer=layer)).holds is not False
