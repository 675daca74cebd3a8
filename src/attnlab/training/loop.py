"""The training loop: one function, on Accelerate, for any task and any model.

Batches are a pure function of (seed, epoch): process r of w takes batches r, r+w, … of each update, so an interrupted
run goes on where it stood, and w processes do what one does with w times the accumulation. A run that is killed and
started again ends, on a CPU, bit-identical to one that was not.
"""

import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from attnlab.tasks.task import PAD, Task
from attnlab.training import optimisers as optimise
from attnlab.training.batches import Batches
from attnlab.training.checkpoints import Position, make_checkpoint, keep_weights, restore_checkpoint, collect_weights
from attnlab.training.run_folder import Metrics, RunFolder, write_checkpoint
from attnlab.training.scoring import Scored, perplexity, score_batches
from attnlab.training.step import Captured, Eager, Flat, Objective, Stepper

LOOK_EVERY = 50  # updates between two looks at the device's flag


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained. None of it depends on the task or on the attention."""

    steps: int = 5000  # updates
    batch_tokens: int = 4096  # padded target tokens in a batch, at most
    batch_examples: int | None = None  # instead: so many examples in a batch
    accumulate: int = 1  # batches in an update
    optimiser: Literal["adam", "adamw", "nag"] = "adam"
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    momentum: float = 0.99  # of nag
    weight_decay: float = 0.0
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = "inverse-sqrt"
    warmup: int | None = None  # updates; None: 400, or a tenth of all where that is fewer
    warmup_start: float = 1e-7
    period: int | None = None  # of the cosine; None: all steps after the warm-up
    period_multiply: float = 1.0
    period_shrink: float = 1.0
    min_lr: float = 0.0
    clip: float = 0.0  # the largest norm of the gradient; 0: no limit
    label_smoothing: float = 0.0
    seed: int = 1
    evaluate_every: int = 500
    evaluate_at: tuple[int, ...] = ()  # further steps to evaluate at, whose weights are kept
    checkpoint_every: int = 500
    keep_last: int = 0  # weights kept at the last so many checkpoints, for averaging
    patience: int | None = None  # stop after so many evaluations without a better one
    log_every: int = 50
    logging: Literal["none", "tensorboard", "wandb"] = "none"  # a tracker beside metrics.jsonl, if it is installed
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on a GPU
    capture: Literal["auto", "yes", "no"] = "auto"  # CUDA graphs; auto: on one GPU
    rungs: int = 8  # widths that batches are padded to where they are captured
    compile: Literal["no", "dynamic", "static"] = "dynamic"  # the blocks where captured; static: each width by itself

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "accumulate", "evaluate_every", "checkpoint_every", "log_every", "rungs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("batch_examples", "period", "patience"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or left out, not {value}")
        if self.keep_last < 0:
            raise ValueError(f"keep_last must not be below 0, as {self.keep_last} is")
        if late := [step for step in self.evaluate_at if not 1 <= step <= self.steps]:
            raise ValueError(f"evaluate_at={late[0]} is no step of a run of steps={self.steps}")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), not {self.label_smoothing}")
        if self.lr <= 0 or self.clip < 0 or self.warmup_steps < 0:
            raise ValueError(
                f"lr must be above 0, clip and warmup not below: lr={self.lr} clip={self.clip} warmup={self.warmup}"
            )

    @property
    def warmup_steps(self) -> int:
        """Updates of warm-up."""
        return min(400, self.steps // 10) if self.warmup is None else self.warmup

    def build_schedule(self) -> optimise.Schedule:
        period = self.period or max(1, self.steps - self.warmup_steps)
        restarts = (self.period_multiply, self.period_shrink, self.min_lr)
        return optimise.Schedule(self.schedule, self.lr, self.warmup_steps, self.warmup_start, period, *restarts)


@dataclass(frozen=True)
class TrainingResult:
    """What a run came to."""

    step: int
    best: float
    best_step: int
    finished: bool
    stepper: str
    history: list[dict[str, Any]] = field(default_factory=list)


class NotFiniteError(ValueError):
    """A loss or a gradient was infinite or no number."""


Report = Callable[[dict[str, Any]], None]


def train(
    task: Task, model: nn.Module, config: TrainConfig, folder: RunFolder, accelerator: Any, report: Report
) -> TrainingResult:
    """Train the model on the task until config.steps, from where folder stands; report is given every measurement."""
    device, main = accelerator.device, accelerator.is_main_process
    _seed(config.seed + accelerator.process_index)
    model.to(device)
    position = Position(processes=accelerator.num_processes)
    stepper = _stepper(model, config, accelerator)
    if (checkpoint := folder.resume()) is not None:
        position = restore_checkpoint(checkpoint, model, stepper, accelerator)
    metrics = Metrics(folder.metrics_file, position.metrics_length) if main else None
    batches = Batches(task, config, accelerator, padded=isinstance(stepper, Captured))
    schedule, history = config.build_schedule(), folder.metrics() if main else []

    def measured(values: dict[str, Any]) -> None:
        history.append(values)
        if metrics is not None:
            metrics.append(values)
            position.metrics_length = metrics.length()
            report(values)

    def save() -> None:
        position.loss = batches.sum_over_processes(float(stepper.loss))
        state = make_checkpoint(position, model, stepper, accelerator)
        if main and config.keep_last:
            keep_weights(folder, collect_weights(model, stepper, position), last=config.keep_last, evaluated=config.evaluate_at)
        if metrics is not None:
            metrics.sync()
            folder.save(state)

    def validate() -> None:
        """Evaluate, unless asked to stop meanwhile: then that is still to be done when the run goes on."""
        values = evaluate(model, task, config, accelerator, asked=stop.is_set if alone else None)
        if values is None:
            return
        position.unevaluated = False
        measured({"step": position.step, "epoch": position.epoch_of_last} | values)
        _note_best(position, values["valid_loss"], config)
        if main and position.since_best == 0:
            write_checkpoint(collect_weights(model, stepper, position), folder.best)
        if main and position.step in config.evaluate_at:
            write_checkpoint(collect_weights(model, stepper, position), folder.step_file(position.step))

    recent: deque[tuple[int, int, list[int]]] = deque(maxlen=max(LOOK_EVERY, config.log_every))
    alone, stopping = accelerator.num_processes == 1, False
    clock, timed, began = time.perf_counter(), 0, position.step
    with catch_stop() as stop, closing(metrics) if metrics is not None else nullcontext():
        while position.unevaluated or (position.step < config.steps and not position.finished):
            if not position.unevaluated:
                epoch = position.epoch
                update = batches(position)
                recent.append((position.step + 1, epoch, [index for batch in update for index in batch.indices]))
                total, stopping = batches.agree_on_update(update, stop.is_set())
                for batch in update:
                    stepper.accumulate(batch.inputs, batch.targets, accelerator.num_processes / total)
                rate = schedule(position.step)
                optimise.set_learning_rate(stepper.optimizer, rate)
                stepper.apply()
                position.step += 1
                position.targets, timed = position.targets + total, timed + total
                position.unevaluated = _is_evaluated(position.step, config)
                last, stopping = position.step == config.steps, stopping or (alone and stop.is_set())
                saving = position.step % config.checkpoint_every == 0 or last or stopping
                if (position.step % LOOK_EVERY == 0 or saving or position.unevaluated) and stepper.bad:
                    raise NotFiniteError(_where_it_went_wrong(folder, recent, began + int(stepper.updates) + 1, config))
                if position.step % config.log_every == 0 or last:
                    loss = batches.sum_over_processes(stepper.read_loss()) / position.targets
                    speed = timed / (time.perf_counter() - clock)
                    how = {"lr": rate, "norm": float(stepper.norm), "tokens_per_second": speed}
                    measured({"step": position.step, "epoch": epoch, "loss": loss} | how)
                    clock, timed, position.targets = time.perf_counter(), 0, 0
                if saving:
                    save()
            if position.unevaluated and not stopping:
                validate()
                clock, timed = time.perf_counter(), 0
                if position.unevaluated:
                    save()
                    break
            if stopping:
                break
            if position.step == config.steps or position.finished:
                position.finished = True
                save()
    return TrainingResult(
        position.step, position.best, position.best_step, position.finished, type(stepper).__name__.lower(), history
    )


def _is_evaluated(step: int, config: TrainConfig) -> bool:
    return step % config.evaluate_every == 0 or step in config.evaluate_at or step == config.steps


def evaluate(
    model: nn.Module,
    task: Task,
    config: TrainConfig,
    accelerator: Any,
    part: str = "valid",
    asked: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Loss in nats a target, perplexity and accuracy on a part, without label smoothing, noise or dropout.

    None if it was asked, between two batches, to stop.
    """
    model.eval()
    longest = int(np.maximum.reduce(task.get_lengths(part)).max())
    plan = task.plan_batches(part, tokens=max(config.batch_tokens, longest), shuffle=False)
    mine = plan[accelerator.process_index :: accelerator.num_processes]
    made = (task.make_batch(part, indices) for indices in mine if asked is None or not asked())
    batches = (([x.to(accelerator.device) for x in b.inputs], b.targets.to(accelerator.device)) for b in made)
    padding = None if task.architecture == "classification" else PAD
    try:
        scored = score_batches(model, batches, padding=padding) if mine else Scored(0.0, 0.0, 0, 0)
    except ValueError:
        if asked is None or not asked():
            raise
    finally:
        model.train()
    if asked is not None and asked():
        return None
    sums = torch.tensor([scored.nll_sum, scored.correct, scored.count], dtype=torch.float64, device=accelerator.device)
    nll, correct, count = accelerator.reduce(sums).tolist()
    return {"valid_loss": nll / count, "valid_perplexity": perplexity(nll, count), "valid_accuracy": correct / count}


def _stepper(model: nn.Module, config: TrainConfig, accelerator: Any) -> Stepper:
    device = accelerator.device
    able = device.type == "cuda" and accelerator.num_processes == 1
    if config.capture == "yes" and not able:
        raise ValueError("capture=yes needs one process on a CUDA device; say capture=auto or capture=no")
    captured = able and config.capture != "no"
    objective = Objective(model.train(), smoothing=config.label_smoothing)
    if captured and config.compile != "no":
        objective.compile_parts(dynamic=config.compile == "dynamic")
    wrapped = (
        accelerator.prepare_model(objective) if accelerator.num_processes > 1 else objective
    )  # it moves parameters
    half = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    flat = Flat(model, torch.bfloat16 if half else torch.float32)
    how = {"betas": config.betas, "eps": config.eps, "momentum": config.momentum, "weight_decay": config.weight_decay}
    optimizer = optimise.build_optimiser(flat.master, config.optimiser, **how)  # type: ignore[arg-type]
    return (Captured if captured else Eager)(wrapped, flat, optimizer, clip=config.clip)


def _note_best(position: Position, loss: float, config: TrainConfig) -> None:
    if loss < position.best:
        position.best, position.best_step, position.since_best = loss, position.step, 0
    else:
        position.since_best += 1
        if config.patience is not None and position.since_best >= config.patience:
            position.finished = True


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _where_it_went_wrong(
    folder: RunFolder, recent: Iterable[tuple[int, int, list[int]]], bad: int, config: TrainConfig
) -> str:
    """bad is the number of the first update that was not applied."""
    epoch, examples = next(((epoch, examples) for step, epoch, examples in recent if step == bad), ("?", []))
    shown = ", ".join(map(str, examples[:8])) + (", …" if len(examples) > 8 else "")
    good = folder.last if folder.last.exists() else "none yet"
    return (
        f"the loss or a gradient was not finite at step {bad} (epoch {epoch}, training examples {shown}); "
        f"nothing after it was applied, and the last good checkpoint is {good}; "
        f"try a lower lr (now {config.lr}), clip=1, or a longer warmup"
    )


@contextmanager
def catch_stop() -> Iterator[threading.Event]:
    """Set on the first Ctrl-C or SIGTERM, to stop after the current update; a second one stops at once."""
    stop = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
