"""It learns, really: several attentions and seeds under one recipe, scored on the test part, with intervals.

    python benchmarks/learning.py multi30k [--attention softmax,coda] [--seeds 1,2,3] [--out results] [key=value …]
    python benchmarks/learning.py ptb

multi30k: German to English, a small Transformer (3+3 layers, width 256, 4 heads); the test part of 2016 (1,000
sentences), raw cased text, beam 5, sacrebleu's default BLEU (13a) with its signature. ptb: a word-level language model
on the Penn Treebank; perplexity of the test part with a context window. Both with the weights of the best validation
loss. Intervals are Student's t over three seeds or more. Each run lies in OUT/SET/runs and is not trained again; rows
of the same recipe that OUT/SET holds already are kept.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import measuring
import torch

from attnlab.config import split_pairs
from attnlab.decoding.evaluation import evaluate_part
from attnlab.training.recipe import resolve_recipe
from attnlab.training.runs import open_run, start_run
from results import format_spread

SETS = {
    "multi30k": ("translation", "test", {
        "data": "multi30k", "layers": "3", "width": "256", "heads": "4", "feed_forward": "512", "dropout": "0.3",
        "lr": "1e-3", "warmup": "1000", "steps": "4000", "label_smoothing": "0.1", "batch_tokens": "4096",
        "evaluate_every": "250", "checkpoint_every": "4000", "compile": "no",
    }),
    "ptb": ("language", "test-context", {
        "data": "ptb", "block": "128", "context": "96", "layers": "4", "width": "256", "heads": "4",
        "feed_forward": "1024", "dropout": "0.3", "attention_dropout": "0.1", "lr": "2e-3", "warmup": "400",
        "steps": "4000", "schedule": "cosine", "clip": "1.0", "weight_decay": "0.01", "optimiser": "adamw",
        "batch_tokens": "4096", "evaluate_every": "200", "checkpoint_every": "4000", "compile": "no",
    }),
}  # fmt: skip


def one(task, part, settings, folder):
    """Train (or find trained) one run and score it."""
    began = time.perf_counter()
    _, outcome = start_run(resolve_recipe(task, settings), out=str(folder), report=lambda values: None, note=print)
    trained = time.perf_counter() - began
    if not outcome.finished:
        raise SystemExit(f"{folder} was stopped at step {outcome.step}; the same command goes on")
    run = open_run(folder)
    found = evaluate_part(run, part, bootstrap=0)
    speeds = [row["tokens_per_second"] for row in outcome.history if "tokens_per_second" in row]
    row = {
        "test_perplexity": found["perplexity"], "valid_loss": outcome.best, "best_step": outcome.best_step,
        "steps": outcome.step, "parameters": sum(p.numel() for p in run.model.parameters()), "seconds": trained,
        "tokens_per_second": statistics.median(speeds), "stepper": outcome.stepper,
    }  # fmt: skip
    if scores := {score["name"]: score for score in found.get("text", [])}:
        row |= {"bleu": scores["BLEU"]["value"], "signature": scores["BLEU"]["signature"]}
        row |= {"chrf": scores["chrF2"]["value"], "example": found["translations"][:3]}
    return row


def kept(path, recipe):
    """What was measured before, under the same recipe."""
    if not path.exists():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    if before["about"]["recipe"] != recipe:
        raise SystemExit(f"{path} was measured with another recipe: give another --out, or move it away")
    return before["rows"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--out", default="results")
    parser.add_argument("--runs", help="folder for the runs; by default OUT/SET/runs")
    parser.add_argument("--attention", default="softmax,realformer,coda,dagpam")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--untimed", action="store_true", help="other work shares the device: keep no speeds")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="changes to the recipe, for every attention")
    given = parser.parse_intermixed_args()
    task, part, recipe = SETS[given.set]
    recipe |= split_pairs(given.settings)
    folder = Path(given.out) / given.set
    path, runs = folder / ("gpu.json" if torch.cuda.is_available() else "cpu.json"), Path(given.runs or folder / "runs")
    rows = kept(path, recipe)
    for seed in map(int, given.seeds.split(",")):
        for attention in given.attention.split(","):
            named = {"attention": attention, "seed": seed}
            if any(named.items() <= row.items() for row in rows):
                continue
            values = {key: str(value) for key, value in (recipe | named).items()}
            about = measuring.collect_provenance(seed)
            made = one(task, part, values, runs / f"{attention}-{seed}")
            if given.untimed:
                made |= {"seconds": None, "tokens_per_second": None}
            rows.append(row := named | made | {"commit": about["commit"]})
            print({key: value for key, value in row.items() if key != "example"}, flush=True)
            seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
            measuring.write_results(str(folder), path.stem, about | {"seed": seeds, "recipe": recipe}, rows)
    measures = [key for key in ("bleu", "test_perplexity") if key in rows[0]]
    shown = []
    for attention in dict.fromkeys(row["attention"] for row in rows):
        own = [row for row in rows if row["attention"] == attention]
        values = [format_spread([row[key] for row in own], 2) for key in measures]
        speeds = [row["tokens_per_second"] for row in own if row["tokens_per_second"]]
        shown.append([attention, len(own), *values, f"{speeds[0]:,.0f}" if speeds else "–"])
    print(measuring.format_table(["attention", "seeds", *measures, "tokens/s"], shown))


if __name__ == "__main__":
    main()
