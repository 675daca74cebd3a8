"""It learns, really: several attentions and seeds under one recipe, scored on the test part, with intervals.

    python benchmarks/learning.py multi30k [--attention softmax,coda] [--seeds 1,2,3] [--out results] [key=value …]
    python benchmarks/learning.py ptb

multi30k: German to English, a small Transformer (3+3 layers, width 256, 4 heads); the test part of 2016 (1,000
sentences), raw cased text, beam 5, sacrebleu's default BLEU (13a) with its signature. ptb: a word-level language model
on the Penn Treebank; perplexity of the test part with a context window. Both with the weights of the best validation
loss. Intervals are Student's t over three seeds or more. Every run is a row of OUT/SET/ledger.jsonl and is not trained
again; OUT/SET/gpu.json (cpu.json) is drawn from the rows.
"""

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import measuring
from page_tables import format_spread

from attnlab.config import split_pairs
from attnlab.decoding.evaluation import evaluate_part
from attnlab.experiments.deadline import Deadline, stop_at_deadline
from attnlab.experiments.engine import complete
from attnlab.experiments.plan import Measure, TrainedRun, Workplace
from attnlab.experiments.recipes import MULTI30K, PENN_TREEBANK
from attnlab.experiments.schedulers import open_scheduler
from attnlab.training.recipe import resolve_recipe

SETS = {"multi30k": ("translation", "test", MULTI30K), "ptb": ("language", "test-context", PENN_TREEBANK)}


class LearningRun(TrainedRun):
    """A run whose row also says how long training took, by its metrics."""

    def train(self, place):
        began = time.perf_counter()
        super().train(place)
        (self.folder(place).path / "seconds.txt").write_text(str(time.perf_counter() - began))


def measure_learning(part, run, place):
    """Return the scores of a run, its size and its speed."""
    found, position = evaluate_part(run, part, bootstrap=0), run.folder.position()
    speeds = [row["tokens_per_second"] for row in run.folder.metrics() if "tokens_per_second" in row]
    seconds = run.folder.path / "seconds.txt"
    values = {
        "test_perplexity": found["perplexity"], "valid_loss": position["best"], "best_step": position["best_step"],
        "steps": position["step"], "parameters": sum(p.numel() for p in run.model.parameters()),
        "seconds": float(seconds.read_text()) if seconds.exists() else None,
        "tokens_per_second": statistics.median(speeds),
    }  # fmt: skip
    if scores := {score["name"]: score for score in found.get("text", [])}:
        values |= {"bleu": scores["BLEU"]["value"], "signature": scores["BLEU"]["signature"]}
        values |= {"chrf": scores["chrF2"]["value"], "example": found["translations"][:3]}
    return values


def make_plan(name, recipe, attentions, seeds):
    """Return the planned runs by attention and seed."""
    task, part, _ = SETS[name]
    measure = Measure(f"learning {name}", partial(measure_learning, part))
    values = {(a, seed): recipe | {"attention": a, "seed": str(seed)} for seed in seeds for a in attentions}
    return {key: LearningRun(resolve_recipe(task, each), measure) for key, each in values.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--out", default="results")
    parser.add_argument("--attention", default="softmax,realformer,coda,dagpam")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; with more than one, no speeds are kept")
    parser.add_argument("--until", help="stop at checkpoints before this: 9m, 1h30m or 14:30")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="changes to the recipe, for every attention")
    given = parser.parse_intermixed_args()
    recipe = SETS[given.set][2] | split_pairs(given.settings)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    plan = make_plan(given.set, recipe, given.attention.split(","), seeds)
    folder = Path(given.out) / given.set
    command = f"python benchmarks/learning.py {given.set}"
    until = Deadline.parse_optional(given.until)
    with stop_at_deadline(command), open_scheduler("local", jobs=given.jobs) as on:
        place = replace(Workplace.at(folder, command=command), device=on.device)
        measured = complete(lambda rows: rows.read_plan(plan), place, on, until=until)
    rows = []
    for (attention, seed), values in measured.values.items():
        timed = {} if given.jobs == 1 else {"seconds": None, "tokens_per_second": None}
        commit = measured.rows[attention, seed].provenance["commit"]
        rows.append({"attention": attention, "seed": seed, **values, **timed, "commit": commit})
    for key, reason in measured.failures.items():
        print(*key, "failed:", reason)
    origins = [row.provenance for row in measured.rows.values()]  # where the rows were measured, not where this runs
    about = {key: x for key, x in origins[-1].items() if key not in ("command", "began")}
    about |= {"commit": ", ".join(dict.fromkeys(origin["commit"] for origin in origins))}
    about |= {"seed": given.seeds.replace(",", ", "), "recipe": recipe}
    measuring.write_results(str(folder), "gpu" if "+cu" in about["torch"] else "cpu", about, rows)
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
