"""It learns, really: German to English on multi30k with several attentions and seeds, test-2016 BLEU with intervals.

    python benchmarks/multi30k.py [--out results/multi30k] [--attention softmax,coda] [--seeds 1,2,3] [key=value …]

A small Transformer (3+3 layers, width 256, 4 heads) with the same recipe for every attention. What is scored: the test
part of 2016 (1,000 sentences), raw cased text, beam 5, the weights of the best validation loss, sacrebleu's default
BLEU (13a) with its signature. Intervals are Student's t over three seeds or more. Each run lies in OUT/runs and is not
trained again.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import measuring
import torch

from attnlab.config import split_pairs
from attnlab.evaluation import evaluated
from attnlab.recipe import resolved
from attnlab.runs import open_run, start

RECIPE = {
    "data": "multi30k", "layers": "3", "width": "256", "heads": "4", "feed_forward": "512", "dropout": "0.3",
    "lr": "1e-3", "warmup": "1000", "steps": "4000", "label_smoothing": "0.1", "batch_tokens": "4096",
    "evaluate_every": "250", "checkpoint_every": "4000", "compile": "no",
}  # fmt: skip
T_95 = {3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, two-sided, by the number of seeds


def one(attention, seed, settings, folder):
    """Train (or find trained) one run and score it."""
    recipe = resolved("translation", RECIPE | settings | {"attention": attention, "seed": str(seed)})
    began = time.perf_counter()
    _, outcome = start(recipe, out=str(folder), report=lambda values: None, note=print)
    trained = time.perf_counter() - began
    if not outcome.finished:
        raise SystemExit(f"{folder} was stopped at step {outcome.step}; the same command goes on")
    run = open_run(folder)
    found = evaluated(run, "test", bootstrap=0)
    scores = {score["name"]: score for score in found["text"]}
    speeds = [row["tokens_per_second"] for row in outcome.history if "tokens_per_second" in row]
    return {
        "attention": attention, "seed": seed, "bleu": scores["BLEU"]["value"], "signature": scores["BLEU"]["signature"],
        "chrf": scores["chrF2"]["value"], "test_perplexity": found["perplexity"], "valid_loss": outcome.best,
        "best_step": outcome.best_step, "steps": outcome.step,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "seconds": trained, "tokens_per_second": statistics.median(speeds), "stepper": outcome.stepper,
        "example": found["translations"][:3],
    }  # fmt: skip


def interval(values):
    mean = statistics.mean(values)
    if len(values) not in T_95:
        return mean, None
    return mean, T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/multi30k")
    parser.add_argument("--runs", help="folder for the runs; by default OUT/runs")
    parser.add_argument("--attention", default="softmax,realformer,coda,dagpam")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="changes to the recipe, for every attention")
    given = parser.parse_args()
    settings, runs = split_pairs(given.settings), Path(given.runs or Path(given.out) / "runs")
    rows = []
    for seed in map(int, given.seeds.split(",")):
        for attention in given.attention.split(","):
            rows.append(one(attention, seed, settings, runs / f"{attention}-{seed}"))
            print({key: value for key, value in rows[-1].items() if key != "example"}, flush=True)
            about = measuring.surroundings(seed) | {"recipe": RECIPE | settings}
            Path(given.out).mkdir(parents=True, exist_ok=True)
            name = "gpu.json" if torch.cuda.is_available() else "cpu.json"
            (Path(given.out) / name).write_text(
                json.dumps({"about": about, "rows": rows}, indent=1, ensure_ascii=False) + "\n"
            )
    shown = []
    for attention in given.attention.split(","):
        own = [row for row in rows if row["attention"] == attention]
        (bleu, margin), (ppl, spread) = (interval([row[key] for row in own]) for key in ("bleu", "test_perplexity"))
        plus = ["" if m is None else f" ± {m:.2f}" for m in (margin, spread)]
        shown.append(
            [attention, len(own), f"{bleu:.2f}{plus[0]}", f"{ppl:.3f}{plus[1]}", f"{own[0]['tokens_per_second']:,.0f}"]
        )
    print(measuring.table(["attention", "seeds", "BLEU test-2016", "perplexity", "tokens/s"], shown))


if __name__ == "__main__":
    main()
