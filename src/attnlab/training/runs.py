"""Start runs from a recipe, and open them."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.config import replace_values
from attnlab.files import replace_file, write_text
from attnlab.files.user_files import read_json
from attnlab.huggingface.fine_tuning import TunedConfig, TunedLanguageModel, open_tuned_model
from attnlab.mechanisms import own
from attnlab.mechanisms.kernels.launch import LAUNCHED
from attnlab.models.model import Model
from attnlab.models.presets import Config, build, build_on_meta
from attnlab.registry import own_files
from attnlab.tasks import find_task
from attnlab.tasks.task import Task
from attnlab.training.checkpoints import Position, average_checkpoints, load_weights
from attnlab.training.loop import Training, TrainingResult
from attnlab.training.memory import explain_memory
from attnlab.training.optimisers import compute_learning_rate
from attnlab.training.processes import SingleProcess, count_processes
from attnlab.training.recipe import Recipe, restore_recipe
from attnlab.training.run_folder import DamagedError, RunFolder, read_checkpoint
from attnlab.training.run_hashes import check_fixed_weights, check_unchanged, check_vocabulary, write_hashes
from attnlab.training.run_list import ROOT, find_run
from attnlab.training.starting import Preparation


@dataclass(frozen=True)
class Run:
    """A trained model with the task it was trained on."""

    folder: RunFolder
    recipe: Recipe
    task: Task
    model: nn.Module
    weights: str  # as given to `open_run`


def start_run(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    device: str = "auto",
    report: Callable[[dict[str, Any]], None],
    note: Callable[[str], None],
    task: Task | None = None,
    allow_code: bool = False,
    export: bool = True,
    began: float | None = None,
) -> tuple[RunFolder, TrainingResult]:
    """Train a recipe, or resume it from its folder.

    out     the run's folder; default: runs/NAME with the name of the recipe
    report  receives every measurement; note receives lines for the user
    task    the recipe's task, if the caller has prepared it already
    allow_code   run the file of a user-written mechanism that model=FOLDER names; the recipe's own files always run
    export  save a finished fine-tuned model in the format of Hugging Face too
    began   time.perf_counter() at the start of the command, from which the time to full speed counts; default: now
    """
    began = time.perf_counter() if began is None else began
    folder = RunFolder(Path(out) if out else ROOT / recipe.name())
    accelerator = _open_accelerator(recipe, folder, choose_device(device))
    main, tracking = accelerator.is_main_process, recipe.training.logging != "none"
    note = note if main else _stay_silent
    report = partial(_report_and_track, report, accelerator) if tracking else report
    with _hold_folder(folder) if main else nullcontext():
        with Preparation(recipe, accelerator):
            task, config = _prepare(recipe, folder, accelerator, task)
        model = _make_model(recipe, config, task, allow_code)
        for line in [*task.notes, _describe(task, model, accelerator.device)]:
            note(line)
        LAUNCHED.clear()
        try:
            with explain_memory(partial(_advise_on_memory, config)):
                given = (task, model, recipe.training, folder, accelerator, report)
                training = Training(*given, at_full_speed=partial(_note_full_speed, note, began))
                if main:
                    _extend_run(folder, recipe, training.position, note)
                outcome = training.run()
        finally:
            if tracking:
                accelerator.end_training()
        if main and outcome.step > training.first_step:
            write_what_ran(folder, training.first_step, outcome, accelerator.device, recipe.training.steps)
        if main and export and outcome.finished and isinstance(model, TunedLanguageModel):
            _save_for_hugging_face(folder, recipe, allow_code)
        return folder, outcome


def _make_model(recipe: Recipe, config: Config | TunedConfig, task: Task, allow_code: bool) -> Model:
    """Build the model of a run as its seed initializes it, with the task's word vectors, if it has any."""
    torch.manual_seed(recipe.training.seed)
    with explain_memory(partial(_advise_on_memory, config)):
        model = _build_model(config, allow_code)
    _load_embeddings(model, task)
    return model


def _report_and_track(report: Callable[[dict[str, Any]], None], accelerator: Any, values: dict[str, Any]) -> None:
    report(values)
    accelerator.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])


def _note_full_speed(note: Callable[[str], None], began: float, updates: int) -> None:
    note(f"full speed after {updates} update{'s' * (updates > 1)}, {time.perf_counter() - began:.1f} s")


def _stay_silent(line: str) -> None:
    """Ignore a line for the user, in all processes but the main one."""


def _extend_run(folder: RunFolder, recipe: Recipe, position: Position, note: Callable[[str], None]) -> None:
    """If the folder's run has fewer steps than the recipe, store the recipe and say what differs."""
    now = recipe.training
    if (steps := folder.config()["training"]["steps"]) == now.steps:
        return
    if position.finished:
        ended = f"patience={now.patience} ended {folder.path} at step {position.step}"
        note(f"{ended}; to train longer, choose another --out and raise patience=")
        return
    folder.write_config(recipe.values())
    shutil.rmtree(folder.hugging_face, ignore_errors=True)  # holds the weights of the shorter run
    note(f"{folder.path} is a run of {steps} steps; training continues to step {now.steps}")
    before = replace(now, steps=steps)
    if any(compute_learning_rate(before, step) != compute_learning_rate(now, step) for step in range(position.step)):
        note(f"the learning rate depends on steps=, so the result differs from a run that began with steps={now.steps}")


@contextmanager
def _hold_folder(folder: RunFolder) -> Iterator[None]:
    """Hold the folder while training. An error before the first checkpoint removes a new folder again.

    Otherwise the corrected command, such as one with another mechanism, would find the folder of another run.
    """
    is_new = not folder.path.exists()
    with folder.lock():
        try:
            yield
        except (Exception, SystemExit):  # SystemExit by a user-written mechanism
            if is_new and not folder.last.exists():
                shutil.rmtree(folder.path, ignore_errors=True)
            raise


def _open_accelerator(recipe: Recipe, folder: RunFolder, device: torch.device) -> Any:
    """Return an Accelerator, with the recipe's tracker if it has one; a SingleProcess if that is enough."""
    tracker = None if recipe.training.logging == "none" else recipe.training.logging
    if tracker and find_spec(tracker) is None:
        raise ValueError(f"logging={tracker} needs a package that is not installed: pip install {tracker}")
    if tracker is None and count_processes() == 1:
        return SingleProcess(device)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu", log_with=tracker, project_dir=str(folder.path))
    if tracker:
        accelerator.init_trackers("attnlab", config=_flatten(recipe.values()))
    return accelerator


def _prepare(
    recipe: Recipe, folder: RunFolder, accelerator: Any, task: Task | None
) -> tuple[Task, Config | TunedConfig]:
    """Claim the folder, read the data, and write model.json. Errors in the settings or the data are raised here."""
    if accelerator.is_main_process:
        folder.claim(recipe.values(), recipe.defaults(), extend=True)
        check_unchanged(folder.path, recipe.data, recipe.model)
    with accelerator.main_process_first():
        task = task or find_task(recipe.task).prepare(recipe.data, folder.path)
    config = recipe.resolve_model(task)
    for part in ("train", "valid"):
        task.get_lengths(part)
    if accelerator.is_main_process:
        write_text(folder.path / "model.json", json.dumps(asdict(config), indent=1) + "\n")
        write_hashes(folder.path, recipe.data, recipe.model)
    return task, config


def _describe(task: Task, model: nn.Module, device: torch.device) -> str:
    training, validation = (len(task.get_lengths(part)[0]) for part in ("train", "valid"))
    parameters = sum(p.numel() for p in model.parameters())
    return f"{training:,} training and {validation:,} validation examples; {parameters:,} parameters; on {device}"


def open_run(
    path: str | Path,
    *,
    device: str = "auto",
    weights: str | None = None,
    data: Mapping[str, str] | None = None,
    allow_code: bool = False,
    asked: Recipe | None = None,
) -> Run:
    """Open a run: its task, and its model in evaluation mode.

    weights  "best", "last", "5" for the mean of 5 kept checkpoints, or "at:5000" for those of step 5000. Default: the
             recipe's average=, if it is set; else best; else last, if the run was never evaluated
    data     keys of other data of the same kind (data=, pair=, …), read with the run's vocabulary
    allow_code   run the files of user-written mechanisms that the run names
    asked    the recipe that the user asked to train; the files that it names run without allow_code
    """
    folder = find_run(path)
    config = folder.config()
    model_file = folder.path / "model.json"
    values = read_json(model_file)
    named = [values.get(key) for key in ("attention", "cross_attention")]
    is_asked = asked is not None and all(name in asked.attentions for name in named)
    own.check_code(named, config.get("code"), model_file, allow=allow_code or is_asked)
    _load_own_task(config, folder, allow=allow_code or (asked is not None and config.get("task") == asked.task))
    recipe = restore_recipe(config | {"model": values}, where=f"config.json or model.json of {folder.path}")
    if data:
        recipe = replace(recipe, data=_replace_data(recipe.data, data))
    check_vocabulary(folder.path)
    check_fixed_weights(folder.path, recipe.model)
    task = find_task(recipe.task).prepare(recipe.data, folder.path)
    recipe.check_sizes(task, folder.path)
    weights = weights or str(recipe.decoding.average or ("best" if folder.best.exists() else "last"))
    tensors = _read_weights(folder, weights)
    try:
        model = _build_model(recipe.model, allow_code)
        load_weights(model, tensors)
    except (ValueError, TypeError, RuntimeError) as error:
        if recipe.code() or isinstance(recipe.model, TunedConfig):  # the user's file, or the pretrained model
            raise
        raise ValueError(f"{model_file} does not describe the model of the run: {error}") from None
    return Run(folder, recipe, task, model.eval().to(choose_device(device)), weights)


def _load_own_task(config: Mapping[str, Any], folder: RunFolder, *, allow: bool) -> None:
    """Import the user's file of a run's task, if it is allowed; an error in the file is not blamed on the run."""
    task, where = str(config.get("task")), folder.path / "config.json"
    if own_files.is_own(task):
        own_files.check_code([task], config.get("code"), where, allow=allow)
        find_task(task)


def _read_weights(folder: RunFolder, weights: str) -> dict[str, Tensor]:
    """Read the weights of a run by their name in `open_run`."""
    if weights.isdecimal():
        return average_checkpoints(folder, int(weights))
    if weights in ("best", "last"):
        try:
            return read_checkpoint(getattr(folder, weights)).part("model/")
        except DamagedError as error:
            other = "last" if weights == "best" else "best"
            with suppress(OSError, DamagedError):
                read_checkpoint(getattr(folder, other))
                raise ValueError(f"{error}; {other}.safetensors is whole: use weights={other}") from None
            raise
    if weights.startswith("at:") and weights[3:].isdecimal():
        return read_checkpoint(folder.step_file(int(weights[3:]))).part("model/")
    raise ValueError(f"weights={weights}: expected best, last, a number of checkpoints to average, or at:STEP")


def write_what_ran(folder: RunFolder, first: int, outcome: TrainingResult, device: torch.device, steps: int) -> None:
    """Append to ran.json the updates after step `first`: device, versions, stepper and the fused kernels launched.

    steps   the setting of that name, which an extended run changes
    """
    file = folder.path / "ran.json"
    before = read_json(file, list) if file.exists() else []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    ran = {"after": first, "to": outcome.step, "steps": steps, "device": name, "torch": torch.__version__}
    ran |= {"stepper": outcome.stepper, "kernels": sorted(LAUNCHED)}
    write_text(file, json.dumps([*before, ran], indent=1) + "\n")


def _replace_data(config: Any, values: Mapping[str, str]) -> Any:
    """Return a task's configuration with other data; a named data set replaces the files of the run."""
    files = ("src", "tgt", "valid", "valid_src", "valid_tgt", "test", "test_src", "test_tgt", "pair")
    unset = {name: None for name in files if "data" in values and hasattr(config, name)}
    return replace_values(replace(config, **unset), dict(values))


def _build_model(config: Config | TunedConfig, allow_code: bool) -> Model:
    return open_tuned_model(config, allow_code=allow_code) if isinstance(config, TunedConfig) else build(config)


def _advise_on_memory(config: Config | TunedConfig) -> str:
    """Say how much memory a model takes, and what to lower."""
    size = ""
    if not isinstance(config, TunedConfig):
        count = sum(p.numel() for p in build_on_meta(config).parameters())
        gibibytes = 16 * count / 2**30  # float32: weights, gradients and two moments of Adam
        size = f": {count:,} parameters take about {gibibytes:,.1f} GiB in training, before any batch"
    return f"{size}; lower width=, feed_forward=, layers= or batch_tokens="


def _save_for_hugging_face(folder: RunFolder, recipe: Recipe, allow_code: bool) -> None:
    """Save a fine-tuned model with its best weights in the format of Hugging Face, all files or none."""
    if folder.hugging_face.exists():
        return
    run: Any = open_run(folder.path, device="cpu", weights="best", allow_code=allow_code, asked=recipe)
    with replace_file(folder.hugging_face) as scratch:
        run.model.save(scratch, run.recipe.data.tokenizer)


def _load_embeddings(model: Any, task: Any) -> None:
    """Initialize the word embedding with the task's vectors, if it has any."""
    vectors = task.read_embeddings() if hasattr(task, "read_embeddings") else None
    if vectors is None:
        return
    words = model.encoder.embedding.words.weight
    if words.shape != vectors.shape:
        raise ValueError(
            f"embeddings= has vectors of size {vectors.shape[1]}, but the model's words have size {words.shape[1]}: "
            "set width=, or embedding_width= for an LSTM"
        )
    with torch.no_grad():
        words.copy_(vectors)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values to dotted names; values that trackers do not accept become text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        flat |= {name: x if isinstance(x, int | float | str | bool) else str(x) for name, x in inner.items()}
    return flat


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; auto is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name}: expected auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no CUDA device; use device=cpu")
    return device
