"""Word alignment: sentence pairs a second, of every kind of model of attnlab's and of other aligners at hand.

    python benchmarks/alignment.py [--out results/alignment] [--pairs 20000] [--run RUN]
    python benchmarks/alignment.py --source de.txt --target en.txt [--gold links.talp]

The text is that of attnlab reproduce kobayashi2020: the German–English pairs aligned by hand, which AER is of, then
training pairs of Europarl; or a text of one's own, words between white space. CPU seconds of one thread, children
included: training and alignment of IBM Model 1, with and without the diagonal and a prior on θ; a translator by weights
and by norms (a RUN, or one of the iwslt14 size with random weights, which costs the same and aligns nothing);
fast_align (as PyPI's systran-align) and eflomal (PyPI), where they are installed. Every aligner learns from the pairs
it then aligns, and links of both directions are joined by grow-diag-final-and, those of systran-align as it joins them
itself.
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
from attnlab.aligning.extraction import find
from attnlab.aligning.ibm1_aligner import WordModel
from attnlab.aligning.pair_readers import run_reader
from attnlab.analysis.alignment import aer
from attnlab.analysis.symmetrise import grow_diag_final_and
from attnlab.studies.kobayashi2020.ibm1_baseline import MODELS
from attnlab.studies.kobayashi2020.plan import aligned_by_hand, tokenised, without
from attnlab.tasks.links import read_gold
from attnlab.tasks.parallel import find_parallel_text
from attnlab.tasks.text import read_parallel
from attnlab.tasks.translation import TranslationConfig
from attnlab.training import runs

SEED = 0
PEERS = ("systran-align", "eflomal")


def installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def europarl(pairs):
    """The gold pairs, then training pairs; as many as asked for in all. With the gold links."""
    lines, gold = aligned_by_hand(None)
    if pairs < len(gold):
        raise SystemExit(f"--pairs {pairs}: the {len(gold)} gold pairs come first, say at least so many")
    read = find_parallel_text(TranslationConfig(data="europarl", pair="de-en")).read_part("train")
    more = without(lines, tokenised((read[0][:pairs], read[1][:pairs])))[: pairs - len(gold)]
    return [own + [pair[side] for pair in more] for side, own in enumerate(lines)], gold


def given_text(given):
    """Lines of both sides, and gold links of the first of them, or None."""
    if given.source is None:
        return europarl(given.pairs)
    lines = [side[: given.pairs] for side in read_parallel(Path(given.source), Path(given.target))]
    if given.gold is None:
        return lines, None
    count = len(Path(given.gold).read_text().splitlines())
    lengths = [(len(x.split()), len(y.split())) for x, y in zip(*lines, strict=True)][:count]
    return lines, read_gold(Path(given.gold), lengths)


def cpu_seconds():
    """Of this process and its finished children."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def timed(work: Callable):
    start = cpu_seconds()
    made = work()
    return made, cpu_seconds() - start


def random_run(folder, source, target):
    """An iwslt14 Transformer that was trained for one step, on words' pieces of this text."""
    from attnlab.training.recipe import resolve_recipe

    for name, side in (("s", source), ("t", target)):
        (folder / name).write_text("".join(f"{' '.join(words)}\n" for words in side[:2000]))
    values = {"model": "iwslt14", "src": f"{folder}/s", "tgt": f"{folder}/t", "vocabulary": "4000", "joint": "false"}
    values |= {"subwords": "bpe", "steps": "1", "batch_tokens": "1024", "accumulate": "1", "compile": "no"}
    recipe = resolve_recipe("translation", values)
    runs.start_run(recipe, out=str(folder / "run"), device="cpu", report=lambda _: None, note=lambda _: None)
    return folder / "run"


def joined_with_back(source, target, ahead, how):
    """The other direction, and the two joined."""
    back = WordModel.train(target, source, **how).align(target, source).links()
    return joined(ahead, [frozenset((s, t) for t, s in links) for links in back])


def joined(ahead, back):
    return [grow_diag_final_and(a, b) for a, b in zip(ahead, back, strict=True)]


def fast_align(source, target, folder):
    """With fast_align's usual options -d -o -v; systran-align always trains and joins both directions."""
    import systran_align

    text, ahead, back = (str(folder / name) for name in ("text", "ahead", "back"))
    lines = (f"{' '.join(x)} ||| {' '.join(y)}\n" for x, y in zip(source, target, strict=True))
    Path(text).write_text("".join(lines))
    options = {"favor_diagonal": True, "optimize_tension": True, "variational_bayes": True}
    systran_align.generate_alignment_probabilities(text, ahead, back, **options)
    aligner = systran_align.Aligner(ahead, back)
    found = aligner.align_batch([list(x) for x in source], [list(y) for y in target])
    return [frozenset((int(s), int(t)) for s, t in links["alignments"]) for links in found]


def eflomal(source, target, folder, *, both):
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
    return joined(*found) if both else found[0]


def measured(given, source, target, folder):
    """(what, links or None, seconds) of each."""
    for name, how in MODELS.items():
        model, training = timed(lambda h=how: WordModel.train(source, target, **h))
        made, aligning = timed(lambda m=model: m.align(source, target).links())
        yield f"{name}: training", None, training
        yield f"{name}: alignment", made, aligning
        both, more = timed(lambda h=how, ahead=made: joined_with_back(source, target, ahead, h))
        yield f"{name}, both directions: training and alignment", both, training + aligning + more
    if installed("systran-align"):
        yield "fast_align, both directions: training and alignment", *timed(lambda: fast_align(source, target, folder))
    if installed("eflomal"):
        for name, both in (("eflomal", False), ("eflomal, both directions", True)):
            yield f"{name}: training and alignment", *timed(lambda b=both: eflomal(source, target, folder, both=b))
    some = slice(0, given.attention_pairs)
    run = runs.open_run(given.run or random_run(folder, source, target), device="cpu")
    for by in ("weight", "norm"):
        reading = Reading(by=by, layer=1)
        reader = run_reader(run, source[some], target[some])
        made, seconds = timed(lambda r=reading, x=reader: find(x, r.candidates))
        yield f"translator by {by}, one layer", next(iter(made.aligned.values())).links(), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="a text of one's own, a sentence a line; with --target")
    parser.add_argument("--target")
    parser.add_argument("--gold", help="links of the first pairs of that text")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--attention-pairs", type=int, default=200)
    parser.add_argument("--run", help="a trained translator")
    parser.add_argument("--out", help="folder for the numbers as JSON")
    given = parser.parse_args()
    if (given.source is None) != (given.target is None) or (given.gold and not given.source):
        parser.error("--source and --target go together, and --gold with them")
    torch.set_num_threads(1)
    lines, gold = given_text(given)
    source, target = ([line.split() for line in side] for side in lines)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for what, links, seconds in measured(given, source, target, Path(folder)):
            pairs = len(source) if links is None else len(links)
            scored = links is not None and gold is not None and len(links) >= len(gold)
            error = 100 * aer(links[: len(gold)], gold.sure, gold.possible) if scored else None
            rows.append({"what": what, "pairs": pairs, "pairs_per_cpu_second": pairs / seconds, "aer_percent": error})
            print(rows[-1], file=sys.stderr, flush=True)
    shown = [["–" if value is None else value for value in row.values()] for row in rows]
    print(measuring.table(["what", "pairs", "pairs / CPU s", "AER %"], shown))
    about = {"text": given.source or "Europarl, German–English", "gold_pairs": len(gold) if gold else None}
    about |= {"translator": given.run or "iwslt14, random weights", "peers": {name: installed(name) for name in PEERS}}
    for name in PEERS:
        if not installed(name):
            print(f"not run: {name} is not installed")
    measuring.write(given.out, "cpu", measuring.surroundings(SEED) | about, rows)


if __name__ == "__main__":
    main()
