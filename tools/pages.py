"""The pages of the site that are made from the code: one for each mechanism and task, the reference, and the README.

mkdocs calls `on_files` (mkdocs.yml). To add a page: write docs/NAME.md, and a line in the nav. A mechanism or a task
needs the line alone.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch

import attnlab
from attnlab.mechanisms import MECHANISMS, Mechanism, attention
from attnlab.recipe import keys
from attnlab.report.figures import as_png, attention_maps
from attnlab.tasks import TASKS

ROOT = Path(__file__).parent.parent
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "slept"]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, content in pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def pages() -> dict[str, str | bytes]:
    """Every page and picture that is made, by its place under docs/."""
    made: dict[str, str | bytes] = {"index.md": index(), "contributing.md": _text("CONTRIBUTING.md")}
    made |= {"reference.md": reference()}
    for name in MECHANISMS:
        made |= {f"mechanisms/{name}.md": mechanism(name), f"mechanisms/{name}.png": picture(name)}
    return made | {f"tasks/{name}.md": task(name) for name in TASKS}


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
    return as_png(attention_maps({f"head {h}": weights[h] for h in range(2)}, WORDS, WORDS))


def task(name: str) -> str:
    """What a task is, and every key that training on it takes."""
    summary, rest = _docstring(TASKS[name])
    lines = "\n".join(f"| `{key}` | `{value}` | {part} |" for key, value, part in keys(name))
    return f"""# {name}

{summary}

{rest}

```sh
attnlab train {name}                          # the default; key=value changes any of the keys below
attnlab list {name}                           # the same table
```

| key | default | of |
|---|---|---|
{lines}

What is common to all tasks, and where data come from: [tasks and data](../tasks.md).
"""


def reference() -> str:
    """The public names, and the functions of each analysis, from their docstrings."""
    rooms = sorted(path.stem for path in (ROOT / "src/attnlab/analysis").glob("[a-z]*.py"))
    analyses = "\n\n".join(f"## attnlab.analysis.{room}\n\n::: attnlab.analysis.{room}" for room in rooms)
    names = "\n".join(f"- `attnlab.{name}`" for name in attnlab.__all__)
    places = {
        "attention": "attnlab.mechanisms.attention", "Mechanism": "attnlab.mechanisms.mechanism.Mechanism",
        "Record": "attnlab.recording.Record", "record": "attnlab.models.watch.record",
        "contribution": "attnlab.analysis.pairs.contribution", "adapt": "attnlab.models.pretrained.adapt",
        "load": "attnlab.models.pretrained.load", "show": "attnlab.inspection.viewing.show",
    }  # fmt: skip
    public = "\n\n".join(f"## attnlab.{name}\n\n::: {place}" for name, place in places.items())
    return f"# Python reference\n\n{names}\n\n{public}\n\n{analyses}\n"


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
            return re.sub(r"\]\((?!http|\.\./)", "](../", body).strip()
    raise ValueError(f"docs/{page} has no heading {heading!r}: write what to read in it")


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit("mkdocs runs this: make docs")
