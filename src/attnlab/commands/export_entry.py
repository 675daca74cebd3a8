"""The command `attnlab export`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from attnlab.commands.arguments import AllowCode, Pairs, RunName, choose

To = Annotated[str, Option(help="Format to write: huggingface.", autocompletion=choose("huggingface"))]


def export(
    run: RunName,
    settings: Pairs = None,
    to: To = "huggingface",
    out: Annotated[Path | None, Option(help="New folder to write to; default: exported/RUN.")] = None,
    allow_code: AllowCode = False,
) -> None:
    """Write the model of a run as a Hugging Face model, with its tokenizer, and prove that the logits are the same.

    Settings: weights=best|last|N|at:STEP
    transformers loads it: a language model such as modern-25m as Llama or Qwen3, a translator as Marian or Pegasus.
    With another attention than softmax, attnlab.load loads it.
    """
    from attnlab.commands.export import export_run

    export_run(run, settings or [], to=to, out=out, allow_code=allow_code)
