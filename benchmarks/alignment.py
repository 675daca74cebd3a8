"""Word alignment: sentence pairs per second of attnlab's aligners and of other installed aligners.

    python benchmarks/alignment.py [--out results/alignment] [--pairs 20000] [--run RUN]
    python benchmarks/alignment.py --source de.txt --target en.txt [--gold links.talp]

The text is that of attnlab reproduce kobayashi2020: the German–English pairs aligned by hand, which give the AER, then
training pairs of Europarl. With --source and --target it is your own text, split at white space. Times are CPU seconds
of one thread, with child processes. Measured are IBM Model 1 (training and alignment, with and without the diagonal and
a prior on θ), a translator by weights and by norms (a RUN, or an iwslt14 model with random weights, which takes the
same time), and fast_align (PyPI: systran-align) and eflomal (PyPI), if they are installed. Every aligner is trained on
the pairs it then aligns. grow-diag-final-and joins the links of both directions; systran-align joins them itself.
`alignment_readings.py` measures pretrained translators and encoders, and the speed on a GPU.
"""

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import measuring
import torch

from attnlab.aligning.choice import Reading
from attnlab.aligning.extraction import find_links
from attnlab.aligning.ibm1_aligner import WordModel
from attnlab.aligning.pair_readers import open_run_reader
from attnlab.analysis.alignment import aer
from attnlab.analysis.symmetrise import grow_diag_final_and
from attnlab.studies.kobayashi2020.ibm1_baseline import MODELS
from attnlab.studies.kobayashi2020.plan import read_gold_pairs, remove_gold, tokenize_pairs
from attnlab.tasks.links import read_gold
from attnlab.tasks.parallel import find_parallel_text
from attnlab.tasks.text import read_parallel
from attnlab.tasks.translation import TranslationConfig
from attnlab.training import runs

SEED = 0
PEERS = ("systran-align", "eflomal")


def find_version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_europarl(pairs):
    """Return `pairs` lines of both sides, the gold pairs first, and the gold links."""
    lines, gold = read_gold_pairs(None)
    if pairs < len(gold):
        raise SystemExit(f"--pairs must be at least {len(gold)}, the number of gold pairs, got {pairs}")
    read = find_parallel_text(TranslationConfig(data="europarl", pair="de-en")).readers["train"]()
    more = remove_gold(lines, tokenize_pairs((read[0][:pairs], read[1][:pairs])))[: pairs - len(gold)]
    return [own + [pair[side] for pair in more] for side, own in enumerate(lines)], gold


def read_text(given):
    """Return the lines of both sides, and the gold links of the first lines or None."""
    if given.source is None:
        return read_europarl(given.pairs)
    lines = [side[: given.pairs] for side in read_parallel(Path(given.source), Path(given.target))]
    if given.gold is None:
        return lines, None
    count = len(Path(given.gold).read_text().splitlines())
    lengths = [(len(x.split()), len(y.split())) for x, y in zip(*lines, strict=True)][:count]
    return lines, read_gold(Path(given.gold), lengths)


def cpu_seconds():
    """Return the processor time of this process and its finished children."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure_time(work: Callable):
    """Return the result of the work and its processor time."""
    start = cpu_seconds()
    result = work()
    return result, cpu_seconds() - start


def train_random_run(folder, source, target):
    """Train an iwslt14 Transformer for one step on subwords of this text."""
    from attnlab.training.recipe import resolve_recipe

    for name, side in (("s", source), ("t", target)):
        (folder / name).write_text("".join(f"{' '.join(words)}\n" for words in side[:2000]))
    values = {"model": "iwslt14", "src": f"{folder}/s", "tgt": f"{folder}/t", "vocabulary": "4000", "joint": "false"}
    values |= {"subwords": "bpe", "steps": "1", "batch_tokens": "1024", "accumulate": "1", "compile": "no"}
    recipe = resolve_recipe("translation", values)
    runs.start_run(recipe, out=str(folder / "run"), device="cpu", report=lambda _: None, note=lambda _: None)
    return folder / "run"


def align_both_ways(source, target, ahead, how):
    """Align the other direction and join the two."""
    back = WordModel.train(target, source, **how).align(target, source)[0].links()
    return join_directions(ahead, [frozenset((s, t) for t, s in links) for links in back])


def join_directions(ahead, back):
    return [grow_diag_final_and(a, b) for a, b in zip(ahead, back, strict=True)]


def run_fast_align(source, target, folder):
    """Run fast_align with its usual options -d -o -v; systran-align always trains and joins both directions."""
    import systran_align

    text, ahead, back = (str(folder / name) for name in ("text", "ahead", "back"))
    lines = (f"{' '.join(x)} ||| {' '.join(y)}\n" for x, y in zip(source, target, strict=True))
    Path(text).write_text("".join(lines))
    options = {"favor_diagonal": True, "optimize_tension": True, "variational_bayes": True}
    systran_align.generate_alignment_probabilities(text, ahead, back, **options)
    aligner = systran_align.Aligner(ahead, back)
    found = aligner.align_batch([list(x) for x in source], [list(y) for y in target])
    return [frozenset((int(s), int(t)) for s, t in links["alignments"]) for links in found]


def run_eflomal(source, target, folder, *, both):
    files = [folder / name for name in ("s", "t", "ahead", "back")]
    for file, side in zip(files[:2], (source, target), strict=True):
        file.write_text("".join(f"{' '.join(words)}\n" for words in side))
    program = shutil.which("eflomal-align") or Path(sys.executable).parent / "eflomal-align"
    words = [program, "--overwrite", "-s", files[0], "-t", files[1], "-f", files[2]]
    words += ["-r", files[3]] if both else []
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    found = [
        [frozenset(tuple(map(int, link.split("-"))) for link in line.split()) for line in file.open()]
        for file in files[2 : 3 + both]
    ]
    return join_directions(*found) if both else found[0]


def measure_aligners(given, source, target, folder):
    """Yield (what, links or None, seconds) for each aligner."""
    for name, how in MODELS.items():
        model, training = measure_time(lambda h=how: WordModel.train(source, target, **h))
        made, aligning = measure_time(lambda m=model: m.align(source, target)[0].links())
        yield f"{name}: training", None, training
        yield f"{name}: alignment", made, aligning
        both, more = measure_time(lambda h=how, ahead=made: align_both_ways(source, target, ahead, h))
        yield f"{name}, both directions: training and alignment", both, training + aligning + more
    if find_version("systran-align"):
        links, seconds = measure_time(lambda: run_fast_align(source, target, folder))
        yield "fast_align, both directions: training and alignment", links, seconds
    if find_version("eflomal"):
        for name, both in (("eflomal", False), ("eflomal, both directions", True)):
            links, seconds = measure_time(lambda b=both: run_eflomal(source, target, folder, both=b))
            yield f"{name}: training and alignment", links, seconds
    some = slice(0, given.attention_pairs)
    run = runs.open_run(given.run or train_random_run(folder, source, target), device="cpu")
    for by in ("weight", "norm"):
        reading = Reading(by=by, setting="awi", layer=1)
        reader = open_run_reader(run, source[some], target[some])
        made, seconds = measure_time(lambda r=reading, x=reader: find_links(x, r.candidates))
        yield f"translator by {by}, one layer", next(iter(made.aligned.values())).links(), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="your own text, one sentence per line; needs --target")
    parser.add_argument("--target")
    parser.add_argument("--gold", help="gold links of the first pairs of that text")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--attention-pairs", type=int, default=200)
    parser.add_argument("--run", help="a trained translator")
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    given = parser.parse_args()
    if (given.source is None) != (given.target is None) or (given.gold and not given.source):
        parser.error("--source and --target must be given together, and --gold needs both")
    torch.set_num_threads(1)
    lines, gold = read_text(given)
    source, target = ([line.split() for line in side] for side in lines)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for what, links, seconds in measure_aligners(given, source, target, Path(folder)):
            pairs = len(source) if links is None else len(links)
            scored = links is not None and gold is not None and len(links) >= len(gold)
            error = 100 * aer(links[: len(gold)], gold.sure, gold.possible) if scored else None
            rows.append({"what": what, "pairs": pairs, "pairs_per_cpu_second": pairs / seconds, "aer_percent": error})
            print(rows[-1], file=sys.stderr, flush=True)
    shown = [["–" if value is None else value for value in row.values()] for row in rows]
    print(measuring.format_table(["what", "pairs", "pairs / CPU s", "AER %"], shown))
    about = {"text": given.source or "Europarl, German–English", "gold_pairs": len(gold) if gold else None}
    about["translator"] = given.run or "iwslt14, random weights"
    about["peers"] = {name: find_version(name) for name in PEERS}
    for name in PEERS:
        if not find_version(name):
            print(f"not run: {name} is not installed")
    measuring.write_results(given.out, "cpu", measuring.collect_provenance(SEED) | about, rows)


if __name__ == "__main__":
    main()
