"""The count table, EM of IBM Model 1 and the diagnosis on one core: seconds and peak memory, beside a plain loop.

    python benchmarks/cooccurrence.py [--out results/cooccurrence] [--pairs 160000] [--types 8000] [--iterations 5]

Pairs have words drawn with Zipf's frequencies and lengths 1 … 40; a target has the words of its source in another
order. --source and --target read your own files instead (one sentence per line, split at white space, the most frequent
types kept). Each measurement has its own process; seconds are processor time. The loop counts every 40th pair in a
dictionary, and its time is multiplied by 40.
"""

import argparse
import multiprocessing
import time
from collections import defaultdict
from pathlib import Path

import measuring
import numpy as np
import torch

from attnlab.counting.diagnosis import diagnose
from attnlab.counting.ibm1 import count_cooccurrences, fit_ibm1
from attnlab.tasks.task import SPECIALS
from attnlab.tasks.text import read_parallel
from attnlab.tasks.vocabulary import Words

SEED = 0


def draw_pairs(number, types):
    draw = np.random.default_rng(SEED)
    mass = np.cumsum(1.0 / np.arange(1, types + 1))
    lengths = draw.integers(1, 41, size=number)
    words = np.searchsorted(mass, draw.random(int(lengths.sum())) * mass[-1])
    return [(x, draw.permutation(x)) for x in np.split(words, np.cumsum(lengths)[:-1])]


def read_pairs(source, target, number, types):
    sides = [side[:number] for side in read_parallel(Path(source), Path(target))]
    encoded = []
    for side in sides:
        vocabulary = Words(Words.from_lines(side).words[len(SPECIALS) : types])
        encoded.append(list(vocabulary.encode(side)))
    return list(zip(*encoded, strict=True))


def count_in_loop(pairs):
    table = defaultdict(float)
    for x, y in pairs:
        for i in x:
            for o in y:
                table[i, o] += 1.0 / len(x)
    return table


def measure_task(given, name, answer):
    """Send (CPU seconds, MiB before, MiB at the peak) of one task."""
    torch.set_num_threads(1)
    text = given.source, given.target
    pairs = read_pairs(*text, given.pairs, given.types) if given.source else draw_pairs(given.pairs, given.types)
    before = measuring.process_peak_mebibytes()
    tasks = {
        "count table, plain loop × 40": lambda: count_in_loop(pairs[::40]),
        "count table": lambda: count_cooccurrences(pairs),
        "EM": lambda: fit_ibm1(pairs, iterations=given.iterations, tolerance=0.0),
        "EM, diagonal learnt": lambda: fit_ibm1(
            pairs, null=0.08, diagonal=4.0, learn_diagonal=True, iterations=given.iterations, tolerance=0.0
        ),
        "diagnosis": lambda: diagnose(pairs),
    }
    start = time.process_time()
    tasks[name]()
    taken = time.process_time() - start
    answer.put((taken * (40 if "loop" in name else 1), before, measuring.process_peak_mebibytes()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--pairs", type=int, default=160_000)
    parser.add_argument("--types", type=int, default=8000)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--source", help="a text file to read instead of drawing pairs; needs --target")
    parser.add_argument("--target")
    given = parser.parse_args()
    if bool(given.source) != bool(given.target):
        parser.error("--source and --target must be given together")
    spawn, rows = multiprocessing.get_context("spawn"), []
    for name in ("count table, plain loop × 40", "count table", "EM", "EM, diagonal learnt", "diagnosis"):
        answer = spawn.Queue()
        process = spawn.Process(target=measure_task, args=(given, name, answer))
        process.start()
        seconds, before, peak = answer.get()
        process.join()
        rows.append({"what": name, "cpu_seconds": seconds, "mebibytes": peak - before})
    print(measuring.format_table(["what", "CPU s", "MiB beyond the pairs"], [list(row.values()) for row in rows]))
    about = measuring.collect_provenance(SEED) | vars(given)
    measuring.write_results(given.out, "cooccurrence", about, rows)


if __name__ == "__main__":
    main()
