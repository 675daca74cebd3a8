"""Each mechanism, forward and backward, against torch's fused softmax attention in the same run: time and peak memory.

    python benchmarks/mechanisms.py [--out results/mechanisms] [--only dagpam,coda]

On a GPU: bf16, causal, queries laid out as a projection leaves them; time on the device (CUDA graph) and as eager
Python runs it. On a CPU: float32, one thread, each mechanism in a process of its own. A mechanism that carries is
timed as a layer that has a carry. No time is printed for one that does not first equal its definition.
"""

import argparse
import json
import subprocess
import sys

import measuring
import torch
from torch.nn import functional as F

from attnlab.mechanisms import MECHANISMS, attention

GPU_SHAPES = [(64, 8, 128, 64), (16, 8, 512, 64), (8, 16, 1024, 64), (4, 16, 2048, 64)]
CPU_SHAPES = [(2, 8, 128, 64), (1, 8, 512, 64)]
PEER = "torch SDPA"
SEED = 0


def step_of(name, shape, device, dtype):
    """A function that runs forward and backward once, and the tensors it is checked by."""
    b, h, n, d = shape
    torch.manual_seed(SEED)
    q, k, v = (torch.randn(b, n, h, d, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    grad = torch.randn(b, n, h, d, device=device, dtype=dtype).transpose(1, 2)
    arguments = [x.transpose(1, 2) for x in (q, k, v)]
    if name == PEER:
        return lambda: torch.autograd.grad(
            F.scaled_dot_product_attention(*arguments, is_causal=True), (q, k, v), grad
        ), None
    mechanism = attention(name, heads=h, head_dim=d, layer=1).to(device=device, dtype=dtype)
    carry = torch.randn(b, h, n, n, device=device, dtype=dtype).requires_grad_() if mechanism.carries else None
    wanted = [q, k, v, *(p for p in mechanism.parameters() if p.requires_grad), *([carry] if mechanism.carries else [])]

    def step():
        context, _ = mechanism(*arguments, None, carry, causal=True)
        return torch.autograd.grad(context, wanted, grad, allow_unused=True)

    return step, (mechanism, arguments, carry)


def equals_its_definition(mechanism, arguments, carry):
    """The relative distance of mix from weights·v, both at evaluation, the latter in float32."""
    mechanism.eval()
    q, k, v = (x.detach()[:1] for x in arguments)
    with torch.no_grad():
        part = None if carry is None else carry.detach()[:1]
        got = mechanism.mix(q, k, v, None, part, causal=True)[0].float()
        dtype = next(mechanism.parameters(), q).dtype
        wide = mechanism.float().weights(
            q.float(), k.float(), None, None if part is None else part.float(), causal=True
        )[0]
        expected = wide @ v.float()
    mechanism.to(dtype).train()
    return float((got - expected).norm() / expected.norm())


def on_gpu(names):
    torch.cuda.set_stream(torch.cuda.Stream())
    rows = []
    for shape in GPU_SHAPES:
        for name in [PEER, *names]:
            torch.cuda.empty_cache()
            row = {"shape": list(shape), "mechanism": name}
            try:
                step, made = step_of(name, shape, "cuda", torch.bfloat16)
                error = equals_its_definition(*made) if made else 0.0
                if error > 2e-2:
                    raise ValueError(f"mix differs from its definition by {error:.1e}")
                row |= {
                    "device_ms": measuring.device_milliseconds(step),
                    "eager_ms": measuring.eager_milliseconds(step),
                }
                row |= {"peak_mib": measuring.device_peak_mebibytes(step), "error": error}
            except (ImportError, RuntimeError, ValueError) as reason:
                row["not_run"] = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def on_cpu(names):
    rows = []
    for shape in CPU_SHAPES:
        for name in [PEER, *names]:
            words = [sys.executable, __file__, "--one", name, "--shape", ",".join(map(str, shape))]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            made = (
                json.loads(done.stdout) if done.returncode == 0 else {"not_run": done.stderr.strip().splitlines()[-1]}
            )
            rows.append({"shape": list(shape), "mechanism": name} | made)
    return rows


def one_on_cpu(name, shape):
    torch.set_num_threads(1)
    step, made = step_of(name, shape, "cpu", torch.float32)
    before = measuring.process_peak_mebibytes()
    step()
    peak = measuring.process_peak_mebibytes() - before  # before the check, which makes weights
    error = equals_its_definition(*made) if made else 0.0
    if error > 1e-4:
        raise ValueError(f"mix differs from its definition by {error:.1e}")
    print(json.dumps({"eager_ms": measuring.eager_milliseconds(step), "peak_mib": peak, "error": error}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="mechanisms, separated by commas")
    parser.add_argument("--out", help="folder for the numbers as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return one_on_cpu(given.one, tuple(map(int, given.shape.split(","))))
    names = given.only.split(",") if given.only else list(MECHANISMS)
    rows = on_gpu(names) if torch.cuda.is_available() else on_cpu(names)
    clock = "device_ms" if torch.cuda.is_available() else "eager_ms"
    for row in rows:
        peer = next(r for r in rows if r["shape"] == row["shape"] and r["mechanism"] == PEER)
        if clock in row:
            row["times_sdpa"] = row[clock] / peer[clock]
    columns = ["mechanism", "b,h,n,d", "device ms", "eager ms", "× SDPA", "peak MiB"]
    shown = [
        [r["mechanism"], ",".join(map(str, r["shape"]))]
        + [r.get(key, "–") for key in ("device_ms", "eager_ms", "times_sdpa", "peak_mib")]
        for r in rows
    ]
    about = measuring.surroundings(SEED)
    print(f"forward + backward on {about['hardware']}, torch {about['torch']}; × SDPA by {clock.replace('_', ' ')}")
    print(measuring.table(columns, shown))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {row['mechanism']} at {row['shape']}: {row['not_run']}")
    measuring.write(given.out, "gpu" if torch.cuda.is_available() else "cpu", about, rows)


if __name__ == "__main__":
    main()
