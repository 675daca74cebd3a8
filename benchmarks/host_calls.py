"""The host's part of one eager call of every mechanism, forward and backward, counted on a CPU without launching.

    python benchmarks/host_calls.py [--only coda,dagpam] [--profile]

Triton's kernels are replaced by nothing, and tensors are so small that Python and torch's dispatch take all the time.
Columns: operations of torch that compute (no views), kernels of Triton, and microseconds of one call. On a GPU an
operation costs the host about 5 µs more than here, and a kernel about 8 µs. Peer: scaled_dot_product_attention.
--profile prints where Python spends the time of the mechanisms of --only.
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

from attnlab.mechanisms import MECHANISMS, attention

SHAPE = (1, 8, 16, 64)
VIEWS = {
    "alias", "as_strided", "chunk", "detach", "detach_", "diagonal", "expand", "expand_as", "flatten", "item",
    "is_nonzero", "lift_fresh", "matmul", "mT", "narrow", "permute", "reshape", "result_type", "select", "slice",
    "split", "split_with_sizes", "squeeze", "squeeze_", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "view_as", "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "to", "_to_copy", "contiguous", "clone",
    "empty_like", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "type_as",
    "scaled_dot_product_attention", "resolve_conj", "linear", "softmax", "log_softmax", "sum_to_size", "is_same_size",
    "promote_types", "float", "mm_out", "einsum", "conj", "stride", "size", "broadcast_tensors", "expand_copy",
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


def measure_calls(name, case):
    """Return the counts and the host time of one mechanism, by kernels where it has them."""
    if name is None:
        step = case.make_peer(BACKENDS[3])
    else:
        kind = attention(name, heads=8, head_dim=64)
        mechanism, leaves = case.make_layer(name, "fused" if kind.kernels else "auto")
        step = case.make_step(mechanism, leaves)
    step()
    operations, kernels = count_operations(step)
    return step, {"mechanism": name or "softmax by torch", "operations": operations, "kernels": kernels,
                  "host_us": 1e3 * measuring.host_milliseconds(step, 100)}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of mechanisms, separated by commas")
    parser.add_argument("--profile", action="store_true", help="print where Python spends the time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    interpreter.InterpretedFunction.run = Launches.__call__
    case = Case(SHAPE, "cpu")
    for name in [None, *(given.only.split(",") if given.only else MECHANISMS)]:
        try:
            step, row = measure_calls(name, case)
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
