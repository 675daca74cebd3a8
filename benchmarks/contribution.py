"""Norms of contributions against the materialised way, in the same run: time and peak memory.

    python benchmarks/contribution.py [--out results/contribution] [--device cpu|gpu] [--tokens 512]

At the shape of BERT-base (12 layers, 12 heads, width 768, one text) in float32: the head map ‖αf‖ with ‖f‖, and all
three maps, with ‖Σ_h αf‖; each layer's maps are let go before the next. The peer makes every αf(x), (h,i,j,e), by
einsum and measures it: a transcription of the equations, as the published code has them. No time is printed unless both
agree.

On a CPU, one thread: CPU time, and the growth of the peak resident size in a process of its own. There too the whole of
it: what a record and its head norms add to an eager forward pass of a BERT, and 8,192 tokens through one lazily
recorded layer of Llama's shape (32 heads, 8 key heads, width 4096). On a GPU: time on the device, and as eager Python
runs it.
"""

import argparse
import json
import os
import subprocess
import sys

import measuring
import torch

from attnlab.analysis.contribution import norms
from attnlab.recording import Layer

LAYERS, HEADS, WIDTH, SEED = 12, 12, 768, 0
FORWARDS = ("forward", "forward, recorded", "forward, recorded, head norms")
WAYS = ("materialised head", "materialised all", "gram head", "gram all")


def made_layer(tokens, device="cpu", dtype=torch.float32):
    torch.manual_seed(SEED)
    size = WIDTH // HEADS
    weights = torch.randn(1, HEADS, tokens, tokens, device=device, dtype=dtype).softmax(-1)
    values = torch.randn(1, HEADS, tokens, size, device=device, dtype=dtype)
    projection = torch.randn(HEADS, size, WIDTH, device=device, dtype=dtype) / WIDTH**0.5
    context = weights @ values
    states = torch.zeros(1, tokens, WIDTH, device=device, dtype=dtype)
    mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device=device)
    return Layer("encoder-self", 0, "layer", weights, values, context, context, projection, None, states, states, mask)


def materialised(layer, *, summed):
    """‖f‖ (b,h,j), ‖αf‖ (b,h,i,j) and, if summed, ‖Σ_h αf‖ (b,i,j), out of all vectors (b,h,i,j,e)."""
    f = torch.einsum("bhjd,hde->bhje", layer.values, layer.output_weight)
    vectors = torch.einsum("bhij,bhje->bhije", layer.weights, f)
    found = [f.norm(dim=-1), vectors.norm(dim=-1)]
    return [*found, vectors.sum(1).norm(dim=-1)] if summed else found


def gram(layer, *, summed):
    found = norms(layer)
    return [found.vector, found.head, found.layer] if summed else [found.vector, found.head]


def step_of(way, layer):
    make = materialised if way.startswith("materialised") else gram
    return lambda: make(layer, summed=way.endswith("all"))


def distance(layer):
    """The largest relative distance of the two ways, over the three maps."""
    pairs = zip(gram(layer, summed=True), materialised(layer, summed=True), strict=True)
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def checked(tokens, device):
    error = distance(made_layer(min(tokens, 128), device))
    if error > 1e-5:
        raise SystemExit(f"the two ways differ by {error:.1e}: no times")
    return error


def on_cpu(tokens):
    error = checked(tokens, "cpu")
    rows = []
    for way in (*WAYS, *FORWARDS, "lazy llama"):
        words = [sys.executable, __file__, "--one", way, "--tokens", str(tokens)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
            rows.append({"device": "cpu", "way": way, "not_run": reason})
        else:
            rows.append({"device": "cpu", "way": way, "tokens": tokens, "error": error} | json.loads(done.stdout))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def one_on_cpu(way, tokens):
    torch.set_num_threads(1)
    if way == "lazy llama":
        return lazy_llama()
    if way.startswith("forward"):
        return forward(tokens, FORWARDS.index(way))
    layer = made_layer(tokens)
    step = step_of(way, layer)
    before = measuring.process_peak_mebibytes()
    step()
    peak = measuring.process_peak_mebibytes() - before
    return {"ms": LAYERS * measuring.eager_milliseconds(step), "peak_mib": peak}


def forward(tokens, way):
    """An eager pass of BERT-base with random weights; that pass recorded; that with the head norms of each layer."""
    import transformers

    import attnlab

    torch.manual_seed(SEED)
    model = transformers.BertModel(transformers.BertConfig(attn_implementation="eager")).eval()
    ids = torch.randint(1000, 30000, (1, tokens))
    attnlab.record(model, {"input_ids": ids[:, :16]})  # proved on load: once for each model, and not part of a pass
    before = measuring.process_peak_mebibytes()

    def plain():
        with torch.no_grad():
            return model(ids, output_attentions=True)

    def recorded():
        return attnlab.record(model, {"input_ids": ids})

    def measured():
        return [norms(layer).head for layer in recorded().layers]

    step = (plain, recorded, measured)[way]
    step()
    peak = measuring.process_peak_mebibytes() - before
    return {"ms": measuring.eager_milliseconds(step), "peak_mib": peak}


def lazy_llama(tokens=8192):
    """The head and layer norms of one layer, range by range; what is kept is their sum over queries."""
    import time

    import transformers

    import attnlab

    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1, intermediate_size=11008,
        vocab_size=1000, max_position_embeddings=tokens,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    ids = torch.randint(1000, (1, tokens))
    attnlab.record(model, {"input_ids": ids[:, :16]}, lazy=True)
    start = time.process_time()
    layer = attnlab.record(model, {"input_ids": ids}, lazy=True).layers[0]
    recorded = time.process_time() - start
    total = torch.zeros(tokens)
    for _, part in norms(layer).chunks():
        total += part.head.sum((0, 1, 2)) + part.layer.sum((0, 1))
    seconds = time.process_time() - start - recorded
    peak = measuring.process_peak_mebibytes()  # of the whole process, the model and all
    return {"tokens": tokens, "ms": 1e3 * seconds, "record_ms": 1e3 * recorded, "peak_mib": peak}


def on_gpu(tokens):
    error = checked(tokens, "cuda")
    torch.cuda.set_stream(torch.cuda.Stream())
    layer, rows = made_layer(tokens, "cuda"), []
    for way in WAYS:
        torch.cuda.empty_cache()
        step = step_of(way, layer)
        row = {"device": "gpu", "way": way, "tokens": tokens, "error": error}
        row["peak_mib"] = measuring.device_peak_mebibytes(step)
        row["ms"] = LAYERS * measuring.device_milliseconds(step)
        row["eager_ms"] = LAYERS * measuring.eager_milliseconds(step)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def compared(rows):
    """Each way against the materialised one of the same maps; a recorded forward against the plain one."""
    by_way = {row["way"]: row for row in rows if "ms" in row}
    for way, row in by_way.items():
        peer = by_way.get("forward" if way in FORWARDS else way.replace("gram", "materialised"))
        if peer and peer is not row:
            row["times_faster"] = peer["ms"] / row["ms"]
            if row["peak_mib"] >= 1:  # less is not seen in the resident size
                row["times_less_memory"] = peer["peak_mib"] / row["peak_mib"]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for the numbers as JSON")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", choices=["cpu", "gpu"], help="one alone; by default both, where there is a GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one_on_cpu(given.one, given.tokens)))
        return
    devices = [given.device] if given.device else ["cpu", *(["gpu"] if torch.cuda.is_available() else [])]
    torch.set_num_threads(1)
    rows = [row for device in devices for row in compared((on_gpu if device == "gpu" else on_cpu)(given.tokens))]
    about = measuring.surroundings(SEED) | {"load": os.getloadavg()[0]}
    keys = ("ms", "eager_ms", "peak_mib", "times_faster", "times_less_memory")
    shown = [[row["way"], row["device"], row.get("tokens", "–"), *(row.get(key, "–") for key in keys)] for row in rows]
    print(
        f"{LAYERS} layers of BERT-base's shape on {about['hardware']}, torch {about['torch']}, load {about['load']:.1f}"
    )
    columns = ["way", "device", "tokens", "ms", "eager ms", "peak MiB", "× faster", "× less memory"]
    print(measuring.table(columns, shown))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {row['way']}: {row['not_run']}")
    for device in devices:
        measuring.write(given.out, device, about, [row for row in rows if row["device"] == device])


if __name__ == "__main__":
    main()
