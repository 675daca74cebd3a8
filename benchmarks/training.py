"""A training step of the iwslt14 model against Hugging Face's Marian of the same size, in the same run.

    python benchmarks/training.py [--out results/training] [--tokens 4096,16384] [--attention softmax,coda,dagpam]

A step is forward, backward and the update (fused Adam), at a given number of target tokens, length 32 on both sides.
On a GPU both run in bf16; ours as `attnlab train` runs it there (compiled blocks, CUDA graphs), Marian as transformers
is used: eager, sdpa. On a CPU: float32, one thread, a smaller number of tokens. Dropout is on in both.
"""

import argparse
import time
from dataclasses import replace

import measuring
import torch

from attnlab import optimise
from attnlab.models.presets import PRESETS
from attnlab.models.transformer import build
from attnlab.stepping import Captured, Eager, Flat, Objective

LENGTH, SEED = 32, 0


def batch(tokens, device):
    torch.manual_seed(SEED)
    rows = tokens // LENGTH
    return [torch.randint(4, 6000, (rows, LENGTH), device=device) for _ in range(3)]


def seconds_of(step, device, repeats):
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def ours(attention, device, dynamic):
    """A function of a number of tokens that makes the step; one model, compiled once, serves all numbers."""
    torch.manual_seed(SEED)
    model = build(replace(PRESETS["iwslt14"], attention=attention)).to(device).train()
    captured = device.type == "cuda"
    objective = Objective(model, smoothing=0.1)
    flat = Flat(model, torch.bfloat16 if captured else torch.float32)
    optimizer = optimise.optimiser(flat.master, "adam", betas=(0.9, 0.98), eps=1e-8, momentum=0.0, weight_decay=0.0)
    if captured:
        torch._dynamo.reset()
        objective.compile_parts(dynamic=dynamic)
    stepper = (Captured if captured else Eager)(objective, flat, optimizer, clip=0.0)

    def of(tokens, steps):
        source, target, goal = batch(tokens, device)

        def step():
            for _ in range(steps):
                stepper.accumulate([source, target], goal, 1.0 / tokens)
                optimise.set_rate(optimizer, 1e-4)
                stepper.apply()

        return step

    return of, stepper


def marian(tokens, device, steps):
    from transformers import MarianConfig, MarianMTModel

    preset = PRESETS["iwslt14"]
    torch.manual_seed(SEED)
    config = MarianConfig(
        vocab_size=preset.vocabulary, d_model=preset.width, encoder_layers=6, decoder_layers=6,
        encoder_attention_heads=preset.heads, decoder_attention_heads=preset.heads, encoder_ffn_dim=preset.feed_forward,
        decoder_ffn_dim=preset.feed_forward, dropout=preset.dropout, activation_dropout=preset.activation_dropout,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=1, max_position_embeddings=256, forced_eos_token_id=None,
    )  # fmt: skip
    model = MarianMTModel(config).to(device).train()
    source, target, goal = batch(tokens, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)

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

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for the numbers as JSON")
    parser.add_argument("--tokens", help="target tokens a step, separated by commas")
    parser.add_argument("--attention", default="softmax,realformer,coda,dagpam")
    parser.add_argument("--compile", default="static", choices=["static", "dynamic"], help="as attnlab train compile=")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    steps, repeats = (10, 5) if device.type == "cuda" else (1, 5)
    sizes = [int(n) for n in (given.tokens or ("4096,16384" if device.type == "cuda" else "512")).split(",")]
    rows = []
    for tokens in sizes:
        speed = tokens * steps / seconds_of(marian(tokens, device, steps), device, repeats)
        rows.append({"tokens": tokens, "model": "Marian (transformers)", "tokens_per_second": speed})
    for attention in given.attention.split(","):
        of, stepper = ours(attention, device, given.compile == "dynamic")
        for tokens in sizes:
            start = time.perf_counter()
            step = of(tokens, steps)
            step()
            ready = time.perf_counter() - start
            speed = tokens * steps / seconds_of(step, device, repeats)
            row = {"tokens": tokens, "model": attention, "tokens_per_second": speed, "ready_seconds": ready}
            rows.append(row | {"stepper": type(stepper).__name__, "not_finite": float(stepper.bad)})
            print(f"{attention} {tokens}: {speed:,.0f} tokens/s", flush=True)
    for row in rows:
        same = {r["model"]: r["tokens_per_second"] for r in rows if r["tokens"] == row["tokens"]}
        row["times_marian"] = row["tokens_per_second"] / same["Marian (transformers)"]
        row["step_times_softmax"] = same["softmax"] / row["tokens_per_second"] if "softmax" in same else None
    about = measuring.surroundings(SEED)
    columns = ["model", "tokens a step", "tokens/s", "× Marian", "step ÷ softmax step", "first step after s"]
    keys = ["model", "tokens", "tokens_per_second", "times_marian", "step_times_softmax", "ready_seconds"]
    print(f"iwslt14 training step on {about['hardware']}, torch {about['torch']}")
    print(
        measuring.table(
            columns, [[f"{r[k]:,.0f}" if k == "tokens_per_second" else r.get(k, "–") for k in keys] for r in rows]
        )
    )
    measuring.write(given.out, device.type if device.type == "cpu" else "gpu", about, rows)


if __name__ == "__main__":
    main()
