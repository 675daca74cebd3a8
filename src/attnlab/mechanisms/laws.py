"""The laws of attention mechanisms. Each law measures its worst violation, in float64; for kernels also in float32.

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
from attnlab.mechanisms.law_trial import BATCH, FAR, LENGTH, Build, LawTrial, make_trial
from attnlab.mechanisms.mechanism import Mechanism, NotCoveredError, repeat_heads

Measurement = tuple[float, str] | None

TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PADDING = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)  # hides the last two keys of the second example
PADDING[1, ..., -2:] = False
MIDDLE = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)  # hides a key between others
MIDDLE[0, ..., 2], MIDDLE[1, ..., 4] = False, False
FLOAT32 = 2e-5  # what a law in float32 allows


@dataclass(frozen=True)
class Finding:
    """The result of one law on one mechanism. holds is None if the law does not apply."""

    law: str
    holds: bool | None
    worst: float
    allowed: float
    compared: str


def rows_sum_as_declared(example: LawTrial) -> Measurement:
    declared = example.mechanism.row_sum
    if declared is None:
        return None
    padding = example.place(PADDING)
    expected = torch.as_tensor(declared).to(example.q).reshape(-1, 1)  # (h,1) or (1,1)
    plain = _distance(example.weights().sum(-1), expected)
    causal = _distance(example.weights(causal=True).sum(-1), expected)
    padded = example.weights(padding).sum(-1)
    if example.mechanism.self_only:  # a query that cannot see itself is padding
        padded = torch.where(padding[:, :, 0], padded, expected)
    return _worst(plain, causal, _distance(padded, expected)), "Σ_j weights against row_sum: plain, causal, padded"


def mix_equals_weights_times_values(example: LawTrial) -> Measurement:
    worst = 0.0
    for mask in (None, example.place(PADDING)):
        for causal in (False, True):
            given = example.mechanism.give_sides(example.sides)
            weights, expected = example.mechanism.weights(
                example.q, example.k, mask, example.logits_carry, causal=causal, **given
            )
            context, carry = example.mix(mask, causal=causal)
            worst = _worst(worst, _distance(context, weights @ repeat_heads(example.values, example.mechanism.heads)))
            if (carry is None) != (expected is None):
                return float("inf"), "one of mix and weights returns a carry, the other does not"
            if carry is not None and expected is not None:
                seen = example.mechanism.visible(example.q, example.k, mask, causal=causal)
                worst = _worst(worst, _distance(carry.masked_fill(~seen, 0.0), expected.masked_fill(~seen, 0.0)))
    return worst, "mix against weights @ v, and their carries: plain, causal, padded, both"


def future_has_no_influence(example: LawTrial) -> Measurement:
    now = LENGTH // 2
    after = example.place(torch.arange(LENGTH) > now)
    later = example.change_keys(after[None])
    later = replace(
        later, q=later.q.masked_fill(after[:, None], FAR), x=later.x.masked_fill(after[:, None], FAR)
    )  # fmt: skip
    moved = _distance(example.output(causal=True)[:, :, : now + 1], later.output(causal=True)[:, :, : now + 1])
    gradients = _gradients(example, lambda e: e.output(causal=True)[:, :, : now + 1])
    leaked = _worst(*(float(g.narrow(-2, now + 1, LENGTH - now - 1).abs().max()) for g in gradients.values()))
    return _worst(
        moved, leaked
    ), "context and gradients of queries ≤ 3 when all that belongs to tokens > 3 changes; causal"


def hidden_keys_have_no_influence(example: LawTrial) -> Measurement:
    worst = 0.0
    for mask in (example.place(PADDING), example.place(MIDDLE)):
        hidden = ~mask[:, 0, 0]  # (b,j)
        for causal in (False, True):
            read = partial(_read_seeing, mask=mask, causal=causal)
            gradients = {name: g for name, g in _gradients(example, read).items() if name in ("k", "v", "y")}
            leaks = [(g if name == "y" else g.transpose(1, 2))[hidden] for name, g in gradients.items()]
            moved = _distance(read(example), read(example.change_keys(hidden)))
            worst = _worst(worst, moved, *(float(leak.abs().max()) for leak in leaks))
    return worst, "output and gradients when hidden keys change: padded, a key in the middle; causal or not"


def _read_seeing(example: LawTrial, mask: Tensor, causal: bool) -> Tensor:
    """Return the output; of a self-only mechanism 0 for a query that cannot see itself, which is padding."""
    output = example.output(mask, causal=causal)
    return output.masked_fill(~mask.mT, 0.0) if example.mechanism.self_only else output


def left_padding_is_absence(example: LawTrial) -> Measurement:
    mask = example.place(torch.arange(LENGTH) >= 2)
    shorter = example.select_queries(slice(2, None)).select_keys(slice(2, None))
    moved = _distance(example.output(mask, causal=True)[:, :, 2:], shorter.output(causal=True))
    return moved, "two hidden keys before the others against none; causal"


def hidden_carry_is_never_read(example: LawTrial) -> Measurement:
    if example.carry is None or example.mechanism.carry_of == "keys":
        return None
    worst = 0.0
    for mask in (example.place(PADDING), example.place(TRIANGLE)):
        poisoned = replace(example, carry=example.carry.masked_fill(~mask, float("nan")))
        gradients = _gradients(poisoned, partial(LawTrial.output, mask=mask))
        finite = all(gradient.isfinite().all() for gradient in gradients.values())
        moved = _distance(example.output(mask), poisoned.output(mask))
        worst = _worst(worst, moved, 0.0 if finite else float("inf"))
    return worst, "output and gradients when hidden entries of the carry are NaN: padded, causal"


def order_of_keys_is_irrelevant(example: LawTrial) -> Measurement:
    if example.mechanism.positional:
        return None
    order = example.place(torch.tensor([4, 0, 6, 2, 5, 1, 3]))
    at, shuffled_at = example.place(torch.arange(LENGTH)), order.argsort()
    padding, shuffled = example.place(PADDING), example.select_keys(order)
    weights = shuffled.weights(padding[..., order], at=shuffled_at)
    contexts = _distance(example.output(padding, at=at), shuffled.output(padding[..., order], at=shuffled_at))
    moved = _worst(contexts, _distance(example.weights(padding, at=at)[..., order], weights))
    return moved, "weights and output when keys, values, mask, carry and at are permuted together"


def blind_row_is_zero(example: LawTrial) -> Measurement:
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[0, :, 3], mask[1] = False, False
    mask = example.place(mask)
    blind = ~mask.any(-1).expand(-1, example.mechanism.heads, -1)
    values = [float(x[blind].detach().abs().max()) for x in (example.weights(mask), example.context(mask))]
    both = [_gradients(example, lambda e: e.context(mask)), _gradients(example, lambda e: e.weights(mask))]
    finite = all(g.isfinite().all() for gradients in both for g in gradients.values())
    worst = _worst(*values, 0.0 if finite else float("inf"))
    return worst, "rows without visible keys: weights and context are 0, and all gradients finite"


def no_keys_give_zeros(example: LawTrial) -> Measurement:
    trial = partial(make_trial, example.build, dtype=example.q.dtype, device=example.q.device)
    example = trial(queries=0 if example.mechanism.self_only else LENGTH, keys=0)
    shape, worst = (BATCH, example.mechanism.heads, example.q.shape[2], 0), 0.0
    for mask in (None, example.place(PADDING[..., :0])):
        for causal in (False, True):
            weights, context = example.weights(mask, causal=causal), example.context(mask, causal=causal)
            views = (partial(f, mask=mask, causal=causal) for f in (LawTrial.output, LawTrial.weights))
            both = [_gradients(example, view) for view in views]
            finite = all(g.isfinite().all() for gradients in both for g in gradients.values())
            sound = finite and weights.shape == shape and context.shape == (*shape[:3], example.v.shape[3])
            worst = _worst(worst, float(context.detach().abs().sum()), 0.0 if sound else float("inf"))
    return worst, "no keys at all: empty weights, a context of 0 and finite gradients; plain, causal, padded, both"


def causal_equals_a_triangular_mask(example: LawTrial) -> Measurement:
    moved = _distance(example.context(causal=True), example.context(example.place(TRIANGLE)))
    return moved, "causal=True against a triangular mask"


def one_query_at_a_time(example: LawTrial) -> tuple[float, str]:
    full, worst = example.output(causal=True), 0.0
    for now in range(LENGTH):
        row = example.select_queries(slice(max(0, now - example.mechanism.lookback), now + 1))
        at = example.place(torch.arange(now + 1)[-row.q.shape[2] :])
        static, grown = row.output(causal=True, at=at), row.select_keys(slice(now + 1)).output(causal=True)
        worst = _worst(worst, *(_distance(full[:, :, now], x[:, :, -1]) for x in (static, grown)))
    return worst, "each row alone, over a growing and over a preallocated cache, against the full causal pass"


def grouped_heads_equal_repeated_heads(example: LawTrial) -> Measurement:
    grouped = make_trial(example.build, groups=1, dtype=example.q.dtype, device=example.q.device)
    heads = grouped.mechanism.heads
    repeated = replace(grouped, k=repeat_heads(grouped.k, heads), v=repeat_heads(grouped.v, heads))
    if grouped.carry is not None and grouped.mechanism.carry_of == "keys":
        repeated = replace(repeated, carry=repeat_heads(grouped.carry, heads))
    worst = _worst(*(_distance(grouped.output(causal=c), repeated.output(causal=c)) for c in (False, True)))
    return worst, "one key head for all query heads against the same key head repeated"


def cross_attention_works(example: LawTrial) -> Measurement:
    if example.mechanism.self_only:
        return None
    example = make_trial(example.build, queries=5, dtype=example.q.dtype, device=example.q.device)
    padding = example.place(PADDING)
    alone = example.select_queries(slice(max(0, 2 - example.mechanism.lookback), 3))
    apart = _distance(example.output(padding)[:, :, 2], alone.output(padding)[:, :, -1])
    values = repeat_heads(example.values, example.mechanism.heads)
    mixed = _distance(example.context(padding), example.weights(padding) @ values)
    return _worst(apart, mixed), "5 queries on 7 keys, padded: mix against weights @ v, and one query alone against all"


def examples_do_not_mix(example: LawTrial) -> Measurement:
    alone = example.select_examples(slice(1))
    moved = _distance(example.output(causal=True)[:1], alone.output(causal=True))
    return moved, "an example in a batch against itself alone"


def zero_bias_changes_nothing(example: LawTrial) -> Measurement:
    bias = example.q.new_zeros(1, example.mechanism.query_heads, LENGTH, LENGTH)
    moved = _worst(*(_distance(example.context(causal=c), example.context(causal=c, bias=bias)) for c in (False, True)))
    return moved, "bias=0 against no bias"


def bias_reaches_the_logits(example: LawTrial) -> Measurement:
    heads, padding = example.mechanism.query_heads, example.place(PADDING)
    bias = torch.linspace(-1, 1, heads * LENGTH * LENGTH).view(1, heads, LENGTH, LENGTH).sin().to(example.q)
    weights = example.weights(padding, bias=bias, causal=True)
    unmoved = 0.0 if _distance(weights, example.weights(padding, causal=True)) > 1e-6 else float("inf")
    fewer = _distance(weights, example.weights(padding, bias=bias[0], causal=True))
    context = _distance(example.context(padding, bias=bias, causal=True), weights @ example.values)
    return _worst(unmoved, fewer, context), "a bias per head changes weights; 3-D as 4-D; mix against weights @ v"


def infinite_bias_hides_its_key(example: LawTrial) -> Measurement:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    seen[:, 2], seen[3, :2], seen[5] = False, False, False
    seen, worst = example.place(seen), 0.0
    bias = torch.zeros_like(seen, dtype=example.q.dtype).masked_fill(~seen, float("-inf"))
    for causal in (False, True):
        read = partial(LawTrial.output, bias=bias, causal=causal)
        finite = all(g.isfinite().all() for g in _gradients(example, read).values())
        weights = _distance(example.weights(seen, causal=causal), example.weights(bias=bias, causal=causal))
        moved = _distance(example.output(seen, causal=causal), read(example))
        worst = _worst(worst, weights, moved, 0.0 if finite else float("inf"))
    return worst, "a bias of −∞ against a mask of the same keys: weights, output, finite gradients; causal or not"


def carry_is_what_is_declared(example: LawTrial) -> Measurement:
    mechanism, carry = example.mechanism, example.forward()[1]
    shapes = {"pairs": (BATCH, mechanism.carry_heads, LENGTH, LENGTH), "keys": tuple(example.v.shape)}
    expected = shapes[mechanism.carry_of] if mechanism.carries else None
    given = None if carry is None else tuple(carry.shape)
    return (0.0 if given == expected else float("inf")), f"carry of shape {given}, declared {expected}"


def turning_is_linear(example: LawTrial) -> Measurement:
    mechanism, values, sides = example.mechanism, example.values, example.sides
    if type(mechanism).turn is Mechanism.turn:
        return None
    with torch.random.fork_rng(devices=[]):
        first, second = torch.randn(2, *example.context().shape).to(example.q)

    def turn(context: Tensor) -> Tensor:
        return mechanism.turn(context, values, None, sides)

    sums = _distance(turn(2 * first - 3 * second), 2 * turn(first) - 3 * turn(second))
    other = first.clone()
    other[:, 1:], other[:, :, 3:] = second[:, 1:], second[:, :, 3:]  # other heads, and other queries
    apart = _distance(turn(first)[:, :1, :3], turn(other)[:, :1, :3])
    return _worst(sums, apart), "turn of a sum against the sum of turns; other heads and queries have no influence"


def sides_are_of_each_token(example: LawTrial) -> Measurement:
    if example.sides == (None, None):
        return None
    worst, pairs = 0.0, ((example.mechanism.query_side, example.x), (example.mechanism.key_side, example.y))
    for read, x in pairs:
        if (full := read(x)) is not None:
            if full.dim() != 4 or (len(full), full.shape[2]) != (BATCH, LENGTH):
                return float("inf"), f"a side must be (b,·,n,·), got {tuple(full.shape)} for {LENGTH} tokens"
            alone = read(x[:1, 2:3])
            worst = _worst(worst, float("inf") if alone is None else _distance(full[:1, :, 2:3], alone))
    return worst, "the side of one token alone against that of all tokens"


def evaluation_is_deterministic(example: LawTrial) -> Measurement:
    return _distance(example.output(), example.output()), "two evaluations of the same arguments"


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
    if example.q.dtype != torch.float64:
        return _compare_gradients(example)
    padding, triangle = example.place(PADDING), example.place(TRIANGLE)

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        changes: dict[str, Any] = dict(zip(example.arguments, tensors, strict=False))
        context, carry = replace(example, **changes).forward(padding, causal=True)
        if carry is None or example.mechanism.carry_of == "keys":
            return (context,) if carry is None else (context, carry)
        return context, carry.masked_fill(~(padding & triangle), 0.0)

    inputs = [getattr(example, name).clone().requires_grad_() for name in example.arguments]
    parameters = [p for p in example.mechanism.parameters() if p.requires_grad]
    try:
        torch.autograd.gradcheck(outputs, (*inputs, *parameters), fast_mode=True)
    except (RuntimeError, AssertionError) as error:
        return float("inf"), f"gradcheck: {' '.join(str(error).split())[:200]}"
    return 0.0, "gradcheck of output and carry by every argument and parameter; causal, padded"


def _compare_gradients(example: LawTrial) -> Measurement:
    """Compare the gradients of a fused implementation with those of the definition, in the same precision."""
    definition = make_trial(example.build, dtype=example.q.dtype, device=example.q.device)
    definition.mechanism.impl = "reference"
    worst = 0.0
    for mask in (None, example.place(PADDING)):
        found, expected = (
            _gradients(e, partial(LawTrial.output, mask=mask, causal=True)) for e in (example, definition)
        )
        worst = _worst(worst, *(_distance(found[name], expected[name]) for name in expected))
    return worst, "gradients by every argument against those of impl=reference; causal, and padded"


LAWS: dict[str, tuple[Callable[[LawTrial], Measurement], float]] = {
    "rows sum as declared": (rows_sum_as_declared, 1e-12),
    "mix equals weights times values": (mix_equals_weights_times_values, 1e-12),
    "the future has no influence": (future_has_no_influence, 1e-12),
    "hidden keys have no influence": (hidden_keys_have_no_influence, 1e-12),
    "left padding is absence": (left_padding_is_absence, 1e-12),
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
    "a bias of −∞ hides its key": (infinite_bias_hides_its_key, 1e-12),
    "the carry is what is declared": (carry_is_what_is_declared, 0.0),
    "turning is linear": (turning_is_linear, 1e-12),
    "a side is of its token": (sides_are_of_each_token, 1e-12),
    "evaluation is deterministic": (evaluation_is_deterministic, 0.0),
    "dropout falls in training alone": (dropout_falls_in_training, 0.0),
    "gradients are right": (gradients_are_right, 0.0),
}


def judge_law(
    name: str, build: Build, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Finding:
    """Apply one law to one mechanism. A law that raises does not hold; the finding names the exception.

    In float32 a law allows an error of 2e-5 where it allows any. A case that kernels do not cover does not apply.
    """
    law, allowed = LAWS[name]
    if dtype != torch.float64 and (allowed or law is gradients_are_right):
        allowed = FLOAT32
    try:
        measured = law(make_trial(build, dtype=dtype, device=device))
    except NotCoveredError as error:
        return Finding(name, None, 0.0, allowed, str(error))
    except (Exception, SystemExit) as error:  # SystemExit by a user-written class
        return Finding(name, False, float("inf"), allowed, f"raised {describe_error(error)}")
    if measured is None:
        return Finding(name, None, 0.0, allowed, "does not apply")
    worst, compared = measured
    return Finding(name, worst <= allowed, worst, allowed, compared)


def _gradients(example: LawTrial, output: Callable[[LawTrial], Tensor]) -> dict[str, Tensor]:
    """Gradients of a linear combination of the output by every argument."""
    inputs: dict[str, Any] = {name: getattr(example, name).clone().requires_grad_() for name in example.arguments}
    y = output(replace(example, **inputs))
    direction = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)
    gradients = torch.autograd.grad((y * direction).sum(), list(inputs.values()), allow_unused=True)
    return {name: torch.zeros_like(inputs[name]) if g is None else g for name, g in zip(inputs, gradients, strict=True)}


def _distance(x: Tensor, y: Tensor) -> float:
    return _worst(float((x - y).detach().abs().max()))


def _worst(*numbers: float) -> float:
    """The largest number; NaN counts as infinity."""
    return max(float("inf") if math.isnan(number) else number for number in numbers)
