"""Find runs by their names, and list the runs of a folder."""

import difflib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from attnlab.files.user_files import read_json
from attnlab.tasks import TASKS
from attnlab.training import FILES, iterate_runs
from attnlab.training.run_folder import RunFolder

ROOT = Path("runs")
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what files with another content lead to


def find_run(path: str | Path) -> RunFolder:
    """Return the folder of a run, given its path or its name in runs/. Raises FileNotFoundError with similar names."""
    found = next((folder for folder in (Path(path), ROOT / path) if folder.exists()), None)
    if found is None:
        raise FileNotFoundError(_explain_missing(str(path)))
    return RunFolder(found)


def find_folder(name: str, file: str) -> Path | None:
    """Return the folder of that name, or of that name in runs/, if it has the file; else None."""
    return next((path for path in (Path(name), ROOT / name) if (path / file).is_file()), None)


def refuse_missing_run(name: str) -> None:
    """Raise FileNotFoundError if a name that is no folder can only be a run: it is in runs/, or beside other runs."""
    path = Path(name)
    is_inside = path.parent == ROOT or (path.parent != Path() and any(iterate_runs(path.parent)))
    if is_inside and not path.exists():
        raise FileNotFoundError(_explain_missing(name))


@contextmanager
def suggest_runs(name: str, others: Sequence[str] = ()) -> Iterator[None]:
    """Add similar runs or other names to a FileNotFoundError about a model that is no folder and not on the hub."""
    try:
        yield
    except FileNotFoundError as error:
        hint = _suggest(name, others)
        raise FileNotFoundError(f"{error}; {hint}" if hint else str(error)) from None


def _explain_missing(name: str) -> str:
    """Return an error about a run that does not exist, with the names of similar runs."""
    known = _find_names(Path(name))
    hint = (_suggest(name) or "attnlab runs lists the runs") if known else "start one with attnlab train"
    return f"there is no run {name}; {hint}"


def _suggest(name: str, others: Sequence[str] = ()) -> str:
    known = {other: other for other in others} | _find_names(Path(name))
    close = [known[near] for near in difflib.get_close_matches(Path(name).name, list(known), cutoff=0.5)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def _find_names(path: Path) -> dict[str, str]:
    """Return the paths of the runs beside a path and in runs/, by name."""
    return {folder.name: str(folder) for root in (path.parent, ROOT) for folder in iterate_runs(root)}


def list_runs(root: Path) -> list[dict[str, Any]]:
    """Return one row per run folder, the one that changed last at the end. The row of a damaged run names the file."""
    dated = sorted((max(_get_time(path / name) for name in FILES), path) for path in iterate_runs(root))
    dates = [datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M") for time, _ in dated]
    return [_make_row(RunFolder(path)) | {"date": date} for (_, path), date in zip(dated, dates, strict=True)]


def _get_time(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def _make_row(folder: RunFolder) -> dict[str, str]:
    row = {"run": folder.path.name} | dict.fromkeys(("task", "attention", "seed", "state", "step", "best score"), "–")
    try:
        config = folder.config()
        data, training, position = config["data"], config["training"], folder.position()
        row |= {"task": f"{config['task']} {data.get('src') or data.get('data', '')}", "seed": str(training["seed"])}
        row |= {"attention": config["model"]["attention"], "step": f"{position.get('step', 0)}/{training['steps']}"}
        row["state"] = _get_state(folder, position)
        row["best score"] = _describe_score(folder, config, position)
    except DAMAGED as error:
        file = "config.json" if row["task"] == "–" else "metrics.jsonl or an evaluation"
        reason = "it is missing" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
        row["state"] = f"damaged: cannot read {file} ({reason})"
    return row


def _get_state(folder: RunFolder, position: dict[str, Any]) -> str:
    if folder.is_locked():
        return "running"
    if not position and (folder.last.exists() or folder.previous.exists()):
        return "damaged: no checkpoint can be read"
    return "finished" if position.get("finished") else "interrupted" if position else "not started"


def _describe_score(folder: RunFolder, config: dict[str, Any], position: dict[str, Any]) -> str:
    """Return the main score with its name: what `attnlab evaluate` found, else the best of validation."""
    task = config["task"]
    name = TASKS[task].name_main_score(config["data"]) if task in TASKS else "perplexity"  # runs no code of the user
    for part in ("test", "valid"):
        file = folder.path / f"evaluation-{part}.json"
        if file.exists():
            scores = read_json(file)
            bleu = next((score["value"] for score in scores["text"] if score["name"] == "BLEU"), None)
            score = f"{part} {name} {scores[name]:.4g}" if bleu is None else f"{part} BLEU {bleu:.2f}"
            step = scores.get("step")  # of the run when it was evaluated; older versions did not store it
            return score if step in (None, position.get("step")) else f"{score} at step {step}"
    if not math.isfinite(position.get("best", math.inf)):
        return "–"
    measured = {row["step"]: row for row in folder.metrics() if "valid_loss" in row}
    best = measured.get(position["best_step"], {})
    return f"valid {name} {best[f'valid_{name}']:.4g}" if best else f"valid loss {position['best']:.4g}"
