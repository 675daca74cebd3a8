"""What limits CODA's fused layer: each kernel's time beside the least time that each hardware unit allows.

    python benchmarks/roofline.py COUNTERS.csv --times results/kernels/gpu.json [--out results/roofline]

COUNTERS.csv is the output of Nsight Compute for the layer at (b,h,n,d) = (8,16,1024,64), without clock boost:

    ncu --csv --kernel-name "regex:_collide|_attend" --launch-skip 8 --launch-count 4 --metrics METRICS \\
        python benchmarks/kernels.py --profile > COUNTERS.csv

(--metrics alone prints METRICS.) A counter is a unit's throughput as a share of its peak: of memory while the kernel
runs, of the others while a processor has work. That share of the kernel's time is about the least time it would take
with only that unit at its peak. ncu lowers the clock, so its times are longer than those of benchmarks/kernels.py.
"""

import argparse
import csv
import json
from pathlib import Path

import measuring

TIME = "gpu__time_duration.sum"
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
UNITS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "L1 and shared memory",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "instructions issued",
}
STALLS = {
    f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio": why.replace("_", " ")
    for why in ("barrier", "long_scoreboard", "short_scoreboard", "math_pipe_throttle", "mio_throttle")
}
SIZE = {
    "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active",
}
METRICS = (TIME, *UNITS, *STALLS, *SIZE)
WHAT = {
    "_collide": "σ, logits",
    "_attend": "attend",
    "_attend_backward": "attend, back",
    "_collide_backward": "σ, back",
}


def read_kernels(file):
    """Return for each profiled kernel its microseconds, floors by unit, stalls and size."""
    lines = [row for row in csv.reader(file.read_text().splitlines()) if len(row) > 10]
    if not lines or "Metric Name" not in lines[0]:
        raise SystemExit(f"{file} has no table of ncu: run ncu with --csv")
    place = {name: column for column, name in enumerate(lines[0])}
    found = {}
    for row in lines[1:]:
        counters = found.setdefault((row[place["ID"]], row[place["Kernel Name"]]), {})
        value = float(row[place["Metric Value"]].replace(",", ""))
        name = row[place["Metric Name"]]
        counters[name] = value * MICROSECONDS[row[place["Metric Unit"]]] if name == TIME else value
    rows = []
    for (_, name), counters in found.items():
        us = counters[TIME]
        floors = {unit: us * counters[metric] / 100 for metric, unit in UNITS.items()}
        about = {label: counters[metric] for metric, label in (STALLS | SIZE).items()}
        rows.append({"kernel": name.strip(), "us": us, "floors_us": floors} | about)
    return rows


def draw_roofline(rows, floors, path):
    """Draw the kernels' times as bars with their floors, and below them the layer with its two floors from --times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(UNITS.values(), ("#0072b2", "#e69f00", "#009e73"), strict=True))
    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), layout="constrained")
    names = [*(WHAT[row["kernel"]] for row in rows), "layer"]
    total = {unit: sum(row["floors_us"][unit] for row in rows) for unit in UNITS.values()}
    for place, (us, lowest) in enumerate(
        [*((r["us"], r["floors_us"]) for r in rows), (sum(r["us"] for r in rows), total)]
    ):
        axes.barh(place, us, 0.8, color="#d9d9d9", label=None if place else "measured")
        for slot, (unit, floor) in enumerate(lowest.items()):
            label = None if place else f"{unit}, at its peak"
            axes.barh(place - 0.25 + 0.25 * slot, floor, 0.2, color=colours[unit], label=label)
    for name, floor, style in zip(("traffic", "σ's products"), floors, ("--", ":"), strict=True):
        axes.plot([floor, floor], [len(rows) - 0.5, len(rows) + 0.5], style, color="black", label=f"floor of {name}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("µs at the profiler's clock: one CODA layer, forward and backward, (b,h,n,d) = (8,16,1024,64)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"drawn: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counters", type=Path, nargs="?", help="output of ncu")
    parser.add_argument("--times", type=Path, help="output of benchmarks/kernels.py on the same machine")
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--figure", type=Path, help="file to write the figure to")
    parser.add_argument("--metrics", action="store_true", help="print the names of the needed counters")
    given = parser.parse_args()
    if given.metrics:
        print(",".join(METRICS))
        return
    if given.counters is None or given.times is None:
        raise SystemExit("COUNTERS.csv and --times are needed; --help shows how to make them")
    times = json.loads(given.times.read_text())
    fused = next(r for r in times["rows"] if (r["mechanism"], r["way"], r["shape"][2]) == ("coda", "fused", 1024))
    rows = read_kernels(given.counters)
    head = ["kernel", "us", *UNITS.values(), *STALLS.values(), *SIZE.values()]
    labels = (*STALLS.values(), *SIZE.values())
    shown = [[WHAT[r["kernel"]], r["us"], *r["floors_us"].values(), *(r[name] for name in labels)] for r in rows]
    print(measuring.format_table(head, shown))
    floors = [1e3 * fused[key] for key in ("traffic_floor_ms", "arithmetic_floor_ms")]
    if given.figure:
        draw_roofline(rows, floors, given.figure)
    about = times["about"] | {"layer_us": 1e3 * fused["device_ms"], "floors_us": floors}
    measuring.write_results(given.out, "gpu", about, rows)


if __name__ == "__main__":
    main()
