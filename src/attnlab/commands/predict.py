"""attnlab predict: print the label of each line of standard input or of a file."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from attnlab.config import parse_values, split_pairs
from attnlab.decoding.labels import LabelPrediction, check_classifier, predict_labels
from attnlab.files.user_files import iterate_lines, read_standard_input
from attnlab.training.runs import open_run

TYPES = {"weights": str}


def predict_lines(
    run: str,
    settings: Sequence[str],
    *,
    file: Path | None,
    words: int,
    as_json: bool,
    device: str = "auto",
    allow_code: bool = False,
) -> None:
    """Print one line for each line of the input, a blank one for a line without words; notes go to standard error."""
    values = parse_values(split_pairs(settings), TYPES)
    opened = open_run(run, device=device, weights=values.get("weights"), allow_code=allow_code)
    check_classifier(opened)
    lines = read_standard_input() if file is None else iterate_lines(file)
    for number, prediction in enumerate(predict_labels(opened, lines, words=words), start=1):
        print(_format_json(number, prediction) if as_json else _format_text(prediction))
        for note in prediction.notes:
            print(f"line {number}: {note}", file=sys.stderr)


def _format_text(prediction: LabelPrediction) -> str:
    if prediction.probability is None:
        return ""
    words = ", ".join(f"{each.word} {each.contribution:+.2f}" for each in prediction.words)
    return f"{prediction.label}\t{prediction.probability:.4f}\t{words}".rstrip("\t")


def _format_json(number: int, prediction: LabelPrediction) -> str:
    return json.dumps({"line": number} | asdict(prediction), ensure_ascii=False)
