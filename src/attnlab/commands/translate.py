"""attnlab translate: translate standard input, one sentence per line, to standard output."""

from collections.abc import Sequence

from attnlab.config import LengthPenalty, parse_values, split_pairs
from attnlab.decoding.evaluation import check_translator, open_search, search_lines
from attnlab.files.user_files import read_standard_input
from attnlab.tasks.task import UNK
from attnlab.tasks.vocabulary import describe_unknown
from attnlab.terminal import Bar
from attnlab.training.runs import open_run

TYPES = {"weights": str, "beam": int, "length_penalty": LengthPenalty, "n_best": int}


def translate_input(run: str, settings: Sequence[str], *, device: str = "auto", allow_code: bool = False) -> None:
    """Print the best translation of each line; with n_best=, its N best as NUMBER ||| TRANSLATION ||| SCORE."""
    rules = parse_values(split_pairs(settings), TYPES)
    weights = rules.pop("weights", None)
    opened = open_run(run, device=device, weights=weights, allow_code=allow_code)
    search = open_search(opened, **rules)
    lines, best = list(read_standard_input()), {}
    check_translator(opened.task)
    encoded = opened.task.encode(lines)  # type: ignore[attr-defined]
    unread = [line for place, line in enumerate(lines) if UNK in encoded[place]]
    unknown = describe_unknown(opened.task, (word for line in unread for word in line.split()))
    with Bar(1) as progress:
        if unknown:
            progress.note(unknown)
        for number, candidates in search_lines(search, opened.task, lines):
            best[number] = candidates
            progress.tick(len(best), len(lines))
    for number in range(len(lines)):
        for each in best[number]:
            print(f"{number} ||| {each.text} ||| {each.score:.4f}" if "n_best" in rules else each.text)
