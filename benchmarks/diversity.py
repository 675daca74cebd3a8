"""All pairs of heads: JSD against a plain broadcast and a compiled one, in the same run: time and peak memory.

    python benchmarks/diversity.py [--out results/diversity] [--device cpu|gpu] [--shape 16,8,512]

Weights (b,h,n,n) of a softmax in float32, as a record has them; also with a causal mask. The peers make
H(½(p_a + p_b)) of all pairs by one broadcast to (b,h,h,n,n), as PyTorch runs it and as torch.compile fuses it. No time
is printed unless all three agree with the sum over queries in float64.

On a GPU: time on the device by CUDA graphs, and as eager Python runs it. On a CPU, one thread: CPU time, and the growth
of the peak resident size, each way in a process of its own; without the compiled one, where no compiler is.
"""

import argparse
import json
import shutil
import subprocess
import sys

import measuring
import torch

from attnlab.analysis.diversity import jsd

SEED = 0
WAYS = ("broadcast", "torch.compile", "attnlab")
SMALLER = {"gpu": "16,8,512", "cpu": "2,8,256"}


def made(shape, device, causal):
    """Weights (b,h,n,n), of heads that differ, and their mask."""
    torch.manual_seed(SEED)
    b, h, n = shape
    mask = torch.ones(n, n, dtype=torch.bool, device=device).tril() if causal else None
    logits = 2 * torch.randn(b, h, n, n, device=device)
    return (logits if mask is None else logits.masked_fill_(~mask, -torch.inf)).softmax(-1), mask


def broadcast(weights):
    """The definition at once: every pair's middle, and its entropy less those of the two. Hidden weights are 0."""
    middle = (weights[:, :, None] + weights[:, None]) / 2  # (b,h,h,n,n)
    own = torch.special.entr(weights).sum((-2, -1))  # (b,h)
    return (torch.special.entr(middle).sum((-2, -1)) - (own[:, :, None] + own[:, None]) / 2).mean(0)


def step_of(way, weights, mask):
    if way == "attnlab":
        return lambda: jsd(weights, mask)
    peer = torch.compile(broadcast, dynamic=False) if way == "torch.compile" else broadcast
    return lambda: peer(weights)


def checked(way, shape, device, causal):
    """The relative distance from the definition in float64, one example and one pair of heads at a time."""
    weights, mask = made((min(2, shape[0]), *shape[1:]), device, causal)
    exact = torch.stack([_exact(example.double()) for example in weights]).mean(0)
    error = float((step_of(way, weights, mask)().double() - exact).norm() / exact.norm())
    if not error < 1e-4:
        raise ValueError(f"{way} is {error:.1e} from the definition: no times")
    return error


def _exact(p):
    found = p.new_zeros(len(p), len(p))
    for a in range(len(p)):
        for c in range(a):
            middle = (p[a] + p[c]) / 2
            terms = torch.special.entr(middle) - (torch.special.entr(p[a]) + torch.special.entr(p[c])) / 2
            found[a, c] = found[c, a] = terms.sum()
    return found


def on_gpu(shape, causal):
    torch.cuda.set_stream(torch.cuda.Stream())
    rows = []
    for way in WAYS:
        row = {"way": way, "causal": causal, "shape": list(shape)}
        try:
            row["error"] = checked(way, shape, "cuda", causal)
            weights, mask = made(shape, "cuda", causal)
            step = step_of(way, weights, mask)
            row |= {"device_ms": measuring.device_milliseconds(step), "eager_ms": measuring.eager_milliseconds(step)}
            row |= {"peak_mib": measuring.device_peak_mebibytes(step), "weights_mib": weights.nbytes / 2**20}
        except (ImportError, RuntimeError, ValueError) as reason:
            row["not_run"] = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def on_cpu(shape, causal):
    rows = []
    for way in WAYS:
        row = {"way": way, "causal": causal, "shape": list(shape)}
        words = [sys.executable, __file__, "--one", way, "--shape", ",".join(map(str, shape))]
        done = subprocess.run(words + ["--causal"] * causal, capture_output=True, text=True, check=False)
        if done.returncode:
            row["not_run"] = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        else:
            row |= json.loads(done.stdout.splitlines()[-1])
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def one_on_cpu(way, shape, causal):
    torch.set_num_threads(1)
    if way == "torch.compile" and not (shutil.which("g++") or shutil.which("clang++")):
        raise SystemExit("torch.compile needs a C++ compiler on a CPU, and there is none")
    error = checked(way, (1, shape[1], min(shape[2], 32)), "cpu", causal)
    weights, mask = made(shape, "cpu", causal)
    step = step_of(way, weights, mask)
    before = measuring.process_peak_mebibytes()
    step()
    found = {"error": error, "peak_mib": measuring.process_peak_mebibytes() - before}
    return found | {"eager_ms": measuring.eager_milliseconds(step), "weights_mib": weights.nbytes / 2**20}


def times_faster(rows, clock):
    """How many times faster attnlab is than each peer, at its row."""
    found = {row["way"]: row[clock] for row in rows if clock in row}
    if "attnlab" in found:
        rows[-1] |= {f"times_{way}": ms / found["attnlab"] for way, ms in found.items() if way != "attnlab"}
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", help="examples, heads and tokens: 16,8,512 on a GPU, less on a CPU")
    parser.add_argument("--out", help="folder for the numbers as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--causal", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = tuple(map(int, (given.shape or SMALLER[given.device]).split(",")))
    if given.one:
        print(json.dumps(one_on_cpu(given.one, shape, given.causal)))
        return
    measure, clock = (on_gpu, "device_ms") if given.device == "gpu" else (on_cpu, "eager_ms")
    rows = [row for causal in (False, True) for row in times_faster(measure(shape, causal), clock)]
    about = measuring.surroundings(SEED)
    print(f"JSD of all pairs of heads on {about['hardware']}, torch {about['torch']}, (b,h,n) = {shape}")
    columns = ["by", "causal", "device ms", "eager ms", "peak MiB", "weights MiB", "× broadcast", "× compiled", "error"]
    keys = ("device_ms", "eager_ms", "peak_mib", "weights_mib", "times_broadcast", "times_torch.compile", "error")
    print(measuring.table(columns, [[r["way"], r["causal"], *(r.get(key, "–") for key in keys)] for r in rows]))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {row['way']}, causal {row['causal']}: {row['not_run']}")
    measuring.write(given.out, given.device, about, rows)


if __name__ == "__main__":
    main()
