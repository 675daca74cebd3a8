"""The command line: one function a verb. An error is one plain line on stderr and exit status 2."""

import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from attnlab import __version__
from attnlab.terminal import Bar, Interruptible, command_line, resumable, show_table

app = typer.Typer(
    cls=Interruptible,
    name="attnlab",
    help="A laboratory for attention: swap it, train it, watch it being learnt, read what it attends to.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Pairs = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="settings; an unknown one names the nearest")
]


def main() -> None:
    """Run the command line; what a user got wrong is one line, unless ATTNLAB_TRACE is set."""
    if not os.environ.get("ATTNLAB_TRACE"):
        warnings.showwarning = lambda message, *_, **__: print(f"attnlab: {message}", file=sys.stderr)
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("ATTNLAB_TRACE"):
            raise
        sys.stderr.write(f"attnlab: {' '.join(str(error).split())}\n")
        sys.exit(2)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.command("list")
def list_everything(
    task: Annotated[
        str | None, typer.Argument(help="a task: all keys of attnlab train TASK, with their defaults")
    ] = None,
) -> None:
    """What exists: mechanisms and their options, model presets, tasks, data sets, studies; or the keys of a task."""
    import inspect

    if task is not None:
        from attnlab.training.recipe import list_keys

        show_table(
            f"attnlab train {task}",
            ["key", "default", "of the"],
            [[name, x, part] for name, x, part in list_keys(task)],
        )
        return

    from attnlab.mechanisms import MECHANISMS, option_types
    from attnlab.models.presets import PRESETS
    from attnlab.studies import STUDIES, open_study
    from attnlab.tasks import TASKS
    from attnlab.tasks.sources import SETS

    everyone = set(option_types("softmax"))
    rows = []
    for name, kind in MECHANISMS.items():
        about = (inspect.getdoc(inspect.getmodule(kind)) or "").split("\n")[0]
        rows.append(
            [name, about.rstrip(".:"), " ".join(option for option in option_types(name) if option not in everyone)]
        )
    show_table("mechanisms (every one also takes layer, scale, dropout)", ["attention=", "what it is", "options"], rows)
    sizes = [[name, c.model, c.layers, c.width, c.heads, c.vocabulary] for name, c in PRESETS.items()]
    show_table("model presets", ["model", "what it is", "layers", "width", "heads", "words"], sizes)
    sets = [[s.name, s.task, s.licence] for s in SETS.values()]
    show_table(f"tasks: {', '.join(TASKS)}; data sets", ["data=", "task", "licence"], sets)
    studies = [[study.name, study.title, " ".join(study.items)] for study in map(open_study, STUDIES)]
    show_table("studies", ["reproduce", "what it is", "items"], studies)


@app.command()
def demo(settings: Pairs = None) -> None:
    """Train several attentions to translate, run every analysis, and write one page of what was found.

    Settings: attention=a,b,… steps=400 seed=0 seeds=3 batch=32 lr=3e-3 copying=true open=true out=runs/demo
    The same command goes on after an interruption, and finished runs are used again.
    """
    from attnlab.commands.demo import run_demo as command
    from attnlab.config import split_pairs

    with resumable():
        well = command.run(split_pairs(settings or []))
    raise typer.Exit(0 if well else 1)


@app.command()
def describe(
    model: Annotated[str, typer.Argument(help="a preset: iwslt14, wmt14, wikitext103, tiny, lstm, lstm-copy, …")],
    settings: Pairs = None,
) -> None:
    """Print a model's parameters by block. A key that the model does not have is an option of its attention."""
    from attnlab.config import split_pairs
    from attnlab.models.presets import configured, on_meta, parameter_table

    config = configured(model, split_pairs(settings or []))
    counts = parameter_table(on_meta(config))
    rows = [[block, f"{count:,}"] for block, count in [*counts, ("total", sum(count for _, count in counts))]]
    show_table(f"{model}, attention={config.attention}", ["block", "parameters"], rows)


@app.command()
def train(
    task: Annotated[str, typer.Argument(help="translation, language, classification or synthetic")],
    settings: Pairs = None,
) -> None:
    """Train a model; the same command goes on with a run that was interrupted.

    Settings of the run itself: out=FOLDER device=auto|cpu|cuda. All others belong to the task (data=…), the model
    (model=iwslt14, attention=…, width=…), the training (steps=…, lr=…) or the attention (alpha=…).
    attnlab list TASK shows them all. model=FOLDER fine-tunes a Hugging Face language model.
    """
    from attnlab.config import split_pairs
    from attnlab.training import runs
    from attnlab.training.recipe import resolve_recipe

    values = split_pairs(settings or [])
    out, device = values.pop("out", None), values.pop("device", "auto")
    recipe = resolve_recipe(task, values)
    with Bar(recipe.training.steps) as progress:
        folder, outcome = runs.start_run(recipe, out=out, device=device, report=progress.show, note=progress.note)
    command = " ".join(["attnlab train", task, *(settings or [])])
    if int(os.environ.get("RANK", "0")):  # of several processes one speaks
        return
    if outcome.finished:
        best = f"best validation loss {outcome.best:.4f} at step {outcome.best_step}"
        print(f"{folder.path}: finished at step {outcome.step}; {best}")
        if folder.hugging_face.exists():
            print(f"for Hugging Face, attnlab.load and attnlab.record: {folder.hugging_face}")
    else:
        print(f"{folder.path}: stopped at step {outcome.step}, nothing is lost; to go on: {command}")
        raise typer.Exit(130)


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(help="a run's folder, or its name in runs/")],
    settings: Pairs = None,
) -> None:
    """Score a run: perplexity and accuracy; for translation also BLEU and chrF, with 95 % intervals.

    Settings: part=test weights=best|last|N|at:STEP beam= length_penalty= eval_samples=0 bootstrap=1000 device=auto
    data=NAME (pair=, data_dir=): on another data set, read with the run's vocabulary.
    Or src=FILE tgt=FILE: how text of one's own is translated.
    """
    import json

    from attnlab.config import parse_value, split_pairs
    from attnlab.decoding.evaluation import evaluated, text_evaluated
    from attnlab.decoding.scores import TextScore
    from attnlab.files import write_text
    from attnlab.training.runs import open_run

    values = split_pairs(settings or [])
    part, device = values.pop("part", "test"), values.pop("device", "auto")
    weights, source, target = (values.pop(key, None) for key in ("weights", "src", "tgt"))
    if (source is None) != (target is None):
        raise ValueError("src= and tgt= go together; only one is given")
    given = {key: parse_value(values.pop(key), kind, key) for key, kind in EVALUATION.items() if key in values}
    data: dict[str, str] = {key: values.pop(key) for key in ("data", "pair", "data_dir") if key in values}
    _refuse_unknown(values, ["part", "weights", "device", "src", "tgt", "data", "pair", "data_dir", *EVALUATION])
    samples, bootstrap = given.pop("eval_samples", 0), given.pop("bootstrap", 1000)
    opened = open_run(run, device=device, weights=weights, data=data)
    with Bar(1) as progress:
        if source and target:
            part, how = Path(source).name, {"bootstrap": bootstrap, "tick": progress.tick, **given}
            found = text_evaluated(opened, Path(source), Path(target), **how)
        else:
            found = evaluated(opened, part, samples=samples, bootstrap=bootstrap, tick=progress.tick, **given)
    texts = found.pop("translations", None)
    scores = found.pop("text", [])
    rows = [[key, f"{x:.4f}" if isinstance(x, float) else x] for key, x in found.items()]
    rows += [[score["name"], str(TextScore(**score)).removeprefix(f"{score['name']} ")] for score in scores]
    show_table(f"{run} on {part}", ["measure", "value"], rows)
    file = opened.folder.path / f"evaluation-{'-'.join([*data.values(), part]).replace('/', '_')}.json"
    write_text(file, json.dumps(found | {"text": scores, "translations": texts}, ensure_ascii=False, indent=1) + "\n")
    print(f"written: {file}")


@app.command()
def translate(
    run: Annotated[str, typer.Argument(help="a run's folder, or its name in runs/")],
    settings: Pairs = None,
) -> None:
    """Translate standard input, a sentence a line, to standard output.

    Settings: weights=best|last|N|at:STEP beam= length_penalty= device=auto; n_best=N: the N best of every line, each as
    NUMBER ||| TRANSLATION ||| SCORE, lines counted from 0; the score is log p over length to the length penalty
    """
    from attnlab.config import parse_value, split_pairs
    from attnlab.decoding.evaluation import translations, translator
    from attnlab.training.runs import open_run

    values = split_pairs(settings or [])
    device, weights = values.pop("device", "auto"), values.pop("weights", None)
    kinds: dict[str, Any] = {"beam": int, "length_penalty": float, "n_best": int}
    rules = {key: parse_value(values.pop(key), kind, key) for key, kind in kinds.items() if key in values}
    _refuse_unknown(values, ["weights", "device", *kinds])
    opened = open_run(run, device=device, weights=weights)
    translator(opened.task)
    lines, found = _lines(sys.stdin.buffer.read()), {}
    with Bar(1) as progress:
        for number, best in translations(opened, lines, **rules):
            found[number] = best
            progress.tick(len(found), len(lines))
    for number in range(len(lines)):
        for each in found[number]:
            print(f"{number} ||| {each.text} ||| {each.score:.4f}" if "n_best" in rules else each.text)


@app.command()
def diagnose(
    source: Annotated[str, typer.Argument(metavar="SRC", help="text, a sentence a line; or a .csv, .tsv, .jsonl file")],
    target: Annotated[str | None, typer.Argument(metavar="TGT", help="its translation, line by line")] = None,
    limit: Annotated[int | None, typer.Option(help="Read only so many pairs.")] = None,
    vocabulary: Annotated[int, typer.Option(help="The most frequent types of a side; others are <unk>.")] = 8000,
    units: Annotated[str, typer.Option(help="word or subword (SentencePiece, learnt from the text)")] = "word",
    text: Annotated[str, typer.Option(help="The field of the text, in a labelled file.")] = "text",
    label: Annotated[str, typer.Option(help="The field of the label.")] = "label",
    sentence: Annotated[int | None, typer.Option(help="Draw the counts of this pair, from 1.")] = None,
    out: Annotated[str | None, typer.Option(help="A folder for tables, figures and a page.")] = None,
) -> None:
    """Can attention be learnt from this corpus? From co-occurrence alone, without training."""
    from attnlab.commands import diagnose as study
    from attnlab.counting.diagnosis import diagnose as judge

    if sentence is not None and out is None:
        raise ValueError("--sentence draws a figure: say with --out where it is to be written")
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise ValueError(f"--out {out} is a file: name a folder, which is made where it is not there")
    files = Path(source), Path(target) if target is not None else None
    read = study.read(*files, limit=limit, vocabulary=vocabulary, units=units, text=text, label=label)
    read.check_sentence(sentence)
    found = judge(read.pairs, sizes=(len(read.source), len(read.target)))
    table = study.named(found, read)
    show_table(read.name, ["measure", "value"], [[key, told] for key, told in study.summary(found).items()])
    if (hard := study.hardest(table, 12)).rows:
        what = "labels" if read.labelled else "words"
        show_table(f"{what} that the counts cannot teach", list(hard.columns), [list(row) for row in hard.rows])
    for line in study.notes(read, table):
        print(line)
    if out is not None:
        said = command_line()
        print("written:", *study.write(found, read, table, Path(out), sentence, said))


@app.command()
def align(
    model: Annotated[str, typer.Argument(help="a run, a Hugging Face encoder-decoder (id or folder), or ibm1")],
    source: Annotated[Path, typer.Argument(metavar="SRC", help="text, a sentence a line")],
    target: Annotated[Path, typer.Argument(metavar="TGT", help="its translation, line by line")],
    by: Annotated[str | None, typer.Option(help="weight, norm or probe; else norm")] = None,
    setting: Annotated[str | None, typer.Option(help="awo or awi; else awi, of an LSTM and by probe awo")] = None,
    layer: Annotated[
        str | None, typer.Option(help="a number from 0, mean, highest-norm or best-on:GOLD; else highest-norm")
    ] = None,
    head: Annotated[str | None, typer.Option(help="likewise; else mean, all heads together")] = None,
    best_on_text: Annotated[
        tuple[str, str] | None, typer.Option(metavar="SRC TGT", help="the text of best-on's links; else this one")
    ] = None,
    reverse: Annotated[str | None, typer.Option(metavar="MODEL", help="also align TGT to SRC, by this model")] = None,
    symmetrise: Annotated[
        str | None, typer.Option(help="intersection, union or grow-diag-final-and; else the last")
    ] = None,
    tokenize: Annotated[str, typer.Option(help="none: words are between white space; moses: with --pair")] = "none",
    pair: Annotated[str | None, typer.Option(help="the languages, as de-en")] = None,
    train_on: Annotated[
        tuple[str, str] | None, typer.Option(metavar="SRC TGT", help="what ibm1 is trained on; else this text")
    ] = None,
    diagonal: Annotated[
        bool, typer.Option("--diagonal", help="ibm1 as fast_align: it learns to prefer the diagonal, with a prior on θ")
    ] = False,
    gold: Annotated[str | None, typer.Option(metavar="FILE", help="links to score against")] = None,
    gold_format: Annotated[str | None, typer.Option(help="pharaoh, talp or naacl; else by the name")] = None,
    gold_base: Annotated[int | None, typer.Option(help="what the file calls the first word, 0 or 1")] = None,
    bootstrap: Annotated[int, typer.Option(help="resamplings for the intervals")] = 1000,
    scores: Annotated[bool, typer.Option("--scores", help="write each link with its value, as 0-0:0.93")] = False,
    out: Annotated[Path | None, typer.Option(help="where to write the links; else to standard output")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Word alignments, from 0 in Pharaoh's format: one line a sentence pair, empty where nothing is linked."""
    from attnlab.commands.align import Options, align_files
    from attnlab.files import write_text

    options = Options(
        by=by, setting=setting, layer=layer, head=head, best_on_text=best_on_text, reverse=reverse,
        symmetrise=symmetrise, tokenize=tokenize, pair=pair, train_on=train_on, diagonal=diagonal, gold=gold,
        gold_format=gold_format, gold_base=gold_base, bootstrap=bootstrap, scores=scores, device=device,
    )  # fmt: skip
    with Bar(1) as progress:
        outcome = align_files(model, source, target, options, tick=progress.tick)
    text = "".join(f"{line}\n" for line in outcome.lines)
    if out is None:
        sys.stdout.write(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
    for line in [*outcome.notes, *([str(outcome.score)] if outcome.score else [])]:
        sys.stderr.write(f"{line}\n")


@app.command("runs")
def list_runs(root: Annotated[str, typer.Argument(help="the folder of runs")] = "runs") -> None:
    """Runs, their state and best metric."""
    from attnlab.training.runs import list_runs

    rows = list_runs(Path(root))
    if not rows:
        raise ValueError(f"no runs in {root}/; attnlab train … makes one")
    show_table(f"runs in {root}/", list(rows[0]), [list(row.values()) for row in rows])


@app.command()
def check(
    mechanism: Annotated[str, typer.Argument(help="a mechanism's name, or a file and a class: ./mine.py:Mine")],
    settings: Pairs = None,
) -> None:
    """Run every law on a mechanism and print what holds, with the numbers. Exit status 1 if one fails."""
    from attnlab.config import parse_value, split_pairs
    from attnlab.mechanisms import attention, find, parse_options
    from attnlab.mechanisms.laws import LAWS, judge

    find(mechanism)
    values = split_pairs(settings or [])
    heads, head_dim = (
        parse_value(values.pop(key, text), int, key) for key, text in (("heads", "3"), ("head_dim", "6"))
    )
    options = parse_options(mechanism, values)
    attention(mechanism, heads=heads, head_dim=head_dim, **{"layer": 1} | options)
    findings = [
        judge(law, lambda layer: attention(mechanism, heads=heads, head_dim=head_dim, **{"layer": layer} | options))
        for law in LAWS
    ]
    said = {True: "[green]holds[/]", False: "[red]FAILS[/]", None: "–"}
    rows = [
        [f.law, said[f.holds], "" if f.holds is None else f"{f.worst:.1e}", f"{f.allowed:.0e}", f.compared]
        for f in findings
    ]
    show_table(f"laws on {mechanism}", ["law", "", "worst", "allowed", "what was compared"], rows)
    failed = [f.law for f in findings if f.holds is False]
    print(
        f"{len(findings) - len(failed)} of {len(findings)} laws hold or do not apply"
        + (f"; {len(failed)} fail" if failed else "")
    )
    raise typer.Exit(1 if failed else 0)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="a Hugging Face id or folder, a run's folder, or its name in runs/")],
    text: Annotated[str | None, typer.Option(help="One text.")] = None,
    pair: Annotated[tuple[str, str] | None, typer.Option(metavar="SRC TGT", help="Source and target.")] = None,
    file: Annotated[str | None, typer.Option(help="A text a line; .tsv: pairs.")] = None,
    layers: Annotated[str | None, typer.Option(help="Only these, as 0,2-4; from 0, within their kind.")] = None,
    heads: Annotated[str | None, typer.Option(help="Only these.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut texts off after so many tokens.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Padded tokens read at a time.")] = 4096,
    limit: Annotated[int | None, typer.Option(help="Of the file, only so many examples.")] = None,
    examples: Annotated[int, typer.Option(help="Of the file, so many with full maps.")] = 0,
    categories: Annotated[str | None, typer.Option(help="A file: name, tab, tokens; a category a line.")] = None,
    frequency: Annotated[str | None, typer.Option(help="A file of token counts; else those of the corpus.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, float16, bfloat16; else as it was saved")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; else inspected/MODEL-DIGEST.")] = None,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Weights that are not safetensors too.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
) -> None:
    """What a model attends to, by weights and by norms: tables, figures and a page.

    The same command goes on after an interruption; torchrun and accelerate launch share a file out over processes.
    """
    from attnlab.commands.inspect import inspection as inspecting
    from attnlab.config import parse_numbers
    from attnlab.provenance import collect_provenance

    request = inspecting.Request(
        model=model, text=text, pair=pair, file=file, limit=limit, examples=examples, max_length=max_length,
        layers=parse_numbers(layers, "layers"), heads=parse_numbers(heads, "heads"), batch_tokens=batch_tokens,
        dtype=dtype, categories=categories, frequency=frequency,
    )  # fmt: skip
    with Bar(1) as progress:
        page = inspecting.inspect(
            request, out=out, device=device, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code,
            command=command_line(), made=collect_provenance, progress=progress.tick,
        )  # fmt: skip
    if page is not None:
        print(f"report: {page}")


@app.command()
def compare(
    task: Annotated[str, typer.Argument(help="translation, language, classification or synthetic")],
    settings: Pairs = None,
    controls: Annotated[bool, typer.Option(help="also softmax with as many parameters, and with more heads")] = True,
    on: Annotated[str, typer.Option(help="local, or ray: the cluster at RAY_ADDRESS")] = "local",
    jobs: Annotated[int | None, typer.Option(help="so many runs at a time at most; else as many as fit")] = None,
) -> None:
    """Train attentions under equal conditions: quality with intervals and tests, cost, and what is inside.

    attention=softmax,coda,./mine.py:Mine seeds=3; a list for any other key is a grid; out= runs= device=auto
    The same command goes on after an interruption, and finished runs are used again.
    """
    from attnlab.commands.compare import command
    from attnlab.config import split_pairs

    said = command_line()
    with resumable():
        well = command.run(task, split_pairs(settings or []), controls=controls, on=on, jobs=jobs, command=said)
    raise typer.Exit(0 if well else 1)


@app.command()
def reproduce(
    study: Annotated[str, typer.Argument(help="a paper; attnlab list names them and their items")],
    settings: Pairs = None,
    only: Annotated[list[str] | None, typer.Option(metavar="ITEM", help="this item; may be repeated")] = None,
    scale: Annotated[str, typer.Option(help="smoke, small or full")] = "smoke",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    seeds: Annotated[int | None, typer.Option(help="how many; else as many as each item says")] = None,
    out: Annotated[Path | None, typer.Option(help="where to write; else results/STUDY/SCALE")] = None,
    data_dir: Annotated[str | None, typer.Option(help="a folder of data sets, in the layout of ATTNLAB_DATA")] = None,
    again: Annotated[bool, typer.Option("--again", help="run items anew that are already there")] = False,
    on: Annotated[str, typer.Option(help="where models train: local, or ray, the cluster at RAY_ADDRESS")] = "local",
    jobs: Annotated[int | None, typer.Option(help="so many models at a time at most; else as many as fit")] = None,
) -> None:
    """Run a paper's tables and figures: its numbers beside ours, with intervals and verdicts.

    The same command goes on after an interruption: an item that is finished is not run again.
    """
    from attnlab.config import split_pairs
    from attnlab.experiments import reproduction as running
    from attnlab.experiments.schedulers import scheduler
    from attnlab.experiments.study import known_scale
    from attnlab.experiments.study_page import brief, outcome_table, tally_table, write
    from attnlab.studies import open_study
    from attnlab.training.runs import choose_device

    chosen = open_study(study)
    options = {"seeds": seeds, "out": out, "data-dir": data_dir}
    words = ["attnlab", "reproduce", study, *(settings or [])]
    words += [*(f"--only={name}" for name in only or []), f"--scale={scale}"]
    words += [f"--{name}={value}" for name, value in options.items() if value is not None]
    said = split_pairs(settings or [])
    command, folder = shlex.join(words), out or Path("results") / study / scale
    with resumable(), scheduler(on, jobs=jobs, device=device) as where, Bar(1) as progress:
        terms = running.StudyTerms(known_scale(scale), choose_device(device), seeds, data_dir, command, said, where)
        outcomes = running.reproduce(
            chosen, terms, folder, only=only or (), again=again, note=progress.note, progress=progress.tick
        )
    asked = [outcome for outcome in outcomes if outcome.config.item in chosen.chosen(only or ())]
    tables = dict(brief(outcome.title, outcome_table(outcome.cells)) for outcome in asked)
    tables[f"{study} at scale {scale}"] = tally_table([cell for outcome in asked for cell in outcome.cells])
    for title, table in tables.items():
        show_table(title, list(table.columns), [list(row) for row in table.rows])
    print(f"report: {write(chosen, outcomes, folder)}")


EVALUATION: dict[str, Any] = {"beam": int, "length_penalty": float, "eval_samples": int, "bootstrap": int}


def _refuse_unknown(values: dict[str, str], known: list[str]) -> None:
    from attnlab.config import suggest_nearest

    for key in values:
        raise ValueError(f"unknown key {key!r}{suggest_nearest(key, known)}; there are {', '.join(known)}")


def _lines(text: bytes) -> list[str]:
    try:
        return text.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise ValueError(f"standard input, line {line}: not UTF-8 ({error.reason})") from None


if __name__ == "__main__":
    main()
