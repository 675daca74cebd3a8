"""A training step of the iwslt14 model against Hugging Face's Marian, and on a CPU Joey NMT, of the same size.

    python benchmarks/training.py [--out results/training] [--tokens 4096,16384] [--attention softmax,coda,dagpam]
                                  [--joey /path/to/joey/bin/python]

A step is forward, backward and the update (Adam), at a given number of target tokens, length 32 on both sides, nothing
padded. Layers, widths, vocabularies, activation, label smoothing and every dropout are the same in all of them.

On a GPU, in bf16 and in the same run: ours as `attnlab train` runs it there (compiled blocks, CUDA graphs), Marian as
transformers is used: eager, sdpa, fused Adam.

On a CPU, in float32 on one thread: each a process of its own, taking turns; the median of the processor time of the
rounds. --joey names the interpreter of an environment that has Joey NMT (`pip install joeynmt`); its Adam is that of
its own builder.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import alternating
import measuring
import torch

from attnlab.models.presets import PRESETS
from attnlab.models.transformer import build
from attnlab.training import optimisers as optimise
from attnlab.training.step import Captured, Eager, Flat, Objective

LENGTH, SEED, ROUNDS = 32, 0, 11
MARIAN, JOEY = "Marian (transformers)", "Joey NMT"


def batch(tokens, device):
    torch.manual_seed(SEED)
    rows = tokens // LENGTH
    return [torch.randint(4, 6000, (rows, LENGTH), device=device) for _ in range(3)]


def seconds_of(step, repeats):
    """The median by the wall clock, waiting for the GPU."""
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


def ours(attention, device, dynamic):
    """A function of a number of tokens that makes the step; one model, compiled once, serves all numbers."""
    torch.manual_seed(SEED)
    model = build(replace(PRESETS["iwslt14"], attention=attention)).to(device).train()
    captured = device.type == "cuda"
    objective = Objective(model, smoothing=0.1)
    flat = Flat(model, torch.bfloat16 if captured else torch.float32)
    optimizer = optimise.build_optimiser(flat.master, "adam", betas=(0.9, 0.98), eps=1e-8, momentum=0.0, weight_decay=0.0)
    if captured:
        torch._dynamo.reset()
        objective.compile_parts(dynamic=dynamic)
    stepper = (Captured if captured else Eager)(objective, flat, optimizer, clip=0.0)

    def of(tokens, steps):
        source, target, goal = batch(tokens, device)

        def step():
            for _ in range(steps):
                stepper.accumulate([source, target], goal, 1.0 / tokens)
                optimise.set_learning_rate(optimizer, 1e-4)
                stepper.apply()
            return stepper.read_loss() / (tokens * steps)

        return step

    return of, stepper


def marian(device):
    """The same of Hugging Face's Marian."""
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

    def of(tokens, steps):
        source, target, goal = batch(tokens, device)

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

    return of, model


def on_gpu(given, sizes, kept, steps=10, repeats=5):
    """A row for each model and size; kept is given all rows so far, lest an interruption lose them."""
    device = torch.device("cuda")
    rows = []
    of = marian(device)[0]
    for tokens in sizes:
        speed = tokens * steps / seconds_of(of(tokens, steps), repeats)
        rows.append({"tokens": tokens, "model": MARIAN, "tokens_per_second": speed})
    for attention in given.attention.split(","):
        of, stepper = ours(attention, device, given.compile == "dynamic")
        for tokens in sizes:
            start = time.perf_counter()
            step = of(tokens, steps)
            step()
            ready = time.perf_counter() - start
            speed = tokens * steps / seconds_of(step, repeats)
            row = {"tokens": tokens, "model": attention, "tokens_per_second": speed, "ready_seconds": ready}
            rows.append(row | {"stepper": type(stepper).__name__, "not_finite": float(stepper.bad)})
            print(f"{attention} {tokens}: {speed:,.0f} tokens/s", flush=True)
            kept(rows)
    return rows


def on_cpu(given, sizes):
    """A row for each program and size; the first program of a round is ours."""
    commands = {name: [sys.executable, __file__, "--answer", name] for name in (*given.attention.split(","), MARIAN)}
    if given.joey:
        script = Path(__file__).with_name("joey_step.py")
        commands[JOEY] = [given.joey, str(script), json.dumps(asdict(PRESETS["iwslt14"]))]
    questions = [{"tokens": tokens, "steps": 1} for tokens in sizes]
    about, seconds = alternating.in_turns(commands, questions, ROUNDS)
    rows = []
    for (name, place), times in seconds.items():
        tokens = sizes[place]
        row = {"tokens": tokens, "model": name, "tokens_per_second": tokens / statistics.median(times)}
        spread = {"lowest": tokens / max(times), "highest": tokens / min(times), "rounds": len(times)}
        rows.append(row | spread | about[name])
    return rows


def answer(name):
    """Be one of the programs that take turns on a CPU."""
    torch.set_num_threads(1)
    if name == MARIAN:
        of, model = marian(torch.device("cpu"))
        versions = f"transformers {version('transformers')}, torch {torch.__version__}"
    else:
        of, stepper = ours(name, torch.device("cpu"), dynamic=False)
        model, versions = stepper.objective.model, f"torch {torch.__version__}"
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    alternating.answer({"parameters": parameters, "version": versions}, of)


def compare(rows):
    """Add to each row its speed as a multiple of the others', and its step as one of the softmax step."""
    for row in rows:
        same = {r["model"]: r["tokens_per_second"] for r in rows if r["tokens"] == row["tokens"]}
        for key, other in {"times_marian": MARIAN, "times_joey": JOEY}.items():
            if other in same:
                row[key] = row["tokens_per_second"] / same[other]
        row["step_times_softmax"] = same["softmax"] / row["tokens_per_second"] if "softmax" in same else None


COLUMNS = {
    "model": "model", "parameters": "parameters", "tokens": "tokens a step", "tokens_per_second": "tokens/s",
    "lowest": "lowest", "highest": "highest", "times_marian": "× Marian", "times_joey": "× Joey NMT",
    "step_times_softmax": "step ÷ softmax step", "ready_seconds": "first step after s",
}  # fmt: skip


def table(rows):
    """Those of the columns that some row has."""
    keys = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    whole = ("parameters", "tokens", "tokens_per_second", "lowest", "highest")
    cells = [[f"{row[key]:,.0f}" if key in whole and key in row else row.get(key, "–") for key in keys] for row in rows]
    return measuring.table([COLUMNS[key] for key in keys], cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for the numbers as JSON")
    parser.add_argument("--tokens", help="target tokens a step, separated by commas")
    parser.add_argument("--attention", help="mechanisms, separated by commas")
    parser.add_argument("--compile", default="static", choices=["static", "dynamic"], help="as attnlab train compile=")
    parser.add_argument("--joey", help="on a CPU: the Python that has Joey NMT")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        return answer(given.answer)
    gpu = torch.cuda.is_available()
    if gpu and given.joey:
        parser.error("--joey is compared on a CPU, and this is a GPU: hide it with CUDA_VISIBLE_DEVICES=")
    if given.joey and shutil.which(given.joey) is None:
        parser.error(f"--joey {given.joey} is no program: name the python of an environment that has Joey NMT")
    torch.set_num_threads(1)
    sizes = [int(n) for n in (given.tokens or ("4096,16384" if gpu else "512,1024")).split(",")]
    if any(n < LENGTH or n % LENGTH for n in sizes):
        parser.error(f"--tokens {given.tokens}: each must be a multiple of the length of a sentence, {LENGTH}")
    given.attention = given.attention or ("softmax,realformer,coda,dagpam" if gpu else "softmax")
    about = measuring.surroundings(SEED) | ({"compile": given.compile} if gpu else {})

    def keep(rows):
        compare(rows)
        measuring.write(given.out, "gpu" if gpu else "cpu", about, rows)

    rows = on_gpu(given, sizes, keep) if gpu else on_cpu(given, sizes)
    keep(rows)
    print(f"iwslt14 training step on {about['hardware']}, torch {about['torch']}")
    print(table(rows))


if __name__ == "__main__":
    main()
