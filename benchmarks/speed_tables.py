"""Sections of docs/results.md on the speed of attention, training, decoding and populations."""

from pathlib import Path

import floors
from page_tables import fold_table, format_speed, read_results, render_head

FLOOR = (
    "A floor is the least time of the layer's work at the speeds that the GPU reached in this run: matrix products, "
    "bytes of carries, or other instructions, whichever takes longest (`benchmarks/floors.py`)."
)

PASSES = 14  # of daGPAM's layer over tensors of q's size, forward and backward: stack both queries, and combine


def render_mechanisms(path: Path) -> str:
    """Return forward and backward times beside the fastest softmax attention: on the device, else in eager mode."""
    about, rows = read_results(path)
    part = rows[0]["part"]
    titles = {"layers": "Mechanisms", "llama": "An adapted Llama", "host": "Host time of one call"}
    cases = list(dict.fromkeys(r["case"] for r in rows))
    name = f"{titles[part]}, {' and '.join(cases)}," if part == "layers" else titles[part]
    title = render_head(name, about, f"mechanisms.py --part {part}")
    note = {
        "layers": "Forward and backward of one layer, causal. × is the ratio to the fastest of torch's backends in the "
        "same run.",
        "llama": "A training step of 135M parameters in eager mode. × is the ratio to the model's own attention.",
        "host": "One eager call, forward and backward, on the host. × is the ratio to the fastest of torch's backends.",
    }[part]
    timed = [r for r in rows if r["by"] == "auto" or r["mechanism"] == rows[0]["mechanism"]]
    cases = list(dict.fromkeys((tuple(r["shape"]), r["case"]) for r in timed))
    found = {(r["mechanism"], tuple(r["shape"]), r["case"]): r for r in timed}
    table = [["mechanism", *(f"{case} {','.join(map(str, shape))}" for shape, case in cases)]]
    table += [["---"] + ["---:"] * len(cases)]
    table += [
        [name, *(format_layer(found.get((name, *case), {})) for case in cases)]
        for name in dict.fromkeys(r["mechanism"] for r in timed)
    ]
    missing = sorted({f"{r['mechanism']}: {r['not_run']}" for r in timed if "not_run" in r})
    texts = [title, note, fold_table(table), *compare_with_definitions(rows)]
    if misses := floors.list_misses(rows):
        texts.append(f"Above the goal (× the peer): {'; '.join(misses)}.")
        texts += [FLOOR] if part == "layers" else []
    return "\n\n".join(texts + (["Not run: " + "; ".join(missing) + "."] if missing else []))


def format_layer(row: dict) -> str:
    """Return the time of a step, its ratio to the peer, and its memory."""
    clock = next((row[key] for key in ("host_ms", "device_ms", "eager_ms") if key in row), None)
    if clock is None or "times_peer" not in row:
        return "not run" if "not_run" in row else "–"
    memory = f", {row['peak_mib']:.0f} MiB" if "peak_mib" in row else ""
    return f"{clock:.3g} ms, {row['times_peer']:.3g}×{memory}"


def compare_with_definitions(rows: list[dict]) -> list[str]:
    """Return a table of the layers whose definition was timed too, eager and compiled by torch."""
    found = {(r["mechanism"], r["by"], tuple(r["shape"])): r for r in rows if r["case"] == "causal"}
    table = [["mechanism", "b,h,g,n,d", "attnlab", "definition", "compiled definition"], ["---"] * 2 + ["---:"] * 3]
    for name, shape in [(name, shape) for name, by, shape in found if by == "definition"]:
        cells = [format_layer(found.get((name, by, shape), {})) for by in ("auto", "definition", "compiled definition")]
        table.append([name, ",".join(map(str, shape)), *cells])
    return ["Beside their definitions, eager and by `torch.compile`:", fold_table(table)] if table[2:] else []


def render_kernels(path: Path) -> str:
    """Return the fused layers beside their definitions, after the fastest softmax attention of each shape."""
    about, rows = read_results(path)
    title = render_head("Fused kernels", about, "kernels.py")
    speeds = f"{about['bytes_per_s'] / 1e12:.2f} TB/s and {about['operations_per_s'] / 1e12:.0f} TFLOP/s"
    note = (
        "Forward and backward of one layer, time on the device, bf16, causal, with the carry and its gradient if there "
        "is one. Floors of CODA: reading and writing (b,h,n,n), and σ's products computed twice with both gradients, "
        f"at the {speeds} measured in the same run. Peak ÷ carries: the peak divided by the size of carry in, carry "
        "out and their gradients."
    )
    head = ["layer", "by", "b,h,n,d", "ms", "peak MiB", "× eager", "× compiled", "larger floor, ms", "peak ÷ carries"]
    table = [head, ["---"] * 3 + ["---:"] * 6]
    for r in rows:
        floor = max((r[key] for key in ("traffic_floor_ms", "arithmetic_floor_ms") if key in r), default=None)
        ratios = [r.get("times_eager"), r.get("times_torch.compile"), floor, r.get("peak_of_carries")]
        shown = [f"{x:.3g}" if x is not None else "–" for x in ratios]
        shape = ",".join(map(str, r["shape"]))
        if "device_ms" in r:
            table.append([r["mechanism"], r["way"], shape, f"{r['device_ms']:.3g}", f"{r['peak_mib']:,.0f}", *shown])
        else:
            table.append([r["mechanism"], r["way"], shape, "not run", *["–"] * 5])
    return "\n\n".join([title, note, fold_table(table), *explain_dagpam(about, rows)])


def explain_dagpam(about: dict, rows: list[dict]) -> list[str]:
    """Explain the time of daGPAM's layer: twice softmax attention, and passes over tensors of q's size."""
    sums = []
    for r in rows:
        if (r["mechanism"], r["way"]) == ("dagpam", "fused") and "times_softmax" in r:
            b, h, n, d = r["shape"]
            once = r["device_ms"] / r["times_softmax"]
            passes = 1e3 * PASSES * 2 * b * h * n * d / about["bytes_per_s"]
            total = f"{2 * once:.3g} + {passes:.3g} = {2 * once + passes:.3g} ms, measured {r['device_ms']:.3g} ms"
            sums.append(f"n={n}: {total}, {r['times_softmax']:.3g}×")
    if not sums:
        return []
    return [f"daGPAM as two softmax attentions and {PASSES} passes over tensors of q's size: {'; '.join(sums)}."]


def render_training(path: Path) -> str:
    about, rows = read_results(path)
    taking_turns = "rounds" in rows[0]
    title = render_head("Training step", about, "training.py" + (" --joey PYTHON" if taking_turns else ""))
    note = "The iwslt14 model, forward, backward and update, beside Hugging Face's Marian of the same size"
    if taking_turns:
        versions = "; ".join(dict.fromkeys(f"{r['model']}: {r['version']}" for r in rows))
        note += (
            f" and Joey NMT: {rows[0]['parameters']:,} parameters each, float32, one thread; the processes take turns "
            f"on a shared machine. The speed is the median of {rows[0]['rounds']} rounds by processor time, with the "
            f"slowest and the fastest in brackets. {versions}."
        )
    else:
        note += " in the same run. Ours with CUDA graphs, and blocks compiled as `compile=` says."
    last = {"times_joey": "× Joey NMT"} if taking_turns else {"step_times_softmax": "step ÷ softmax step"}
    ratios = {"times_marian": "× Marian"} | last
    table = [["model", "target tokens per step", "tokens/s", *ratios.values()], ["---"] + ["---:"] * 4]
    for r in rows:
        speed = f"{r['tokens_per_second']:,.0f}"
        if taking_turns:
            speed += f" ({r['lowest']:,.0f}–{r['highest']:,.0f})"
        shown = [f"{r[key]:.2f}" if r.get(key) else "–" for key in ratios]
        model = f"{r['model']}, compile={r['compile']}" if "compile" in r else r["model"]
        table.append([model, f"{r['tokens']:,}", speed, *shown])
    return "\n\n".join([title, note, fold_table(table)])


def render_decoding(path: Path) -> str:
    about, rows = read_results(path)
    peers = [key.removeprefix("times_") for key in rows[0] if key.startswith("times_")]
    compared = any(peer.startswith("ctranslate2") for peer in peers)
    title = render_head("Beam search", about, "decoding.py" + " --ctranslate2 --dtype float32,bfloat16" * compared)
    rules = f"beam {rows[0]['beam']}, {rows[0]['tokens']} tokens per sentence"
    note = f"The {rows[0]['size']} model, {rules}, beside `generate` of Hugging Face's Marian of the same size."
    if compared:
        version = f"CTranslate2 {about['ctranslate2']}"
        note += f" {version} has the weights of our softmax model. One thread, processor time."
    names = {"marian": "Marian", "ctranslate2_float32": "CTranslate2 float32", "ctranslate2_int8": "CTranslate2 int8"}
    heads = [text for peer in peers for text in (f"{names[peer]}, sentences/s", f"× {names[peer]}")]
    columns = ["attention", "type", "batch", "sentences/s", *heads]
    table = [columns, ["---"] * 2 + ["---:"] * (len(columns) - 2)]
    for r in rows:
        cells = [r["attention"], r.get("dtype", "bfloat16"), str(r["batch"]), format_speed(r["sentences_per_s"])]
        for peer in peers:
            speed, times = r.get(f"{peer}_sentences_per_s"), r.get(f"times_{peer}")
            cells += ["–", "–"] if speed is None or times is None else [format_speed(speed), f"{times:.1f}"]
        table.append(cells)
    return "\n\n".join([title, note, fold_table(table)])


def render_population(path: Path) -> str:
    about, rows = read_results(path)
    part = path.stem.partition("-")[2]
    title = render_head(f"Many seeds at once, {part},", about, f"population.py --part {part}")
    if part == "command":
        (r,) = rows
        work = f"{r['runs']} seeds × {r['updates']:,} updates of the Multi30k translator, trained and scored by BLEU"
        took = f"**{r['seconds']:.0f} s** from the command to the last score (mean {r['mean_bleu']:.1f})"
        return f"{title}\n\n{work}: {took}."
    if part == "start":
        note = "Seconds from `attnlab train` to the thirtieth update of the Multi30k translator."
        table = [["attention", "in empty caches", "again"], ["---", "---:", "---:"]]
        table += [[r["attention"], f"{r['first_s']:.1f}", f"{r['again_s']:.1f}"] for r in rows]
    elif part == "transformer":
        note = "Target tokens per second of all runs of the Multi30k translator together."
        table = [["way", "attention", "runs", "tokens/s", "ms an update"], ["---"] * 2 + ["---:"] * 3]
        for r in rows:
            took = f"{r['ms_per_update']:.3g}" if "ms_per_update" in r else "–"
            table.append([r["way"], r["attention"], str(r["runs"]), f"{r['tokens_per_s']:,.0f}", took])
    elif part == "memory":
        note = (
            "GiB that a population of the Multi30k translator reserves; its state (parameters, gradients, moments), "
            "what a pass keeps for its gradient at most, and what is reserved beyond both."
        )
        table = [["attention", "runs", "reserved", "state", "activations", "beyond"], ["---"] + ["---:"] * 5]
        for r in rows:
            sizes = [f"{r[key]:.3g}" for key in ("reserved_gib", "state_gib", "activations_gib")]
            table.append([r["attention"], str(r["runs"]), *sizes, f"{r['beyond_share']:.0%}"])
    else:
        note = "Seed-steps per second of the copy task: a population, and one seed after the other (`nn.LSTM`)."
        table = [["case", "seeds", "one by one", "population", "×"], ["---"] + ["---:"] * 4]
        for r in rows:
            speeds = [f"{r['one_by_one_per_s']:,.0f}", f"{r['population_per_s']:,.0f}"]
            table.append([r["case"], str(r["seeds"]), *speeds, f"{r['times']:.1f}"])
    return "\n\n".join([title, note, fold_table(table)])


SECTIONS = {  # folder of results/ → its section
    "mechanisms": render_mechanisms,
    "kernels": render_kernels,
    "training": render_training,
    "decoding": render_decoding,
    "population": render_population,
}
