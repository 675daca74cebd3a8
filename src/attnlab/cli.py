"""The command line: one function per command, which calls a module of `commands`.

Errors that the user can correct are printed as one line on stderr, with exit status 2.
"""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from attnlab import __version__
from attnlab.commands.align_entry import align, align_train
from attnlab.commands.examples import write_examples
from attnlab.commands.export_entry import export
from attnlab.commands.ledger_group import ledger
from attnlab.config import parse_numbers, split_pairs, write_given
from attnlab.terminal import Bar, Interruptible, command_line, resumable, show_table
from attnlab.terminal.bash_words import join_bash_words

# isort: off
from attnlab.commands.arguments import (
    AllowCode, Device, Items, Jobs, ListedTask, MechanismName, On, Pairs, Preset, ReadModel, Root,
    RunName, Scaled, Seeds, StudyName, TaskName, Together, Until,
)  # fmt: skip
# isort: on

app = typer.Typer(
    cls=Interruptible,
    name="attnlab",
    help="A laboratory for attention: swap it, train it, watch it learn, and read what it attends to.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line. Errors are printed as one line, or with a traceback if ATTNLAB_TRACE is set."""
    join_bash_words()
    if not os.environ.get("ATTNLAB_TRACE"):
        warnings.showwarning = lambda message, *_, **__: print(f"attnlab: {message}", file=sys.stderr)
    try:
        app()
    except BaseException as error:
        own_files = sys.modules.get("attnlab.registry.own_files")  # imported only by commands that can load a file
        message = own_files.explain(error) if own_files is not None else None
        if message is None and isinstance(error, ValueError | OSError | ImportError | OverflowError):
            message = " ".join(str(error).split())
        if message is None or os.environ.get("ATTNLAB_TRACE"):
            raise
        sys.stderr.write(f"attnlab: {message}\n")
        sys.exit(2)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.command("list")
def list_everything(task: ListedTask = None) -> None:
    """List mechanisms and their options, model presets, tasks, data sets and studies; or explain a task's keys."""
    from attnlab.commands.list_all import print_all, print_keys

    print_all() if task is None else print_keys(task)


@app.command()
def demo(
    settings: Pairs = None,
    seeds: Seeds = None,
    out: Annotated[Path | None, Option(help="Output folder; default: runs/demo.")] = None,
    browser: Annotated[bool | None, Option("--open/--no-open", help="Open the page if there is a desktop.")] = None,
    until: Until = None,
) -> None:
    """Train several attentions to translate, run every analysis, and write one page of results.

    Settings: attention=a,b,… steps=400 seed=0 batch=32 lr=3e-3 copying=true
    The same command resumes after an interruption and reuses finished runs.
    """
    from attnlab.commands.demo.run_demo import run_demo

    with resumable():
        values = split_pairs(settings or []) | write_given(seeds=seeds, out=out, open=browser)
        well = run_demo(values, command_line(), until)
    raise typer.Exit(0 if well else 1)


@app.command()
def describe(model: Preset, settings: Pairs = None) -> None:
    """Print the number of parameters of each block. Keys that the model lacks are options of its attention."""
    from attnlab.commands.describe import describe_model

    describe_model(model, settings or [])


@app.command()
def train(
    task: TaskName,
    settings: Pairs = None,
    out: Annotated[Path | None, Option(help="Folder of the run; default: a name in runs/.")] = None,
    device: Device = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Train a model. The same command resumes an interrupted run.

    Settings belong to the task (data=…), the model (model=iwslt14, attention=…, width=…), the training (steps=…, lr=…)
    or the attention (alpha=…). `attnlab list TASK` explains all of them.
    model=FOLDER fine-tunes a Hugging Face language model.
    """
    began = time.perf_counter()  # before the slow imports
    from attnlab.commands.train import train_model

    if not train_model(task, settings or [], out=out, device=device, allow_code=allow_code, began=began):
        raise typer.Exit(130)


@app.command()
def evaluate(run: RunName, settings: Pairs = None, device: Device = "auto", allow_code: AllowCode = False) -> None:
    """Score a run: perplexity and accuracy; for translation also BLEU and chrF, with 95 % intervals.

    Settings: part=test (without one, valid) weights=best|last|N|at:STEP beam= length_penalty= eval_samples=0
    bootstrap=1000
    data=NAME (pair=, data_dir=) scores another data set, read with the run's vocabulary.
    src=FILE tgt=FILE scores the translation of your own text.
    """
    from attnlab.commands.evaluate import evaluate_run

    evaluate_run(run, settings or [], device=device, allow_code=allow_code)


@app.command()
def translate(run: RunName, settings: Pairs = None, device: Device = "auto", allow_code: AllowCode = False) -> None:
    """Translate standard input, one sentence per line, to standard output.

    Settings: weights=best|last|N|at:STEP beam= length_penalty= n_best=N
    n_best=N prints the N best translations of each line as NUMBER ||| TRANSLATION ||| SCORE. Lines are numbered from 0;
    the score is log p divided by the length to the power of the length penalty.
    """
    from attnlab.commands.translate import translate_input

    translate_input(run, settings or [], device=device, allow_code=allow_code)


@app.command()
def predict(
    run: RunName,
    settings: Pairs = None,
    file: Annotated[Path | None, Option(help="File with one text per line; default: standard input.")] = None,
    words: Annotated[int, Option(help="Number of words to show, those that contribute most.")] = 3,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per line.")] = False,
    device: Device = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Classify texts, one per line: label, probability, and the words that contribute most.

    Settings: weights=best|last|N|at:STEP
    A word's contribution is what the log-odds of the label lose if the word is deleted: +0.69 doubles the odds.
    --words 0 is much faster. A line without words gets an empty line.
    """
    from attnlab.commands.predict import predict_lines

    how: dict[str, Any] = {"file": file, "words": words, "as_json": as_json, "device": device, "allow_code": allow_code}
    predict_lines(run, settings or [], **how)


@app.command()
def generate(
    run: RunName,
    settings: Pairs = None,
    prompt: Annotated[str | None, Option(help="Text to continue; default: each line of standard input.")] = None,
    tokens: Annotated[int | None, Option(help="Largest number of tokens to write; default: 200.")] = None,
    temperature: Annotated[float | None, Option(help="0 is greedy (default), 1 samples from the model.")] = None,
    top_k: Annotated[int | None, Option(help="Sample from this many of the likeliest tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Sample from the likeliest tokens with this much probability.")] = None,
    seed: Annotated[int, Option(help="Seed of the sampling; line n of the input adds n − 1.")] = 0,
    as_json: Annotated[bool, Option("--json", help="Write JSON lines with the prompt and the text after it.")] = False,
    device: Device = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Continue a text with a language model. Writes the prompt and what follows it, until the end of the text.

    Settings: weights=best|last|N|at:STEP cached=true
    """
    # one parameter per command-line option
    from attnlab.commands.generate import generate_text
    from attnlab.decoding.generation import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    well = generate_text(
        run, settings or [], prompt=prompt, tokens=tokens, sampling=sampling, as_json=as_json, device=device,
        allow_code=allow_code,
    )  # fmt: skip
    raise typer.Exit(0 if well else 1)


app.command()(export)


@app.command()
def diagnose(
    source: Annotated[Path, Argument(metavar="SRC", help="Text, one sentence per line; or .csv, .tsv, .jsonl.")],
    target: Annotated[Path | None, Argument(metavar="TGT", help="Translation of SRC, line by line.")] = None,
    limit: Annotated[int | None, Option(help="Number of pairs to read; default: all.")] = None,
    vocabulary: Annotated[int, Option(help="Number of types per side; all others become <unk>.")] = 8000,
    units: Annotated[str, Option(help="word, or subword (SentencePiece, trained on the text).")] = "word",
    text: Annotated[str, Option(help="Field of the text in a labelled file.")] = "text",
    label: Annotated[str, Option(help="Field of the label in a labelled file.")] = "label",
    sentence: Annotated[int | None, Option(help="Number of the pair whose counts to draw, from 1.")] = None,
    out: Annotated[Path | None, Option(help="Folder to write tables, figures and a page to.")] = None,
) -> None:
    """Predict from co-occurrence counts, without training, whether attention can be learnt from a corpus."""
    from attnlab.commands.diagnose import diagnose_files

    how = {"limit": limit, "vocabulary": vocabulary, "units": units, "text": text, "label": label}
    diagnose_files(source, target, sentence=sentence, out=out, command=command_line(), **how)


app.command()(align)
app.command("align-train")(align_train)


@app.command("runs")
def list_runs(root: Root = Path("runs")) -> None:
    """List runs with task, seed, state, best score and date, the newest last."""
    from attnlab.training.run_list import list_runs

    rows = list_runs(root)
    if not rows:
        raise ValueError(f"no runs in {root}/: start one with attnlab train")
    show_table(f"runs in {root}/", list(rows[0]), [list(row.values()) for row in rows])


@app.command()
def check(mechanism: MechanismName, settings: Pairs = None) -> None:
    """Run every law on a mechanism and print the results with their numbers. Exit status 1 if a law fails."""
    from attnlab.commands.check import check_laws

    raise typer.Exit(0 if check_laws(mechanism, settings or []) else 1)


@app.command()
def inspect(
    model: ReadModel,
    text: Annotated[str | None, Option(help="A single text to read; a translator translates it.")] = None,
    pair: Annotated[tuple[str, str] | None, Option(metavar="SRC TGT", help="A source and a target text.")] = None,
    file: Annotated[str | None, Option(help="File with one text per line; .tsv: pairs.")] = None,
    document: Annotated[str | None, Option(help="File that is one text, of any length.")] = None,
    window: Annotated[list[int] | None, Option(help="Token where a window of a long text begins.")] = None,
    pan: Annotated[bool, Option("--pan", help="Show windows one after another, as many as the page holds.")] = False,
    layers: Annotated[str | None, Option(help="Layers to read, as 0,2-4; from 0 within each kind.")] = None,
    heads: Annotated[str | None, Option(help="Heads to read, as 0,2-4.")] = None,
    max_length: Annotated[int | None, Option(help="Number of tokens after which texts are cut off.")] = None,
    batch_tokens: Annotated[int, Option(help="Number of padded tokens per batch.")] = 4096,
    limit: Annotated[int | None, Option(help="Number of examples from the file to read.")] = None,
    examples: Annotated[int, Option(help="Number of examples to show with full maps.")] = 0,
    categories: Annotated[str | None, Option(help="File of categories: per line a name, a tab, tokens.")] = None,
    frequency: Annotated[str | None, Option(help="File of token counts; default: count the corpus.")] = None,
    analysis: Annotated[list[str] | None, Option(help="A further table: a name, all, ./file.py:Class.")] = None,
    importance: Annotated[bool, Option("--importance", help="Rank heads by the effect of knocking out each.")] = False,
    device: Device = "auto",
    dtype: Annotated[str | None, Option(help="float32, float16, bfloat16; default: as saved.")] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a model on the hub.")] = None,
    gguf_file: Annotated[str | None, Option(help="GGUF file of the model to load instead of safetensors.")] = None,
    out: Annotated[Path | None, Option(help="Output folder; default: inspected/MODEL-DIGEST.")] = None,
    allow_pickle: Annotated[bool, Option("--allow-pickle", help="Also load weights that are not safetensors.")] = False,
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run the code of the model.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Show what a model attends to, by weights and by norms: tables, figures and a page.

    The same command resumes after an interruption. torchrun and accelerate launch split a file between processes.
    """
    from attnlab.commands.inspect import inspection as inspecting

    request = inspecting.InspectionRequest(
        model=model, text=text, pair=pair, file=file, limit=limit, examples=examples, max_length=max_length,
        layers=parse_numbers(layers, "--layers"), heads=parse_numbers(heads, "--heads"), batch_tokens=batch_tokens,
        dtype=dtype, categories=categories, frequency=frequency, analyses=tuple(analysis or ()), document=document,
        windows=tuple(window or ()), pan=pan, revision=revision, gguf_file=gguf_file, importance=importance,
    )  # fmt: skip
    with Bar(1) as progress:
        page = inspecting.inspect(
            request, out, device=device, command=command_line(), progress=progress.tick,
            allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, allow_code=allow_code,
        )  # fmt: skip
    if page is not None:
        print(f"report: {page}")


@app.command()
def compare(
    task: TaskName,
    settings: Pairs = None,
    controls: Annotated[bool, Option(help="Add softmax with as many parameters, and with more heads.")] = True,
    winners: Annotated[bool, Option("--control-winners", help="Add them only for rows that beat softmax.")] = False,
    plan: Annotated[bool, Option("--plan", help="Print the seeds that effect=… needs, from a pilot of 3.")] = False,
    seeds: Seeds = None,
    out: Annotated[Path | None, Option(help="Output folder; default: a name in compared/.")] = None,
    runs: Annotated[Path, Option(help="Folder of the runs, which are reused.")] = Path("runs"),
    device: Device = "auto",
    on: On = "local",
    jobs: Jobs = None,
    until: Until = None,
    population: Together = True,
    source: Annotated[Path | None, Option("--from", help="Ledger or its folder to draw from; do not train.")] = None,
) -> None:  # one parameter per command-line option
    """Train attentions under equal conditions and compare quality (with intervals and tests), cost and what they learn.

    Settings: attention=softmax,coda,./mine.py:Mine; a list for any other key is a grid. The same command resumes.
    With --plan: effect=0.5, the difference to detect, and measure=BLEU (default: the one that judges the rows).
    Without a task, model=A,B tasks=hellaswag limit=200 scores language models with lm-eval, paired by item.
    """
    if task.startswith(("model=", "tasks=")) and not plan:
        from attnlab.commands.compare.harness import run_harness

        run_harness(split_pairs([task, *(settings or [])]), out=out, device=device, command=command_line())
        return
    from attnlab.commands.compare.command import ComparisonRequest, run_comparison, run_seed_plan
    from attnlab.tasks import check_task

    check_task(task)
    with resumable():
        values, command = split_pairs(settings or []) | write_given(seeds=seeds), command_line()
        where: dict[str, Any] = {"out": out, "runs": runs, "on": on, "device": device, "jobs": jobs, "until": until}
        chosen: Any = "winners" if winners else "all" if controls else "none"
        request = ComparisonRequest(**where, controls=chosen, command=command, population=population, source=source)
        well = (run_seed_plan if plan else run_comparison)(task, values, request)
    raise typer.Exit(0 if well else 1)


@app.command()
def reproduce(
    study: StudyName = None,
    settings: Pairs = None,
    only: Items = None,
    scale: Scaled = None,
    device: Device = "auto",
    seeds: Annotated[int | None, Option(help="Number of seeds; default: as each item defines.")] = None,
    out: Annotated[Path | None, Option(help="Output folder; default: results/STUDY.")] = None,
    data_dir: Annotated[str | None, Option(help="Folder of data sets, in the layout of ATTNLAB_DATA.")] = None,
    again: Annotated[bool, Option("--again", help="Measure again what the ledger has.")] = False,
    on: On = "local",
    jobs: Jobs = None,
    until: Until = None,
    source: Annotated[Path | None, Option("--from", help="Ledger or its folder to draw from; do not train.")] = None,
    status: Annotated[bool, Option("--status", help="Show how much of each paper, or of STUDY, is run.")] = False,
    table: Annotated[bool, Option("--table", help="Print every cell, not only the clearest ones.")] = False,
    population: Together = True,
) -> None:  # one parameter per command-line option
    """Reproduce a paper's tables and figures: its numbers beside ours, with intervals and verdicts.

    Every measured run is a row of OUT/ledger.jsonl. The same command resumes, and runs only what the ledger lacks.
    """
    from attnlab.commands.reproduce import ROOT, Request, draw_again, run_study, show_status

    if status:
        return show_status(study, source or out or ROOT)
    if study is None:
        raise ValueError("name a study, such as attnlab reproduce snell2021; attnlab list shows them all")
    request = Request(only or (), scale, device, seeds, out, data_dir, again, on, jobs, until, table, population)
    if source is not None:
        return draw_again(study, source, request)
    with resumable():
        run_study(study, settings or [], request)
    return None


app.add_typer(ledger, name="ledger")

for group, prefix in ((app, ""), (ledger, "ledger ")):
    for command in group.registered_commands:
        command.epilog = write_examples(prefix + (command.name or command.callback.__name__))  # type: ignore[union-attr]
