"""JSD of all pairs of heads, beside a plain and a compiled broadcast in the same run: time and peak memory.

    python benchmarks/diversity.py [--out results/diversity] [--device cpu|gpu] [--shape 16,8,512]

Weights (b,h,n,n) are those of a softmax in float32, without and with a causal mask. The peers compute H(½(p_a + p_b))
of all pairs by one broadcast to (b,h,h,n,n), in eager mode and with torch.compile. Times are printed only if all three
agree with the sum over queries in float64.

On a GPU: time on the device by CUDA graphs, and in eager mode. On a CPU: one thread, CPU time, and the growth of the
peak resident size, one process per way; the compiled way needs a C++ compiler.
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


def make_weights(shape, device, causal):
    """Return the weights (b,h,n,n) of different heads, and their mask."""
    torch.manual_seed(SEED)
    b, h, n = shape
    mask = torch.ones(n, n, dtype=torch.bool, device=device).tril() if causal else None
    logits = 2 * torch.randn(b, h, n, n, device=device)
    return (logits if mask is None else logits.masked_fill_(~mask, -torch.inf)).softmax(-1), mask


def compute_broadcast(weights):
    """Return the definition by one broadcast: the entropy of each pair's mean, minus the mean of their entropies."""
    middle = (weights[:, :, None] + weights[:, None]) / 2  # (b,h,h,n,n)
    own = torch.special.entr(weights).sum((-2, -1))  # (b,h)
    return (torch.special.entr(middle).sum((-2, -1)) - (own[:, :, None] + own[:, None]) / 2).mean(0)


def make_step(way, weights, mask):
    if way == "attnlab":
        return lambda: jsd(weights, mask)
    peer = torch.compile(compute_broadcast, dynamic=False) if way == "torch.compile" else compute_broadcast
    return lambda: peer(weights)


def measure_error(way, shape, device, causal):
    """Return the relative distance from the definition in float64, computed pair by pair; raise if it is too large."""
    weights, mask = make_weights((min(2, shape[0]), *shape[1:]), device, causal)
    exact = torch.stack([_compute_exact(example.double()) for example in weights]).mean(0)
    error = float((make_step(way, weights, mask)().double() - exact).norm() / exact.norm())
    if not error < 1e-4:
        raise ValueError(f"{way} is {error:.1e} from the definition; no times are printed")
    return error


def _compute_exact(p):
    found = p.new_zeros(len(p), len(p))
    for a in range(len(p)):
        for c in range(a):
            middle = (p[a] + p[c]) / 2
            terms = torch.special.entr(middle) - (torch.special.entr(p[a]) + torch.special.entr(p[c])) / 2
            found[a, c] = found[c, a] = terms.sum()
    return found


def measure_on_gpu(shape, causal):
    torch.cuda.set_stream(torch.cuda.Stream())
    rows = []
    for way in WAYS:
        row = {"way": way, "causal": causal, "shape": list(shape)}
        try:
            row["error"] = measure_error(way, shape, "cuda", causal)
            weights, mask = make_weights(shape, "cuda", causal)
            step = make_step(way, weights, mask)
            row |= {"device_ms": measuring.device_milliseconds(step), "eager_ms": measuring.eager_milliseconds(step)}
            row |= {"peak_mib": measuring.device_peak_mebibytes(step), "weights_mib": weights.nbytes / 2**20}
        except (ImportError, RuntimeError, ValueError) as reason:
            row["not_run"] = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def measure_on_cpu(shape, causal):
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


def measure_one(way, shape, causal):
    torch.set_num_threads(1)
    if way == "torch.compile" and not (shutil.which("g++") or shutil.which("clang++")):
        raise SystemExit("torch.compile needs a C++ compiler on a CPU: install g++ or clang++")
    error = measure_error(way, (1, shape[1], min(shape[2], 32)), "cpu", causal)
    weights, mask = make_weights(shape, "cpu", causal)
    step = make_step(way, weights, mask)
    before = measuring.process_peak_mebibytes()
    step()
    found = {"error": error, "peak_mib": measuring.process_peak_mebibytes() - before}
    return found | {"eager_ms": measuring.eager_milliseconds(step), "weights_mib": weights.nbytes / 2**20}


def add_ratios(rows, clock):
    """Add to attnlab's row the ratio of each peer's time to its own."""
    found = {row["way"]: row[clock] for row in rows if clock in row}
    if "attnlab" in found:
        rows[-1] |= {f"times_{way}": ms / found["attnlab"] for way, ms in found.items() if way != "attnlab"}
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", help="examples, heads, tokens; default: 16,8,512 on a GPU, 2,8,256 on a CPU")
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--causal", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = tuple(map(int, (given.shape or SMALLER[given.device]).split(",")))
    if given.one:
        print(json.dumps(measure_one(given.one, shape, given.causal)))
        return
    measure, clock = (measure_on_gpu, "device_ms") if given.device == "gpu" else (measure_on_cpu, "eager_ms")
    rows = [row for causal in (False, True) for row in add_ratios(measure(shape, causal), clock)]
    about = measuring.collect_provenance(SEED)
    print(f"JSD of all pairs of heads on {about['hardware']}, torch {about['torch']}, (b,h,n) = {shape}")
    columns = ["by", "causal", "device ms", "eager ms", "peak MiB", "weights MiB", "× broadcast", "× compiled", "error"]
    keys = ("device_ms", "eager_ms", "peak_mib", "weights_mib", "times_broadcast", "times_torch.compile", "error")
    print(measuring.format_table(columns, [[r["way"], r["causal"], *(r.get(key, "–") for key in keys)] for r in rows]))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {row['way']}, causal {row['causal']}: {row['not_run']}")
    measuring.write_results(given.out, given.device, about, rows)


if __name__ == "__main__":
    main()
