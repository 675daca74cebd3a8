"""Word alignment by translators and encoders: AER, sentence pairs a second and memory of each reading.

    python benchmarks/alignment_readings.py [--trained FOLDER] [--out results/alignment-readings]
    python benchmarks/alignment_readings.py --forward RUN --backward RUN --gold-pair de-en
    python benchmarks/alignment_readings.py --gpu [--out results/alignment-readings]

The AER is on the gold pairs of --gold-pair (en-fr: 45 pairs of the Hansards, a development set on which thresholds were
tuned), with a bootstrap interval. No reading sees a gold link. Speed and memory are those of the first --pairs test
pairs of Europarl, on one CPU thread, without loading and choosing. Each reading runs in a process of its own, so that
its peak memory is its own. Data is read from the folder
ATTNLAB_DATA. The models are OPUS-MT en-fr and fr-en (--forward, --backward), MiniLM, and an aligner of
attnlab align-train (--trained). With --gpu, a model of OPUS-MT's shape with random weights aligns random text in
bfloat16 on a GPU, from words to links: speed only.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import measuring
import numpy as np
import torch

from attnlab.aligning import AlignmentRequest, MapAligner
from attnlab.aligning.pair_readers import PretrainedTranslator
from attnlab.aligning.word_tokens import EncodedLines
from attnlab.analysis.alignment import NOWHERE, score
from attnlab.huggingface.cross_pass import CrossPlan
from attnlab.tasks.links import read_gold
from attnlab.tasks.text import load_moses, read_parallel
from attnlab.training.runs import choose_device

SEED = 0
DATA = Path(os.environ.get("ATTNLAB_DATA", "data"))
MODELS = Path.home() / ".cache/attnlab-models"
ONE_WAY = {"one direction, by auto": {"by": "auto"}, "one direction, by norm (default)": {}}
READINGS = {
    "both directions, by auto (default)": {},
    "by auto, mutual links": {"decide": "mutual"},
    "by auto, int8": {"precision": "int8"},
    "by encoder, mutual links": {"by": "encoder", "decide": "mutual"},
    "by encoder, mutual links, int8": {"by": "encoder", "decide": "mutual", "precision": "int8"},
    "by signed contributions, layer by agreement": {"by": "signed", "layer": "agreement"},
    "by weight, layer by agreement": {"by": "weight", "layer": "agreement"},
    "by norm, layer of the highest norm": {"by": "norm"},
    "by norm, layer of the lowest entropy": {"by": "norm", "layer": "lowest-entropy"},
    "by auto, grow-diag-final-and": {"decide": "grow-diag-final-and"},
    "by auto, itermax": {"decide": "itermax"},
    "by auto, transport": {"decide": "transport"},
    "by auto, geometric mean": {"combine": "geometric"},
    "by auto, pieces by max": {"pieces": "max"},
}
SLOW = {"by probe": {"by": "probe", "decide": "mutual"}, "by gradient": {"by": "gradient", "decide": "mutual"}}


def list_readings(given):
    """Yield (name, model, reverse, options)."""
    if given.trained:
        yield "after align-train", given.trained, None, {}
        yield "after align-train, mutual links", given.trained, None, {"decide": "mutual"}
        if given.pretrained:
            yield "after align-train, int8", given.trained, None, {"precision": "int8"}
    for name, options in READINGS.items():
        if given.pretrained or ("encoder" not in name and "int8" not in name):
            yield name, given.forward, given.backward, options
    for name, options in ONE_WAY.items():
        yield name, given.forward, None, options
    if given.slow:
        for name, options in SLOW.items():
            yield name, given.forward, given.backward, options
    if given.minilm and Path(given.minilm).is_dir():
        yield (
            "MiniLM (English only) by encoder, mutual links",
            given.minilm,
            None,
            {"by": "encoder", "decide": "mutual"},
        )


def read_gold_text(pair):
    folder = DATA / "gold-alignments" / pair
    x, y = (folder / f"{pair}.{language}" for language in pair.split("-"))
    lines = read_parallel(x, y)
    words = [line.split() for line in lines[0]], [line.split() for line in lines[1]]
    file = next(path for path in folder.iterdir() if path.suffix in (".talp", ".pharaoh"))
    return words, read_gold(file, [(len(a), len(b)) for a, b in zip(*words, strict=True)])


def read_speed_text(pair, count):
    """Return test pairs of Europarl, cut by Moses."""
    languages = pair.split("-")
    stem = next(s for s in (pair, "-".join(reversed(languages))) if (DATA / f"europarl/{s}.test.en.gz").is_file())
    lines = read_parallel(*(DATA / f"europarl/{stem}.test.{language}.gz" for language in languages))
    sides = zip(languages, lines, strict=True)
    return tuple([load_moses(language)[0](line).split() for line in side[:count]] for language, side in sides)


def measure_one(given):
    """Measure one reading in this process, and print a row as JSON."""
    torch.set_num_threads(1)
    what, model, reverse, options = json.loads(given.one)
    words, gold = read_gold_text(given.gold_pair)
    aligner = MapAligner.open(model, AlignmentRequest(device=given.device, **options), reverse)
    aligner.choose(words)
    links = [frozenset(each) for each in aligner.align(words)]
    found = score(links, gold.sure, gold.possible)
    some = read_speed_text(given.gold_pair, 8 if options.get("by") in SLOW_KINDS else given.pairs)
    aligner.align(tuple(side[:4] for side in some))
    start = time.process_time() if given.device == "cpu" else time.perf_counter()
    aligner.align(some)
    seconds = (time.process_time() if given.device == "cpu" else time.perf_counter()) - start
    low, high = found.intervals["aer"]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row = {"reading": what, "aer_percent": 100 * found.aer, "low": 100 * low, "high": 100 * high}
    row |= {"precision": 100 * found.precision, "recall": 100 * found.recall}
    row |= {"pairs_per_second": len(some[0]) / seconds, "peak_gib": memory, "read": [str(c) for c in aligner.chosen]}
    print(json.dumps(row))


SLOW_KINDS = ("probe", "gradient")


class RandomWords:
    """A tokenizer of made-up words: word k has 1 + k % 2 pieces."""

    padding = 0

    def encode(self, sentences):
        pieces = [[[3 + 2 * int(w), 4 + 2 * int(w)][: 1 + int(w) % 2] for w in words] for words in sentences]
        ids = [[token for word in line for token in word] + [2] for line in pieces]
        owners = [[k for k, word in enumerate(line) for _ in word] + [NOWHERE] for line in pieces]
        return EncodedLines(ids, owners)


def build_random_translator(device, dtype):
    import transformers

    sizes = {"vocab_size": 59514, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6}
    sizes |= {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "encoder_attention_heads": 8}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    config = transformers.MarianConfig(**sizes, decoder_attention_heads=8, **special, max_position_embeddings=512)
    model = transformers.MarianMTModel(config).eval().to(device, dtype)
    from attnlab.huggingface import pretrained

    ids = torch.arange(3, 13, device=device).view(2, 5)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    plan = CrossPlan.from_record(model, pretrained.record(model, batch))
    return PretrainedTranslator("random", model, (RandomWords(), RandomWords()), plan, 8)


def measure_gpu(given):
    """Return pairs a second of one direction and of both, from words to links, and peak GPU memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rng = np.random.default_rng(SEED)
    lengths = np.clip(rng.lognormal(3.1, 0.5, given.gpu_pairs).astype(int), 3, 90)  # words, about as in Europarl
    text = [[rng.integers(0, 29_000, n).astype(str).tolist() for n in np.maximum(lengths + k, 2)] for k in (0, 1)]
    rows = []
    translator = build_random_translator(device, dtype)
    for what, count, layer in (("one direction", 1, "1"), ("one direction", 1, "5"), ("both directions", 2, "1")):
        request = AlignmentRequest(by="norm", setting="awi", layer=layer, device=str(device))
        aligner = MapAligner(request, directions=[translator] * count)
        aligner.choose(tuple(side[:50] for side in text))
        aligner.align(tuple(text))  # every shape of a batch has run once before the clock starts
        start = time.perf_counter()
        aligner.align(tuple(text))
        seconds = time.perf_counter() - start
        row = {"reading": f"random weights, {what}, by norm, layer {layer}", "pairs": given.gpu_pairs}
        row |= {"pairs_per_second": given.gpu_pairs / seconds, "words_per_side": float(lengths.mean())}
        if device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def read_rows(out, name):
    """Return the rows of an interrupted command."""
    file = Path(out) / f"{name}.json" if out else None
    return json.loads(file.read_text())["rows"] if file and file.is_file() else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", default=str(MODELS / "opus-mt-en-fr"))
    parser.add_argument("--backward", default=str(MODELS / "opus-mt-fr-en"))
    parser.add_argument("--minilm", default=str(MODELS / "minilm"))
    parser.add_argument("--trained", help="folder of an aligner of attnlab align-train")
    parser.add_argument("--gold-pair", default="en-fr")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of Europarl for speed and memory")
    parser.add_argument("--slow", action="store_true", help="also probes and gradients, which take minutes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--gpu-pairs", type=int, default=20_000)
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out, and measure the others")
    parser.add_argument("--about", help="JSON file that is stored with the results, such as how models were trained")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.pretrained = not (Path(given.forward) / "model.json").is_file()
    if given.one:
        measure_one(given)
        return
    about = measuring.collect_provenance(SEED) | {"gold_pair": given.gold_pair, "speed_pairs": given.pairs}
    if given.about:
        about["training"] = json.loads(Path(given.about).read_text())
    name = "gpu" if given.gpu else f"{choose_device(given.device).type}-{given.gold_pair}"
    if given.gpu:
        rows = measure_gpu(given)
    else:
        rows = read_rows(given.out, name) if given.resume else []
        for reading in list_readings(given):
            if reading[0] in [row["reading"] for row in rows]:
                continue
            words = [sys.executable, __file__, "--one", json.dumps(reading), "--gold-pair", given.gold_pair]
            words += ["--pairs", str(given.pairs), "--device", given.device]
            try:
                made = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            except KeyboardInterrupt:
                raise SystemExit("interrupted; with --resume, the rows of --out are kept") from None
            rows.append(json.loads(made.stdout.splitlines()[-1]))
            print(rows[-1], file=sys.stderr, flush=True)
            measuring.write_results(given.out, name, about, rows)  # what there is, if interrupted
    columns = [name for name in rows[0] if name != "read"]
    table = [
        [round(value, 2) if isinstance(value := row.get(c, "–"), float) else value for c in columns] for row in rows
    ]
    print(measuring.format_table(columns, table))
    measuring.write_results(given.out, name, about, rows)


if __name__ == "__main__":
    main()
