"""What reading every head of a model costs beside its own fused forward pass, in the same run: time and peak memory.

    python benchmarks/reading.py [--part gpu|cpu|tiles] [--length 8192,131072] [--rounds 2] [--out results/reading]

A reading is one forward pass in which each layer is reduced to its totals as it runs: received and taken ‖αf(x)‖,
entropies and sinks of every head (attnlab.huggingface.streaming). Its time includes the forward pass. The peer is the
model's own forward pass with torch's fused attention. Both take turns in one process.

    gpu     a Llama of 8.0 billion parameters with random weights in bfloat16, built on the device, one text
    cpu     SmolLM2-135M on docs/*.md in float32, one thread, processor time; with random weights if it is not there
    tiles   the kernel alone at several tile sizes, on one layer of the Llama at 32,768 tokens

Before any time is printed, two heads of the first layer are compared with plain PyTorch at the same length (all totals,
in float32), rows of every layer with the model's own eager attention, and the strongest links with the rows that
contain them.
"""

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import measuring
import torch
import transformers
from adapted_llama import SIZES

from attnlab.analysis import totals as definition
from attnlab.analysis.sinks import EPSILON, tabulate_sinks
from attnlab.huggingface.streaming import Stream, stream_layers
from attnlab.records.visibility import SoftmaxScores

SEED = 0
LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
}  # fmt: skip
SMOL = Path.home() / ".cache" / "attnlab-models" / "smollm2-135m"
LENGTHS = {"gpu": (8192, 131072), "cpu": (8192,), "tiles": (32768,)}
GOALS = {("gpu", 8192): 1.5, ("gpu", 131072): 2.0, ("cpu", 8192): 3.0}
LARGEST = {"gpu": 1e-4, "cpu": 1e-4}  # relative distance from the definition
TILES = [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4), (128, 128, 8, 2), (128, 32, 4, 4)]


def build_llama():
    """Build the 8-billion-parameter model on the GPU in bfloat16."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.LlamaConfig(**LLAMA, attn_implementation="sdpa")
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def build_smol():
    """Load SmolLM2-135M in float32, or build it with random weights."""
    if SMOL.is_dir():
        return transformers.LlamaForCausalLM.from_pretrained(SMOL, dtype=torch.float32).eval(), "SmolLM2-135M"
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(**SIZES | {"max_position_embeddings": 8192})
    return transformers.LlamaForCausalLM(config).eval(), "SmolLM2-135M's shape, random weights"


def build_ids(part, length, vocabulary):
    """Return the tokens of one text: the documentation for SmolLM2, else random ones."""
    if part == "cpu" and SMOL.is_dir():
        tokenizer = transformers.AutoTokenizer.from_pretrained(SMOL)
        pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
        ids = tokenizer("\n".join(page.read_text() for page in pages), verbose=False)["input_ids"]
        return torch.tensor([ids[:length]])
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(SEED))


class CheckedStream(Stream):
    """A stream that compares the first layer's totals of two heads with plain PyTorch."""

    def keep_layer(self, layer):
        if not self.visited:
            self.error = compare_heads(layer)
        super().keep_layer(layer)


def compare_heads(layer):
    """Return the largest relative distance of the totals of the first and the last head from the definition."""
    ours = definition.totals(layer, links=8)
    scores, heads = layer.attended, layer.context.shape[1]
    shared, errors = heads // scores.key.shape[1], []
    for head in (0, heads - 1):
        q, k = scores.query[:, head : head + 1], scores.key[:, head // shared : head // shared + 1]
        alone = SoftmaxScores(scores.weigh, q.float(), k.float(), scores.scale, scores.causal)  # its own logsumexp
        plain = definition.stream_scores(alone, ours.vector[:, head : head + 1])
        found = (ours.received_weight, ours.taken_norm, ours.entropy, ours.peak)
        for mine, theirs in zip(found, plain, strict=True):
            errors.append(float((mine[:, head] - theirs[:, 0]).norm() / theirs.norm()))
        row = int(ours.links.query[0, head, 0])
        norms = layer.rows(row, row + 1)[0, head, 0].float() * ours.vector[0, head]
        norms[row] = 0.0  # a link joins different tokens
        best = norms.max()
        if abs(float(best) / float(ours.links.norm[0, head, 0]) - 1) > 2e-2:  # its own weights are rounded to bfloat16
            raise SystemExit("the strongest link is not the largest of its row; no times are printed")
    return max(errors)


def check_reading(model, inputs, largest):
    """Compare a reading with the definition, and return the error; no time is printed if it is too large."""
    stream = CheckedStream(model, lambda layer: None, check=True)
    stream.run(inputs)
    if not stream.error <= largest:
        raise SystemExit(f"the totals differ from the definition by {stream.error:.1e}; no times are printed")
    return stream.error


def read_model(model, inputs):
    """Read every head: totals, entropies and sinks. Return the table of sinks."""
    tables, how = [], set()

    def visit(layer):
        tables.append(tabulate_sinks([layer.totals]))
        how.add(layer.totals.how)

    stream_layers(model, inputs, visit, check=False)
    return tables, how


def measure(model, name, part, length, rounds):
    """Measure a model at one length: check it, then time its forward pass and its reading in turns."""
    device = next(model.parameters()).device
    inputs = {"input_ids": build_ids(part, length, model.config.vocab_size).to(device), "logits_to_keep": 1}
    clock = read_clock(device)

    @torch.no_grad()
    def forward():
        model(**inputs, use_cache=False)

    if part == "gpu":  # compile kernels and start libraries, at a small length
        small = {"input_ids": inputs["input_ids"][:, :2048], "logits_to_keep": 1}
        read_model(model, small)
        with torch.no_grad():
            model(**small, use_cache=False)
    start = clock()
    error = check_reading(model, inputs, LARGEST[part])
    print(f"{length:,} tokens: checked, error {error:.1e}, {clock() - start:.0f} s", file=sys.stderr, flush=True)
    times, peaks = {"forward": [], "reading": []}, {}
    tables, how = [], set()
    for _ in range(rounds):
        for way, step in (("forward", forward), ("reading", lambda: read_model(model, inputs))):
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            start = clock()
            found = step()
            times[way].append(clock() - start)
            if device.type == "cuda":
                peaks[way] = torch.cuda.max_memory_allocated() / 2**30
            tables, how = found or (tables, how)
            print(f"{length:,} tokens, {way}: {times[way][-1]:.2f} s", file=sys.stderr, flush=True)
    forward_s, reading_s = (statistics.median(times[way]) for way in ("forward", "reading"))
    sinks = [row for table in tables for row in table["is_sink"]]
    return {
        "part": part, "model": name, "parameters": sum(p.numel() for p in model.parameters()), "tokens": length,
        "layers": len(tables), "heads": len(sinks), "how": ", ".join(sorted(how)), "rounds": rounds, "error": error,
        "forward_s": forward_s, "reading_s": reading_s, "times_forward": reading_s / forward_s,
        "goal": GOALS.get((part, length)), "forward_gib": peaks.get("forward"), "reading_gib": peaks.get("reading"),
        "sink_rate": sum(sinks) / len(sinks), "epsilon": EPSILON,
    }  # fmt: skip


def read_clock(device):
    """Return a clock: processor time on a CPU, and on a GPU the time after all its work is done."""
    if device.type == "cpu":
        return time.process_time

    def synchronise():
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronise


def measure_tiles(length):
    """Time the kernel alone at several tile sizes, on q, k and sizes of one layer of the Llama."""
    from attnlab.analysis import totals_kernel

    torch.manual_seed(SEED)
    h, g, d = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"], 128
    q = torch.randn(1, length, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k = torch.randn(1, length, g, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    v = torch.randn(1, length, g, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    size = torch.rand(1, h, length, device="cuda")
    scores = SoftmaxScores(lambda start, stop: q, q, k, d**-0.5, True)
    known = SoftmaxScores(scores.weigh, q, k, scores.scale, True, totals_kernel.compute_logsumexp(scores))
    exact, rows = None, []

    def attend():
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    rows.append({"tiles": "torch's fused attention", "ms": time_on_gpu(attend)})
    rows.append({"tiles": "logsumexp alone", "ms": time_on_gpu(lambda: totals_kernel.compute_logsumexp(scores))})
    for tiles in TILES:
        chosen = dict(zip(("ROWS", "KEYS", "num_warps", "num_stages"), tiles, strict=True))
        try:
            found = totals_kernel.stream_scores(known, size, peaks=False, tiles=chosen)[:3]
            exact = exact or found
            error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
            if error > 1e-4:
                raise SystemExit(f"tiles {tiles} differ from the first by {error:.1e}; no times are printed")
            ms = time_on_gpu(
                lambda chosen=chosen: totals_kernel.stream_scores(known, size, peaks=False, tiles=chosen)[:3]
            )
            rows.append({"tiles": str(tiles), "ms": ms})
        except Exception as error:  # a tile that does not fit
            rows.append({"tiles": str(tiles), "not_run": f"{type(error).__name__}: {error}"[:200]})
    return rows


def time_on_gpu(step, rounds=5):
    step()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(LENGTHS), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", help="numbers of tokens, with commas between")
    parser.add_argument("--rounds", type=int, help="default: 2 on a GPU, 1 on a CPU")
    parser.add_argument("--out", default="results/reading", help="folder to write the numbers to, as JSON")
    given = parser.parse_args()
    if given.part != "cpu" and not torch.cuda.is_available():
        raise SystemExit(f"--part {given.part} needs a GPU; --part cpu runs here")
    lengths = [int(x) for x in given.length.split(",")] if given.length else LENGTHS[given.part]
    about = measuring.collect_provenance(SEED)
    if given.part == "tiles":
        rows = measure_tiles(lengths[0])
        print(measuring.format_table(["tiles", "ms"], [[r["tiles"], r.get("ms", r.get("not_run"))] for r in rows]))
        measuring.write_results(given.out, "tiles", about, rows)
        return
    if given.part == "cpu":
        torch.set_num_threads(1)
    rounds = given.rounds or (2 if given.part == "gpu" else 1)
    model, name = (build_llama(), "Llama 8B, random weights") if given.part == "gpu" else build_smol()
    rows = [measure(model, name, given.part, length, rounds) for length in lengths]
    keys = ("tokens", "forward_s", "reading_s", "times_forward", "goal", "forward_gib", "reading_gib", "error", "how")
    print(f"{rows[0]['model']} on {about['hardware']}, torch {about['torch']}, {rounds} rounds in turns")
    columns = ["tokens", "forward s", "reading s", "× forward", "goal", "forward GiB", "reading GiB", "error", "how"]
    print(measuring.format_table(columns, [["–" if row[key] is None else row[key] for key in keys] for row in rows]))
    measuring.write_results(given.out, given.part, about, rows)


if __name__ == "__main__":
    main()
