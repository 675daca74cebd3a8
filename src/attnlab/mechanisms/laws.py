"""The laws of attention mechanisms. Each law measures its worst violation, in float64.

The test suite runs them on the registry, `attnlab check` on one mechanism. A law takes a trial. It returns its worst
violation and a description of what was compared, or None if the law does not apply.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnlab.config import describe_error
from attnlab.mechanisms.mechanism import Mechanism

Build = Callable[[int], Mechanism]  # the mechanism of a layer
Measurement = tuple[float, str] | None

BATCH, LENGTH, FAR = 2, 7, 1e3
TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PADDING = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)  # hides the last two keys of the second example
PADDING[1, ..., -2:] = False


@dataclass(frozen=True)
class Finding:
    """The result of one law on one mechanism. holds is None if the law does not apply."""

    law: str
    holds: bool | None
    worst: float
    allowed: float
    compared: str


@dataclass(frozen=True)
class LawTrial:
    """A mechanism with perturbed parameters, since initial values may be special, and arguments for it."""

    mechanism: Mechanism
    q: Tensor
    k: Tensor
    v: Tensor
    carry: Tensor | None
    build: Build

    def weights(self, mask: Tensor | None = None, **options: Any) -> Tensor:
        return self.mechanism.weights(self.q, self.k, mask, self.carry, **options)[0]

    def context(self, mask: Tensor | None = None, **options: Any) -> Tensor:
        return self.mechanism.mix(self.q, self.k, self.v, mask, self.carry, **options)[0]

    def output(self, mask: Tensor | None = None, **options: Any) -> Tensor:
        return self.mechanism.forward(self.q, self.k, self.v, mask, self.carry, **options)[0]


def make_trial(build: Build, *, queries: int = LENGTH, keys: int = LENGTH, groups: int | None = None) -> LawTrial:
    """Draw random arguments. A mechanism that carries is built for layer 1 and gets the carry of a layer 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = shake_parameters(build(0))
        heads, size = first.heads, first.head_dim
        q0, q = torch.randn(2, BATCH, heads, queries, size, dtype=torch.float64)
        k0, k, v = torch.randn(3, BATCH, groups or heads, keys, size, dtype=torch.float64)
        if not first.carries:
            return LawTrial(first, q, k, v, None, build)
        return LawTrial(shake_parameters(build(1)), q, k, v, first.weights(q0, k0)[1], build)


def rows_sum_as_declared(example: LawTrial) -> Measurement:
    declared = example.mechanism.row_sum
    if declared is None:
        return None
    expected = torch.as_tensor(declared, dtype=torch.float64).reshape(-1, 1)  # (h,1) or (1,1)
    plain = _distance(example.weights().sum(-1), expected)
    causal = _distance(example.weights(causal=True).sum(-1), expected)
    padded = example.weights(PADDING).sum(-1)
    if example.mechanism.self_only:  # a query that cannot see itself is padding
        padded = torch.where(PADDING[:, :, 0], padded, expected)
    return _worst(plain, causal, _distance(padded, expected)), "Σ_j weights against row_sum: plain, causal, padded"


def mix_equals_weights_times_values(example: LawTrial) -> Measurement:
    worst = 0.0
    for mask in (None, PADDING):
        for causal in (False, True):
            context = example.weights(mask, causal=causal) @ example.v
            worst = _worst(worst, _distance(example.context(mask, causal=causal), context))
    return worst, "mix against weights @ v: plain, causal, padded, both"


def future_has_no_influence(example: LawTrial) -> Measurement:
    now = LENGTH // 2
    after = torch.arange(LENGTH)[:, None] > now
    later = replace(example, k=example.k.masked_fill(after, FAR), v=example.v.masked_fill(after, FAR))
    moved = _distance(example.output(causal=True)[:, :, : now + 1], later.output(causal=True)[:, :, : now + 1])
    gradients = _gradients(example, lambda e: e.output(causal=True)[:, :, : now + 1])
    leaked = _worst(*(float(gradients[x][:, :, now + 1 :].abs().max()) for x in ("k", "v")))
    return _worst(moved, leaked), "context and gradients of queries ≤ 3 when keys and values > 3 change; causal"


def hidden_keys_have_no_influence(example: LawTrial) -> Measurement:
    hidden = ~PADDING[:, :, 0, :, None]
    other = replace(example, k=example.k.masked_fill(hidden, FAR), v=example.v.masked_fill(hidden, FAR))
    moved = _distance(example.output(PADDING), other.output(PADDING))
    gradients = _gradients(example, lambda e: e.output(PADDING))
    leaked = _worst(*(float(gradients[x].masked_select(hidden).abs().max()) for x in ("k", "v")))
    return _worst(moved, leaked), "context and gradients when hidden keys and values change; padded"


def hidden_carry_is_never_read(example: LawTrial) -> Measurement:
    if example.carry is None:
        return None
    worst = 0.0
    for mask in (PADDING, TRIANGLE):
        poisoned = replace(example, carry=example.carry.masked_fill(~mask, float("nan")))
        gradients = _gradients(poisoned, partial(LawTrial.output, mask=mask))
        finite = all(gradient.isfinite().all() for gradient in gradients.values())
        moved = _distance(example.output(mask), poisoned.output(mask))
        worst = _worst(worst, moved, 0.0 if finite else float("inf"))
    return worst, "output and gradients when hidden entries of the carry are NaN: padded, causal"


def order_of_keys_is_irrelevant(example: LawTrial) -> Measurement:
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    at, shuffled_at = torch.arange(LENGTH), order.argsort()
    carry = None if example.carry is None else example.carry[..., order]
    shuffled = replace(example, k=example.k[:, :, order], v=example.v[:, :, order], carry=carry)
    weights = shuffled.weights(PADDING[..., order], at=shuffled_at)
    contexts = _distance(example.context(PADDING, at=at), shuffled.context(PADDING[..., order], at=shuffled_at))
    moved = _worst(contexts, _distance(example.weights(PADDING, at=at)[..., order], weights))
    return moved, "weights and context when keys, values, mask, carry and at are permuted together"


def blind_row_is_zero(example: LawTrial) -> Measurement:
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[0, :, 3], mask[1] = False, False
    blind = ~mask.any(-1).expand(-1, example.mechanism.heads, -1)
    values = [float(x[blind].detach().abs().max()) for x in (example.weights(mask), example.context(mask))]
    both = [_gradients(example, lambda e: e.context(mask)), _gradients(example, lambda e: e.weights(mask))]
    finite = all(g.isfinite().all() for gradients in both for g in gradients.values())
    worst = _worst(*values, 0.0 if finite else float("inf"))
    return worst, "rows without visible keys: weights and context are 0, and all gradients finite"


def no_keys_give_zeros(example: LawTrial) -> Measurement:
    example = make_trial(example.build, queries=0 if example.mechanism.self_only else LENGTH, keys=0)
    shape, worst = (BATCH, example.mechanism.heads, example.q.shape[2], 0), 0.0
    for mask in (None, PADDING[..., :0]):
        for causal in (False, True):
            weights, context = example.weights(mask, causal=causal), example.context(mask, causal=causal)
            views = (partial(f, mask=mask, causal=causal) for f in (LawTrial.output, LawTrial.weights))
            both = [_gradients(example, view) for view in views]
            finite = all(g.isfinite().all() for gradients in both for g in gradients.values())
            sound = finite and weights.shape == shape and context.shape == example.q.shape
            worst = _worst(worst, float(context.detach().abs().sum()), 0.0 if sound else float("inf"))
    return worst, "no keys at all: empty weights, a context of 0 and finite gradients; plain, causal, padded, both"


def causal_equals_a_triangular_mask(example: LawTrial) -> Measurement:
    return _distance(example.context(causal=True), example.context(TRIANGLE)), "causal=True against a triangular mask"


def one_query_at_a_time(example: LawTrial) -> Measurement:
    full, worst = example.output(causal=True), 0.0
    for now in range(LENGTH):
        carry = None if example.carry is None else example.carry[:, :, now : now + 1]
        row = replace(example, q=example.q[:, :, now : now + 1], carry=carry)
        static = row.output(causal=True, at=torch.tensor([now]))
        past = None if carry is None else carry[..., : now + 1]
        grown = replace(row, k=row.k[:, :, : now + 1], v=row.v[:, :, : now + 1], carry=past).output(causal=True)
        worst = _worst(worst, _distance(full[:, :, now : now + 1], static), _distance(full[:, :, now : now + 1], grown))
    return worst, "each row alone, over a growing and over a preallocated cache, against the full causal pass"


def grouped_heads_equal_repeated_heads(example: LawTrial) -> Measurement:
    grouped = make_trial(example.build, groups=1)
    heads = grouped.mechanism.heads
    repeated = replace(grouped, k=grouped.k.expand(-1, heads, -1, -1), v=grouped.v.expand(-1, heads, -1, -1))
    worst = _worst(*(_distance(grouped.context(causal=c), repeated.context(causal=c)) for c in (False, True)))
    return worst, "one key head for all query heads against the same key head repeated"


def cross_attention_works(example: LawTrial) -> Measurement:
    if example.mechanism.self_only:
        return None
    example = make_trial(example.build, queries=5)
    alone = replace(example, q=example.q[:, :, 2:3], carry=None if example.carry is None else example.carry[:, :, 2:3])
    apart = _distance(example.output(PADDING)[:, :, 2:3], alone.output(PADDING))
    mixed = _distance(example.context(PADDING), example.weights(PADDING) @ example.v)
    return _worst(apart, mixed), "5 queries on 7 keys, padded: mix against weights @ v, and one query alone against all"


def examples_do_not_mix(example: LawTrial) -> Measurement:
    carry = None if example.carry is None else example.carry[:1]
    alone = replace(example, q=example.q[:1], k=example.k[:1], v=example.v[:1], carry=carry)
    moved = _distance(example.output(causal=True)[:1], alone.output(causal=True))
    return moved, "an example in a batch against itself alone"


def zero_bias_changes_nothing(example: LawTrial) -> Measurement:
    bias = torch.zeros(1, example.mechanism.heads, LENGTH, LENGTH, dtype=torch.float64)
    moved = _worst(*(_distance(example.context(causal=c), example.context(causal=c, bias=bias)) for c in (False, True)))
    return moved, "bias=0 against no bias"


def bias_reaches_the_logits(example: LawTrial) -> Measurement:
    heads = example.mechanism.heads
    bias = torch.linspace(-1, 1, heads * LENGTH * LENGTH, dtype=torch.float64).view(1, heads, LENGTH, LENGTH).sin()
    weights = example.weights(PADDING, bias=bias, causal=True)
    unmoved = 0.0 if _distance(weights, example.weights(PADDING, causal=True)) > 1e-6 else float("inf")
    fewer = _distance(weights, example.weights(PADDING, bias=bias[0], causal=True))
    context = _distance(example.context(PADDING, bias=bias, causal=True), weights @ example.v)
    return _worst(unmoved, fewer, context), "a bias per head changes weights; 3-D as 4-D; mix against weights @ v"


def carry_is_what_is_declared(example: LawTrial) -> Measurement:
    carry = example.mechanism.mix(example.q, example.k, example.v, None, example.carry)[1]
    expected = (BATCH, example.mechanism.carry_heads, LENGTH, LENGTH) if example.mechanism.carries else None
    given = None if carry is None else tuple(carry.shape)
    return (0.0 if given == expected else float("inf")), f"carry of shape {given}, declared {expected}"


def evaluation_is_deterministic(example: LawTrial) -> Measurement:
    return _distance(example.context(), example.context()), "two evaluations of the same arguments"


def dropout_falls_in_training(example: LawTrial) -> Measurement:
    example.mechanism.dropout = 0.5
    still = _distance(example.context(), replace(example).context())
    example.mechanism.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        example.mechanism.sample_seed = 3  # the same noise in both passes: only dropout differs
        first, second = example.context(), example.context()
    differs = _distance(first, second) > 1e-6
    return _worst(still, 0.0 if differs else float("inf")), "dropout=0.5: two training passes differ, two others do not"


def gradients_are_right(example: LawTrial) -> Measurement:
    names = ["q", "k", "v"] + ["carry"] * (example.carry is not None)

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        changes: dict[str, Any] = dict(zip(names, tensors, strict=False))
        moved = replace(example, **changes)
        context, carry = moved.mechanism(moved.q, moved.k, moved.v, PADDING, moved.carry, causal=True)
        seen = PADDING & TRIANGLE
        return (context,) if carry is None else (context, carry.masked_fill(~seen, 0.0))

    inputs = [getattr(example, name).clone().requires_grad_() for name in names]
    parameters = [p for p in example.mechanism.parameters() if p.requires_grad]
    try:
        torch.autograd.gradcheck(outputs, (*inputs, *parameters), fast_mode=True)
    except (RuntimeError, AssertionError) as error:
        return float("inf"), f"gradcheck: {' '.join(str(error).split())[:200]}"
    return 0.0, "gradcheck of context and carry by q, k, v, carry and every parameter; causal, padded"


LAWS: dict[str, tuple[Callable[[LawTrial], Measurement], float]] = {
    "rows sum as declared": (rows_sum_as_declared, 1e-12),
    "mix equals weights times values": (mix_equals_weights_times_values, 1e-12),
    "the future has no influence": (future_has_no_influence, 1e-12),
    "hidden keys have no influence": (hidden_keys_have_no_influence, 1e-12),
    "the hidden carry is never read": (hidden_carry_is_never_read, 1e-12),
    "the order of keys is irrelevant": (order_of_keys_is_irrelevant, 1e-12),
    "a blind row is zero": (blind_row_is_zero, 0.0),
    "no keys give zeros": (no_keys_give_zeros, 0.0),
    "causal equals a triangular mask": (causal_equals_a_triangular_mask, 1e-12),
    "one query at a time equals all": (one_query_at_a_time, 1e-12),
    "grouped heads equal repeated heads": (grouped_heads_equal_repeated_heads, 1e-12),
    "cross attention works": (cross_attention_works, 1e-12),
    "examples do not mix": (examples_do_not_mix, 1e-12),
    "a zero bias changes nothing": (zero_bias_changes_nothing, 1e-12),
    "a bias reaches the logits": (bias_reaches_the_logits, 1e-12),
    "the carry is what is declared": (carry_is_what_is_declared, 0.0),
    "evaluation is deterministic": (evaluation_is_deterministic, 0.0),
    "dropout falls in training alone": (dropout_falls_in_training, 0.0),
    "gradients are right": (gradients_are_right, 0.0),
}


def judge_law(name: str, build: Build) -> Finding:
    """Apply one law to one mechanism. A law that raises does not hold; the finding names the exception."""
    law, allowed = LAWS[name]
    try:
        measured = law(make_trial(build))
    except (Exception, SystemExit) as error:  # SystemExit by a user-written class
        return Finding(name, False, float("inf"), allowed, f"raised {describe_error(error)}")
    if measured is None:
        return Finding(name, None, 0.0, allowed, "does not apply")
    worst, compared = measured
    return Finding(name, worst <= allowed, worst, allowed, compared)


def shake_parameters(mechanism: Mechanism) -> Mechanism:
    """Add noise to all trained parameters; return the mechanism in float64, for evaluation."""
    for parameter in mechanism.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return mechanism.double().eval()


def _gradients(example: LawTrial, output: Callable[[LawTrial], Tensor]) -> dict[str, Tensor]:
    """Gradients of a linear combination of the output by every argument."""
    names = ["q", "k", "v"] + ["carry"] * (example.carry is not None)
    inputs: dict[str, Any] = {name: getattr(example, name).clone().requires_grad_() for name in names}
    y = output(replace(example, **inputs))
    direction = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    gradients = torch.autograd.grad((y * direction).sum(), list(inputs.values()), allow_unused=True)
    return {name: torch.zeros_like(inputs[name]) if g is None else g for name, g in zip(names, gradients, strict=True)}


def _distance(x: Tensor, y: Tensor) -> float:
    return _worst(float((x - y).detach().abs().max()))


def _worst(*numbers: float) -> float:
    """The largest number; NaN counts as infinity."""
    return max(float("inf") if math.isnan(number) else number for number in numbers)
