"""Sections of docs/results.md on reading models: analyses, alignment, the viewer, and robustness."""

from pathlib import Path

from page_tables import fold_table, read_results, render_head


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


SECTIONS = {  # folder of results/ → its section
    "reading": render_reading,
    "diversity": render_diversity,
    "contribution": render_contribution,
    "alignment": render_alignment,
    "alignment-readings": render_alignment_readings,
    "viewer": render_viewer,
    "faults": render_faults,
}
