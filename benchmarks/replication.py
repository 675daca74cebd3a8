"""Write docs/replication.md from results/replication/: every mechanism of the lab against softmax, under one recipe.

python benchmarks/replication.py [--results FOLDER] [--out FILE]

The runs are those of one command, `attnlab compare`, which the page shows. It resumes, and `--from` draws its page.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from page_tables import format_table

ROOT = Path(__file__).parent.parent
COMMAND = (
    "attnlab compare language data=enwik8 model=modern-25m layers=6 width=256 heads=4 key_value_heads=2 "
    "feed_forward=896 \\\n        block=512 batch_tokens=16384 steps=1250 evaluate_every=1250 checkpoint_every=1250 "
    "optimiser=adamw lr=1e-3,2e-3,4e-3 \\\n        attention=all --seeds 5 --control-winners --out results/replication"
)
INTRODUCTION = (
    "# Every mechanism against softmax",
    "Which attention is better than softmax, if all train under the same conditions? One command answers, and resumes:",
    f"    {COMMAND}",
    "- **Model.** The [modern backbone](backbone.md) with 5.4 million parameters: RoPE, RMSNorm, SwiGLU, QK-norm and "
    "grouped keys.\n"
    "- **Data.** enwik8 as bytes, 90/5/5 million. A run reads 20.5 million bytes: 1,250 updates of 16,384.\n"
    "- **Learning rate.** Three for each mechanism with the first seed. The best on validation runs with five seeds. "
    "The optimiser is AdamW, not Muon, because runs of AdamW train as one [population](population.md).\n"
    "- **Controls.** A row that beats softmax is also compared with a softmax of its size, and with twice the heads.\n"
    "- **Tests.** [Welch's t-test over seeds](compare.md#paired-or-unpaired) with Holm's correction. *Detectable* is "
    "the smallest difference that the test finds with power 0.8.",
    "The papers have other sizes, more data and longer texts. So *open* or *opposite* does not refute a paper. It says "
    "what to expect of a mechanism at this size.",
)
NOT_RUN = (
    "**Not run yet.** The command passes with all mechanisms at a tiny size on a CPU. The runs need about an hour of a "
    "large GPU."
)
SHOWN = (
    "attention", "log-perplexity (nats)", "difference from the first row", "detectable", "Holm's p", "bits per byte",
    "parameters", "speed (tokens/s)", "memory (MiB)",
)  # fmt: skip


def render_page(results: Path) -> str:
    """Return the page as Markdown."""
    file = results / "results.json"
    if not file.exists():
        return "\n\n".join((*INTRODUCTION, NOT_RUN)) + "\n"
    found = json.loads(file.read_text(encoding="utf-8"))
    parts = [*INTRODUCTION, "## Results", format_lines(read_table(results / "table.csv"))]
    parts += ["## What the papers claim", format_lines(found["claims"])]
    if against := found["against_controls"]:
        parts += ["## Winners against their controls", format_lines(list(map(pick_contrast, against)))]
    about = found["about"]
    where = about.get("trained on", about["hardware"])
    return "\n\n".join((*parts, f"`{about['command']}`, trained on {where}, commit {about['commit']}.")) + "\n"


def read_table(file: Path) -> list[dict[str, str]]:
    """Return the shown columns of a comparison's table."""
    with open(file, newline="", encoding="utf-8") as lines:
        return [{name: row[name] for name in SHOWN if name in row} for row in csv.DictReader(lines)]


def format_lines(lines: list[dict[str, str]]) -> str:
    head = list(lines[0])
    return format_table([head, ["---"] + ["---:"] * (len(head) - 1), *(list(line.values()) for line in lines)])


def pick_contrast(x: dict[str, Any]) -> dict[str, str]:
    """Return a winner minus a control as a line of the table."""
    low, high = x["interval"] or (None, None)
    interval = "–" if low is None else f"{low:.3g} … {high:.3g}"
    p = "–" if x["holm"] is None else f"{x['holm']:.2g}"
    gap = f"{x['mean']:.3g}"
    return {"attention": x["row"], "minus": x["control"], "difference": gap, "interval": interval, "Holm's p": p}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "replication")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "replication.md")
    given = parser.parse_args()
    given.out.write_text(render_page(given.results), encoding="utf-8")


if __name__ == "__main__":
    main()
