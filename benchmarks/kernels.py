"""The fused kernels, forward and backward of one layer, beside the definition in eager mode and compiled.

    python benchmarks/kernels.py [--out results/kernels] [--only coda,realformer,coda-cs,dagpam]

Needs a GPU. One layer, with a carry if its mechanism takes one; bf16, causal, queries in the memory layout of a
projection; gradients of the context and of the carried logits, with respect to q, k, v, the carry and all parameters.
Beside the times: torch's fused softmax attention with its fastest backend, and for CODA two floors. Traffic is what any
implementation must read and write of (b,h,n,n), the visible half of it. Arithmetic is σ's products: forward,
recomputed, and both gradients. A time of a fused layer is printed only if its output, carry and gradients are at most
twice as far from float32 as the definition in bf16. Errors are relative. The error of a bias is relative to the weight
and bias of its linear layer, because the terms of σ's last bias cancel almost completely under softmax.
"""

import argparse
import sys
from contextlib import nullcontext

import floors
import measuring
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlab.mechanisms import MECHANISMS, attention

SHAPES = [(64, 8, 128, 64), (16, 8, 512, 64), (8, 16, 1024, 64), (4, 16, 2048, 64)]
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
WAYS = ("eager", "torch.compile", "fused")
SLACK = 2e-2  # added to twice eager's error, which is nearly 0 where terms cancel
SEED = 0


class Case:
    """The tensors of one layer in bf16, and steps that run it forward and backward once."""

    def __init__(self, shape):
        b, h, n, d = self.shape = shape
        torch.manual_seed(SEED)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.leaves = [torch.randn(b, n, h, d, **options).requires_grad_() for _ in range(3)]
        self.carry = torch.randn(b, h, n, n, **options).requires_grad_()
        self.grad = torch.randn(b, n, h, d, **options).transpose(1, 2)
        self.grad_z = torch.randn(b, h, n, n, **options).tril() / n

    def softmax(self, backend=None):
        def step():
            q, k, v = (x.transpose(1, 2) for x in self.leaves)
            with nullcontext() if backend is None else sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(y, self.leaves, self.grad)

        return step

    def layer(self, name, way):
        """Return a step of a mechanism in training mode, with its noise, by one of the ways; and the mechanism."""
        torch.manual_seed(SEED)
        impl = "fused" if way == "fused" else "reference"
        mechanism = attention(name, heads=self.shape[1], head_dim=self.shape[3], layer=1, impl=impl)
        mechanism = mechanism.to(device="cuda", dtype=torch.bfloat16).train()
        called = torch.compile(mechanism) if way == "torch.compile" else mechanism
        carry, given = (self.carry, 2) if mechanism.carries else (None, 1)
        wanted = [*self.leaves, *([self.carry] if mechanism.carries else []), *mechanism.parameters()]

        def step():
            q, k, v = (x.transpose(1, 2) for x in self.leaves)
            made = called(q, k, v, None, carry, causal=True)
            return torch.autograd.grad(made[:given], wanted, [self.grad, self.grad_z][:given])

        return step, mechanism

    def results(self, mechanism, dtype):
        """Return the context, the visible logits and every gradient of the first example, by name, with fixed noise."""
        mechanism = mechanism.to(dtype).eval()
        mechanism.sample_seed = SEED  # without noise, coda-cs is plain softmax attention and its kernel does not run
        given = [x.detach()[:1].to(dtype) for x in (*(x.transpose(1, 2) for x in self.leaves), self.carry)]
        given = [x.requires_grad_() for x in given]
        grads = [self.grad[:1].to(dtype), self.grad_z[:1].to(dtype)]
        if mechanism.carries:
            made = mechanism(*given[:3], None, given[3], causal=True)
        else:
            given, grads = given[:3], grads[:1]
            made = mechanism(*given, causal=True)[:1]
        names = [f"gradient {k}" for k in range(len(given))] + [name for name, _ in mechanism.named_parameters()]
        slopes = torch.autograd.grad(made, [*given, *mechanism.parameters()], grads)
        mechanism.to(torch.bfloat16).train().sample_seed = None
        found = {f"result {k}": x.detach().tril() if k else x.detach() for k, x in enumerate(made)}
        return found | dict(zip(names, slopes, strict=True))


def measure_error(case, name):
    """Return the largest relative distance of the fused layer from the definition in float32; raise if too large."""
    (_, fused), (_, eager) = (case.layer(name, way) for way in ("fused", "eager"))
    exact = case.results(eager, torch.float32)
    sizes: dict[str, float] = {}
    for place, x in exact.items():
        sizes[name_part(place)] = (sizes.get(name_part(place), 0.0) ** 2 + float(x.norm()) ** 2) ** 0.5
    errors = []
    for layer in (fused, eager):
        made = case.results(layer, torch.bfloat16)
        errors.append({place: float((x - exact[place]).norm()) / sizes[name_part(place)] for place, x in made.items()})
    for place, mine in errors[0].items():
        if not mine <= 2 * errors[1][place] + SLACK:
            raise ValueError(f"{name}, {place}: {mine:.1e} from float32, the definition in bf16 {errors[1][place]:.1e}")
    return max(errors[0].values())


def name_part(place):
    """Return the name of the linear layer that a weight or a bias belongs to."""
    return place.removesuffix(".weight").removesuffix(".bias")


def compute_floors(shape, bandwidth, rate):
    """Return the milliseconds of a CODA layer's traffic and of its arithmetic, at the measured speeds."""
    b, h, n, _ = shape
    pairs = b * n * (n + 1) / 2
    moved = 2 * h * pairs * (2 + 4)  # forward: read carry, write logits; backward: read both and a gradient, write one
    products = 2 * 4 * pairs * (2 * h * 4 * h + 16 * h * h)  # forward, recomputed, and two gradients of each product
    return {"traffic_floor_ms": 1e3 * moved / bandwidth, "arithmetic_floor_ms": 1e3 * products / rate}


def measure_step(row, step):
    try:
        row |= {"device_ms": measuring.device_milliseconds(step), "eager_ms": measuring.eager_milliseconds(step)}
        row["peak_mib"] = measuring.device_peak_mebibytes(step)
    except (ImportError, RuntimeError, ValueError) as reason:
        row["not_run"] = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"
    print(row, file=sys.stderr, flush=True)
    return row


def measure_shape(shape, names, limits):
    """Return the peer's row, then a row for each mechanism and way, with the ratios of their times to the fused one."""
    case, about = Case(shape), {"shape": list(shape)}
    peers = [measure_step(about | {"mechanism": "softmax", "way": b.name.lower()}, case.softmax(b)) for b in BACKENDS]
    able = [row for row in peers if "device_ms" in row]
    rows = [min(able, key=lambda row: row["device_ms"])] if able else peers
    for name in names:
        try:
            error = measure_error(case, name)
        except ValueError as reason:  # what the kernels do not cover, or a result that differs
            rows.append(about | {"mechanism": name, "way": "fused", "not_run": str(reason)})
            continue
        made = {}
        for way in WAYS:
            torch.cuda.empty_cache()
            torch.compiler.reset()  # else torch stops compiling at the eighth program of a mechanism
            step, _ = case.layer(name, way)
            made[way] = measure_step(about | {"mechanism": name, "way": way}, step)
            del step
        made["fused"] |= {"error": error} | (compute_floors(shape, *limits) if name == "coda" else {})
        clocks = {way: row["device_ms"] for way, row in made.items() if "device_ms" in row}
        if "fused" in clocks:
            made["fused"] |= {f"times_{way}": clocks[way] / clocks["fused"] for way in clocks if way != "fused"}
        carry = case.carry.nbytes / 2**20
        if "device_ms" in made["fused"] and "device_ms" in rows[0]:
            made["fused"]["times_softmax"] = made["fused"]["device_ms"] / rows[0]["device_ms"]
        if name in ("coda", "realformer") and "peak_mib" in made["fused"]:
            made["fused"]["carry_dtype"] = str(case.carry.dtype).removeprefix("torch.")
            # the peak does not count the carry and the gradient that were allocated before
            made["fused"]["peak_of_carries"] = (made["fused"]["peak_mib"] + 2 * carry) / (4 * carry)
        rows += made.values()
    return rows


def takes_one_case(kind):
    """Whether the tensors of a case suffice: as many queries and carried logits as heads, and no input of the layer."""
    built = kind(2, 16)
    plain = not built.needs_layer and built.query_heads == built.heads and built.carry_of == "pairs"
    return plain and (not built.carries or built.carry_heads == built.heads)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated mechanisms")
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--profile", action="store_true", help="only run CODA's fused layer three times at n = 1024")
    given = parser.parse_args()
    able = [name for name, kind in MECHANISMS.items() if kind.kernels and takes_one_case(kind)]
    names = given.only.split(",") if given.only else ["coda", "realformer", "coda-cs", "dagpam"]
    if unable := [name for name in names if name not in able]:
        parser.error(f"{unable[0]} is not measured here; choose from {', '.join(able)}")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernels.py needs a GPU")
    if given.profile:
        step, _ = Case(SHAPES[2]).layer("coda", "fused")
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        return
    torch.cuda.set_stream(torch.cuda.Stream())
    speeds = floors.measure_speeds()
    limits = speeds["bytes"], 2 * speeds["products"]  # an operation is a multiplication or an addition
    rows = [row for shape in SHAPES for row in measure_shape(shape, names, limits)]
    about = measuring.collect_provenance(SEED) | {"bytes_per_s": limits[0], "operations_per_s": limits[1]}
    print(f"forward + backward of one layer on {about['hardware']}, torch {about['torch']}, bf16, causal")
    columns = ["mechanism", "by", "b,h,n,d", "device ms", "eager ms", "peak MiB", "× eager", "× compiled", "÷ softmax"]
    keys = ("device_ms", "eager_ms", "peak_mib", "times_eager", "times_torch.compile", "times_softmax")
    floor_keys = ("traffic_floor_ms", "arithmetic_floor_ms", "peak_of_carries")
    columns += ["traffic floor", "arithmetic floor", "peak ÷ carries"]
    shown = [
        [r["mechanism"], r["way"], ",".join(map(str, r["shape"])), *(r.get(key, "–") for key in (*keys, *floor_keys))]
        for r in rows
    ]
    print(measuring.format_table(columns, shown))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {row['mechanism']} {row['way']} at {row['shape']}: {row['not_run']}")
    measuring.write_results(given.out, "gpu", about, rows)


if __name__ == "__main__":
    main()
