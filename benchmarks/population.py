"""Many seeds trained at once, beside what a user would do otherwise.

    python benchmarks/population.py [--part lstm|transformer|memory|start|command] [--out results/population]
                                    [--seeds 20] [--resume]

lstm         the copy study of Snell et al. 2021, seed-steps per second. The peer is the same model with `nn.LSTM`
             (cuDNN on a GPU) and Adam, eager, one seed after the other. Both use tf32 products on a GPU.
transformer  the small Multi30k translator, target tokens per second of all seeds. The peers are one run, and eight
             processes at once, under CUDA MPS where it can be started. Needs a GPU; on a CPU a tiny model.
memory       what such a population holds on the device, beside parameters, gradients, moments and activations.
start        from the command to the thirtieth update of one run of it, in seconds. Needs a GPU.
command      12 seeds × 4,000 updates of it, from the command to the last BLEU, in seconds. Needs a GPU.

Times are printed only if a small population first ends as its seeds do alone. On a CPU everything has one thread.
Every row is written when it is measured; --resume measures only what the files in --out lack.
"""

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path

import measuring
import torch
import transformer_population as transformers
from torch import nn
from torch.nn import functional as F

from attnlab.experiments.population import Population
from attnlab.experiments.population_updates import Updates
from attnlab.studies.snell2021.copying import CopyExperiment


class Plain(nn.Module):
    """The copy model, written in the usual way."""

    def __init__(self, words, width):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.encoder, self.decoder = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.query, self.project = nn.Linear(width, width), nn.Linear(width, width)
        self.readout = nn.Linear(width, words)
        self.hidden = nn.Linear(2 * width, width)

    def forward(self, source, given):
        memory, state = self.encoder(self.words(source))
        states, _ = self.decoder(self.words(given), state)
        weights = (self.query(states) @ memory.mT).softmax(-1)
        both = torch.cat([states, self.project(weights @ memory)], -1)
        return self.readout(self.hidden(both).tanh())


def check_equal(device):
    """Check that a small population ends as each of its seeds does alone, in float32 without tf32."""
    case = CopyExperiment(data="subset", length=5, types=7, width=16, steps=5, examples=8)
    batches = case.feed([0, 1], device)
    runs = []
    for seeds in ([0, 1], [0], [1]):
        population = Population([case.model(seed) for seed in seeds], device)
        updates = Updates(population, seeds=seeds, lr=case.lr, clip=0.0)
        with torch.backends.cudnn.flags(allow_tf32=False):  # the recurrence reads this flag
            for step in range(case.steps):
                (batch,) = batches(step)
                updates(tuple(x[seeds[0] : seeds[0] + len(seeds)] for x in batch))
        runs.append(population.weights)
    for name, both in runs[0].items():
        for k in (0, 1):
            torch.testing.assert_close(both[k], runs[1 + k][name][0], atol=1e-5, rtol=1e-4)


def measure_single(case, device, steps):
    """Return the seconds per step of one seed."""
    torch.manual_seed(0)
    model = Plain(case.words, case.width).to(device)
    adam, feed = torch.optim.Adam(model.parameters(), lr=case.lr, fused=device.type == "cuda"), case.feed([0], device)

    def step(n):
        source, given, targets = (x[0] for x in feed(n)[0])
        loss = F.cross_entropy(model(source, given).flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()

    return measure_time(step, device, steps)


def measure_population(case, seeds, device, steps):
    """Return the seconds per step of all seeds together."""
    population = Population([case.model(seed).train() for seed in range(seeds)], device)
    updates = Updates(population, seeds=range(seeds), lr=case.lr, clip=0.0)
    feed = case.feed(range(seeds), device)
    return measure_time(lambda n: updates(*feed(n)), device, steps)


def measure_time(step, device, steps):
    """Return the seconds per step, after three warm-up steps."""
    for n in range(3):
        step(n)
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for n in range(steps):
        step(n)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def measure_lstms(device, given, sheet):
    """Yield the rows of the copy study that the sheet lacks."""
    rows = [({"case": name, "seeds": given.seeds}, types) for name, types in LSTM_CASES.items()]
    rows = [(row, types) for row, types in rows if sheet.lacks(row)]
    if rows:
        check_equal(device)
    torch.set_float32_matmul_precision("high")
    for row, types in rows:
        case = CopyExperiment(data="subset", types=types)
        alone = measure_single(case, device, given.steps)
        ours = measure_population(case, given.seeds, device, given.steps)
        speeds = {"one_by_one_per_s": 1 / alone, "population_per_s": given.seeds / ours}
        yield row | speeds | {"times": given.seeds * alone / ours}
    torch.set_float32_matmul_precision("highest")


def measure_transformers(device, given, sheet):
    """Yield the rows of the translator that the sheet lacks."""
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for attention in ("softmax", "coda", "dagpam"):
            rows = [{"way": "population", "attention": attention, "runs": n} for n in ((1, 12) if on_gpu else (2,))]
            if rows := [row for row in rows if sheet.lacks(row)]:
                transformers.check_equal(attention, device, folder)
            for row in rows:
                yield transformers.measure_together(attention, row["runs"], device, folder, tiny=not on_gpu)
        for runs in (1, 8) if on_gpu else ():
            if sheet.lacks({"way": "processes", "attention": "softmax", "runs": runs}):
                yield transformers.measure_processes("softmax", runs, folder, mps=runs > 1)


def measure_memory(device, given, sheet):
    """Yield the memory of populations that the sheet lacks."""
    with tempfile.TemporaryDirectory() as name:
        for attention, runs in ((a, n) for a in ("softmax", "coda", "dagpam") for n in (1, 12)):
            if sheet.lacks({"attention": attention, "runs": runs}):
                if device.type == "cuda":
                    gc.collect()
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                tiny = device.type != "cuda"
                yield transformers.measure_memory(attention, runs, device, Path(name), tiny=tiny)


def measure_command(device, given, sheet):
    """Yield the time of the whole command, if the sheet lacks it."""
    if sheet.lacks({"attention": "softmax", "runs": 12}):
        with tempfile.TemporaryDirectory() as name:
            yield transformers.measure_command(12, Path(name))


def measure_starts(device, given, sheet):
    """Yield the times to the thirtieth update that the sheet lacks: in empty caches, and again."""
    for attention in ("softmax", "coda"):
        if sheet.lacks({"attention": attention}):
            with tempfile.TemporaryDirectory() as name:
                (caches := Path(name) / "caches").mkdir()
                first, again = (transformers.measure_start(attention, Path(name), caches) for _ in range(2))
            yield {"attention": attention, "first_s": first, "again_s": again}


def identify(row):
    """Return what a row is about: processes under MPS are measured instead of others."""
    way = "processes" if row.get("way", "population") != "population" else "population"
    return [way, *(row.get(key) for key in ("attention", "runs", "case", "seeds"))]


LSTM_CASES = {"permutations of 40": 40, "40 of 60": 60}  # names, and numbers of types
PARTS = {"lstm": measure_lstms, "transformer": measure_transformers, "memory": measure_memory}
PARTS |= {"start": measure_starts, "command": measure_command}
TITLES = {
    "lstm": "seed-steps per second, batches of 128 × 41, width 256",
    "transformer": "target tokens per second of all runs",
    "memory": "GiB of the device; beyond_share: reserved over state and activations, minus 1",
    "start": "seconds from the command to the thirtieth update: in empty caches, and again",
    "command": "from the command to the last BLEU",
}


def main():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="default: all, on a CPU the first three")
    parser.add_argument("--seeds", type=int, default=20 if on_gpu else 4, help="of the copy study")
    parser.add_argument("--steps", type=int, default=100 if on_gpu else 4, help="of the copy study")
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--resume", action="store_true", help="measure only the rows that the files in --out lack")
    given = parser.parse_args()
    if given.part in ("start", "command") and not on_gpu:
        parser.error(f"--part {given.part} needs a GPU")
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    about = measuring.collect_provenance(0)
    print(f"on {about['hardware']}, torch {about['torch']}")
    for part in [given.part] if given.part else list(PARTS)[: 5 if on_gpu else 3]:
        name = f"{'gpu' if on_gpu else 'cpu'}-{part}"
        sheet = measuring.Sheet(given.out, name, about, identify, given.resume)
        for row in PARTS[part](device, given, sheet):
            print(row, file=sys.stderr, flush=True)
            sheet.add(row)
        print(TITLES[part])
        keys = list(dict.fromkeys(key for row in sheet.rows for key in row))
        print(measuring.format_table(keys, [[row.get(key, "–") for key in keys] for row in sheet.rows]))


if __name__ == "__main__":
    main()
