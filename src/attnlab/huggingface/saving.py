"""Save an adapted model with what is needed to adapt it again. Nothing here imports transformers."""

import sys
from pathlib import Path
from typing import Any

import torch

from attnlab.files import write_text
from attnlab.huggingface import adaptation, dispatch


def save(model: Any, save_directory: str | Path, is_main_process: bool = True, *arguments: Any, **options: Any) -> None:
    """Save an adapted model (its save_pretrained)."""
    if options.get("push_to_hub"):
        raise ValueError(f"save_pretrained(push_to_hub=True) would omit {adaptation.FILE}: call model.push_to_hub(id)")
    about = dispatch.find_adaptation(model).to_json(list_versions())
    if options.get("state_dict") is None:
        options["state_dict"] = adaptation.collect_weights(model)
    type(model).save_pretrained(model, save_directory, is_main_process, *arguments, **options)
    if is_main_process:
        write_text(Path(save_directory) / adaptation.FILE, about)
        adaptation.mark_config(Path(save_directory))
        model.name_or_path = model.name_or_path or str(save_directory)


def refuse_part(part: Any, *_arguments: Any, **_options: Any) -> None:
    """Refuse to save a model inside an adapted one (its save_pretrained and push_to_hub)."""
    raise ValueError(
        f"this {type(part).__name__} is a part of an adapted model and would be saved without {adaptation.FILE}: "
        "call save_pretrained of the whole model"
    )


def list_versions() -> dict[str, str]:
    """Return the versions of attnlab, transformers and torch."""
    from attnlab import __version__

    theirs = sys.modules["transformers"].__version__
    return {"attnlab": __version__, "transformers": theirs, "torch": str(torch.__version__)}
