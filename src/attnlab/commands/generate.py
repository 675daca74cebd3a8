"""attnlab generate: continue a prompt, or each line of standard input, with a language model."""

import json
import sys
from collections.abc import Iterable, Sequence

from attnlab.config import parse_values, split_pairs
from attnlab.decoding.generation import Sampling, TextGenerator
from attnlab.files.user_files import read_standard_input
from attnlab.training.runs import open_run

TYPES = {"weights": str, "cached": bool}


def generate_text(
    run: str,
    settings: Sequence[str],
    *,
    prompt: str | None,
    tokens: int | None,
    sampling: Sampling,
    as_json: bool,
    device: str = "auto",
    allow_code: bool = False,
) -> bool:
    """Print each prompt and what follows it, as it is written; notes go to standard error.

    Returns whether every line of standard input was continued. One that cannot be is named on standard error.
    """
    values = parse_values(split_pairs(settings), TYPES)
    opened = open_run(run, device=device, weights=values.get("weights"), allow_code=allow_code)
    generator = TextGenerator(opened, sampling, tokens=tokens, cached=values.get("cached"))
    prompts: Iterable[str] = read_standard_input() if prompt is None else [prompt]
    number, is_complete = 0, True
    for number, text in enumerate(prompts, start=1):
        where = "" if prompt is not None else f"line {number}: "
        try:
            _print_text(generator, text, number, as_json)
        except ValueError as error:
            if prompt is not None:
                raise
            print(f"attnlab: {where}{error}", file=sys.stderr)
            is_complete = False
            continue
        for note in generator.notes:
            print(f"{where}{note}", file=sys.stderr)
    if not number:
        raise ValueError("standard input has no prompt: give one on each line, or use --prompt TEXT")
    return is_complete


def _print_text(generator: TextGenerator, prompt: str, number: int, as_json: bool) -> None:
    pieces = generator.stream(prompt, number=number - 1)
    if as_json:
        print(json.dumps({"line": number, "prompt": prompt, "text": "".join(pieces)}, ensure_ascii=False))
        return
    begun = False
    for piece in pieces:
        print(piece if begun else prompt + piece, end="", flush=True)
        begun = True
    print(flush=True)
