"""A training step of the iwslt14 model, beside Hugging Face's Marian and, on a CPU, Joey NMT of the same size.

    python benchmarks/training.py [--out results/training] [--tokens 4096,16384] [--attention softmax,coda,dagpam]
                                  [--compile auto,static] [--resume] [--joey /path/to/joey/bin/python]

A step is forward, backward and the update (Adam), at a given number of target tokens, with length 32 on both sides and
no padding. All models have the same layers, widths, vocabularies, activation, label smoothing and dropouts.

On a GPU, in bf16 and in the same run: ours as `attnlab train` runs it (CUDA graphs, blocks compiled as --compile says),
Marian as transformers runs it by default: eager, sdpa, fused Adam. With compile=auto a shape is compiled after AFTER
batches instead of a thousand, and its speed is also measured before. Programs that one --compile has compiled are in
torch's cache for the next one; so the seconds to compile are those of the first in the list. Every row is written when
it is measured; --resume measures Marian again, and of ours only what the file in --out lacks.

On a CPU, in float32 on one thread: one process each, taking turns; the median over rounds of the processor time. --joey
names the Python of an environment with Joey NMT (`pip install joeynmt`), which builds its own Adam.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path

import alternating
import measuring
import torch

from attnlab.models.presets import PRESETS
from attnlab.models.transformer import build
from attnlab.training import optimisers as optimise
from attnlab.training.loop import TrainConfig
from attnlab.training.objective import Objective
from attnlab.training.step import Captured, Eager, Flat

LENGTH, SEED, ROUNDS = 32, 0, 11
AFTER = {"auto": 110, "static": 0}  # batches of a shape before it is compiled; auto: after its speed was measured
MARIAN, JOEY = "Marian (transformers)", "Joey NMT"


def make_batch(tokens, device):
    torch.manual_seed(SEED)
    rows = tokens // LENGTH
    return [torch.randint(4, 6000, (rows, LENGTH), device=device) for _ in range(3)]


def measure_seconds(step, repeats):
    """Return the median wall-clock time of a step, with synchronization."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def build_ours(attention, device, compiling="no"):
    """Return make_step(tokens, steps) and the stepper; one model is used for all sizes."""
    torch.manual_seed(SEED)
    model = build(replace(PRESETS["iwslt14"], attention=attention)).to(device).train()
    captured = device.type == "cuda"
    objective = Objective(model, smoothing=[0.1])
    flat = Flat(model, torch.bfloat16 if captured else torch.float32)
    optimizer = optimise.build_optimiser(flat, TrainConfig())
    stepper = Eager(objective, flat, optimizer, clip=0.0)
    if captured:
        torch._dynamo.reset()
        stepper = Captured(objective, flat, optimizer, clip=0.0, compile_after=AFTER.get(compiling))
        if compiling == "dynamic":
            objective.compile_parts(dynamic=True)

    def make_step(tokens, steps):
        source, target, goal = make_batch(tokens, device)

        def step():
            for _ in range(steps):
                stepper.accumulate([source, target], goal, 1.0 / tokens)
                optimise.set_learning_rate(optimizer, 1e-4)
                stepper.apply()
            return stepper.read_loss() / (tokens * steps)

        return step

    return make_step, stepper


def build_marian(device):
    """Return make_step(tokens, steps) of Hugging Face's Marian, and the model."""
    from transformers import MarianConfig, MarianMTModel

    preset = PRESETS["iwslt14"]
    torch.manual_seed(SEED)
    config = MarianConfig(
        vocab_size=preset.vocabulary, decoder_vocab_size=preset.target_vocabulary,
        share_encoder_decoder_embeddings=False, d_model=preset.width, encoder_layers=6, decoder_layers=6,
        encoder_attention_heads=preset.heads, decoder_attention_heads=preset.heads, encoder_ffn_dim=preset.feed_forward,
        decoder_ffn_dim=preset.feed_forward, activation_function=preset.activation, scale_embedding=True,
        dropout=preset.dropout, activation_dropout=preset.activation_dropout, use_cache=False, pad_token_id=0,
        eos_token_id=2, decoder_start_token_id=1, max_position_embeddings=256, forced_eos_token_id=None,
    )  # fmt: skip
    model = MarianMTModel(config).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)

    def make_step(tokens, steps):
        source, target, goal = make_batch(tokens, device)

        def step():
            for _ in range(steps):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    logits = model(input_ids=source, decoder_input_ids=target).logits
                    loss = torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1).float(), goal.flatten(), label_smoothing=0.1
                    )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()

        return step

    return make_step, model


def measure_shape(step, stepper, tokens, repeats):
    """Return the speed of a step on a new shape, the seconds of its first 30 updates, and those of compiling it."""
    start = time.perf_counter()
    for _ in range(3):
        step()
    found = {"ready_seconds": time.perf_counter() - start}
    if stepper.compile_after:
        found["tokens_per_second_before"] = tokens / measure_seconds(step, repeats)
        start = time.perf_counter()
        step()
        found["compile_seconds"] = time.perf_counter() - start
    found["tokens_per_second"] = tokens / measure_seconds(step, repeats)
    return found | {"stepper": type(stepper).__name__, "not_finite": float(stepper.bad)}


def measure_on_gpu(given, sizes, sheet, steps=10, repeats=5):
    """Yield a row for each model and size that the sheet lacks; those of Marian always."""
    device, kinds = torch.device("cuda"), product(given.attention.split(","), given.compile.split(","))
    rows = [[{"tokens": n, "model": name, "compile": compiling} for n in sizes] for name, compiling in kinds]
    rows = [lacking for group in rows if (lacking := [row for row in group if sheet.lacks(row)])]
    if rows:
        make_step = build_marian(device)[0]
    for tokens in sizes if rows else ():
        speed = tokens * steps / measure_seconds(make_step(tokens, steps), repeats)
        yield {"tokens": tokens, "model": MARIAN, "tokens_per_second": speed}
    for group in rows:
        make_step, stepper = build_ours(group[0]["model"], device, group[0]["compile"])
        for row in group:
            tokens = row["tokens"]
            yield row | measure_shape(make_step(tokens, steps), stepper, tokens * steps, repeats)


def measure_on_cpu(given, sizes):
    """Return a row for each program and size."""
    commands = {name: [sys.executable, __file__, "--answer", name] for name in (*given.attention.split(","), MARIAN)}
    if given.joey:
        script = Path(__file__).with_name("joey_step.py")
        commands[JOEY] = [given.joey, str(script), json.dumps(asdict(PRESETS["iwslt14"]))]
    questions = [{"tokens": tokens, "steps": 1} for tokens in sizes]
    about, seconds = alternating.time_in_turns(commands, questions, ROUNDS)
    rows = []
    for (name, place), times in seconds.items():
        tokens = sizes[place]
        row = {"tokens": tokens, "model": name, "tokens_per_second": tokens / statistics.median(times)}
        spread = {"lowest": tokens / max(times), "highest": tokens / min(times), "rounds": len(times)}
        rows.append(row | spread | about[name])
    return rows


def serve_model(name):
    """Be one of the programs that are timed in turns on a CPU."""
    torch.set_num_threads(1)
    if name == MARIAN:
        make_step, model = build_marian(torch.device("cpu"))
        versions = f"transformers {version('transformers')}, torch {torch.__version__}"
    else:
        make_step, stepper = build_ours(name, torch.device("cpu"))
        model, versions = stepper.objective.model, f"torch {torch.__version__}"
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    alternating.serve_steps({"parameters": parameters, "version": versions}, make_step)


def add_ratios(rows):
    """Add to each row the ratios of its speed to the peers' speeds, and of its step time to that of softmax."""
    for row in rows:
        alike = [r for r in rows if r["tokens"] == row["tokens"] and r.get("compile") in (None, row.get("compile"))]
        same = {r["model"]: r["tokens_per_second"] for r in alike}
        for key, other in {"times_marian": MARIAN, "times_joey": JOEY}.items():
            if other in same:
                row[key] = row["tokens_per_second"] / same[other]
        if "softmax" in same:
            row["step_times_softmax"] = same["softmax"] / row["tokens_per_second"]


COLUMNS = {
    "model": "model", "compile": "compile", "parameters": "parameters", "tokens": "tokens a step",
    "tokens_per_second": "tokens/s",
    "lowest": "lowest", "highest": "highest", "times_marian": "× Marian", "times_joey": "× Joey NMT",
    "step_times_softmax": "step ÷ softmax step", "tokens_per_second_before": "tokens/s before compiling",
    "ready_seconds": "30th update after s", "compile_seconds": "compiled in s",
}  # fmt: skip


def format_rows(rows):
    """Format the columns that at least one row has."""
    keys = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    whole = ("parameters", "tokens", "tokens_per_second", "tokens_per_second_before", "lowest", "highest")
    cells = [[f"{row[key]:,.0f}" if key in whole and key in row else row.get(key, "–") for key in keys] for row in rows]
    return measuring.format_table([COLUMNS[key] for key in keys], cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--tokens", help="comma-separated numbers of target tokens per step")
    parser.add_argument("--attention", help="comma-separated mechanisms")
    parser.add_argument("--compile", default="auto,static", help="comma-separated values of attnlab train compile=")
    parser.add_argument("--joey", help="Python of an environment with Joey NMT (CPU only)")
    parser.add_argument("--resume", action="store_true", help="measure only the rows that the file lacks (GPU only)")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        return serve_model(given.answer)
    gpu = torch.cuda.is_available()
    if gpu and given.joey:
        parser.error("--joey needs a CPU, but this machine has a GPU: hide it with CUDA_VISIBLE_DEVICES=")
    if given.joey and shutil.which(given.joey) is None:
        parser.error(f"--joey {given.joey} is not a program: give the python of an environment with Joey NMT")
    torch.set_num_threads(1)
    sizes = [int(n) for n in (given.tokens or ("4096,16384" if gpu else "512,1024")).split(",")]
    if any(n < LENGTH or n % LENGTH for n in sizes):
        parser.error(f"--tokens must be multiples of the sentence length {LENGTH}, got {given.tokens}")
    if wrong := set(given.compile.split(",")) - {"auto", "no", "dynamic", "static"}:
        parser.error(f"--compile must be some of auto, no, dynamic and static, got {min(wrong)!r}")
    given.attention = given.attention or ("softmax,realformer,coda,dagpam,sigmoid" if gpu else "softmax")
    about = measuring.collect_provenance(SEED)
    sheet = measuring.Sheet(given.out, "gpu" if gpu else "cpu", about, identify, given.resume and gpu)
    rows = []
    for row in measure_on_gpu(given, sizes, sheet) if gpu else measure_on_cpu(given, sizes):
        rows.append(row)
        add_ratios(rows)
        print(" ".join(f"{key}={value}" for key, value in row.items()), file=sys.stderr, flush=True)
        for each in [row] if gpu else rows:  # on a CPU all take turns, so that each row is compared with all others
            sheet.add(each)
    print(f"iwslt14 training step on {about['hardware']}, torch {about['torch']}")
    print(format_rows(sheet.rows))


def identify(row):
    """Return what a row is about."""
    return [row["tokens"], row["model"], row.get("compile")]


if __name__ == "__main__":
    main()
