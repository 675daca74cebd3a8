"""The model card of an adapted model, and its upload to the Hugging Face hub.

The card says which attention the model has, which model it was adapted from, what a ledger measured of it, and how to
load it. Nothing here imports transformers.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attnlab.files import write_text
from attnlab.files.user_files import parse_json
from attnlab.huggingface.adaptation import Adaptation
from attnlab.tasks.hub import is_hub_reachable, is_path

CARD = "README.md"
CODE = "This mechanism is a class in a file of its author's. Get the file, read it, and pass allow_code=True."


def push_to_hub(
    model: Any, repo_id: str, *, ledger: str | Path | None = None, tags: list[str] | None = None, **options: Any
) -> str:
    """Upload an adapted model with its model card, and return the address of the commit.

    ledger    a ledger whose figures of this attention the card shows
    options   private, token, revision, create_pr, commit_message, commit_description, max_shard_size

    Raises ConnectionError if the hub does not answer, and ValueError if the ledger has no figures of the attention.
    """
    from huggingface_hub import HfApi

    create = {key: options.pop(key) for key in ("private",) if key in options}
    size = {key: options.pop(key) for key in ("max_shard_size",) if key in options}
    api, place = HfApi(token=options.pop("token", None)), model.name_or_path
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **size)
        write_card(model, Path(folder), repo_id, ledger=ledger, tags=tags)  # raises before anything is uploaded
        if not is_hub_reachable():
            advice = "save_pretrained(FOLDER) keeps the model here"
            raise ConnectionError(f"{repo_id} cannot be uploaded: the Hugging Face hub does not answer; {advice}")
        name = str(api.create_repo(repo_id, exist_ok=True, **create).repo_id)
        write_card(model, Path(folder), name, ledger=ledger, tags=tags)  # with the name of the owner
        options.setdefault("commit_message", "Upload adapted model")
        address = str(api.upload_folder(repo_id=name, folder_path=folder, **options))
        model.name_or_path = place or name  # not the temporary folder
        return address


def write_card(
    model: Any, folder: Path, repo_id: str, *, ledger: str | Path | None = None, tags: list[str] | None = None
) -> None:
    """Write README.md into the folder of a saved adapted model."""
    about: Adaptation = model.attnlab_adaptation
    write_text(folder / CARD, build_card(model, about, repo_id, ledger, tags or []))


def build_card(model: Any, about: Adaptation, repo_id: str, ledger: str | Path | None, tags: list[str]) -> str:
    """Return the model card, in Markdown with the metadata that the hub reads."""
    parent, head = about.parent, ["---", "library_name: transformers"]
    if parent and (Path(parent).exists() or is_path(parent)):
        parent = f"a local model, {Path(parent).name}"  # its path says nothing to others, and may name a person
    elif parent:
        head += [f"base_model: {json.dumps(parent)}"]
    head += ["tags:", *(f"- {json.dumps(tag)}" for tag in dict.fromkeys(["attnlab", *tags])), "---"]
    new = sum(x.numel() for name, x in model.named_parameters() if ".attnlab" in f".{name}")
    rows = [("attention", f"`{about.label}`"), ("options", _list_options(about.options))]
    rows += [("in", ", ".join(about.kinds)), ("architecture", type(model).__name__)]
    rows += [("adapted from", parent or "a model of random initialization")]
    rows += [("parameters", f"{sum(x.numel() for x in model.parameters()):,}, of the attention {new:,}")]
    lines = [*head, "", f"# {repo_id.rpartition('/')[2]}", ""]
    lines += [f"A {type(model).__name__} whose attention is `{about.label}`, made with attnlab.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += ["## How to load it", "", "```", "pip install attnlab", "```", "", "```python"]
    if about.is_users_own:
        lines += ["import attnlab", "", f'model = attnlab.load("{repo_id}", allow_code=True)', "```", "", CODE]
    else:
        lines += ["import attnlab.huggingface  # lets from_pretrained install the attention", ""]
        kind = type(model).__name__
        lines += [f"from transformers import {kind}", "", f'model = {kind}.from_pretrained("{repo_id}")', "```", ""]
        lines += ["Without attnlab, from_pretrained loads another model: the same weights with ordinary attention."]
    if ledger is not None:
        lines += ["", "## Measured", "", *tabulate_ledger(Path(ledger), about)]
    return "\n".join(lines) + "\n"


def tabulate_ledger(path: Path, about: Adaptation) -> list[str]:
    """Return a table of the figures that a ledger has of an attention: their means over seeds.

    Raises ValueError if the ledger has none, and OSError if it cannot be read.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for row in _read_rows(path):
        model = row["recipe"].get("model")
        if not isinstance(model, Mapping) or model.get("attention") != about.label:
            continue
        if dict(model.get("attention_options") or {}) != dict(about.options):
            continue
        data = row["recipe"].get("data") or {}
        where = f"{row['recipe'].get('task', '')} {data.get('data', '') if isinstance(data, Mapping) else data}"
        for name, value in _list_numbers(row["values"]):
            found.setdefault((where.strip(), name), []).append(value)
    if not found:
        options = f" with {_list_options(about.options)}" if about.options else ""
        raise ValueError(f"{path} has no figures of attention {about.label}{options}: leave ledger= out")
    lines = ["| task | figure | mean | lowest to highest | seeds |", "|---|---|---|---|---|"]
    for (where, name), values in found.items():
        spread = f"{min(values):.4g} to {max(values):.4g}"
        lines.append(f"| {where} | {name} | {statistics.fmean(values):.4g} | {spread} | {len(values)} |")
    return lines


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest successful row of each run in a ledger."""
    if not path.is_file():
        raise FileNotFoundError(f"ledger={path}: no such file; pass a ledger.jsonl, or leave ledger= out")
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = parse_json(line, f"{path}:{number}")
        if isinstance(row, dict) and row.get("values"):
            newest[(row.get("digest"), row.get("seed"), row.get("measure"), row.get("edition"))] = row
    yield from newest.values()


def _list_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)
        elif name == "scores" and isinstance(value, Mapping):
            yield from _list_numbers(value)


def _list_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "the defaults"
