"""The host's part of one eager call of every mechanism, forward and backward, counted on a CPU without launching.

    python benchmarks/host_calls.py [--only coda,dagpam] [--profile] [--long]

Triton's kernels are replaced by nothing, and tensors are so small that Python and torch's dispatch take all the time.
Columns: operations of torch that compute (no views), kernels of Triton, and microseconds of one call. On a GPU an
operation costs the host about 5 µs more than here, and a kernel about 8 µs. Peer: scaled_dot_product_attention.
--profile prints where Python spends the time of the mechanisms of --only. --long takes the way of impl="auto" on a GPU
for rows that the kernels of short rows do not hold, with small heads, so that torch's products take little of the time.
"""

import argparse
import cProfile
import os
import pstats

os.environ["TRITON_INTERPRET"] = "1"
import measuring
import torch
from mechanisms import BACKENDS, Case
from torch.profiler import profile
from triton.runtime import interpreter

from attnlab.mechanisms import MECHANISMS, attention, visible_sums
from attnlab.mechanisms.kernels import short_dagpam, softmax
from attnlab.mechanisms.mechanism import Mechanism

SHAPE, LONG = (1, 8, 16, 64), (1, 2, 16, 16)
VIEWS = {
    "alias", "as_strided", "chunk", "detach", "detach_", "diagonal", "expand", "expand_as", "flatten", "item",
    "is_nonzero", "lift_fresh", "matmul", "mT", "narrow", "permute", "reshape", "result_type", "select", "slice",
    "split", "split_with_sizes", "squeeze", "squeeze_", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "view_as", "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "to", "_to_copy", "contiguous", "clone",
    "empty_like", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "type_as",
    "scaled_dot_product_attention", "resolve_conj", "linear", "softmax", "log_softmax", "sum_to_size", "is_same_size",
    "promote_types", "float", "mm_out", "einsum", "conj", "stride", "size", "broadcast_tensors", "expand_copy",
    "numpy_T",
}  # fmt: skip


class Launches:
    """Stands for all launches of Triton's interpreter: it counts them and computes nothing."""

    count = 0

    def __call__(self, *arguments, **constants):
        Launches.count += 1


def count_operations(step):
    """Return the number of operations of torch that compute or fill memory, and of kernels, in one step."""
    Launches.count = 0
    with profile() as seen:
        step()
    names = [event.name for event in seen.events() if event.name.startswith("aten::")]
    return sum(name.removeprefix("aten::") not in VIEWS and "empty" not in name for name in names), Launches.count


def measure_calls(name, case, long=False):
    """Return the counts and the host time of one mechanism, by kernels where it has them."""
    if name is None:
        step = case.make_peer(BACKENDS[1] if long else BACKENDS[3])
    else:
        kind = attention(name, heads=case.shape[1], head_dim=case.shape[3])
        mechanism, leaves = case.make_layer(name, "fused" if kind.kernels and not long else "auto")
        step = case.make_step(mechanism, leaves)
    step()
    operations, kernels = count_operations(step)
    return step, {"mechanism": name or "softmax by torch", "operations": operations, "kernels": kernels,
                  "host_us": 1e3 * measuring.host_milliseconds(step, 100)}  # fmt: skip


def take_long_ways():
    """Let rows of LONG count as long, and impl="auto" ask for kernels as on a GPU."""
    softmax.LONGEST, visible_sums.CHUNK = LONG[2] - 1, LONG[2] // 2
    short_dagpam.LONGEST.clear()
    Mechanism.wants_kernels = lambda self, q: self.impl != "reference"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of mechanisms, separated by commas")
    parser.add_argument("--profile", action="store_true", help="print where Python spends the time")
    parser.add_argument("--long", action="store_true", help="count rows as too long for the kernels of short rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    interpreter.InterpretedFunction.run = Launches.__call__
    if given.long:
        take_long_ways()
    case = Case(LONG if given.long else SHAPE, "cpu")
    for name in [None, *(given.only.split(",") if given.only else MECHANISMS)]:
        try:
            step, row = measure_calls(name, case, given.long)
        except (ValueError, NotImplementedError, RuntimeError) as reason:
            print(f"{name:20s} not run: {str(reason).splitlines()[0]}")
            continue
        print(f"{row['mechanism']:20s} {row['operations']:4d} {row['kernels']:3d} {row['host_us']:8.0f}", flush=True)
        if given.profile and name is not None:
            profiler = cProfile.Profile()
            profiler.runcall(lambda step=step: [step() for _ in range(200)])
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)


if __name__ == "__main__":
    main()
