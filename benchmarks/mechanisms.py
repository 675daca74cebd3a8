"""Each mechanism, forward and backward, beside torch's fused softmax attention in the same run: time and peak memory.

    python benchmarks/mechanisms.py [--out results/mechanisms] [--only dagpam,coda] [--device cpu|gpu]

The peer is `scaled_dot_product_attention` with the fastest of its backends. On a GPU: causal, queries in the memory
layout of a projection, bf16 and, for daGPAM, also padded and float32; time on the device (CUDA graph) and in eager
mode. On a CPU: float32, one thread, one process per mechanism. A mechanism with a carry receives one. A
time is printed only if the output and the gradients first equal those of the definition.
"""

import argparse
import json
import subprocess
import sys
from contextlib import nullcontext

import measuring
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlab.mechanisms import MECHANISMS, attention
from attnlab.mechanisms.mechanism import Mechanism

GPU_SHAPES = [(64, 8, 128, 64), (16, 8, 512, 64), (8, 16, 1024, 64), (4, 16, 2048, 64)]
CPU_SHAPES = [(2, 8, 128, 64), (1, 8, 512, 64)]
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PEER = "torch SDPA"
SEED = 0


class Case:
    """Tensors of one shape, and steps that run forward and backward once."""

    def __init__(self, shape, device, dtype, padded=False):
        b, h, n, d = shape
        torch.manual_seed(SEED)
        self.shape, self.device, self.dtype = shape, device, dtype
        self.leaves = [torch.randn(b, n, h, d, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
        self.qkv = [x.transpose(1, 2) for x in self.leaves]
        self.grad = torch.randn(b, n, h, d, device=device, dtype=dtype).transpose(1, 2)
        lengths = torch.randint(n // 2, n + 1, (b, 1, 1, 1), device=device)
        self.mask = torch.arange(n, device=device) < lengths if padded else None

    def peer(self, backend=None):
        mask = self.mask if self.mask is None else self.mask & torch.ones(
            self.shape[2], self.shape[2], dtype=torch.bool, device=self.device
        ).tril()  # fmt: skip

        def step():
            with nullcontext() if backend is None else sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(*self.qkv, attn_mask=mask, is_causal=mask is None)
            return torch.autograd.grad(y, self.leaves, self.grad)

        return step

    def make_step(self, name):
        b, h, n, d = self.shape
        torch.manual_seed(SEED)
        mechanism = attention(name, heads=h, head_dim=d, layer=1).to(device=self.device, dtype=self.dtype)
        carry = None
        if mechanism.carries:
            carry = torch.randn(b, mechanism.carry_heads, n, n, device=self.device, dtype=self.dtype).requires_grad_()
        wanted = [*self.leaves, *(p for p in mechanism.parameters() if p.requires_grad), *([carry] * mechanism.carries)]

        def step():
            context, _ = mechanism(*self.qkv, self.mask, carry, causal=True)
            return torch.autograd.grad(context, wanted, self.grad, allow_unused=True)

        return step, mechanism, carry


def distance_from_definition(case, mechanism, carry):
    """Return the largest relative distance of mix and its gradients from weights·v in float32, for one example."""
    mechanism.eval()
    results = []
    for wide in (False, True):
        inputs = [(x.detach()[:1].float() if wide else x.detach()[:1]).requires_grad_() for x in case.qkv]
        given = carry if carry is None else (carry.detach()[:1].float() if wide else carry.detach()[:1])
        mask = case.mask if case.mask is None else case.mask[:1]
        run = Mechanism.mix if wide else type(mechanism).mix
        context, _ = run(mechanism.float() if wide else mechanism, *inputs, mask, given, causal=True)
        results.append([context, *torch.autograd.grad(context, inputs, case.grad[:1].to(context.dtype))])
    mechanism.to(case.dtype).train()
    return max(float((x.float() - y).norm() / y.norm()) for x, y in zip(*results, strict=True))


def measure_step(row, step, *checked):
    try:
        row["error"] = distance_from_definition(*checked) if checked else 0.0
        if row["error"] > 3e-2:
            raise ValueError(f"mix or its gradients differ from the definition by {row['error']:.1e}")
        row |= {"device_ms": measuring.device_milliseconds(step), "eager_ms": measuring.eager_milliseconds(step)}
        row["peak_mib"] = measuring.device_peak_mebibytes(step)
    except (ImportError, RuntimeError, ValueError) as reason:
        row["not_run"] = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"
    print(row, file=sys.stderr, flush=True)
    return row


def measure_peer(case, about):
    """Return the row of the fastest backend of torch's attention."""
    rows = [measure_step(about | {"mechanism": PEER, "backend": b.name.lower()}, case.peer(b)) for b in BACKENDS[:3]]
    able = [row for row in rows if "device_ms" in row]
    if able:
        return min(able, key=lambda row: row["device_ms"])
    return measure_step(about | {"mechanism": PEER}, case.peer())


def measure_on_gpu(names):
    torch.cuda.set_stream(torch.cuda.Stream())
    rows = []
    cases = [(shape, "bf16", torch.bfloat16, False, names) for shape in GPU_SHAPES]
    some = [name for name in names if name == "dagpam"]
    cases += [((8, 16, 1024, 64), "bf16 padded", torch.bfloat16, True, some)] * bool(some)
    cases += [((8, 16, 1024, 64), "fp32", torch.float32, False, some)] * bool(some)
    for shape, label, dtype, padded, chosen in cases:
        torch.cuda.empty_cache()
        case, about = Case(shape, "cuda", dtype, padded), {"device": "gpu", "shape": list(shape), "case": label}
        rows.append(measure_peer(case, about))
        for name in chosen:
            try:
                step, *parts = case.make_step(name)
            except ImportError as reason:
                rows.append(about | {"mechanism": name, "not_run": str(reason)})
                continue
            rows.append(measure_step(about | {"mechanism": name}, step, case, *parts))
            del step, parts
            torch.cuda.empty_cache()
    return rows


def measure_on_cpu(names):
    rows = []
    for shape in CPU_SHAPES:
        for name in [PEER, *names]:
            words = [sys.executable, __file__, "--one", name, "--shape", ",".join(map(str, shape))]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            failed = done.returncode != 0
            values = {"not_run": done.stderr.strip().splitlines()[-1]} if failed else json.loads(done.stdout)
            rows.append({"device": "cpu", "shape": list(shape), "case": "fp32", "mechanism": name} | values)
    return rows


def measure_one(name, shape):
    torch.set_num_threads(1)
    case = Case(shape, "cpu", torch.float32)
    step, *parts = (case.peer(),) if name == PEER else case.make_step(name)
    before = measuring.process_peak_mebibytes()
    step()
    peak = measuring.process_peak_mebibytes() - before  # before the check, which allocates the weights
    error = distance_from_definition(case, *parts) if parts else 0.0
    if error > 1e-4:
        raise ValueError(f"mix or its gradients differ from the definition by {error:.1e}")
    print(json.dumps({"eager_ms": measuring.eager_milliseconds(step), "peak_mib": peak, "error": error}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated mechanisms")
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: both, if there is a GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return measure_one(given.one, tuple(map(int, given.shape.split(","))))
    names = given.only.split(",") if given.only else list(MECHANISMS)
    devices = [given.device] if given.device else ["cpu", *(["gpu"] if torch.cuda.is_available() else [])]
    rows = [row for device in devices for row in (measure_on_gpu if device == "gpu" else measure_on_cpu)(names)]
    for row in rows:
        clock = "device_ms" if row["device"] == "gpu" else "eager_ms"
        same = [r for r in rows if all(r[key] == row[key] for key in ("device", "shape", "case"))]
        peer = next(r for r in same if r["mechanism"] == PEER)
        if clock in row and clock in peer:
            row["times_sdpa"] = row[clock] / peer[clock]
    columns = ["mechanism", "device", "b,h,n,d", "case", "device ms", "eager ms", "× SDPA", "peak MiB"]
    keys = ("device_ms", "eager_ms", "times_sdpa", "peak_mib")
    shown = [
        [r["mechanism"], r["device"], ",".join(map(str, r["shape"])), r["case"], *(r.get(key, "–") for key in keys)]
        for r in rows
    ]
    about = measuring.collect_provenance(SEED)
    print(f"forward + backward on {about['hardware']}, torch {about['torch']}; × SDPA by device or CPU time")
    print(measuring.format_table(columns, shown))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {row['mechanism']} at {row['shape']} {row['case']}: {row['not_run']}")
    for device in devices:
        measuring.write_results(given.out, device, about, [row for row in rows if row["device"] == device])
    return None


if __name__ == "__main__":
    main()
