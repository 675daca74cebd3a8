"""What limits CODA's fused layer: each kernel's time beside what it would take if one thing alone took time.

    python benchmarks/roofline.py COUNTERS.csv --times results/kernels/gpu.json [--out results/roofline]

COUNTERS.csv is what Nsight Compute writes of the layer at (b,h,n,d) = (8,16,1024,64), without a GPU's clock boost:

    ncu --csv --kernel-name "regex:_collide|_attend" --launch-skip 8 --launch-count 4 --metrics METRICS \\
        python benchmarks/kernels.py --profile > COUNTERS.csv

(--metrics alone prints METRICS.) A counter is a share of a unit's peak, of memory while the kernel runs, of the others
while a processor has work: that share of its time is about the least it could take, were only that unit at its peak.
ncu holds the clock down, so that its times are longer than those of benchmarks/kernels.py.
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


def kernels(file):
    """Of each kernel that was profiled: microseconds, floors by unit, stalls and size."""
    lines = [row for row in csv.reader(file.read_text().splitlines()) if len(row) > 10]
    if not lines or "Metric Name" not in lines[0]:
        raise SystemExit(f"{file} has no table of ncu's: was it run with --csv?")
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


def draw(rows, floors, path):
    """Bars of the kernels' times, in each the floors; below them the layer, with its two floors from --times."""
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
            axes.barh(
                place - 0.25 + 0.25 * slot,
                floor,
                0.2,
                color=colours[unit],
                label=None if place else f"{unit}, at its peak",
            )
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
    parser.add_argument("counters", type=Path, nargs="?", help="what ncu wrote")
    parser.add_argument("--times", type=Path, help="what benchmarks/kernels.py wrote on the same machine")
    parser.add_argument("--out", help="folder for the numbers as JSON")
    parser.add_argument("--figure", type=Path, help="a file for the figure")
    parser.add_argument("--metrics", action="store_true", help="print the counters that are needed")
    given = parser.parse_args()
    if given.metrics:
        print(",".join(METRICS))
        return
    if given.counters is None or given.times is None:
        raise SystemExit("say COUNTERS.csv and --times; --help tells how they are made")
    times = json.loads(given.times.read_text())
    fused = next(r for r in times["rows"] if (r["mechanism"], r["way"], r["shape"][2]) == ("coda", "fused", 1024))
    rows = kernels(given.counters)
    head = ["kernel", "us", *UNITS.values(), *STALLS.values(), *SIZE.values()]
    labels = (*STALLS.values(), *SIZE.values())
    shown = [[WHAT[r["kernel"]], r["us"], *r["floors_us"].values(), *(r[name] for name in labels)] for r in rows]
    print(measuring.table(head, shown))
    floors = [1e3 * fused[key] for key in ("traffic_floor_ms", "arithmetic_floor_ms")]
    if given.figure:
        draw(rows, floors, given.figure)
    measuring.write(
        given.out, "gpu", times["about"] | {"layer_us": 1e3 * fused["device_ms"], "floors_us": floors}, rows
    )


if __name__ == "__main__":
    main()
