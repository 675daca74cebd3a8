"""docs/results.md from results/*.json: no number in it is typed by hand.

python benchmarks/results.py
"""

import json
import re
from pathlib import Path

from attnlab.experiments.significance import interval

ROOT = Path(__file__).parent.parent
PASSES = 14  # of daGPAM's layer over tensors of q's size, forward and backward: to stack both queries, and to combine


def page() -> str:
    parts = [
        "# Results",
        "Made by `python benchmarks/results.py` from `results/`; each table says what measures it again.",
    ]
    parts += [mechanisms(path) for path in sorted((ROOT / "results" / "mechanisms").glob("*.json"))]
    timed = {"kernels": kernels, "training": training_steps, "decoding": decoding}
    timed |= {"diversity": diversity, "contribution": contribution, "alignment": alignment}
    timed |= {"viewer": viewer, "population": population}
    for name, section in timed.items():
        parts += [section(path) for path in sorted((ROOT / "results" / name).glob("*.json"))]
    for name in LEARNT:
        parts += [learnt(name, path) for path in sorted((ROOT / "results" / name).glob("*.json"))]
    parts += [compared(path) for path in sorted((ROOT / "results" / "compare").glob("*/results.json"))]
    parts += [study(path) for path in sorted((ROOT / "results").glob("*/full/results.json"))]
    return "\n\n".join(parts) + "\n"


def mechanisms(path: Path) -> str:
    """Forward and backward against torch's attention; on a GPU the time on the device, else the eager one."""
    about, rows = read(path)
    clock = "device_ms" if path.stem == "gpu" else "eager_ms"
    command = f"`python benchmarks/mechanisms.py --device {path.stem}`"
    title = f"## Mechanisms on {about['hardware']}\n\n{command}. {where(about)}"
    note = (
        "Forward and backward, causal. × is against torch's fused attention with its fastest backend, in the same run. "
        "Mechanisms without a fused form are timed by their definition."
    )
    cases = list(dict.fromkeys((tuple(r["shape"]), r.get("case", "")) for r in rows))
    head = ["mechanism", *(f"b,h,n,d = {','.join(map(str, shape))} {case}" for shape, case in cases)]
    table = [head, ["---"] + ["---:"] * len(cases)]
    for name in dict.fromkeys(r["mechanism"] for r in rows):
        cells = []
        for shape, case in cases:
            row = next(
                (r for r in rows if r["mechanism"] == name and (tuple(r["shape"]), r.get("case", "")) == (shape, case)),
                {},
            )
            shown = (
                f"{row[clock]:.3g} ms, {row['times_sdpa']:.3g}×, {row['peak_mib']:.0f} MiB" if clock in row else None
            )
            cells.append(shown or ("not run" if "not_run" in row else "–"))
        if any(cell != "–" for cell in cells):
            table.append([name, *cells])
    missing = sorted({f"{r['mechanism']}: {r['not_run']}" for r in rows if "not_run" in r})
    return "\n\n".join([title, note, markdown(table), *(["Not run: " + "; ".join(missing) + "."] if missing else [])])


def kernels(path: Path) -> str:
    """The fused layers against their definitions; the fastest softmax attention of each shape first."""
    about, rows = read(path)
    title = f"## Fused kernels on {about['hardware']}\n\n`python benchmarks/kernels.py`. {where(about)}"
    speeds = f"{about['bytes_per_s'] / 1e12:.2f} TB/s and {about['operations_per_s'] / 1e12:.0f} TFLOP/s"
    note = (
        "Forward and backward of one layer on the device alone, bf16, causal, with the carry and its gradient where "
        "there is one. Floors of CODA: what must be read and written of (b,h,n,n), and σ's products made twice with "
        f"both gradients, at the {speeds} measured in the same run. Peak ÷ carries: the peak, of carry in, carry out "
        "and their gradients."
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
    return "\n\n".join([title, note, markdown(table), *two_attentions(about, rows)])


def two_attentions(about: dict, rows: list[dict]) -> list[str]:
    """What daGPAM's layer must take: twice softmax attention, and its passes over tensors of q's size."""
    said = []
    for r in rows:
        if (r["mechanism"], r["way"]) == ("dagpam", "fused") and "times_softmax" in r:
            b, h, n, d = r["shape"]
            once = r["device_ms"] / r["times_softmax"]
            passes = 1e3 * PASSES * 2 * b * h * n * d / about["bytes_per_s"]
            total = f"{2 * once:.3g} + {passes:.3g} = {2 * once + passes:.3g} ms, measured {r['device_ms']:.3g} ms"
            said.append(f"n={n}: {total}, {r['times_softmax']:.3g}×")
    if not said:
        return []
    return [f"daGPAM as two softmax attentions and {PASSES} passes over tensors of q's size: {'; '.join(said)}."]


def diversity(path: Path) -> str:
    about, rows = read(path)
    title = f"## Divergence of all pairs of heads on {about['hardware']}"
    clock = "device_ms" if path.stem == "gpu" else "eager_ms"
    head = ["by", "b,h,n", "causal", "ms", "peak MiB beside the weights", "× broadcast", "× compiled", "error"]
    table = [head, ["---"] * 3 + ["---:"] * 5]
    for r in rows:
        about_row = [r["way"], ",".join(map(str, r["shape"])), "yes" if r["causal"] else "no"]
        if clock not in r:
            table.append([*about_row, "not run", *["–"] * 4])
            continue
        ratios = [f"{r[key]:.3g}" if key in r else "–" for key in ("times_broadcast", "times_torch.compile")]
        table.append([*about_row, f"{r[clock]:.3g}", f"{r['peak_mib']:,.3g}", *ratios, f"{r['error']:.0e}"])
    command = f"`python benchmarks/diversity.py`. {where(about)}"
    return "\n\n".join([title, command, f"{rows[0]['weights_mib']:.0f} MiB of weights in float32.", markdown(table)])


def contribution(path: Path) -> str:
    about, rows = read(path)
    title = f"## Norms of contributions on {about['hardware']}\n\n`python benchmarks/contribution.py`. {where(about)}"
    note = (
        "Twelve layers of BERT-base's shape, one text, float32, against making every αf(x): ‖f‖ and ‖αf‖ (head), and "
        "‖Σ_h αf‖ too (all)."
    )
    if path.stem == "cpu":
        note += (
            " A record and its norms beside an eager forward pass; the statistics of a corpus (`attnlab inspect "
            "--file`) beside the model's own passes over it, × being its share of their tokens/s; weights of a decoder "
            "by inseq and by a record; 8,192 tokens through one layer of Llama's shape, with the peak of the whole "
            "process. Memory is by how much the resident size grew, of which less than 1 MiB cannot be seen."
        )
    head = ["way", "tokens", "ms", "peak MiB", "× faster", "× less memory"]
    table = [head, ["---", *["---:"] * 5]]
    for r in rows:
        if "ms" not in r:
            table.append([r["way"], "–", "not run", *["–"] * 3])
            continue
        ratios = [f"{r[key]:.3g}" if key in r else "–" for key in ("times_faster", "times_less_memory")]
        table.append([r["way"], f"{r['tokens']:,}", f"{r['ms']:.3g}", f"{r['peak_mib']:,.3g}", *ratios])
    return "\n\n".join([title, note, markdown(table)])


def alignment(path: Path) -> str:
    about, rows = read(path)
    title = f"## Word alignment on {about['hardware']}\n\n`python benchmarks/alignment.py`. {where(about)}"
    peers = ", ".join(f"{name} {version or 'not installed'}" for name, version in about["peers"].items())
    scored = f", AER on the {about['gold_pairs']} pairs aligned by hand" if about["gold_pairs"] else ""
    note = (
        f"{about['text']}, one thread{scored}. Every aligner learns from the pairs it then aligns. Translator: "
        f"{about['translator']}. fast_align is that of systran-align ({peers})."
    )
    table = [["aligner", "pairs", "pairs / CPU s", "AER %"], ["---", *["---:"] * 3]]
    for r in rows:
        error = "–" if r["aer_percent"] is None else f"{r['aer_percent']:.1f}"
        table.append([r["what"], f"{r['pairs']:,}", f"{r['pairs_per_cpu_second']:,.0f}", error])
    return "\n\n".join([title, note, markdown(table)])


def viewer(path: Path) -> str:
    about, rows = read(path)
    title = f"## The viewer's page, {about['hardware']}"
    note = (
        "BERT-base's shape, 12 layers of 12 heads, all of them with weights and norms: MiniLM's six layers on two "
        "texts, and random weights, the hardest to compress. Headless Chromium without a GPU, 2 cores."
    )
    head = [
        "page",
        "tokens",
        "MB",
        "weights alone, MB",
        "first paint, ms",
        "answers after, ms",
        "frames/s",
        "layer, ms",
    ]
    keys = ("megabytes", "weights_megabytes", "first_paint_ms", "ready_ms", "frames_per_second", "layer_ms")
    table = [head, ["---", *["---:"] * 7]]
    for r in rows:
        table.append(
            [r["case"], str(r["tokens"]), *(f"{r[key]:,.3g}" if r.get(key) is not None else "–" for key in keys)]
        )
    return "\n\n".join([title, f"`python benchmarks/viewer.py`. {where(about)}", note, markdown(table)])


def training_steps(path: Path) -> str:
    about, rows = read(path)
    taking_turns = "rounds" in rows[0]
    command = "`python benchmarks/training.py" + (" --joey PYTHON`" if taking_turns else "`")
    title = f"## Training step on {about['hardware']}\n\n{command}. {where(about)}"
    note = "The iwslt14 model, forward, backward and update, against Hugging Face's Marian of that size"
    if taking_turns:
        versions = "; ".join(dict.fromkeys(f"{r['model']}: {r['version']}" for r in rows))
        note += (
            f" and Joey NMT: {rows[0]['parameters']:,} parameters each, float32, one thread, processes taking turns on "
            f"a shared machine. The median of {rows[0]['rounds']} rounds by processor time; in brackets the slowest "
            f"and the fastest. {versions}."
        )
    else:
        note += f" in the same run. Ours with compile={about['compile']}."
    last = {"times_joey": "× Joey NMT"} if taking_turns else {"step_times_softmax": "step ÷ softmax step"}
    ratios = {"times_marian": "× Marian"} | last
    table = [["model", "target tokens a step", "tokens/s", *ratios.values()], ["---"] + ["---:"] * 4]
    for r in rows:
        speed = f"{r['tokens_per_second']:,.0f}"
        if taking_turns:
            speed += f" ({r['lowest']:,.0f}–{r['highest']:,.0f})"
        shown = [f"{r[key]:.2f}" if r.get(key) else "–" for key in ratios]
        table.append([r["model"], f"{r['tokens']:,}", speed, *shown])
    return "\n\n".join([title, note, markdown(table)])


LEARNT = {
    "multi30k": (
        "multi30k, German to English",
        "Test part of 2016, raw cased text, beam 5, best validation loss.",
    ),
    "ptb": (
        "Penn Treebank, language model",
        "Test part, words, windows of `block` tokens of which `context` are only read, best validation loss.",
    ),
}


def learnt(name: str, path: Path) -> str:
    about, rows = read(path)
    heading, scored = LEARNT[name]
    title = f"## {heading}, on {about['hardware']}\n\n`python benchmarks/learning.py {name}`. {where(about)}"
    recipe = ", ".join(f"{key}={value}" for key, value in about["recipe"].items())
    fewer = "± is a 95 % t-interval over the seeds; with fewer than three, the points alone."
    signature = f" {rows[0]['signature']}." if "signature" in rows[0] else ""
    measures = {"bleu": ("BLEU", 1), "test_perplexity": ("test perplexity", 2)}
    measures = {key: value for key, value in measures.items() if key in rows[0]}
    head = ["attention", "parameters", *(title for title, _ in measures.values()), "tokens/s in training"]
    table = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name in dict.fromkeys(r["attention"] for r in rows):
        own = [r for r in rows if r["attention"] == name]
        values = [spread([r[key] for r in own], digits) for key, (_, digits) in measures.items()]
        speeds = [f"{r['tokens_per_second']:,.0f}" for r in own if r["tokens_per_second"]]
        table.append([name, f"{own[0]['parameters']:,}", *values, speeds[0] if speeds else "not timed"])
    return "\n\n".join([title, f"{scored} {fewer}{signature} Recipe: {recipe}.", markdown(table)])


def decoding(path: Path) -> str:
    about, rows = read(path)
    title = f"## Beam search on {about['hardware']}\n\n`python benchmarks/decoding.py`. {where(about)}"
    made = f"beam {rows[0]['beam']}, {rows[0]['tokens']} tokens a sentence"
    note = f"The {rows[0]['size']} model, {made}, against `generate` of Hugging Face's Marian of that size, same run."
    table = [["attention", "batch", "sentences/s", "Marian's", "× Marian"], ["---"] + ["---:"] * 4]
    for r in rows:
        speeds = [f"{r['sentences_per_s']:,.0f}", f"{r['marian_sentences_per_s']:,.0f}"]
        table.append([r["attention"], str(r["batch"]), *speeds, f"{r['times_marian']:.1f}"])
    return "\n\n".join([title, note, markdown(table)])


def population(path: Path) -> str:
    about, rows = read(path)
    title = f"## Many seeds at once on {about['hardware']}\n\n`python benchmarks/population.py`. {where(about)}"
    note = "Steps of one seed a second, copying: a population against one seed after the other (`nn.LSTM`), same run."
    table = [["case", "seeds", "one by one", "population", "×"], ["---"] + ["---:"] * 4]
    for r in rows:
        speeds = [f"{r['one_by_one_per_s']:,.0f}", f"{r['population_per_s']:,.0f}"]
        table.append([r["case"], str(r["seeds"]), *speeds, f"{r['times']:.1f}"])
    return "\n\n".join([title, note, markdown(table)])


def study(path: Path) -> str:
    """The cells of a study that have a verdict, and the remarks of every item."""
    content = json.loads(path.read_text(encoding="utf-8"))
    parts = [f"## {content['title']}"]
    missing = ", ".join(content["items_without_result"])
    parts += [f"Not run at full scale yet: {missing}."] if missing else []
    for item in content["items"]:
        about = item["about"]
        options = "".join(f" {key}={value}" for key, value in item["config"]["options"].items())
        done = f"`attnlab reproduce {content['study']}{options} --only {item['config']['item']} --scale full`"
        on = f"{about['hardware']}, torch {about['torch']}, commit {about['commit']}, {about['wall_s']:.0f} s"
        rows = [
            ["", "", "published", "ours", "95 % interval", "verdict"],
            ["---", "---", "---:", "---:", "---:", "---"],
        ]
        made = [cell for cell in item["cells"] if cell["values"]]
        for cell in made:
            published = cell["published"]
            said = "above 0" if cell["sign"] > 0 else "below 0" if cell["sign"] < 0 else "–"
            interval = " … ".join(map(told, cell["interval"])) if cell["interval"] else "–"
            ours = "–" if cell["mean"] is None else told(cell["mean"])
            shown = said if published is None else told(published)
            rows.append([cell["row"], cell["column"], shown, ours, interval, cell["verdict"]])
        parts += [f"### {item['title']}", f"{done}. {on}. " + literal(" ".join(item["remarks"]))]
        parts += [markdown(rows)] if made else []
        parts += [f"{len(item['cells']) - len(made)} cells more are not run."] if len(made) < len(item["cells"]) else []
    return "\n\n".join(parts)


def told(x: float) -> str:
    """With three digits, or all before the point."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{0.0 if abs(x) < 1e-12 else x:.3g}"


def compared(path: Path) -> str:
    """A comparison: quality, the difference to its first row, and how far heads differ."""
    content = json.loads(path.read_text(encoding="utf-8"))
    about, by, jsd = content["about"], content["judged_by"], "head JSD (nats a sentence)"
    table = [["attention", by, "− first row", "Holm's p", jsd, "parameters"], ["---"] + ["---:"] * 5]
    for row in content["rows"]:
        quality, heads = (row["measures"].get(name, {"seeds": {}}) for name in (by, jsd))
        against = quality.get("against_first") or {"differences": {}, "holm": None}
        values = (quality["seeds"], against["differences"], heads["seeds"])
        first, difference, diverse = (spread(list(each.values()), 2) or "–" for each in values)
        p = "–" if against["holm"] is None else f"{against['holm']:.2g}"
        table.append([row["row"], first, difference, p, diverse, f"{row['parameters']:,}"])
    note = (
        f"`{about['command']}`. Trained on {about.get('trained on', about['hardware'])}, put together at commit "
        f"{about['commit']}, seeds {about['seeds']}; ± half of the 95 % t-interval from three seeds on."
    )
    return "\n\n".join([f"## Compared: {path.parent.name}", note, markdown(table)])


def spread(values: list[float], digits: int) -> str:
    """The mean with its 95 % t-interval from three values on; else the values."""
    if (between := interval(values)) is None:
        return ", ".join(f"{x:.{digits}f}" for x in values)
    low, high = between
    return f"{(low + high) / 2:.{digits}f} ± {(high - low) / 2:.{digits}f}"


def read(path: Path) -> tuple[dict, list[dict]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["about"], content["rows"]


def where(about: dict) -> str:
    versions = f"torch {about['torch']}, Python {about['python']}"
    noted = f" {about['note']}" if "note" in about else ""
    return f"{versions}, commit {about['commit']}, seed {about['seed']}.{noted}"


def literal(text: str) -> str:
    """With tokens such as <s> as code: Markdown would take them for HTML."""
    return re.sub(r"</?\w+>", r"`\g<0>`", text)


def markdown(table: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(map(literal, row)) + " |" for row in table)


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page(), encoding="utf-8")
