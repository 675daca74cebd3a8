"""attnlab evaluate: score a run, print the scores and write them to its folder."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.config import LengthPenalty, Natural, parse_values, split_pairs
from attnlab.decoding.evaluation import evaluate_files, evaluate_part
from attnlab.decoding.scores import TextScore
from attnlab.files import write_text
from attnlab.terminal import Bar, show_table
from attnlab.training.run_hashes import list_changed_texts
from attnlab.training.runs import Run, open_run

DATA_KEYS = ("data", "pair", "data_dir")
NUMBERS = {"beam": int, "length_penalty": LengthPenalty, "eval_samples": Natural, "bootstrap": Natural}
TYPES: dict[str, Any] = dict.fromkeys(("part", "weights", "src", "tgt", *DATA_KEYS), str) | NUMBERS


def evaluate_run(run: str, settings: Sequence[str], *, device: str = "auto", allow_code: bool = False) -> None:
    """Score a run on a part of its data, on other data (data=), or on two text files (src= and tgt=)."""
    values = parse_values(split_pairs(settings), TYPES)
    source, target = values.get("src"), values.get("tgt")
    if (source is None) != (target is None):
        raise ValueError("src= and tgt= must be given together: only one of them is set")
    data = {key: values[key] for key in DATA_KEYS if key in values}
    how: dict[str, Any] = {key: values[key] for key in ("beam", "length_penalty") if key in values}
    how["bootstrap"] = values.get("bootstrap", 1000)
    where: dict[str, Any] = {"device": device, "weights": values.get("weights"), "data": data}
    opened = open_run(run, **where, allow_code=allow_code)
    part = Path(source).name if source else values.get("part") or _choose_part(opened)
    if not data and not source and (changed := list_changed_texts(opened.folder.path, opened.recipe.data)):
        scored = "the text has changed since the run began and is scored as it is now"
        print(f"{', '.join(changed)}: {scored}", file=sys.stderr)
    with Bar(1) as progress:
        if source and target:
            scores = evaluate_files(opened, Path(source), Path(target), tick=progress.tick, **how)
        else:
            scores = evaluate_part(opened, part, samples=values.get("eval_samples", 0), tick=progress.tick, **how)
    translations, text_scores = scores.pop("translations", None), scores.pop("text", [])
    rows = [[key, f"{x:.4f}" if isinstance(x, float) else x] for key, x in scores.items()]
    rows += [[score["name"], str(TextScore(**score)).removeprefix(f"{score['name']} ")] for score in text_scores]
    show_table(f"{run} on {part}", ["measure", "value"], rows)
    file = opened.folder.path / f"evaluation-{'-'.join([*data.values(), part]).replace('/', '_')}.json"
    stored = scores | {"step": opened.folder.position().get("step"), "text": text_scores, "translations": translations}
    write_text(file, json.dumps(stored, ensure_ascii=False, indent=1) + "\n")
    print(f"written: {file}")


def _choose_part(run: Run) -> str:
    """Return test; if the run's data have no test part, say so and return valid."""
    if "test" in run.task.parts:
        return "test"
    print("the data of this run have no test part: scoring validation, which training has used", file=sys.stderr)
    return "valid"
