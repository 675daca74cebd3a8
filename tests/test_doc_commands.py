"""Commands of README, CONTRIBUTING and docs: each can be parsed, and each runs, smaller, or has a reason why not."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import tiny_models
import typer
from in_process import run_attnlab
from typer.core import TyperGroup

from attnlab.cli import app
from attnlab.commands.compare.plan import PLAN_KEYS, plan_comparison
from attnlab.config import parse_values, split_pairs
from attnlab.models.presets import configure_model
from attnlab.studies import open_study
from attnlab.tasks.synthetic import Synthetic, SyntheticConfig
from attnlab.terminal.spelling import SETTINGS
from attnlab.training.recipe import resolve_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP = typer.main.get_command(app)
CONTEXT = GROUP.make_context("attnlab", ["list"])
PLACEHOLDERS = {  # of a command's form
    "align …": "align ibm1 test.de test.en", "[key=value …]": "", "key=value …": "", "TASK": "synthetic data=lexicon",
    "RUN": "runs/mine", "smoke|small|full": "smoke", "FOLDER": "folder",
}  # fmt: skip
NOT_RUN = {  # what is in the command: why it is not run here
    "attnlab demo": "two minutes; tests/test_demo.py runs it smaller",
    "attnlab reproduce": "minutes to days; tests/test_study_runs.py and others run every item at smoke scale",
    "ledger merge": "needs ledgers of two machines; tests/test_ledger.py merges two",
    "Helsinki-NLP/": "downloads a model; tests/test_align_pretrained.py and tests/test_inspect.py run a tiny one",
    "OWNER/NAME": "downloads a model",
    "openai-community/gpt2": "downloads a tokenizer; tests/test_tasks_own_text.py has one of its own",
    "model=./gpt2": "needs a pretrained model; tests/test_tuned.py fine-tunes a tiny one",
    "align en-fr": "needs a trained aligner; tests/test_align_pretrained.py trains a tiny one",
    "runs/fertility-0123456789ab": "the name depends on the text; tests/test_hmm_aligner.py uses the folder",
    "align eflomal": "needs eflomal",
    "tasks=hellaswag": "needs lm-eval and its data; tests/test_harness.py scores a tiny task",
    "logging=tensorboard": "needs tensorboard; tests/test_trackers.py runs it",
    "data=multi30k": "needs a data set",
    "data=europarl": "needs a data set",
    "data=wikitext-2": "needs a data set",
    "data=enwik8": "needs a data set",
    "data=sst": "needs a data set",
    "modern-125m": "needs 1 GB of memory; tests/test_presets.py counts it without weights",
    "--export ctranslate2": "needs a Hugging Face model; tests/test_align_products.py exports one",
    "--export guided": "needs a Hugging Face model or a run; tests/test_align_products.py exports links",
    "HuggingFaceTB/": "downloads a model; tests/test_inspect_long.py reads long texts",
}
SMALLER = {
    "data=tinyshakespeare": "data=novel.txt units=character block=32", "block=256": "block=32", "at:5000": "at:2",
    "vocabulary=4000": "vocabulary=100",
}  # fmt: skip
ELSEWHERE = {"README.md": "test_readme", "tour.md": "test_docs", "own-mechanism.md": "test_docs"}
SMALL = {
    "width": "16", "layers": "2", "heads": "2", "feed_forward": "16", "steps": "2", "examples": "40", "held_out": "8",
    "batch_examples": "5",
}  # fmt: skip


def list_commands(page: Path) -> list[str]:
    """Return the commands that a page shows in fences and in indented blocks, without comments."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    fenced = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()]
    lines += re.findall(r"^    (attnlab [a-z].*)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)
    found = []
    for line in lines:
        match = re.search(r"(?:^|\| )(attnlab .*)", line)
        if match:
            found.append(re.sub(r" {2,}+(?!\w+=|--).*| +# .*| [<>] .*", "", match[1]).strip())
    return found


def split_command(command: str) -> list[str]:
    for form, meant in PLACEHOLDERS.items():
        command = re.sub(
            rf"(?<![\w=-]){re.escape(form)}(?![\w-])" if form.isupper() else re.escape(form), meant, command
        )
    return shlex.split(command)[1:]


def parse(words: list[str]):
    """Return the name and the parameters of a command. Raises an error for an option that it does not have."""
    group, first = GROUP, ""
    if isinstance(inner := GROUP.commands[words[0]], TyperGroup):
        group, first, words = inner, f"{words[0]} ", words[1:]
    name, command, words = group.resolve_command(CONTEXT, words)
    return first + name, command.make_context(name, words).params


SHOWN = [(page.name, command) for page in PAGES for command in list_commands(page)]


def test_commands_are_found_in_both_kinds_of_blocks():
    names = {name for name, _ in SHOWN}
    assert {"README.md", "tour.md", "training.md", "tasks.md", "alignment.md"} <= names
    assert (
        "compare.md",
        "attnlab compare TASK attention=softmax,coda,dagpam,./mine.py:Mine [key=value …] --seeds 3",
    ) in (SHOWN)
    assert len(SHOWN) > 120


@pytest.mark.parametrize("page", dict.fromkeys(name for name, _ in SHOWN))
def test_commands_that_a_page_shows_have_known_options_keys_and_items(page):
    for command in (command for name, command in SHOWN if name == page):
        check_command(*parse(split_command(command)))


def check_command(name: str, params) -> None:
    """Raise an error for a key or an item that does not exist."""
    pairs = split_pairs(params.get(SETTINGS) or [])
    pairs = {key: re.sub(r"\./\w+\.py:\w+", "nap", text) for key, text in pairs.items() if key not in PLAN_KEYS}
    if name == "train":
        if pairs.get("model") != "./gpt2":  # its config.json decides the keys
            resolve_recipe(params["task"], pairs)
    elif name == "compare" and "tasks" not in pairs:
        plan_comparison(params["task"], {"attention": "softmax", **pairs})
    elif name == "describe":
        configure_model(params["model"], pairs)
    elif name in ("evaluate", "translate", "predict"):
        parse_values(pairs, import_module(f"attnlab.commands.{name}").TYPES)
    elif name == "reproduce" and params.get("study"):
        assert set(params["only"] or ()) <= open_study(params["study"]).items.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, mechanisms and runs with the names that the pages use."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "out").mkdir()
    task = Synthetic(SyntheticConfig(held_out=12))
    sides = task.read_sources("test"), task.read_references("test")
    for stem in ("test", "corpus", "new", "train", "big", "a", "v"):
        for ending, side in zip(("de", "en"), sides, strict=True):
            (folder / f"{stem}.{ending}").write_text("".join(f"{line}\n" for line in side))
    (folder / "tags.txt").write_text("".join(re.sub(r"^(\S+)", r"<b> \1 </b>", line) + "\n" for line in sides[0]))
    units = "".join(
        f'<tu><tuv xml:lang="de"><seg>{one}</seg></tuv><tuv xml:lang="en"><seg>{other}</seg></tuv></tu>'
        for one, other in zip(*sides, strict=True)
    )
    (folder / "memory.tmx").write_text(f'<tmx version="1.4"><header srclang="de"/><body>{units}</body></tmx>')
    reviews = "".join(f"{'good' if n % 2 else 'bad'} film {n % 7},{n % 2}\n" for n in range(60))
    (folder / "reviews.csv").write_text(f"review,stars\n{reviews}")
    (folder / "new.txt").write_text("good film\nbad film\n")
    (folder / "corpus.txt").write_text("The cat sat on the mat.\nNobody saw it.\n")
    (folder / "prompts.txt").write_text("ROMEO:\n")
    (folder / "novel.txt").write_text("the cat sat on the mat, and the dog sat on the log.\n" * 200)
    (folder / "mine.py").write_text("from attnlab.mechanisms.softmax import Softmax as Mine\n")
    for name in ("mine", "my-run", "de-en"):
        run("attnlab train synthetic data=lexicon", folder, out=f"runs/{name}", evaluate_at="2")
    run("attnlab train classification data=reviews.csv text=review label=stars", folder, out="runs/reviews")
    run("attnlab train language data=tinyshakespeare model=modern-25m", folder, out="runs/shakespeare")
    (folder / "results").symlink_to(ROOT / "results")
    return folder


def run(command: str, folder: Path, **changes: str) -> None:
    """Run a command, smaller: some keys are replaced by SMALL, and `changes` are keys of its own."""
    for shown, small in SMALLER.items():
        command = command.replace(shown, small)
    words = split_command(command)
    if words[0] in ("train", "compare"):
        left_out = {"layers", "heads", "feed_forward"} if "model=lstm" in words else set()
        left_out |= {"layers"} if "layers=4" in words else set()
        left_out |= {"examples", "held_out"} if "synthetic" not in words else set()
        small = {key: text for key, text in SMALL.items() if key not in left_out}
        words = [word for word in words if word.partition("=")[0] not in {*small, "batch_tokens"}]
        words += [f"{key}={text}" for key, text in (small | changes).items()]
    words += ["--no-controls"] if words[0] == "compare" and "--no-controls" not in words else []
    if "--seeds" in words:
        words[words.index("--seeds") + 1] = "1"
    if "--out" in words and words[0] in ("train", "export"):  # several pages may use one name
        words[words.index("--out") + 1] = f"out/{len(list((folder / 'out').iterdir()))}"
    words = [tiny_models.minilm() if "MiniLM" in word or word == "bert-base-uncased" else word for word in words]
    done = run_attnlab(*words, cwd=folder, input="good film\n")
    assert done.returncode == 0, (words, done.stdout[-1000:], done.stderr)


@pytest.mark.docs
@pytest.mark.parametrize(
    "command",
    dict.fromkeys(
        command for page, command in SHOWN if page not in ELSEWHERE and not any(part in command for part in NOT_RUN)
    ),
)
def test_a_command_that_a_page_shows_runs(command, folder):
    run(command, folder)


@pytest.mark.docs
def test_an_exported_model_generates_as_the_page_says(folder, monkeypatch):
    run("attnlab export runs/shakespeare --to huggingface out=exported/shakespeare", folder)
    monkeypatch.chdir(folder)
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/export.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(block.replace("max_new_tokens=100", "max_new_tokens=5"), "export.md", "exec"), {})


def test_every_reason_not_to_run_a_command_is_needed():
    assert [part for part in NOT_RUN if not any(part in command for _, command in SHOWN)] == []
    for reason in NOT_RUN.values():
        for path in re.findall(r"tests/\w+\.py", reason):
            assert (ROOT / path).is_file(), path
