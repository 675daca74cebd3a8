"""attnlab export: write the model of a run in a format that other tools load, and prove that it computes the same."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnlab.config import parse_values, split_pairs, suggest_nearest
from attnlab.files import replace_file
from attnlab.files.user_files import read_json
from attnlab.huggingface.conversion import plan_installation, write_model
from attnlab.huggingface.skeletons import Skeleton, find_skeleton
from attnlab.huggingface.tokenizer_files import write_tokenizer
from attnlab.mechanisms.per_layer import list_names
from attnlab.models.transformer_config import TransformerConfig
from attnlab.registry.own_files import is_own
from attnlab.training.recipe import Recipe
from attnlab.training.run_list import find_run
from attnlab.training.runs import open_run

TYPES = {"weights": str}
FORMATS = ("huggingface",)
ROOT = Path("exported")
LENGTH = 1024  # least number of positions of an exported model
NEW_TOKENS = 256  # largest number of tokens of a translation, by default


def export_run(
    run: str, settings: Sequence[str], *, to: str, out: Path | None = None, allow_code: bool = False
) -> Path:
    """Write the model of a run to a new folder and return the folder. Nothing is written before all checks pass."""
    weights = parse_values(split_pairs(settings), TYPES).get("weights")
    if to not in FORMATS:
        raise ValueError(f"--to must be one of {', '.join(FORMATS)}, got {to!r}{suggest_nearest(to, FORMATS)}")
    folder = find_run(run)
    out = ROOT / folder.path.name if out is None else out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: choose another --out")
    _refuse_own_files(folder.path)
    opened = open_run(folder.path, device="cpu", weights=weights, allow_code=allow_code)
    config = _require_transformer(opened.recipe, folder.path)
    try:
        installed, skeleton = plan_installation(config), _find_skeleton(config, opened.recipe)
    except ValueError as error:
        raise ValueError(f"{folder.path} cannot be exported: {error}") from None
    with replace_file(out) as scratch:
        model: Any = opened.model
        difference = write_model(model, skeleton, installed, scratch)
        missing = write_tokenizer(opened.task, scratch)
    loads = "transformers" if installed is None else f"attnlab.load, with attention={installed.name}"
    print(f"{out}: {skeleton.kind} for {loads}; largest difference of its logits: {difference:.1g}")
    print(f"no tokenizer: {missing}" if missing else f"tokenizer: AutoTokenizer.from_pretrained({str(out)!r})")
    return out


def _refuse_own_files(folder: Path) -> None:
    """Refuse mechanisms of the user's own files before one is run."""
    values = read_json(folder / "model.json")
    texts = [text for key in ("attention", "cross_attention") if isinstance(text := values.get(key), str)]
    for name in (name for text in texts for name in list_names(text)):
        if is_own(name):
            problem = f"attention={name} is a file of your own, which other tools do not have"
            raise ValueError(f"{folder} cannot be exported: {problem}")


def _require_transformer(recipe: Recipe, folder: Path) -> TransformerConfig:
    """Return the configuration of a Transformer of ours."""
    if isinstance(recipe.model, TransformerConfig):
        return recipe.model
    if hasattr(recipe.model, "path"):
        where = f"it fine-tunes a Hugging Face model, which training saves in {folder / 'hugging_face'}"
        raise ValueError(f"{folder} needs no export: {where}")
    raise ValueError(f"{folder} cannot be exported: transformers has no LSTM with attention")


def _find_skeleton(config: TransformerConfig, recipe: Recipe) -> Skeleton:
    """Return the skeleton of a run's model, which decodes as the run does."""
    read = getattr(recipe.data, "block", None) or getattr(recipe.data, "max_length", None)
    stretched = round(config.rope_length * config.rope_factor) if config.rope_scaling in ("llama3", "yarn") else 0
    skeleton = find_skeleton(config, max(LENGTH, read or 0, stretched))
    if config.model != "translator":
        return skeleton
    beams = {"num_beams": recipe.decoding.beam, "length_penalty": recipe.decoding.length_penalty}
    limit = min(NEW_TOKENS, skeleton.config["max_position_embeddings"] - 1)
    return replace(skeleton, generation={**skeleton.generation, **beams, "max_new_tokens": limit})
