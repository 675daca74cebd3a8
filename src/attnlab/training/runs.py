"""Runs: started from a recipe, opened again from their folder."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnlab.config import replace_values
from attnlab.files import write_text
from attnlab.huggingface.fine_tuning import TunedConfig, TunedLanguageModel, open_tuned_model
from attnlab.mechanisms.kernels.launch import LAUNCHED
from attnlab.models.model import Model
from attnlab.models.presets import Config, build
from attnlab.tasks import TASKS
from attnlab.tasks.task import Task
from attnlab.training.checkpoints import average_checkpoints, load_weights
from attnlab.training.loop import TrainingResult, train
from attnlab.training.recipe import Recipe, restore_recipe
from attnlab.training.run_folder import RunFolder, list_run_folders, read_checkpoint

ROOT = Path("runs")


@dataclass(frozen=True)
class Run:
    """A trained model with the task it was trained on."""

    folder: RunFolder
    recipe: Recipe
    task: Task
    model: nn.Module
    weights: str  # where they are from: best, last or averaged


def start_run(
    recipe: Recipe,
    *,
    out: str | None = None,
    device: str = "auto",
    report: Callable[[dict[str, Any]], None],
    note: Callable[[str], None],
    task: Task | None = None,
) -> tuple[RunFolder, TrainingResult]:
    """Train a recipe, or go on with it where its folder stands; task: the recipe's, where it is at hand already."""
    from accelerate import Accelerator

    folder = RunFolder(Path(out) if out else ROOT / recipe.name())
    tracker = None if recipe.training.logging == "none" else recipe.training.logging
    if tracker and find_spec(tracker) is None:
        raise ValueError(f"logging={tracker}, but it is not installed: pip install {tracker}, or say logging=none")
    accelerator = Accelerator(cpu=_on_cpu(device), log_with=tracker, project_dir=str(folder.path))
    if tracker:
        accelerator.init_trackers("attnlab", config=_flatten(recipe.values()))

    def told(values: dict[str, Any]) -> None:
        report(values)
        if tracker:
            accelerator.log(values, step=values["step"])

    new = not folder.path.exists()
    with folder.lock() if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            folder.claim(recipe.values())
        try:
            with accelerator.main_process_first():
                task = task or TASKS[recipe.task].prepare(recipe.data, folder.path)
            fitted = recipe.resolve_model(task)
            train_size, valid_size = (len(task.get_lengths(part)[0]) for part in ("train", "valid"))  # read now, to be told
        except Exception:
            if new and accelerator.is_main_process:  # nothing half-made: the mended command starts afresh
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        torch.manual_seed(recipe.training.seed)
        if accelerator.is_main_process:
            write_text(folder.path / "model.json", json.dumps(asdict(fitted), indent=1) + "\n")
        model = _build_model(fitted)
        _load_embeddings(model, task)
        parameters = sum(p.numel() for p in model.parameters())
        size = f"{train_size:,} training and {valid_size:,} validation examples; {parameters:,} parameters"
        for line in [*task.notes, f"{size}; on {accelerator.device}"] if accelerator.is_main_process else []:
            note(line)
        LAUNCHED.clear()
        began = folder.position().get("step", 0)
        try:
            outcome = train(task, model, recipe.training, folder, accelerator, told)
        finally:
            if tracker:
                accelerator.end_training()
        if accelerator.is_main_process and outcome.step > began:
            write_what_ran(folder, began, outcome, accelerator.device)
        if accelerator.is_main_process and outcome.finished and isinstance(model, TunedLanguageModel):
            _save_for_hugging_face(folder)
        return folder, outcome


def open_run(
    path: str | Path, *, device: str = "auto", weights: str | None = None, data: Mapping[str, str] | None = None
) -> Run:
    """The model of a run in evaluation mode, with its task.

    weights  best, last, the mean of so many kept ones ("5"), or those kept at a step ("at:5000"); best, unless said,
             or the mean that its recipe says; last, where nothing was evaluated
    data     keys of other data of the same kind (data=, pair=, …), read with the run's vocabulary
    """
    folder = RunFolder(Path(path) if Path(path).exists() else ROOT / path)
    recipe = restore_recipe(folder.config() | {"model": json.loads((folder.path / "model.json").read_text(encoding="utf-8"))})
    if data:
        recipe = replace(recipe, data=_replace_data(recipe.data, data))
    task = TASKS[recipe.task].prepare(recipe.data, folder.path)
    model = _build_model(recipe.model)
    weights = weights or str(recipe.decoding.average or ("best" if folder.best.exists() else "last"))
    if weights.isdigit():
        load_weights(model, average_checkpoints(folder, int(weights)))
    elif weights in ("best", "last"):
        load_weights(model, read_checkpoint(getattr(folder, weights)).part("model/"))
    elif weights.startswith("at:") and weights[3:].isdigit():
        load_weights(model, read_checkpoint(folder.step_file(int(weights[3:]))).part("model/"))
    else:
        raise ValueError(
            f"weights={weights}: expected best, last, how many kept checkpoints to average, or at:STEP of evaluate_at="
        )
    return Run(folder, recipe, task, model.eval().to(choose_device(device)), weights)


def write_what_ran(folder: RunFolder, began: int, outcome: TrainingResult, device: torch.device) -> None:
    """ran.json: for each stretch of updates on what they ran, how they were made, and which fused kernels launched."""
    file = folder.path / "ran.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    ran = {"after": began, "to": outcome.step, "device": name, "torch": torch.__version__, "stepper": outcome.stepper}
    write_text(file, json.dumps([*before, ran | {"kernels": sorted(LAUNCHED)}], indent=1) + "\n")


def list_hardware(folders: Iterable[Path]) -> list[str]:
    """The devices, with the torch, that runs were trained on, each once."""
    files = [folder / "ran.json" for folder in folders]
    known = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return sorted({f"{ran['device']}, torch {ran['torch']}" for stretches in known for ran in stretches})


def _replace_data(config: Any, values: Mapping[str, str]) -> Any:
    """A task's configuration with other data: a named set takes the place of files of one's own."""
    files = ("src", "tgt", "valid", "valid_src", "valid_tgt", "test", "test_src", "test_tgt", "pair")
    kept = {name: None for name in files if "data" in values and hasattr(config, name)}
    return replace_values(replace(config, **kept), dict(values))


def list_runs(root: Path = ROOT) -> list[dict[str, Any]]:
    """What stands in each run folder: state, step, best metric."""
    rows = []
    for folder in list_run_folders(root):
        try:
            config = folder.config()
        except ValueError:
            config = {}
        if not isinstance(config, dict) or "training" not in config:  # somebody else's config.json
            continue
        stands = folder.position()
        step, best = stands.get("step", 0), stands.get("best", math.inf)
        ended = "finished" if stands.get("finished") else "interrupted" if stands else "not started"
        state = "running" if folder.is_locked() else ended
        rows.append(
            {
                "run": folder.path.name,
                "task": f"{config['task']} {config['data'].get('src') or config['data'].get('data', '')}",
                "attention": config["model"]["attention"],
                "state": state,
                "step": f"{step}/{config['training']['steps']}",
                "best valid loss": f"{best:.4f}" if math.isfinite(best) else "–",
            }
        )
    return rows


def _build_model(config: Config | TunedConfig) -> Model:
    return open_tuned_model(config) if isinstance(config, TunedConfig) else build(config)


def _save_for_hugging_face(folder: RunFolder) -> None:
    """A fine-tuned model with its best weights, as Hugging Face models are saved; all of it or nothing."""
    if folder.hugging_face.exists():
        return
    run: Any = open_run(folder.path, device="cpu", weights="best")
    part = folder.path / ".hugging_face.part"
    shutil.rmtree(part, ignore_errors=True)
    run.model.save(part, run.recipe.data.tokenizer)
    part.rename(folder.hugging_face)


def _load_embeddings(model: Any, task: Any) -> None:
    """Start the word embedding from the vectors that a task brings, where it brings some."""
    vectors = task.read_embeddings() if hasattr(task, "read_embeddings") else None
    if vectors is None:
        return
    words = model.encoder.embedding.words.weight
    if words.shape != vectors.shape:
        raise ValueError(
            f"embeddings= has vectors of size {vectors.shape[1]}, the model words of {words.shape[1]}: say width=, "
            "or embedding_width= of an LSTM"
        )
    with torch.no_grad():
        words.copy_(vectors)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under names with dots, as text where a tracker takes no other."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        flat |= {name: x if isinstance(x, int | float | str | bool) else str(x) for name, x in inner.items()}
    return flat


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name}: expected auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but this torch finds no CUDA device; say device=cpu")
    return device


def _on_cpu(name: str) -> bool:
    return choose_device(name).type == "cpu"
