"""Write docs/results.md from results/*.json; no number in it is typed by hand.

python benchmarks/results.py
"""

import json
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import floors

from attnlab.experiments.ledger import FILE
from attnlab.experiments.reproduction import ItemResult, draw_study, list_scales
from attnlab.experiments.significance import compute_interval
from attnlab.experiments.status import tabulate_status
from attnlab.experiments.study import SCALES, Scale
from attnlab.experiments.study_page import format_published, tabulate_wide
from attnlab.experiments.verdicts import VERDICTS, Cell
from attnlab.studies import STUDIES, open_study

ROOT = Path(__file__).parent.parent
FLOOR = (
    "A floor is the least time of the layer's work at the speeds that the GPU reached in this run: matrix products, "
    "bytes of carries, or other instructions, whichever takes longest (`benchmarks/floors.py`)."
)
SHORT = 8  # rows of a table that is not folded
PASSES = 14  # of daGPAM's layer over tensors of q's size, forward and backward: stack both queries, and combine


def render_page() -> str:
    """Return the page as Markdown: its contents, then the papers, comparisons of attention, and speed."""
    timed = {"mechanisms": render_mechanisms, "kernels": render_kernels, "training": render_training}
    timed |= {"decoding": render_decoding, "population": render_population, "reading": render_reading}
    timed |= {"diversity": render_diversity, "contribution": render_contribution, "alignment": render_alignment}
    timed |= {"alignment-readings": render_alignment_readings, "viewer": render_viewer, "faults": render_faults}
    compared = [render_learning(name, path) for name in LEARNING for path in find_files(name)]
    compared += [render_comparison(path) for path in sorted((ROOT / "results" / "compare").glob("*/results.json"))]
    papers = [name for name in sorted(STUDIES) if open_study(name).from_paper]
    own = [name for name in sorted(STUDIES) if name not in papers and (ROOT / "results" / name / FILE).exists()]
    groups = {
        "Papers": [render_status(), *map(render_study, papers)],
        "Comparisons of attention": [*map(render_own_study, own), *compared],
        "Speed, memory and robustness": [show(path) for name, show in timed.items() for path in find_files(name)],
    }
    contents = []
    for group, sections in groups.items():
        contents += [f"- {group}", *(f"    - {link_section(section)}" for section in sections)]
    parts = [
        "# Results",
        "Every table names the command that measures it. Long tables are folded: click a line that starts with a "
        "number of rows. `python benchmarks/results.py` writes this page from `results/`.",
        "\n".join(contents),
        *(section for sections in groups.values() for section in sections),
    ]
    return "\n\n".join(parts) + "\n"


def find_files(name: str) -> list[Path]:
    """Return the files of results of a benchmark, in order."""
    return sorted((ROOT / "results" / name).glob("*.json"))


def link_section(section: str) -> str:
    """Return a link to a section by its heading, for readers of the site and of GitHub."""
    title = section.partition("\n")[0].removeprefix("## ")
    anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
    return f"[{title}](#{anchor})"


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
    rows = [r for r in rows if r["by"] == "auto" or r["mechanism"] == rows[0]["mechanism"]]
    cases = list(dict.fromkeys((tuple(r["shape"]), r["case"]) for r in rows))
    table = [["mechanism", *(f"{case} {','.join(map(str, shape))}" for shape, case in cases)]]
    table += [["---"] + ["---:"] * len(cases)]
    found = {(r["mechanism"], tuple(r["shape"]), r["case"]): r for r in rows}
    for name in dict.fromkeys(r["mechanism"] for r in rows):
        cells = [name]
        for shape, case in cases:
            row = found.get((name, shape, case), {})
            clock = next((row[key] for key in ("host_ms", "device_ms", "eager_ms") if key in row), None)
            text = "not run" if "not_run" in row else "–"
            if clock is not None and "times_peer" in row:
                text = f"{clock:.3g} ms, {row['times_peer']:.3g}×"
                text += f", {row['peak_mib']:.0f} MiB" if "peak_mib" in row else ""
            cells.append(text)
        table.append(cells)
    missing = sorted({f"{r['mechanism']}: {r['not_run']}" for r in rows if "not_run" in r})
    texts = [title, note, fold_table(table)]
    if misses := floors.list_misses(rows):
        texts.append(f"Above the goal (× the peer): {'; '.join(misses)}.")
        texts += [FLOOR] if part == "layers" else []
    return "\n\n".join(texts + (["Not run: " + "; ".join(missing) + "."] if missing else []))


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


def render_diversity(path: Path) -> str:
    about, rows = read_results(path)
    title = render_head("Divergence of all pairs of heads", about, "diversity.py")
    clock = "device_ms" if path.stem == "gpu" else "eager_ms"
    head = ["by", "b,h,n", "causal", "ms", "peak MiB without the weights", "× broadcast", "× compiled", "error"]
    table = [head, ["---"] * 3 + ["---:"] * 5]
    for r in rows:
        about_row = [r["way"], ",".join(map(str, r["shape"])), "yes" if r["causal"] else "no"]
        if clock not in r:
            table.append([*about_row, "not run", *["–"] * 4])
            continue
        ratios = [f"{r[key]:.3g}" if key in r else "–" for key in ("times_broadcast", "times_torch.compile")]
        table.append([*about_row, f"{r[clock]:.3g}", f"{r['peak_mib']:,.3g}", *ratios, f"{r['error']:.0e}"])
    note = f"{rows[0]['weights_mib']:.0f} MiB of weights in float32."
    return "\n\n".join([title, note, fold_table(table)])


def render_contribution(path: Path) -> str:
    about, rows = read_results(path)
    title = render_head("Norms of contributions", about, "contribution.py")
    note = (
        "Twelve layers of BERT-base's shape, one text, float32, beside computing every αf(x): ‖f‖ and ‖αf‖ (head), and "
        "also ‖Σ_h αf‖ (all)."
    )
    if path.stem == "cpu":
        note += (
            " Also: a record and its norms beside an eager forward pass; the statistics of a corpus (`attnlab inspect "
            "--file`) beside the model's passes over it, where × is the share of their tokens/s; the weights of a "
            "decoder by inseq and by a record; 8,192 tokens through one layer of Llama's shape, with the peak of the "
            "whole process. Memory is the growth of the resident size, which does not show less than 1 MiB."
        )
    head = ["way", "tokens", "ms", "peak MiB", "× faster", "× less memory"]
    table = [head, ["---", *["---:"] * 5]]
    for r in rows:
        if "ms" not in r:
            table.append([r["way"], "–", "not run", *["–"] * 3])
            continue
        ratios = [f"{r[key]:.3g}" if key in r else "–" for key in ("times_faster", "times_less_memory")]
        table.append([r["way"], f"{r['tokens']:,}", f"{r['ms']:.3g}", f"{r['peak_mib']:,.3g}", *ratios])
    return "\n\n".join([title, note, fold_table(table)])


def render_alignment(path: Path) -> str:
    if path.stem == "statistical":
        return render_statistical(path)
    about, rows = read_results(path)
    title = render_head("Word alignment", about, "alignment.py")
    peers = ", ".join(f"{name} {version or 'not installed'}" for name, version in about["peers"].items())
    scored = f", AER on the {about['gold_pairs']} pairs aligned by hand" if about["gold_pairs"] else ""
    note = (
        f"{about['text']}, one thread{scored}. Every aligner is trained on the pairs it then aligns. Translator: "
        f"{about['translator']}. fast_align is run by systran-align ({peers})."
    )
    table = [["aligner", "pairs", "pairs / CPU s", "AER %"], ["---", *["---:"] * 3]]
    for r in rows:
        error = "–" if r["aer_percent"] is None else f"{r['aer_percent']:.1f}"
        table.append([r["what"], f"{r['pairs']:,}", f"{r['pairs_per_cpu_second']:,.0f}", error])
    return "\n\n".join([title, note, fold_table(table)])


def render_alignment_readings(path: Path) -> str:
    """Return AER, speed and memory of alignments by translators, encoders and trained aligners."""
    about, rows = read_results(path)
    on_gpu = path.stem == "gpu"
    title = render_head("Alignment by attention", about, f"alignment_readings.py{' --gpu' if on_gpu else ''}")
    note = (
        "From words to links, with random weights of OPUS-MT's shape in bf16: speed only."
        if on_gpu
        else f"AER on the gold pairs of {about['gold_pair']}, a development set on which thresholds were tuned."
    )
    table = [["reading", "AER %", "pairs / s", "peak GiB"], ["---", *["---:"] * 3]]
    for r in rows:
        error = f"{r['aer_percent']:.1f} [{r['low']:.1f}, {r['high']:.1f}]" if "aer_percent" in r else "–"
        table.append([r["reading"], error, f"{r['pairs_per_second']:,.0f}", f"{r['peak_gib']:.1f}"])
    return "\n\n".join([title, note, fold_table(table)])


def render_reading(path: Path) -> str:
    """Return the time of reading every head beside the forward pass of the model."""
    about, rows = read_results(path)
    title = render_head("Reading every head", about, f"reading.py --part {path.stem}")
    note = (
        "Received and taken ‖αf(x)‖, entropies and sinks of every head, streamed layer by layer. The time of a reading "
        "includes the forward pass. Totals were compared with their definition first; the error is the largest."
    )
    table = [["model", "tokens", "forward s", "reading s", "×", "peak GiB", "error"], ["---", *["---:"] * 6]]
    for r in rows:
        peak = f"{r['reading_gib']:.1f}" if r["reading_gib"] else "–"
        times = [f"{r[key]:.3g}" for key in ("forward_s", "reading_s", "times_forward")]
        table.append([r["model"], f"{r['tokens']:,}", *times, peak, f"{r['error']:.1e}"])
    return "\n\n".join([title, note, fold_table(table)])


def render_statistical(path: Path) -> str:
    """Return AER of both directions and joined, speed and memory of the statistical aligners by text."""
    about, rows = read_results(path)
    title = render_head("Statistical word aligners", about, "statistical_aligners.py --out results/alignment")
    peers = ", ".join(f"{name} {version or 'not installed'}" for name, version in about["peers"].items())
    note = (
        "Both directions are trained on the pairs that they align: the gold pairs and Europarl, in lower case. One "
        "thread. Joined by grow-diag-final-and, with 95 % intervals of 1,000 resamplings of the gold pairs. fast_align "
        f"is run by systran-align and joins the directions itself ({peers})."
    )
    table = [["text", "aligner", "pairs", "AER %: ahead", "back", "joined", "pairs / CPU s", "peak GB"]]
    table += [["---", "---", *["---:"] * 6]]
    for r in rows:
        own = [f"{r[name]:.1f}" if name in r else "–" for name in ("ahead_aer_percent", "back_aer_percent")]
        joined = "{:.1f} [{:.1f}, {:.1f}]".format(r["joined_aer_percent"], *r["joined_interval"])
        speed = [f"{r['pairs_per_cpu_second']:,.0f}", f"{r['peak_gigabytes']:.2f}"]
        table.append([r["text"], r["aligner"], f"{r['pairs']:,}", *own, joined, *speed])
    return "\n\n".join([title, note, fold_table(table)])


def render_faults(path: Path) -> str:
    """Return how many faults of each kind were tried, and how they ended."""
    about, rows = read_results(path)
    note = (
        "Kills at random moments, damaged checkpoints and damaged inputs. A damaged input is refused in one line, or "
        "read as an independent reader reads it; `benchmarks/faults.py` defines the columns."
    )
    table = [list(rows[0]), ["---"] + ["---:"] * (len(rows[0]) - 1), *([f"{x}" for x in row.values()] for row in rows)]
    return f"{render_head('Faults', about, 'faults.py --out results/faults')}\n\n{note}\n\n{fold_table(table)}"


def render_viewer(path: Path) -> str:
    about, rows = read_results(path)
    title = render_head("The viewer's page", about, "viewer.py")
    note = (
        "BERT-base's shape, 12 layers of 12 heads, all with weights and norms: MiniLM's six layers on two texts, and "
        "random weights, which compress worst. Headless Chromium without a GPU, 2 cores."
    )
    head = ["page", "tokens", "MB", "weights alone, MB", "first paint, ms", "ready, ms", "frames/s", "layer, ms"]
    keys = ("megabytes", "weights_megabytes", "first_paint_ms", "ready_ms", "frames_per_second", "layer_ms")
    table = [head, ["---", *["---:"] * 7]]
    for r in rows:
        values = [f"{r[key]:,.3g}" if r.get(key) is not None else "–" for key in keys]
        table.append([r["case"], str(r["tokens"]), *values])
    return "\n\n".join([title, note, fold_table(table)])


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


LEARNING = {
    "multi30k": (
        "multi30k, German to English",
        "Test part of 2016, raw cased text, beam 5, weights of the best validation loss.",
    ),
    "ptb": (
        "Penn Treebank, language model",
        "Test part, words, windows of `block` tokens whose first `context` are not scored, weights of the best "
        "validation loss.",
    ),
}


def render_learning(name: str, path: Path) -> str:
    about, rows = read_results(path)
    heading, scored = LEARNING[name]
    title = render_head(f"{heading},", about, f"learning.py {name}")
    recipe = ", ".join(f"{key}={value}" for key, value in about["recipe"].items())
    fewer = "± is a 95 % t-interval over the seeds; with fewer than three seeds, the values are listed."
    signature = f" {rows[0]['signature']}." if "signature" in rows[0] else ""
    measures = {"bleu": ("BLEU", 1), "test_perplexity": ("test perplexity", 2)}
    measures = {key: value for key, value in measures.items() if key in rows[0]}
    head = ["attention", "parameters", *(title for title, _ in measures.values()), "tokens/s in training"]
    table = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name in dict.fromkeys(r["attention"] for r in rows):
        own = [r for r in rows if r["attention"] == name]
        values = [format_spread([r[key] for r in own], digits) for key, (_, digits) in measures.items()]
        speeds = [f"{r['tokens_per_second']:,.0f}" for r in own if r["tokens_per_second"]]
        table.append([name, f"{own[0]['parameters']:,}", *values, speeds[0] if speeds else "not timed"])
    return "\n\n".join([title, f"{scored} {fewer}{signature} Recipe: {recipe}.", fold_table(table)])


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


def format_speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


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


def render_status() -> str:
    """Return how much of each paper is measured, as `attnlab reproduce --status` counts it."""
    table, _ = tabulate_status([open_study(name) for name in STUDIES], ROOT / "results")
    rows = [list(table.columns), ["---"] + ["---:"] * (len(table.columns) - 1), *table.rows]
    note = (
        "`attnlab reproduce --status`. Numbers are those that the papers print, each counted once. A cell compares a "
        "number or a direction with ours; several cells may share a number. The columns from *reproduced* on count the "
        "cells that were run; [how to read a verdict](reproduce.md#how-to-read-a-verdict)."
    )
    return "\n\n".join(["## The papers", note, format_table([[str(x) for x in row] for row in rows])])


def render_study(name: str) -> str:
    """Return the measured cells of a study at full scale, and the remarks of every item."""
    study, items = open_study(name), read_items(name)
    parts = [f"## {study.title.replace(' & ', ' and ')}"]
    absent = ", ".join(each for each in study.items if each not in items)
    parts += [f"Not run at full scale yet: {absent}."] if absent else []
    for item in items.values():
        about = item.about
        options = "".join(f" {key}={value}" for key, value in item.config.options.items())
        command = f"`attnlab reproduce {name}{options} --only {item.config.item} --scale full`"
        on = f"{about['hardware']}, torch {about['torch']}, commit {about['commit']}, {about['wall_s']:.0f} s"
        rows = [
            ["", "", "published ± margin", "ours", "95 % interval", "Holm's p", "verdict", "differs in"],
            ["---", "---", "---:", "---:", "---:", "---:", "---", "---"],
        ]
        cells = [cell for cell in item.cells if cell.values]
        for cell in cells:
            interval = " … ".join(map(format_number, cell.interval)) if cell.interval else "–"
            ours = "–" if cell.mean is None else format_number(cell.mean)
            p = "–" if cell.holm is None else f"{cell.holm:.2g}"
            about_row = [cell.row, cell.column, format_published(cell), ours, interval, p]
            rows.append([*about_row, cell.outcome, ", ".join(cell.tags)])
        parts += [f"### {item.title}", f"{command}. {on}."]
        parts += [quote_tokens(" ".join(item.remarks))] if item.remarks else []
        parts += [fold_table(rows, count_verdicts(cells), short=0)] if cells else []
        missing = len(item.cells) - len(cells)
        parts += [f"{missing} more cells are not run."] if missing else []
    return "\n\n".join(parts)


def render_own_study(name: str) -> str:
    """Return what a study without a paper measured, at its largest scale so far."""
    study, ledger = open_study(name), ROOT / "results" / name / FILE
    scale = max(list_scales(study, ledger), key=SCALES.index)
    parts = [f"## {study.title}"]
    for item in read_items(name, scale=scale).values():
        about, table = item.about, tabulate_wide(item.cells)
        on = f"{about['hardware']}, torch {about['torch']}, commit {about['commit']}"
        parts += [f"`attnlab reproduce {name} --scale {scale}`. {on}.", " ".join(item.remarks)]
        rows = [list(table.columns), ["---"] + ["---:"] * (len(table.columns) - 1), *table.rows]
        parts.append(fold_table([[str(x) for x in row] for row in rows]))
    return "\n\n".join(parts)


def read_items(study: str, results: Path = ROOT / "results", scale: Scale = "full") -> dict[str, ItemResult]:
    """Return the items of a study at a scale by name, drawn from its ledger; nothing is written to results/."""
    ledger = results / study / FILE
    with TemporaryDirectory() as scratch:
        items = (
            draw_study(open_study(study), scale, Path(scratch), ledger=ledger, save=False) if ledger.exists() else []
        )
    return {item.config.item: item for item in items}


def format_number(x: float) -> str:
    """Format a number with three digits, or with all digits before the point."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{0.0 if abs(x) < 1e-12 else x:.3g}"


def render_comparison(path: Path) -> str:
    """Return a comparison: quality, the difference to its first row, and the divergence of heads."""
    content = json.loads(path.read_text(encoding="utf-8"))
    about, jsd = content["about"], "head JSD (nats a sentence)"
    known = {name for row in content["rows"] for name in row["measures"]}
    judges = [name for name in dict.fromkeys((content["judged_by"], "BLEU")) if name in known]
    head = [column for by in judges for column in (by, "− first row", "detectable", "Holm's p")]
    table = [["attention", *head, jsd, "parameters"], ["---"] + ["---:"] * (len(head) + 2)]
    for row in content["rows"]:
        shown = [text for by in judges for text in format_judged(row["measures"].get(by, {"seeds": {}}), by)]
        diverse = format_spread(list(row["measures"].get(jsd, {"seeds": {}})["seeds"].values()), 2) or "–"
        table.append([row["row"], *shown, diverse, f"{row['parameters']:,}"])
    note = (
        f"`{about['command']}`. Trained on {about.get('trained on', about['hardware'])}, analysed at commit "
        f"{about['commit']}, seeds {about['seeds']}; ± is half of the 95 % t-interval, for three seeds or more. "
        "Detectable: the smallest true difference that these seeds find with power 0.8."
    )
    return "\n\n".join([f"## Comparison: {path.parent.name}", note, fold_table(table)])


def format_judged(quality: dict, by: str) -> list[str]:
    """Return the mean of a row, its difference from the first one, the detectable one, and Holm's p."""
    digits = 4 if "log-perplexity" in by else 2
    against = quality.get("against_first") or {"differences": {}, "interval": None, "holm": None, "detectable": None}
    difference = format_spread(list(against["differences"].values()), digits, against["interval"])
    numbers = [("–" if x is None else f"{x:.2g}") for x in (against["detectable"], against["holm"])]
    return [format_spread(list(quality["seeds"].values()), digits) or "–", difference or "–", *numbers]


def format_spread(values: list[float], digits: int, between: tuple[float, float] | None = None) -> str:
    """Format the mean with its 95 % t-interval, by default of these values; or the values, if there are too few."""
    if (between := between or compute_interval(values)) is None:
        return ", ".join(f"{x:.{digits}f}" for x in values)
    low, high = between
    return f"{(low + high) / 2:.{digits}f} ± {(high - low) / 2:.{digits}f}"


def read_results(path: Path) -> tuple[dict, list[dict]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    about, rows = content["about"], content["rows"]
    commits = dict.fromkeys([about.get("commit"), *(row["commit"] for row in rows if "commit" in row)])
    return about | {"commit": " and ".join(map(str, commits))}, rows


def render_head(title: str, about: dict, command: str) -> str:
    """Return the heading of a benchmark, its command, versions, commit and seed."""
    versions = f"torch {about['torch']}, Python {about['python']}, commit {about['commit']}, seed {about['seed']}"
    note = f" {about['note']}" if "note" in about else ""
    return f"## {title} on {about['hardware']}\n\n`python benchmarks/{command}`. {versions}.{note}"


def count_verdicts(cells: list[Cell]) -> str:
    """Return how many cells have each verdict."""
    counts = Counter(cell.verdict for cell in cells)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)


def quote_tokens(text: str) -> str:
    """Quote tokens such as <s> as code, because Markdown reads them as HTML."""
    return re.sub(r"</?\w+>", r"`\g<0>`", text)


def format_table(table: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(map(quote_tokens, row)) + " |" for row in table)


def fold_table(table: list[list[str]], found: str = "", *, short: int = SHORT) -> str:
    """Return a table that a click unfolds, below its number of rows and a summary; a short table stays open."""
    content, count = format_table(table), len(table) - 2
    if count <= short:
        return content
    summary = f"{count} rows: {found}" if found else f"{count} rows"
    return fold_text(summary, content)


def fold_text(summary: str, text: str) -> str:
    """Return Markdown that a click on its summary unfolds, on the site and on GitHub."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(render_page(), encoding="utf-8")
