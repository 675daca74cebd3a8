"""Each mechanism, forward and backward, beside the fastest softmax attention in the same run: time and peak memory.

    python benchmarks/mechanisms.py [--out results/mechanisms] [--only dagpam,coda] [--part layers|llama|host]
                                    [--case grouped] [--length 2048] [--definition] [--jobs 12] [--resume] [--tiny]

layers  one layer of each mechanism, causal, queries in the memory layout of a projection; a mechanism with a carry
        receives one. On a GPU in bf16: time on the device (CUDA graph) and in eager mode, and with --definition the
        definition too, eager and by torch.compile. On a CPU in float32, one thread. Other cases: grouped keys, padding,
        9 heads. The peer is the fastest of torch's SDPA backends and, on a GPU, FlexAttention. × floor: see floors.py.
llama   a Llama of 135M parameters with random weights, adapted to each mechanism: one training step in eager mode. The
        peer is the model's own attention.
host    the time of one eager call on the host alone, at a size where the GPU is faster. The peer is the fastest of
        torch's SDPA backends by the same clock.

A time is printed only if the output and the gradients first equal those of the definition, in float32, on the first
example and its first 2,048 tokens. --tiny runs everything with tiny sizes, to see that it works. --jobs compiles all
kernels of the layers in several processes before anything is timed; the timing process then loads them from Triton's
cache. Every row is written when it is measured, and rows of the file that a run does not measure stay. --resume
measures only what the file lacks; the peer is measured again, and each row is compared with that of its own run.
"""

import argparse
import gc
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing import get_context

import adapted_llama
import floors
import measuring
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlab.mechanisms import MECHANISMS, attention
from attnlab.mechanisms.kernels.launch import LAUNCHED

SHAPES = [(64, 8, 128, 64), (16, 8, 512, 64), (8, 16, 1024, 64), (4, 16, 2048, 64), (1, 16, 8192, 64)]
CASES = [("causal", shape, {}) for shape in SHAPES[:-1]]
CASES += [("grouped", (4, 16, 2048, 64), {"groups": 4}), ("padded", (8, 16, 1024, 64), {"padded": True})]
CASES += [("9 heads", (4, 9, 2048, 64), {"groups": 3}), ("causal", SHAPES[-1], {})]
CHECKED = 2048  # tokens
COMPILED = 256  # tokens of the layers that are compiled first: longer ones use the same programs
HOST_SHAPE, TINY_SHAPE = (2, 8, 128, 64), (2, 4, 9, 16)
CPU_CASES = [("causal", (2, 8, 128, 64), {}), ("causal", (1, 8, 512, 64), {})]
TINY_CASES = [("causal", (2, 4, 9, 16), {}), ("grouped", (2, 9, 9, 16), {"groups": 3})]
TINY_CASES += [("padded", (2, 4, 9, 16), {"padded": True})]
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PEER, WAYS = floors.PEER, ("definition", "compiled definition")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
FAILURES = (ImportError, RuntimeError, ValueError, TypeError)
SEED = 0


class Case:
    """Tensors of one shape, and steps that run forward and backward once."""

    def __init__(self, shape, device, *, groups=None, padded=False):
        b, h, n, d = shape
        torch.manual_seed(SEED)
        self.shape, self.device, self.groups = shape, device, groups or h
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.keys, self.values = (self.draw(b, n, self.groups, d) for _ in range(2))
        self.queries, self.x = self.draw(b, n, h, d), self.draw(b, n, h * d)
        self.grad = torch.randn(b, n, h, d, device=device, dtype=self.dtype).transpose(1, 2)
        lengths = torch.randint(n // 2, n + 1, (b, 1, 1, 1), device=device)
        self.mask = torch.arange(n, device=device) < lengths if padded else None

    def draw(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.dtype).requires_grad_()

    def make_peer(self, backend):
        """Return a step of torch's attention by one backend, or by FlexAttention if that is None."""
        leaves, n = [self.queries, self.keys, self.values], self.shape[2]
        triangle = torch.ones(n, n, dtype=torch.bool, device=self.device).tril()
        mask = None if self.mask is None else self.mask & triangle
        if backend is None:
            attend = self.make_flex()
        else:
            options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": self.groups != self.shape[1]}
            attend = partial(F.scaled_dot_product_attention, **options)

        def step():
            with nullcontext() if backend is None else sdpa_kernel(backend):
                y = attend(*(x.transpose(1, 2) for x in leaves))
            return torch.autograd.grad(y, leaves, self.grad)

        return step

    def make_flex(self):
        """Return FlexAttention with the mask of this case, compiled."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # imports the compiler

        b, _, n, _ = self.shape
        keep = torch.ones(b, n, dtype=torch.bool, device=self.device) if self.mask is None else self.mask[:, 0, 0]

        def see(example, _, i, j):
            return (j <= i) & keep[example, j]

        mask = create_block_mask(see, b, None, n, n, device=self.device)
        return partial(torch.compile(flex_attention), block_mask=mask, enable_gqa=self.groups != self.shape[1])

    def make_layer(self, name, impl="auto"):
        """Return a mechanism in training mode, and its arguments as leaves: q, k, v, a carry or None, and x or None."""
        b, h, n, d = self.shape
        torch.manual_seed(SEED)
        mechanism = attention(name, heads=h, head_dim=d, layer=1, impl=impl).to(self.device, self.dtype)
        queries = self.queries if mechanism.query_heads == h else self.draw(b, n, mechanism.query_heads, d)
        carry = None
        if mechanism.carries:
            pairs = mechanism.carry_of == "pairs"
            carry = self.draw(b, mechanism.carry_heads, n, n) if pairs else self.draw(b, self.groups, n, d)
        return mechanism, [queries, self.keys, self.values, carry, self.x]

    def run(self, mechanism, queries, keys, values, carry, x, mask):
        q, k, v = (leaf.transpose(1, 2) for leaf in (queries, keys, values))
        sides = (mechanism.query_side(x), mechanism.key_side(x))
        return mechanism(q, k, v, mask, carry, causal=True, sides=sides)[0]

    def make_step(self, mechanism, leaves, called=None):
        """Return a step of a mechanism; called: its compiled form."""
        parameters = [p for p in mechanism.parameters() if p.requires_grad]
        wanted = [x for x in leaves if x is not None] + parameters
        run = self.run if called is None else called

        def step():
            return torch.autograd.grad(run(mechanism, *leaves, self.mask), wanted, self.grad, allow_unused=True)

        return step

    def cut(self, x, n):
        """Cut every axis of tokens to the first n."""
        for axis, size in enumerate(x.shape):
            x = x.narrow(axis, 0, n) if size == self.shape[2] > n else x
        return x

    def measure_error(self, mechanism, leaves):
        """Return the largest relative distance of the layer and its gradients from the definition in float32.

        Only the first example and its first CHECKED tokens are compared: the definition stores every weight.
        """
        mechanism.eval()
        results, impl, n = [], mechanism.impl, min(self.shape[2], CHECKED)
        for way, dtype in ((impl, self.dtype), ("reference", torch.float32)):
            mechanism.impl = way
            some = [None if x is None else self.cut(x.detach()[:1], n).to(dtype).requires_grad_() for x in leaves]
            mask = self.mask if self.mask is None else self.mask[:1, ..., :n]
            y = self.run(mechanism.to(dtype), *some, mask)
            given = [x for x in some if x is not None]
            slopes = torch.autograd.grad(y, given, self.grad[:1, :, :n].to(dtype), allow_unused=True)
            results.append([y.detach(), *(x for x in slopes if x is not None)])
        mechanism.to(self.dtype).train().impl = impl
        error = max(float((x.float() - y).norm() / y.norm().clamp_min(1e-6)) for x, y in zip(*results, strict=True))
        if not error <= TOLERANCE[self.dtype]:
            raise ValueError(f"the layer or its gradients differ from the definition by {error:.1e}")
        return error


def compile_layer(name, cases, definition):
    """Run one small step of a mechanism in each case, so that Triton and torch.compile store their programs."""
    torch.cuda.set_stream(torch.cuda.Stream())
    for shape, options in cases:
        case = Case(shape, "cuda", **options)
        for way in ("auto", "compiled definition") if definition else ("auto",):
            with suppress(*FAILURES):  # the timing process meets the same error and reports it
                mechanism, leaves = case.make_layer(name, "auto" if way == "auto" else "reference")
                case.make_step(mechanism, leaves, None if way == "auto" else torch.compile(case.run))()
    return name


def compile_layers(names, cases, definition, jobs, sheet):
    """Compile the layers that the sheet lacks, in `jobs` processes. Shapes of one kind share their programs."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = []
        for name in names:
            lacking = [case for case in cases if any(map(sheet.lacks, list_rows([name], case, definition)))]
            small = {label: ((2, h, COMPILED, d), options) for label, (_, h, _, d), options in lacking}
            kinds = [*small.values(), ((2, *SHAPES[0][1:]), {})]
            running += [pool.submit(compile_layer, name, kinds, definition)] if lacking else []
        for job in running:
            print(f"compiled: {job.result()}", file=sys.stderr, flush=True)


def list_rows(names, case, definition):
    """Return the rows of one case of the layers, before they are measured."""
    label, shape, options = case
    about = {"part": "layers", "case": label, "shape": [*shape[:2], options.get("groups", shape[1]), *shape[2:]]}
    ways = ("auto", *WAYS) if definition else ("auto",)
    return [about | {"mechanism": name, "by": way} for name in names for way in ways]


def measure_step(row, make_step, *, graph=True, host=False):
    """Add the times and the peak memory of a step, or its host time, to a row, or the reason why there are none."""
    LAUNCHED.clear()
    try:
        step, more = make_step()
        row |= more
        if host:
            row["host_ms"] = measuring.host_milliseconds(step)
        elif torch.cuda.is_available():
            row |= {"device_ms": measuring.device_milliseconds(step)} if graph else {}
            row |= {"eager_ms": measuring.eager_milliseconds(step)}
            row["peak_mib"] = measuring.device_peak_mebibytes(step)
        else:
            row |= {"peak_mib": measuring.growth_mebibytes(step), "eager_ms": measuring.eager_milliseconds(step)}
        row["kernels"] = sorted(LAUNCHED)
    except FAILURES as reason:
        row["not_run"] = f"{type(reason).__name__}: {(str(reason).splitlines() or ['no reason given'])[0]}"
    print(row, file=sys.stderr, flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def measure_layers(names, cases, device, definition, sheet):
    """Yield the rows that the sheet lacks, case by case: the fastest peer first, then every mechanism."""
    for each in cases:
        if not (rows := [row for row in list_rows(names, each, definition) if sheet.lacks(row)]):
            continue
        _, shape, options = each
        case, peers = Case(shape, device, **options), []
        backends = {b.name.lower(): b for b in BACKENDS[:3] if device == "cuda"} or {"math": BACKENDS[3]}
        backends |= {"flex": None} if device == "cuda" else {}
        for way, backend in backends.items():
            make = partial(lambda case, backend: (case.make_peer(backend), {}), case, backend)
            peers.append(measure_step(rows[0] | {"mechanism": PEER, "by": way}, make))
        able = [row for row in peers if "eager_ms" in row]
        yield min(able, key=read_clock) if able else peers[0]
        for row in rows:
            yield measure_step(row, partial(prepare, case, row["mechanism"], row["by"]))


def measure_host(names, shape, device, sheet):
    """Yield the rows that the sheet lacks: the fastest of torch's backends first, then every mechanism."""
    about = {"part": "host", "case": "causal", "shape": [*shape[:2], *shape[1:]]}
    rows = [about | {"mechanism": name, "by": "auto"} for name in names]
    if not (rows := [row for row in rows if sheet.lacks(row)]):
        return
    case, peers = Case(shape, device), []
    for backend in BACKENDS[:3] if device == "cuda" else BACKENDS[3:]:
        make = partial(lambda backend: (case.make_peer(backend), {}), backend)
        peers.append(measure_step(about | {"mechanism": PEER, "by": backend.name.lower()}, make, host=True))
    yield min(peers, key=lambda row: row.get("host_ms", float("inf")))
    for row in rows:
        yield measure_step(row, partial(prepare, case, row["mechanism"], "auto"), host=True)


def prepare(case, name, way):
    """Return a step of a mechanism by one way, and its distance from the definition."""
    mechanism, leaves = case.make_layer(name, "auto" if way == "auto" else "reference")
    more = {"carry_dtype": name_dtype(case.dtype)} if mechanism.carries else {}
    more |= {"error": case.measure_error(mechanism, leaves)} if way == "auto" else {}
    if way == "compiled definition":
        torch.compiler.reset()
        return case.make_step(mechanism, leaves, torch.compile(case.run)), more
    return case.make_step(mechanism, leaves), more


def measure_llamas(names, device, tiny, sheet):
    """Yield the rows that the sheet lacks: that of the model's own attention, then one for each mechanism."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options = {"device": device, "dtype": dtype, "tiny": tiny, "seed": SEED}
    about = {"part": "llama", "case": "adapted", "by": "auto"}
    about |= {"shape": list(adapted_llama.TINY_TOKENS if tiny else adapted_llama.TOKENS)}
    missing = [name for name in names if sheet.lacks(about | {"mechanism": name})]
    for name in [None, *missing] if missing else []:
        row = about | {"mechanism": name or PEER}
        row |= {"carry_dtype": name_dtype(dtype)} if name and MECHANISMS[name].carries else {}
        yield measure_step(row, lambda name=name: (adapted_llama.make_step(name, **options), {}), graph=False)


def name_dtype(dtype):
    """Return the name of a type, such as "bfloat16". What a layer passes to the next has the type of its queries."""
    return str(dtype).removeprefix("torch.")


def read_clock(row):
    return next((row[key] for key in ("host_ms", "device_ms", "eager_ms") if key in row), None)


def identify(row):
    """Return what a row is about. Of the peers only the fastest is kept."""
    return [row["part"], row["case"], row["shape"], row["mechanism"], row["by"] if row["mechanism"] != PEER else ""]


def compare_with_peer(row, peer, speeds):
    """Add to a row its time over that of the peer of its case, and on a GPU over its floor."""
    if read_clock(row) and read_clock(peer):
        row["times_peer"] = read_clock(row) / read_clock(peer)
    floors.add_floors([row], speeds)


def show(rows, about):
    columns = ["mechanism", "by", "case", "b,h,g,n,d", "device ms", "eager ms", "host ms", "× peer", "× floor"]
    columns += ["peak MiB", "carry", "kernels"]
    keys = ("device_ms", "eager_ms", "host_ms", "times_peer", "times_floor", "peak_mib", "carry_dtype")
    shown = [
        [r["mechanism"], r["by"], r["case"], ",".join(map(str, r["shape"])), *(r.get(key, "–") for key in keys),
         "+".join(r.get("kernels", [])) or "–"] for r in rows
    ]  # fmt: skip
    clocks = "× peer by host time, else device time, else eager time"
    print(f"forward + backward on {about['hardware']}, torch {about['torch']}; {clocks}")
    print(measuring.format_table(columns, shown))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {row['mechanism']} {row['by']}, {row['case']} {row['shape']}: {row['not_run']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated mechanisms")
    parser.add_argument("--length", type=int, help="only cases of this length n")
    kinds = ["causal", "grouped", "padded", "9 heads"]
    parser.add_argument("--case", action="append", choices=kinds, help="only this case; may be repeated")
    parser.add_argument("--part", choices=["layers", "llama", "host"], help="default: all")
    parser.add_argument("--definition", action="store_true", help="also time the definition, eager and compiled")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile the layers first; default: none")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--resume", action="store_true", help="measure only the rows that the file in --out lacks")
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(MECHANISMS)
    if unknown := [name for name in names if name not in MECHANISMS]:
        parser.error(f"no mechanism is called {unknown[0]!r}; there are {', '.join(MECHANISMS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    else:
        torch.set_num_threads(1)
    cases = TINY_CASES if given.tiny else CASES if device == "cuda" else CPU_CASES
    cases = [case for case in cases if given.length in (None, case[1][2]) and case[0] in (given.case or kinds)]
    parts = {
        "layers": partial(measure_layers, names, cases, device, given.definition),
        "llama": partial(measure_llamas, names, device, given.tiny),
        "host": partial(measure_host, names, TINY_SHAPE if given.tiny else HOST_SHAPE, device),
    }
    speeds = floors.measure_speeds() if device == "cuda" else {}
    about = measuring.collect_provenance(SEED) | {"speeds": speeds}
    for part in [given.part] if given.part else parts:
        sheet, peer = measuring.Sheet(given.out, f"{device}-{part}", about, identify, given.resume), None
        if given.jobs and device == "cuda" and part == "layers":
            compile_layers(names, cases, given.definition, given.jobs, sheet)
        for row in parts[part](sheet=sheet):
            peer = row if row["mechanism"] == PEER else peer
            compare_with_peer(row, peer, speeds)
            sheet.add(row)
        show(sheet.rows, about)


if __name__ == "__main__":
    main()
