"""Statistical word aligners beside eflomal and fast_align: AER, sentence pairs per CPU second, peak memory.

    python benchmarks/statistical_aligners.py [--only de-en-160000 …] [--aligners fertility …] [--out results/alignment]
    python benchmarks/statistical_aligners.py --only de-en-1000000 --aligners fertility        # memory of a long file

Every aligner is trained in both directions on the same text and aligns it in both: the gold pairs, then Europarl, in
Moses' words and lower case, without gold sentences. A text that is longer than the stored 480,000 pairs continues with
varied copies of them (`vary_pairs`); its AER is only a check. Each aligner runs in a process of its own, on one thread,
from text files to files of links, ours as attnlab align does it. Seconds are CPU seconds of that process and its
children, its start included; memory is the peak of one process. grow-diag-final-and then joins the directions, outside
the measured time. fast_align (PyPI: systran-align) joins them itself. eflomal (PyPI) and systran-align are measured
where they are installed.
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from itertools import count as count_from
from itertools import islice
from pathlib import Path

import measuring

ROOT = Path(__file__).parent.parent
TEXTS = {  # name: (language pair, training pairs)
    "de-en-20000": ("de-en", 20_000),
    "de-en-160000": ("de-en", 160_000),
    "en-fr-60000": ("en-fr", 60_000),
    "en-nl-60000": ("en-nl", 60_000),
    "en-pt-60000": ("en-pt", 60_000),
    "de-en-1000000": ("de-en", 1_000_000),
}
USUAL = [name for name, (_, count) in TEXTS.items() if count <= 160_000]
ALIGNERS = ("fertility", "eflomal", "hmm", "fast_align", "ibm1")
USUAL_ALIGNERS = ALIGNERS[:-1]
PACKAGES = {"eflomal": "eflomal", "fast_align": "systran-align"}


def find_version(aligner):
    try:
        return metadata.version(PACKAGES[aligner]) if aligner in PACKAGES else "attnlab"
    except metadata.PackageNotFoundError:
        return None


def read_text(pair, count):
    """Return the lines of both sides, gold pairs first, and the gold links."""
    from attnlab.studies.kobayashi2020.plan import remove_gold
    from attnlab.tasks.links import read_gold
    from attnlab.tasks.text import load_moses

    folder = Path(os.environ["ATTNLAB_DATA"]) / "gold-alignments" / pair
    languages = pair.split("-")
    own = [(folder / f"{pair}.{name}").read_text().lower().removesuffix("\n").split("\n") for name in languages]
    lengths = [(len(x.split()), len(y.split())) for x, y in zip(*own, strict=True)]
    gold = read_gold(next(f for f in folder.iterdir() if f.suffix in (".talp", ".pharaoh")), lengths)
    words = [
        [load_moses(name)[0](line).lower() for line in islice(iterate_stored(pair, name), count)] for name in languages
    ]
    more = remove_gold(own, [(x, y) for x, y in zip(*words, strict=True) if x.strip() and y.strip()])
    more += islice(vary_pairs(more), max(count - len(words[0]), 0))
    return [lines + [line[side] for line in more] for side, lines in enumerate(own)], gold


def iterate_stored(pair, language):
    """Yield the lines of Europarl in a language: those of train and then, if there are, of more."""
    stem = Path(os.environ["ATTNLAB_DATA"]) / "europarl" / ("en-de" if pair == "de-en" else pair)
    for part in ("train", "more"):
        if Path(f"{stem}.{part}.{language}.gz").is_file():
            with gzip.open(f"{stem}.{part}.{language}.gz", "rt", encoding="utf-8", newline="\n") as file:
                yield from (line.rstrip("\n") for line in file)


def vary_pairs(pairs):
    """Yield copies of pairs without end: each with the last words of another, and every fourth with a new word."""
    pairs = list(pairs)
    for number in count_from(len(pairs)):
        other = pairs[(number * 7 + 3) % len(pairs)]
        new = f" new{number // 4}" if number % 4 == 0 else ""
        sides = zip(pairs[number % len(pairs)], other, strict=True)
        yield tuple(f"{own} {' '.join(end.split()[-3:])}{new}" for own, end in sides)


def work(aligner, source, target, ahead, back):
    """Align two files and write the links of both directions, in a process of its own."""
    if aligner == "eflomal":
        program = shutil.which("eflomal-align") or str(Path(sys.executable).parent / "eflomal-align")
        command = [program, "--overwrite", "-s", source, "-t", target, "-f", ahead, "-r", back]
        os.execv(program, command)
    if aligner == "fast_align":
        sides = [[line.split() for line in Path(path).read_text("utf-8").split("\n")[:-1]] for path in (source, target)]
        links = run_fast_align(sides, Path(ahead).parent)
        write_links(ahead, links)
        write_links(back, links)
        return
    from attnlab.commands.align import AlignOptions, align_files

    os.chdir(Path(ahead).parent)  # models are saved in runs/
    align_files(aligner, Path(source), Path(target), AlignOptions(), Path(ahead))
    align_files(aligner, Path(target), Path(source), AlignOptions(), Path(back))


def run_fast_align(sides, folder):
    """Run fast_align with its usual options -d -o -v; systran-align always trains and joins both directions."""
    import systran_align

    text, ahead, back = (str(folder / name) for name in ("text", "table-ahead", "table-back"))
    lines = (f"{' '.join(x)} ||| {' '.join(y)}\n" for x, y in zip(*sides, strict=True))
    Path(text).write_text("".join(lines))
    options = {"favor_diagonal": True, "optimize_tension": True, "variational_bayes": True}
    systran_align.generate_alignment_probabilities(text, ahead, back, **options)
    found = systran_align.Aligner(ahead, back).align_batch(*sides)
    return [{(int(s), int(t)) for s, t in links["alignments"]} for links in found]


def write_links(path, links):
    Path(path).write_text("".join(" ".join(f"{s}-{t}" for s, t in sorted(pair)) + "\n" for pair in links))


def read_links(path, count):
    with Path(path).open() as file:
        return [frozenset(tuple(map(int, link.split("-"))) for link in next(file).split()) for _ in range(count)]


LAUNCHER = """
import json, resource, subprocess, sys
status = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([status, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6]))
"""


def run_alone(command, environment):
    """Return the CPU seconds and the peak memory in GB of a command.

    A small process starts it: the peak of a process begins with the memory of the one that it is forked from.
    """
    launched = [sys.executable, "-S", "-c", LAUNCHER, *command]
    done = subprocess.run(launched, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    status, seconds, peak = json.loads(done.stdout)
    if status:
        raise RuntimeError(f"status {status}: {' '.join(command)}")
    return seconds, peak


def measure(aligner, lines, gold, folder):
    """Return the row of one aligner on one text."""
    from attnlab.analysis.alignment import score
    from attnlab.analysis.symmetrise import grow_diag_final_and

    files = [str(folder / name) for name in ("source", "target", "ahead", "back")]
    for file, side in zip(files[:2], lines, strict=True):
        Path(file).write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    seconds, peak = run_alone([sys.executable, __file__, "--work", aligner, *files], os.environ | one)
    ahead, back = (read_links(file, len(gold)) for file in files[2:])
    if aligner in ("fertility", "hmm", "ibm1"):
        back = [frozenset((s, t) for t, s in links) for links in back]
    joined = ahead if aligner == "fast_align" else list(map(grow_diag_final_and, ahead, back))
    row = {"aligner": aligner, "pairs": len(lines[0]), "gold_pairs": len(gold), "cpu_seconds": seconds}
    row |= {"pairs_per_cpu_second": len(lines[0]) / seconds, "peak_gigabytes": peak}
    row["peak_bytes_per_pair"] = 1e9 * peak / len(lines[0])
    for name, links in {"ahead": ahead, "back": back, "joined": joined}.items():
        if aligner == "fast_align" and name != "joined":
            continue
        scored = score(links, gold.sure, gold.possible)
        row[f"{name}_aer_percent"] = 100 * scored.aer
        row[f"{name}_interval"] = [100 * x for x in scored.intervals["aer"]]
    return row


def main():
    if sys.argv[1:2] == ["--work"]:
        return work(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TEXTS, default=USUAL)
    parser.add_argument("--aligners", nargs="+", choices=ALIGNERS, default=USUAL_ALIGNERS)
    parser.add_argument("--out", help="folder to write statistical.json to; rows measured earlier are kept")
    given = parser.parse_args()
    file = Path(given.out) / "statistical.json" if given.out else None
    rows = json.loads(file.read_text())["rows"] if file and file.is_file() else []
    about = measuring.collect_provenance(0) | {"peers": {name: find_version(name) for name in PACKAGES}}
    for name in given.only:
        lines, gold = read_text(*TEXTS[name])
        for aligner in given.aligners:
            if not find_version(aligner):
                print(f"not run: {PACKAGES[aligner]} is not installed")
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = {"text": name} | measure(aligner, lines, gold, Path(folder))
            rows = [r for r in rows if (r["text"], r["aligner"]) != (name, aligner)] + [row]
            print(row, flush=True)
            rows.sort(key=lambda r: (list(TEXTS).index(r["text"]), ALIGNERS.index(r["aligner"])))
            measuring.write_results(given.out, "statistical", about, rows)


if __name__ == "__main__":
    main()
