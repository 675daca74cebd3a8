"""The least time of a layer, forward and backward: what its work takes at the speeds that the GPU reaches in this run.

    floor = max(products / product rate,  bytes / bandwidth,  instructions / instruction rate)

Counted for each visible pair of a head: products are multiply-adds of matrix products, in tensor cores; bytes are those
of a carry; instructions are float32 operations outside of products. Attention that stores no weights has seven products
of size d: q·k and p·v, and in the backward pass q·k again, dP, dV, dQ and dK. Two softmax maps of a head share dP and
dV. Weights that heads or neighbours share take more. Exponentials and sums are not counted, so kernels need more than
the floor. Some mechanisms have none: NAP has a linear form too, the zeros of sparsemax and 1.5-entmax depend on the
data, and uniform attention has no products.
"""

import inspect
import math
from dataclasses import dataclass

import measuring
import torch

from attnlab.mechanisms import MECHANISMS

PASSES = 4  # of a net over the heads: forward, again in backward, and its two gradients
INSTRUCTIONS = 128  # float32 instructions of a multiprocessor in one cycle
SIDE = 8192  # of the matrices whose product is timed


PEER = "softmax by torch"
AS_SOFTMAX = (PEER, "softmax", "dot", "ssmax", "cosine", "alibi", "fox", "sink", "softmax1", "softpick", "sigmoid",
              "cog", "stick-breaking", "coda-cs", "shaped", "gated", "value-gated", "resformer", "xsa",
              "knocking-heads")  # fmt: skip


@dataclass(frozen=True)
class PairWork:
    """The work of one visible pair of a head, and how many keys a query sees at most."""

    products: float = 7.0  # of size d
    head_products: float = 0.0  # multiply-adds over the heads
    pair_numbers: float = 0.0  # of two bytes, which must be read or written
    instructions: float = 0.0  # in float32
    keys: float = math.inf


def count_work(name: str, h: int, d: int) -> PairWork | None:
    """Return the work of a pair, with the mechanism's default options, or None if it was not counted.

    The linear form of NON keeps Σ_j k_j v_jᵀ, (d,d), and its gradient: for each query as much as for d keys.
    """
    net = 24.0 * h  # multiply-adds of CODA's σ for each head: h → 4h → 4h → h
    carry = 5.0  # read C and write Z; read Z, read the gradient of Z and write that of C
    window = inspect.signature(MECHANISMS["sliding-window"]).parameters["size"].default
    own = {
        "realformer": PairWork(pair_numbers=carry),
        "coda": PairWork(head_products=PASSES * net, pair_numbers=carry),
        "dagpam": PairWork(products=12.0),
        "realformer+dagpam": PairWork(products=12.0, pair_numbers=2 * carry),
        "coda+dagpam": PairWork(products=12.0, head_products=2 * PASSES * 2 * net, pair_numbers=2 * carry),
        "differential": PairWork(products=8.0),  # two maps of half the size, whose p·v differ
        "differential-v2": PairWork(products=12.0),
        "de-attention": PairWork(products=3.0, instructions=8.0 * d),
        "talking-heads": PairWork(head_products=2.0 * PASSES * h),
        "dcmha": PairWork(head_products=2.0 * PASSES * (h + 10)),
        "multi-token": PairWork(head_products=PASSES * h, instructions=PASSES * 66.0),
        "selective": PairWork(products=7.0 + 2.0 / h),  # the first head's q·k once more in each pass
        "sliding-window": PairWork(keys=window),
        "non": PairWork(keys=d),
    }
    return own.get(name, PairWork() if name in AS_SOFTMAX else None)


def count_pairs(n: int, keys: float) -> float:
    """Return the number of visible pairs of a causal head with n queries that see at most `keys` keys."""
    limit = min(n, keys)
    return limit * (limit + 1) / 2 + (n - limit) * limit


def find_floor_ms(name: str, shape: tuple[int, ...], speeds: dict[str, float]) -> float | None:
    """Return the floor of a causal layer (b,h,n,d) in milliseconds, or None; speeds: of `measure_speeds`."""
    b, h, n, d = shape
    work = count_work(name, h, d)
    if work is None:
        return None
    pairs = b * h * count_pairs(n, work.keys)
    tensors = 2.0 * 8 * b * h * n * d  # q, k, v, the context and their gradients, in two bytes
    times = (
        pairs * (work.products * d + work.head_products) / speeds["products"],
        (pairs * 2.0 * work.pair_numbers + tensors) / speeds["bytes"],
        pairs * work.instructions / speeds["instructions"],
    )
    return 1e3 * max(times)


def add_floors(rows: list[dict], speeds: dict[str, float]) -> None:
    """Add to the rows of causal layers on a GPU their floor, and their time over it, if their work was counted."""
    for row in rows:
        if "device_ms" in row and row["case"] == "causal":
            b, h, _, n, d = row["shape"]
            if floor := find_floor_ms(row["mechanism"], (b, h, n, d), speeds):
                row |= {"floor_ms": floor, "times_floor": row["device_ms"] / floor}


def measure_speeds() -> dict[str, float]:
    """Return what the present GPU reaches in a second: by a large bf16 product, a large copy, and its clock."""
    a, b = torch.randn(2, SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    x = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    product = measuring.device_milliseconds(lambda: a @ b)
    copy = measuring.device_milliseconds(lambda: y.copy_(x))
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    instructions = INSTRUCTIONS * device.multi_processor_count * 1e3 * device.clock_rate
    return {"products": 1e3 * SIDE**3 / product, "bytes": 1e3 * 2 * x.nbytes / copy, "instructions": instructions}


CARRIERS = ("realformer", "coda", "realformer+dagpam", "coda+dagpam")
MIXERS = ("talking-heads", "dcmha", "multi-token", "selective", "entmax15", "sparsemax")
GOALS = dict.fromkeys(CARRIERS, 6.0) | dict.fromkeys(MIXERS, 8.0) | {"de-attention": 25.0}  # × softmax; others: 3
LLAMA_GOALS = dict.fromkeys(CARRIERS, 3.0)  # × the step with the model's own attention; others: 2
HOST_GOAL = 3.0  # × the host time of torch's attention


DAGPAM_GOALS = {128: 2.4, 512: 2.4, 1024: 2.2, 2048: 2.2}  # by length
CODA_GOAL = 4.0  # × its floor at 1,024 tokens


def find_goal(row: dict) -> float:
    """Return how many times its peer a mechanism may take, by the part of the benchmark."""
    if row["part"] == "host":
        return HOST_GOAL
    if row["part"] == "layers" and row["mechanism"] == "dagpam":
        return DAGPAM_GOALS.get(row["shape"][3], 3.0)
    goals, usual = (GOALS, 3.0) if row["part"] == "layers" else (LLAMA_GOALS, 2.0)
    return goals.get(row["mechanism"], usual)


def list_misses(rows: list[dict]) -> list[str]:
    """Return a text for each missed goal: of causal layers at n = 2,048, daGPAM at any length, all other parts."""
    texts = []
    for row in rows:
        n, name = row["shape"][3] if row["part"] == "layers" else None, row["mechanism"]
        if row["by"] != "auto" or (n and row["case"] != "causal"):
            continue
        where = f" at n = {n:,}" if n not in (None, 2048) else ""
        counted = not where or (name == "dagpam" and n in DAGPAM_GOALS)
        if counted and row.get("times_peer", 0.0) > find_goal(row):
            floor = (
                f"; {row['times_floor']:.1f} times its floor of {row['floor_ms']:.2f} ms" if "floor_ms" in row else ""
            )
            texts.append(f"{name}{where} {row['times_peer']:.3g} (goal {find_goal(row):.3g}{floor})")
        if name == "coda" and n == 1024 and row.get("times_floor", 0.0) > CODA_GOAL:
            texts.append(f"coda{where} {row['times_floor']:.1f} times its floor (goal {CODA_GOAL:.0f})")
    return texts
