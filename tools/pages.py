"""Generate the pages of the site that come from the code: mechanisms, tasks, the Python reference, and the README.

mkdocs calls `on_config` and `on_files` (mkdocs.yml). To add a page, write docs/NAME.md and a line in the nav. A
mechanism or a task has a page by its line in the registry; a section in docs/mechanisms.md or docs/tasks.md says more.
"""

import importlib
import inspect
import re
import sys
import tempfile
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import attnlab
from attnlab.mechanisms import MECHANISMS, Mechanism, attention, kinds
from attnlab.mechanisms.laws import LAWS, Finding, judge_law
from attnlab.mechanisms.mechanism import ALL
from attnlab.report.colours import NEGATIVE, POSITIVE
from attnlab.report.figures import draw_attention_maps, render_png
from attnlab.tasks import TASKS
from attnlab.training.key_notes import list_keys, write_value

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "slept"]


def on_config(config: Any) -> Any:
    config.nav = fill_nav(config.nav)
    return config


def fill_nav(nav: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nav of mkdocs.yml with a page for each mechanism and each task."""
    more = {"Mechanisms": [{name: f"mechanisms/{name}.md"} for name in MECHANISMS]}
    more["Tasks"] = [{name: f"tasks/{name}.md"} for name in TASKS]
    filled = []
    for entry in nav:
        for title, pages in entry.items():
            if isinstance(pages, list):
                pages = [*fill_nav(pages), *more.get(title, [])]
            filled.append({title: pages})
    return filled


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, content in render_pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def render_pages() -> dict[str, str | bytes]:
    """Return every generated page and picture by its path under docs/."""
    files: dict[str, str | bytes] = {
        "index.md": render_index(),
        "contributing.md": _read_text("CONTRIBUTING.md").replace("](docs/", "]("),
    }
    files |= {"reference.md": render_reference()} | {f"reference/{name}.md": render_room(name) for name in ROOMS}
    files["mechanisms/table.md"] = render_table()
    for name in MECHANISMS:
        files |= {f"mechanisms/{name}.md": render_mechanism(name), f"mechanisms/{name}.png": draw_mechanism(name)}
    for name in TASKS:
        files |= {f"tasks/{name}.md": render_task(name), f"tasks/{name}.png": draw_batch(name)}
    return files


def render_index() -> str:
    """Return the README with the links of the site."""
    return (
        _read_text("README.md")
        .replace("](docs/notebooks)", "](notebooks/read-a-model.md)")
        .replace("](docs/", "](")
        .replace("](CONTRIBUTING.md)", "](contributing.md)")
    )


def render_mechanism(name: str) -> str:
    """Return the page of a mechanism: equation, picture, how to read it, options and commands."""
    kind = MECHANISMS[name]
    summary, rest = _split_docstring(kind)
    chapter = _find_section("mechanisms.md", name) or _describe_kind(kind)
    options = "\n".join(f"| `{key}` | `{value}` |" for key, value in _list_options(kind).items())
    table = f"| option | default |\n|---|---|\n{options}" if options else "It has no further options."
    file = Path(inspect.getfile(kind)).relative_to(ROOT).as_posix()
    return f"""# {name}

{summary}

{rest}

![The weights of {name} on one sentence, untrained: two heads, each row a query]({name}.png)

Two of its heads, untrained and causal, on random queries and keys for eight words.

## What to read in it

{chapter}

## Options

{table}

Every mechanism also takes `layer`, `scale` and `dropout`.

## Facts

{_tabulate_facts(name)}

## Use it

```sh
attnlab check {name}                          # run the laws on it
attnlab train translation data=multi30k attention={name}
```

```python
import attnlab

layer = attnlab.attention("{name}", heads=8, head_dim=64)
```

All mechanisms side by side: [the table](table.md). What they share: [mechanisms](../mechanisms.md).

<details>
<summary>The definition, {file}</summary>

```python
{inspect.getsource(sys.modules[kind.__module__]).strip()}
```

</details>
"""


def _tabulate_facts(name: str) -> str:
    """Return what the code says about a mechanism, and the laws that do not apply to it."""
    _, _, parameters, kinds_of, _, adapted, cached, computed = describe_mechanism(name)
    findings = judge_laws(name)
    held, apart = ([f.law for f in findings if f.holds is holds] for holds in (True, None))
    laws = f"{len(held)} of {len(findings)} hold" + (f"; not applicable: {', '.join(apart)}" if apart else "")
    facts = {
        "kind": kinds_of, "parameters that a layer adds (8 heads of 64)": parameters, "laws": laws,
        "in an adapted Llama": adapted, "kept of each token when decoding": cached, "computed by": computed,
    }  # fmt: skip
    return "| property | value |\n|---|---|\n" + "\n".join(f"| {key} | {x} |" for key, x in facts.items())


def render_table() -> str:
    """Return the table of all mechanisms: every cell is read from the code, counted or measured."""
    rows = "\n".join(f"| {' | '.join(describe_mechanism(name))} |" for name in MECHANISMS)
    return f"""# The table of mechanisms

The site build makes this table of {len(MECHANISMS)} mechanisms from the code.

    equation       from the docstring, with S = q kᵀ/√d; the mechanism's page says more
    parameters     of one layer beyond softmax attention, with 8 heads of 64 and an input of 512
    kind           see below
    laws           number of the {len(LAWS)} laws that hold; the others do not apply
    Hugging Face   whether attnlab.adapt puts it into a Llama; if not, the reason
    cache          what cached decoding keeps of each token
    computed by    our Triton kernels on a GPU; PyTorch without storing weights; or the definition

| name | equation | parameters | kind | laws | Hugging Face | cache | computed by |
|---|---|---|---|---|---|---|---|
{rows}

## Kinds

{inspect.getdoc(kinds)}

`attnlab check NAME` prints the kind of a mechanism. How to write one: [your own mechanism](../own-mechanism.md).
"""


def build_small(name: str, layer: int) -> Mechanism:
    return attention(name, heads=3, head_dim=6, layer=layer)


@lru_cache
def judge_laws(name: str) -> list[Finding]:
    return [judge_law(law, partial(build_small, name)) for law in LAWS]


@lru_cache
def describe_mechanism(name: str) -> list[str]:
    """Return the cells of a mechanism in the table."""
    kind, layer = MECHANISMS[name], attention(name, heads=8, head_dim=64, layer=1)
    first, *_ = _split_docstring(kind)[1].split("\n\n")
    parts = [part for line in first.splitlines() for part in re.split(r" {4,}", line.strip())]
    laws = [finding.holds for finding in judge_laws(name)]
    kept = ["keys", "values"] + ["key side"] * (kind.key_side is not Mechanism.key_side)
    kept += ["queries" if layer.lookback == ALL else f"last {layer.lookback} queries"] * (layer.lookback > 0)
    return [
        f"[{name}]({name}.md)",
        " ".join(f"`{part}`" for part in parts),
        f"{sum(parameter.numel() for parameter in layer.parameters()):,}",
        ", ".join(kinds.list_kinds(partial(build_small, name))) or "plain",
        str(laws.count(True)) + (f", {laws.count(False)} fail" if False in laws else ""),
        try_adapting(name),
        ", ".join(kept),
        "Triton" if kind.kernels else "the definition" if kind.mix is Mechanism.mix else "PyTorch",
    ]


def try_adapting(name: str) -> str:
    """Return "yes" if a small Llama can be adapted, else why not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=16)).eval()
    try:
        attnlab.adapt(model, name)
    except ValueError as error:
        return f"no: {error}"
    return "yes"


def draw_mechanism(name: str) -> bytes:
    """Return a PNG of the weights of two heads."""
    torch.manual_seed(0)
    layer, words = attention(name, heads=2, head_dim=16).double().eval(), len(WORDS)
    q, k = (torch.randn(1, heads, words, 16, dtype=torch.float64) for heads in (layer.query_heads, 2))
    x = torch.randn(1, words, layer.model_size, dtype=torch.float64)
    with torch.no_grad():
        sides = layer.give_sides((layer.query_side(x), layer.key_side(x)))
        weights = layer.weights(q, k, causal=True, **sides)[0][0]
    return render_png(draw_attention_maps({f"head {h}": weights[h] for h in range(2)}, WORDS, WORDS))


def render_task(name: str) -> str:
    """Return the page of a task: what it is, its equation, a batch, and every key of its training."""
    summary, rest = _split_docstring(TASKS[name])
    lines = "\n".join(
        f"| `{key.name}` | `{write_value(key.default)}` | {key.values} | {key.sentence} |" for key in list_keys(name)
    )
    return f"""# {name}

{summary}

{rest}

![A batch of {name}: the tokens that the model reads, the targets, and padding in grey]({name}.png)

A batch as a model receives it: inputs in blue, scored targets in orange, padding in grey.

{_find_section("tasks.md", name)}

## Use it

```sh
attnlab train {name}                          # with the defaults; key=value changes any key below
attnlab list {name}                           # the same table
```

| key | default | values | meaning |
|---|---|---|---|
{lines}

[Tasks and data](../tasks.md) describes what all tasks share, and where their data come from.
"""


def draw_batch(name: str) -> bytes:
    """Return a PNG of two or three examples of a task on a text of a few lines, token by token."""
    with tempfile.TemporaryDirectory() as folder:
        task = TASKS[name].prepare(TASKS[name].config_type(**_write_small_text(name, Path(folder))), Path(folder))
        part = "valid-context" if name == "language" else "valid"
        return render_png(draw_grid(task, task.make_batch(part, list(range(min(3, task.count_examples(part)))))))


def _write_small_text(name: str, folder: Path) -> dict[str, Any]:
    """Write a few lines of data into a folder, and return the settings of a task that reads them."""
    german, english = ["die katze schläft", "der hund sah die katze", "sie schläft"], [
        "the cat sleeps", "the dog saw the cat", "she sleeps"]  # fmt: skip
    files = {"a.de": german, "a.en": english, "a.txt": [*english, *reversed(english)]}
    reviews = ["a good film,good", "a very good film,good", "not good at all,bad", "a bad film,bad"]
    files["a.csv"] = ["text,label", *reviews]
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


def draw_grid(task: Any, batch: Any) -> Figure:
    """Draw one block of rows per example and one cell per token."""
    sides = {"source": "source_vocabulary", "read": "target_vocabulary"} if len(batch.inputs) == 2 else {"read": ""}
    words = [
        (label, getattr(task, kept or "vocabulary"), ids)
        for (label, kept), ids in zip(sides.items(), batch.inputs, strict=True)
    ]
    rows = []
    for example in range(len(batch.targets)):
        rows += [(label, known.get_tokens(ids[example].tolist()), POSITIVE[1]) for label, known, ids in words]
        if batch.targets.dim() == 1:
            rows.append(("class", [task.classes[batch.targets[example]]], NEGATIVE[1]))
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
    "Record": "attnlab.records.record.Record", "record": "attnlab.huggingface.recorder.record",
    "contribution": "attnlab.analysis.contribution_table.contribution", "adapt": "attnlab.huggingface.pretrained.adapt",
    "load": "attnlab.huggingface.pretrained.load", "intervene": "attnlab.huggingface.intervening.intervene",
    "show": "attnlab.reading.maps.show",
}  # fmt: skip
ROOMS = {  # pages of the reference, and the modules on each
    "analysis": [f"analysis.{path.stem}" for path in sorted((ROOT / "src/attnlab/analysis").glob("[a-z]*.py"))],
    "models": [
        "huggingface.recorder", "recording.watch", "recording.probe", "models.presets", "models.transformer",
        "models.transformer_config", "models.lstm", "huggingface.pretrained", "recording.ablation", "recording.depth",
        "recording.interventions", "huggingface.effects", "huggingface.decomposition", "huggingface.zeroing",
        "records.exchange",
        "recording.gradients", "recording.noise_null", "counting.ibm1", "counting.proxy",
    ],
    "tasks": ["tasks", "tasks.task", "tasks.translation", "tasks.language", "tasks.classification", "tasks.synthetic",
              "tasks.lexicon", "tasks.vocabulary", "tasks.links"],
    "training": [
        "training.recipe", "training.loop", "training.runs", "training.run_folder", "experiments.population",
        "experiments.population_training", "experiments.ledger", "experiments.plan", "experiments.engine",
        "decoding.decode", "training.scoring", "decoding.evaluation", "counting.diagnosis",
    ],
    "report": ["reading.maps", "report.view", "report.packing", "report.viewer_html", "report.page", "report.figures",
               "reading.reader", "aligning"],
}  # fmt: skip


def render_reference() -> str:
    """Return the page of the public names, with links to the other pages of the reference."""
    names = "\n".join(f"- `attnlab.{name}`" for name in attnlab.__all__)
    rooms = ", ".join(f"[{name}](reference/{name}.md)" for name in ROOMS)
    public = "\n\n".join(f"## attnlab.{name}\n\n::: {place}" for name, place in PUBLIC.items())
    return f"# Python reference\n\n{names}\n\nThe modules by subject: {rooms}.\n\n{public}\n"


def render_room(name: str) -> str:
    """Return the reference page of some modules."""
    modules = "\n\n".join(f"## attnlab.{module}\n\n::: attnlab.{module}" for module in ROOMS[name])
    return f"# Python reference: {name}\n\n{modules}\n"


def _list_options(kind: type[Mechanism]) -> dict[str, Any]:
    """Return the keyword-only arguments of its constructors and their defaults, without those of every mechanism."""
    options: dict[str, Any] = {}
    for ancestor in kind.__mro__:
        if ancestor is Mechanism:
            break
        if "__init__" in vars(ancestor):
            for parameter in inspect.signature(ancestor.__init__).parameters.values():
                if parameter.kind is parameter.KEYWORD_ONLY:
                    options.setdefault(parameter.name, parameter.default)
    return options


def _split_docstring(kind: type) -> tuple[str, str]:
    """Return the first paragraph of the docstring of a class's module, and the rest."""
    text = inspect.getdoc(importlib.import_module(kind.__module__)) or ""
    first, _, rest = text.partition("\n\n")
    return " ".join(first.split()), rest


def _find_section(page: str, heading: str) -> str:
    """Return a section of a page by its heading, which may name several mechanisms; links start one folder below."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        if heading in title.split(", "):
            body = body.replace("](#", f"](../{page}#")
            return re.sub(r"\]\((?!http|\.\./)", "](../", body).strip("\n")
    return ""


def _describe_kind(kind: type[Mechanism]) -> str:
    """Say what a mechanism declares, where no section says more."""
    declared = {
        "carries": "It passes a carry from layer to layer.", "stochastic": "It draws noise in training.",
        "self_only": "It is for self-attention alone.", "positional": "It reads the order of keys.",
    }  # fmt: skip
    sentences = [sentence for name, sentence in declared.items() if getattr(kind, name)]
    plain = "It reads each query with its keys alone, in any order, and passes nothing to the next layer."
    return " ".join(sentences) or plain


def _read_text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit("mkdocs runs this script: use make docs")
