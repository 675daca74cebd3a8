"""The pages of the site that are made from the code: one for each mechanism and task, the reference, and the README.

mkdocs calls `on_config` and `on_files` (mkdocs.yml). To add a page: write docs/NAME.md, and a line in the nav. A
mechanism or a task needs the line alone, and its chapter in docs/mechanisms.md or docs/tasks.md.
"""

import importlib
import inspect
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import attnlab
from attnlab.mechanisms import MECHANISMS, Mechanism, attention
from attnlab.report.colours import NEGATIVE, POSITIVE
from attnlab.report.figures import draw_attention_maps, render_png
from attnlab.tasks import TASKS
from attnlab.training.recipe import list_keys

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "slept"]


class Literal(Extension):
    """No HTML in Markdown: a token <s> of a docstring or of a result is text. And what is set in columns stays so."""

    def extendMarkdown(self, md: Any) -> None:  # noqa: N802 (Python-Markdown's name)
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")
        md.preprocessors.register(Columns(md), "columns", 20)  # after fenced code was taken out


class Columns(Preprocessor):
    """Lines such as "layers   only these", by which docstrings say what their arguments are, become a block of code."""

    SET = re.compile(r"(?![|>#*+-])\S.*? {2,}\S")

    def run(self, lines: list[str]) -> list[str]:
        made: list[str] = []
        inside = False
        for line in lines:
            columns = bool(self.SET.match(line)) or (inside and line.startswith("  "))
            if columns != inside:
                made.append("")
            made.append(f"    {line}" if columns else line)
            inside = columns
        return made


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Literal())
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, content in pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def pages() -> dict[str, str | bytes]:
    """Every page and picture that is made, by its place under docs/."""
    made: dict[str, str | bytes] = {
        "index.md": index(),
        "contributing.md": _text("CONTRIBUTING.md").replace("](docs/", "]("),
    }
    made |= {"reference.md": reference()} | {f"reference/{name}.md": room(name) for name in ROOMS}
    for name in MECHANISMS:
        made |= {f"mechanisms/{name}.md": mechanism(name), f"mechanisms/{name}.png": picture(name)}
    for name in TASKS:
        made |= {f"tasks/{name}.md": task(name), f"tasks/{name}.png": batch_picture(name)}
    return made


def index() -> str:
    """The README, with its links as the site has them."""
    return _text("README.md").replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)")


def mechanism(name: str) -> str:
    """Equation, picture, what to read in it, options and command of one mechanism."""
    kind = MECHANISMS[name]
    summary, rest = _docstring(kind)
    chapter = _section("mechanisms.md", name)
    options = "\n".join(f"| `{key}` | `{value}` |" for key, value in _options(kind).items())
    table = f"| option | default |\n|---|---|\n{options}" if options else "It has no options of its own."
    file = Path(inspect.getfile(kind)).relative_to(ROOT).as_posix()
    return f"""# {name}

{summary}

{rest}

![The weights of {name} on one sentence, untrained: two heads, each row a query]({name}.png)

Two of its heads, untrained, on random queries and keys for the eight words; causal.

## What to read in it

{chapter}

## Options

{table}

Besides, every mechanism takes `layer`, `scale` and `dropout`.

## Use it

```sh
attnlab check {name}                          # the laws, measured on it
attnlab train translation data=multi30k attention={name}
```

```python
import attnlab

layer = attnlab.attention("{name}", heads=8, head_dim=64)
```

Defined in `{file}`. All mechanisms side by side: [mechanisms](../mechanisms.md).
"""


def picture(name: str) -> bytes:
    """A PNG of two heads' weights."""
    torch.manual_seed(0)
    layer = attention(name, heads=2, head_dim=16).double().eval()
    q, k = torch.randn(2, 1, 2, len(WORDS), 16, dtype=torch.float64)
    with torch.no_grad():
        weights = layer.weights(q, k, causal=True)[0][0]
    return render_png(draw_attention_maps({f"head {h}": weights[h] for h in range(2)}, WORDS, WORDS))


def task(name: str) -> str:
    """What a task is, its equation, a batch of it, and every key that training on it takes."""
    summary, rest = _docstring(TASKS[name])
    lines = "\n".join(f"| `{key}` | `{value}` | {part} |" for key, value, part in list_keys(name))
    return f"""# {name}

{summary}

{rest}

![A batch of {name}: what the model reads, what it is to say, padding in grey]({name}.png)

A batch, as a model gets it: in blue the tokens that are read, in orange the targets that are scored, in grey padding.

{_section("tasks.md", name)}

## Use it

```sh
attnlab train {name}                          # the default; key=value changes any of the keys below
attnlab list {name}                           # the same table
```

| key | default | of |
|---|---|---|
{lines}

What is common to all tasks, and where data come from: [tasks and data](../tasks.md).
"""


def batch_picture(name: str) -> bytes:
    """Two or three examples of a task on a text of a few lines, token by token."""
    with tempfile.TemporaryDirectory() as folder:
        made = TASKS[name].prepare(TASKS[name].config_type(**_small_text(name, Path(folder))), Path(folder))
        part = "valid-context" if name == "language" else "valid"
        return render_png(batch_grid(made, made.make_batch(part, list(range(min(3, made.count_examples(part)))))))


def _small_text(name: str, folder: Path) -> dict[str, Any]:
    """The settings of a task whose data are a few lines, written into a folder."""
    german, english = ["die katze schläft", "der hund sah die katze", "sie schläft"], [
        "the cat sleeps", "the dog saw the cat", "she sleeps"]  # fmt: skip
    files = {"a.de": german, "a.en": english, "a.txt": [*english, *reversed(english)]}
    files["a.csv"] = [
        "text,label",
        "a good film,good",
        "a very good film,good",
        "not good at all,bad",
        "a bad film,bad",
    ]
    for file, lines in files.items():
        (folder / file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    at = {file: str(folder / file) for file in files}
    sides = {"src": at["a.de"], "tgt": at["a.en"], "valid_src": at["a.de"], "valid_tgt": at["a.en"]}
    return {
        "translation": sides | {"units": "word"},
        "language": {"data": at["a.txt"], "valid": at["a.txt"], "units": "word", "block": 8, "context": 5},
        "classification": {"data": at["a.csv"], "valid": at["a.csv"], "at_least": 1},
        "synthetic": {"held_out": 3, "examples": 3},
    }[name]


def batch_grid(made: Any, batch: Any) -> Figure:
    """A block of rows an example, a cell a token."""
    sides = {"source": "source_vocabulary", "read": "target_vocabulary"} if len(batch.inputs) == 2 else {"read": ""}
    words = [
        (label, getattr(made, kept or "vocabulary"), ids)
        for (label, kept), ids in zip(sides.items(), batch.inputs, strict=True)
    ]
    rows = []
    for example in range(len(batch.targets)):
        rows += [(label, known.get_tokens(ids[example].tolist()), POSITIVE[1]) for label, known, ids in words]
        if batch.targets.dim() == 1:
            rows.append(("class", [made.classes[batch.targets[example]]], NEGATIVE[1]))
        else:
            rows.append(("target", words[-1][1].get_tokens(batch.targets[example].tolist()), NEGATIVE[1]))
    width = max(len(tokens) for _, tokens, _ in rows)
    figure = Figure(figsize=(1.0 + 0.72 * width, 0.3 * (len(rows) + len(batch.targets))), layout="constrained")
    axis, each = figure.subplots(), len(rows) // len(batch.targets)
    for row, (label, tokens, colour) in enumerate(rows):
        y = -(row + row // each * 0.6)
        axis.text(-0.15, y + 0.45, label, ha="right", va="center", fontsize=8)
        for place, token in enumerate(tokens):
            axis.add_patch(Rectangle((place, y), 0.94, 0.9, facecolor="#e9ecf1" if token == "<pad>" else colour))
            axis.text(place + 0.47, y + 0.43, token, ha="center", va="center", fontsize=7)
    axis.set(xlim=(-1.2, width), ylim=(y - 0.1, 1.0))
    axis.axis("off")
    return figure


PUBLIC = {
    "attention": "attnlab.mechanisms.attention", "Mechanism": "attnlab.mechanisms.mechanism.Mechanism",
    "Record": "attnlab.records.record.Record", "record": "attnlab.recording.watch.record",
    "contribution": "attnlab.analysis.contribution_table.contribution", "adapt": "attnlab.huggingface.pretrained.adapt",
    "load": "attnlab.huggingface.pretrained.load", "show": "attnlab.reading.maps.show",
}  # fmt: skip
ROOMS = {  # pages of the reference: what is documented on each
    "analysis": [f"analysis.{path.stem}" for path in sorted((ROOT / "src/attnlab/analysis").glob("[a-z]*.py"))],
    "models": [
        "huggingface.recorder", "recording.watch", "recording.probe", "models.presets", "models.transformer",
        "models.lstm", "huggingface.pretrained", "recording.ablation", "recording.depth", "recording.gradients",
        "recording.noise_null", "counting.ibm1", "counting.proxy",
    ],
    "tasks": ["tasks", "tasks.task", "tasks.translation", "tasks.language", "tasks.classification", "tasks.synthetic",
              "tasks.lexicon", "tasks.vocabulary", "tasks.links"],
    "training": ["recipe", "train", "runs", "store", "population", "decode", "score", "evaluation", "diagnosis"],
    "report": ["reading.maps", "report.view", "report.packing", "report.viewer_html", "report.page", "report.figures",
               "reading.reader", "aligning"],
}  # fmt: skip


def reference() -> str:
    """The public names, from their docstrings, and where the rest is."""
    names = "\n".join(f"- `attnlab.{name}`" for name in attnlab.__all__)
    rooms = ", ".join(f"[{name}](reference/{name}.md)" for name in ROOMS)
    public = "\n\n".join(f"## attnlab.{name}\n\n::: {place}" for name, place in PUBLIC.items())
    return f"# Python reference\n\n{names}\n\nThe modules by what they are about: {rooms}.\n\n{public}\n"


def room(name: str) -> str:
    """The modules of one part of the package, from their docstrings."""
    modules = "\n\n".join(f"## attnlab.{module}\n\n::: attnlab.{module}" for module in ROOMS[name])
    return f"# Python reference: {name}\n\n{modules}\n"


def _options(kind: type[Mechanism]) -> dict[str, Any]:
    """The keyword-only arguments of its constructors, but for what every mechanism has."""
    found: dict[str, Any] = {}
    for ancestor in kind.__mro__:
        if ancestor is Mechanism:
            break
        if "__init__" in vars(ancestor):
            for parameter in inspect.signature(ancestor.__init__).parameters.values():
                if parameter.kind is parameter.KEYWORD_ONLY:
                    found.setdefault(parameter.name, parameter.default)
    return found


def _docstring(kind: type) -> tuple[str, str]:
    """The first paragraph of the module that a class is in, and the rest."""
    text = inspect.getdoc(importlib.import_module(kind.__module__)) or ""
    first, _, rest = text.partition("\n\n")
    return " ".join(first.split()), rest


def _section(page: str, heading: str) -> str:
    """What a page says under a heading, which may name several mechanisms; links as seen from one folder below."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        if heading in title.split(", "):
            body = body.replace("](#", f"](../{page}#")
            return re.sub(r"\]\((?!http|\.\./)", "](../", body).strip("\n")
    raise ValueError(f"docs/{page} has no heading {heading!r}: write what to read in it")


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit("mkdocs runs this: make docs")
