"""The training loop: one class for any task and any model, in one process or in several.

Batches are a pure function of (seed, epoch). Process r of w takes batches r, r+w, … of each update, so w processes
compute what one process computes with w times the accumulation. On a CPU, a run that is killed and resumed ends
bit-identical to an uninterrupted one.
"""

import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import nn

from attnlab.config import Natural, NonNegative, Positive, Probability, check_fields, refuse_unused
from attnlab.mechanisms.seeding import Seeds
from attnlab.tasks.task import PAD, Task
from attnlab.training import optimisers as optimise
from attnlab.training.batches import Batches
from attnlab.training.checkpoints import Position, collect_weights, keep_weights, make_checkpoint, restore_checkpoint
from attnlab.training.muon import list_matrices
from attnlab.training.objective import Objective
from attnlab.training.run_folder import Checkpoint, Metrics, RunFolder, write_checkpoint
from attnlab.training.scoring import Scored, bits_per_byte, perplexity, score_batches
from attnlab.training.step import COMPILE_AFTER, Captured, Eager, Flat, Stepper

CHECK_EVERY = 50  # updates between two reads of the device's flag for values that are not finite


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained. None of it depends on the task or on the attention."""

    steps: int = 5000  # number of updates
    batch_tokens: int = 4096  # largest number of padded target tokens per batch
    batch_examples: int | None = None  # number of examples per batch; replaces batch_tokens
    accumulate: int = 1  # number of batches per update
    optimiser: Literal["adam", "adamw", "nag", "muon"] = "adam"  # nag: SGD, Nesterov momentum; muon: adamw for the rest
    lr: Positive = 5e-4  # learning rate at its highest
    muon_lr: Positive = 0.02  # highest learning rate of the matrices that muon trains; lr is that of all else
    muon_momentum: Probability = 0.95  # momentum of muon
    betas: tuple[Probability, Probability] = (0.9, 0.98)  # decay rates of Adam's two moments
    eps: Positive = 1e-8  # constant in the denominator of Adam's update
    momentum: Probability = 0.99  # momentum of nag
    weight_decay: NonNegative = 0.0  # weight decay; adamw decouples it from the gradient
    schedule: Literal["inverse-sqrt", "cosine", "wsd", "constant"] = "inverse-sqrt"  # learning rate after the warm-up
    warmup: Natural | None = None  # number of warm-up updates; none: 400, or a tenth of all updates if that is fewer
    warmup_start: NonNegative = 1e-7  # learning rate at the start of the warm-up
    period: int | None = None  # number of updates of the first cosine period; none: all after the warm-up
    period_multiply: Annotated[float, "[1, inf)"] = 1.0  # factor by which each cosine period is longer than the last
    period_shrink: Annotated[float, "(0, 1]"] = 1.0  # factor on the learning rates of each next cosine period
    decay: Natural | None = None  # number of updates at the end over which wsd decays; none: a fifth of all updates
    min_lr: NonNegative = 0.0  # lowest learning rate of the cosine and wsd schedules
    clip: NonNegative = 0.0  # largest norm of the gradient; 0: no clipping
    label_smoothing: Probability = 0.0  # share of the target probability that is spread over all words
    z_loss: NonNegative = 0.0  # factor of (log Σ exp logits)², which keeps the logits small; 0: none
    seed: Natural = 1  # seed of initialization, batches and noise
    evaluate_every: int = 500  # number of updates between two evaluations on the validation part
    evaluate_at: tuple[Natural, ...] = ()  # additional steps at which to evaluate and keep the weights; 0: the start
    checkpoint_every: int = 500  # number of updates between two checkpoints
    keep_last: Natural = 0  # number of checkpoints whose weights are kept for averaging
    patience: int | None = None  # number of evaluations without improvement before training stops; none: never
    log_every: int = 50  # number of updates between two lines of metrics.jsonl
    logging: Literal["none", "tensorboard", "wandb", "mlflow", "trackio"] = "none"  # a tracker beside metrics.jsonl
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # number format; auto: bf16 on a GPU, else fp32
    capture: Literal["auto", "yes", "no"] = "auto"  # capture updates as CUDA graphs; auto: on one GPU
    rungs: int = 8  # number of widths to which captured batches are padded
    compile: Literal["auto", "no", "dynamic", "static"] = "auto"  # compile captured blocks; auto: for frequent widths

    def __post_init__(self) -> None:
        check_fields(self)
        if late := [step for step in self.evaluate_at if step > self.steps]:
            raise ValueError(f"evaluate_at must be between 0 and steps={self.steps}, got {late[0]}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must be at most lr={self.lr}, got {self.min_lr}")
        if self.optimiser != "muon":
            refuse_unused(self, ("muon_lr", "muon_momentum"), f"optimiser={self.optimiser}", "optimiser=muon")
        if self.schedule != "wsd":
            refuse_unused(self, ("decay",), f"schedule={self.schedule}", "schedule=wsd")
        if self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            both = f"warmup={self.warmup_steps} and decay={self.decay_steps}"
            raise ValueError(f"{both} must not exceed steps={self.steps} together")

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up updates."""
        return min(400, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def decay_steps(self) -> int:
        """Number of updates of the decay of wsd."""
        return self.steps // 5 if self.decay is None else self.decay


@dataclass(frozen=True)
class TrainingResult:
    """Where a training ended."""

    step: int
    best: float
    best_step: int
    finished: bool
    stepper: str
    history: list[dict[str, Any]] = field(default_factory=list)


class NotFiniteError(ValueError):
    """A loss or a gradient is infinite or not a number."""


Report = Callable[[dict[str, Any]], None]


class Training:
    """One run up to config.steps, resumed from the folder's checkpoint if it has one.

    report gets every measurement. at_full_speed gets the number of updates after which the next ones need no more
    preparation: on a GPU, when a graph of every batch width has been captured; else after the first update.
    """

    def __init__(
        self, task: Task, model: nn.Module, config: TrainConfig, folder: RunFolder, accelerator: Any, report: Report,
        at_full_speed: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.task, self.model, self.config, self.folder = task, model, config, folder
        self.accelerator, self.report = accelerator, report
        self.at_full_speed: Callable[[int], None] | None = at_full_speed  # None: it was called
        self.is_main, self.is_alone = accelerator.is_main_process, accelerator.num_processes == 1
        seed = config.seed + accelerator.process_index
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        model.to(accelerator.device)
        self.position = Position(processes=accelerator.num_processes, unevaluated=0 in config.evaluate_at)
        self.stepper = _build_stepper(model, config, accelerator)
        self.seeds = Seeds(model, 1, accelerator.device) if accelerator.device.type == "cuda" else None
        if (checkpoint := folder.resume()) is not None:
            self.position = restore_checkpoint(checkpoint, model, self.stepper, accelerator)
            if self.position.step < config.steps:  # perhaps more steps than before
                self.position.finished = _is_out_of_patience(self.position, config)
        self.metrics = Metrics(folder.metrics_file, self.position.metrics_length) if self.is_main else None
        self.history = folder.metrics() if self.is_main else []
        self.batches = Batches(task, config, accelerator, padded=isinstance(self.stepper, Captured))
        self.recent: deque[tuple[int, int, list[int]]] = deque(maxlen=max(CHECK_EVERY, config.log_every))
        self.first_step, self.graphs = self.position.step, -1  # graphs: their number at the last test for full speed
        self.stop = threading.Event()
        self.clock, self.timed = time.perf_counter(), 0

    def run(self) -> TrainingResult:
        """Alternate updates and validations until the last step, an early stop, or a stop by the user."""
        position, config = self.position, self.config
        with catch_stop() as self.stop, closing(self.metrics) if self.metrics is not None else nullcontext():
            while position.unevaluated or (position.step < config.steps and not position.finished):
                stopping = False if position.unevaluated else self._update()
                if position.unevaluated and not stopping:
                    self._validate()
                    if position.unevaluated:  # the user stopped the validation: a resumed run makes it
                        self._save()
                        stopping = True
                if stopping:
                    break
                if position.step == config.steps or position.finished:
                    position.finished = True
                    self._save()
        best, stepper = (position.best, position.best_step), type(self.stepper).__name__.lower()
        return TrainingResult(position.step, *best, position.finished, stepper, self.history)

    def _update(self) -> bool:
        """Apply one update; log and save where that is due. Return whether to stop now."""
        position, config, stepper, epoch = self.position, self.config, self.stepper, self.position.epoch
        update = self.batches(position)
        self.recent.append((position.step + 1, epoch, [index for batch in update for index in batch.indices]))
        targets, stopping = self.batches.agree_on_update(update, self.stop.is_set())
        for number, batch in enumerate(update):
            if self.seeds is not None:
                place = number * self.accelerator.num_processes + self.accelerator.process_index
                self.seeds.set_batch([config.seed], position.step, place)
            stepper.accumulate(batch.inputs, batch.targets, self.accelerator.num_processes / targets)
        lr = optimise.compute_learning_rate(config, position.step)
        optimise.set_learning_rate(stepper.optimizer, lr, config.muon_lr * lr / config.lr)
        stepper.apply()
        position.step += 1
        position.targets, self.timed = position.targets + targets, self.timed + targets
        self._note_full_speed()
        at = position.step
        position.unevaluated = at % config.evaluate_every == 0 or at in config.evaluate_at or at == config.steps
        last, stopping = position.step == config.steps, stopping or (self.is_alone and self.stop.is_set())
        saving = position.step % config.checkpoint_every == 0 or last or stopping
        if (position.step % CHECK_EVERY == 0 or saving or position.unevaluated) and stepper.bad:
            raise NotFiniteError(self._describe_failure(self.first_step + int(stepper.updates) + 1))
        if position.step % config.log_every == 0 or last:
            self._log(epoch, lr)
        if saving:
            self._save()
        return stopping

    def _note_full_speed(self) -> None:
        if self.at_full_speed is None or self.graphs == self.stepper.count_graphs():
            return
        self.graphs = self.stepper.count_graphs()
        widths = () if self.batches.widths is None else self.batches.widths.tolist()
        if self.stepper.has_full_speed(widths, self.config.accumulate):
            float(self.stepper.norm)  # waits for the device
            self.at_full_speed(self.position.step - self.first_step)
            self.at_full_speed = None

    def _log(self, epoch: int, lr: float) -> None:
        position = self.position
        (loss,) = self.batches.sum_over_processes(self.stepper.read_loss())
        speed = self.timed / (time.perf_counter() - self.clock)
        values = {"lr": lr, "norm": float(self.stepper.norm), "tokens_per_second": speed}
        if self.config.optimiser == "muon":
            values["muon_lr"] = self.config.muon_lr * lr / self.config.lr
        self._measure({"step": position.step, "epoch": epoch, "loss": loss / position.targets} | values)
        self.clock, self.timed, position.targets = time.perf_counter(), 0, 0

    def _validate(self) -> None:
        """Evaluate and keep the best weights. A stop by the user leaves position.unevaluated set."""
        position, config = self.position, self.config
        should_stop = self.stop.is_set if self.is_alone else lambda: False
        values = evaluate(self.model, self.task, config, self.accelerator, should_stop=should_stop)
        if values is not None:
            position.unevaluated = False
            epoch = position.epoch - (position.index == 0 and position.epoch > 0)  # of the last update
            self._measure({"step": position.step, "epoch": epoch} | values)
            note_best(position, values["valid_loss"], config)
            if self.is_main and position.since_best == 0:
                write_checkpoint(self._weights(), self.folder.best)
            if self.is_main and position.step in config.evaluate_at:
                write_checkpoint(self._weights(), self.folder.step_file(position.step))
        self.clock, self.timed = time.perf_counter(), 0

    def _save(self) -> None:
        config, position = self.config, self.position
        (position.loss,) = self.batches.sum_over_processes(float(self.stepper.loss))
        checkpoint = make_checkpoint(position, self.model, self.stepper)
        if self.is_main and config.keep_last:
            keep_weights(self.folder, self._weights(), config)
        if self.metrics is not None:
            self.metrics.sync()
            self.folder.save(checkpoint)

    def _measure(self, values: dict[str, Any]) -> None:
        self.history.append(values)
        if self.metrics is not None:
            self.metrics.append(values)
            self.position.metrics_length = self.metrics.length()
            self.report(values)

    def _describe_failure(self, bad: int) -> str:
        """Describe a value that is not finite; `bad` is the first update that was not applied."""
        epoch, examples = next(((epoch, examples) for step, epoch, examples in self.recent if step == bad), ("?", []))
        shown = ", ".join(map(str, examples[:8])) + (", …" if len(examples) > 8 else "")
        good = self.folder.last if self.folder.last.exists() else "none yet"
        return (
            f"the loss or a gradient was not finite at step {bad} (epoch {epoch}, training examples {shown}); "
            f"no later update was applied, and the last good checkpoint is {good}; "
            f"try a lower lr (now {self.config.lr}), clip=1, or a longer warmup"
        )

    def _weights(self) -> Checkpoint:
        return collect_weights(self.model, self.stepper, self.position)


def evaluate(
    model: nn.Module, task: Task, config: TrainConfig, accelerator: Any, *, should_stop: Callable[[], bool]
) -> dict[str, float] | None:
    """Return validation loss (nats per target), perplexity and accuracy, without label smoothing, noise or dropout.

    The targets of a text also have bits per byte.
    Returns None if should_stop() is true between two batches.
    """
    model.eval()
    longest = int(np.maximum.reduce(task.get_lengths("valid")).max())
    plan = task.plan_batches("valid", tokens=max(config.batch_tokens, longest), shuffle=False)
    mine = plan[accelerator.process_index :: accelerator.num_processes]
    unread = (task.make_batch("valid", indices) for indices in mine if not should_stop())
    batches = (([x.to(accelerator.device) for x in b.inputs], b.targets.to(accelerator.device)) for b in unread)
    padding = None if task.architecture == "classification" else PAD
    try:
        scored = score_batches(model, batches, padding=padding) if mine else Scored(0.0, 0.0, 0, 0)
    except ValueError:
        if not should_stop():
            raise
    finally:
        model.train()
    if should_stop():
        return None
    sums = torch.tensor([scored.nll_sum, scored.correct, scored.count], dtype=torch.float64, device=accelerator.device)
    nll, correct, count = accelerator.reduce(sums).tolist()
    return describe_scores(nll, correct, int(count), task.count_bytes("valid"))


def describe_scores(nll: float, correct: float, count: int, size: int | None) -> dict[str, float]:
    """Return the values of a validation by name; size: bytes of its text, if it is one."""
    values = {"valid_loss": nll / count, "valid_perplexity": perplexity(nll, count), "valid_accuracy": correct / count}
    return values if size is None else values | {"valid_bits_per_byte": bits_per_byte(nll, size)}


def is_captured(config: TrainConfig, accelerator: Any) -> bool:
    """Return whether updates are CUDA graphs."""
    able = accelerator.device.type == "cuda" and accelerator.num_processes == 1
    if config.capture == "yes" and not able:
        raise ValueError("capture=yes needs one process on a CUDA device; use capture=auto or capture=no")
    return able and config.capture != "no"


def is_half(config: TrainConfig, device: torch.device) -> bool:
    """Return whether the model computes in bfloat16."""
    return config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")


def make_objective(model: nn.Module, config: TrainConfig) -> Objective:
    return Objective(model.train(), smoothing=[config.label_smoothing], z_loss=[config.z_loss])


def _build_stepper(model: nn.Module, config: TrainConfig, accelerator: Any) -> Stepper:
    captured, objective = is_captured(config, accelerator), make_objective(model, config)
    if captured and config.compile == "dynamic":
        objective.compile_parts(dynamic=True)
    wrapped = accelerator.prepare_model(objective) if accelerator.num_processes > 1 else objective  # moves parameters
    matrices = list_matrices(model) if config.optimiser == "muon" else []
    half = is_half(config, accelerator.device)
    flat = Flat(model, torch.bfloat16 if half else torch.float32, first=matrices)
    optimizer = optimise.build_optimiser(flat, config, matrices)
    if not captured:
        return Eager(wrapped, flat, optimizer, clip=config.clip)
    compile_after = COMPILE_AFTER.get(config.compile)
    return Captured(wrapped, flat, optimizer, clip=config.clip, compile_after=compile_after)


def note_best(position: Position, loss: float, config: TrainConfig) -> None:
    if loss < position.best:
        position.best, position.best_step, position.since_best = loss, position.step, 0
    else:
        position.since_best += 1
        position.finished = _is_out_of_patience(position, config)


def _is_out_of_patience(position: Position, config: TrainConfig) -> bool:
    return config.patience is not None and position.since_best >= config.patience


@contextmanager
def catch_stop() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets; a second signal raises KeyboardInterrupt."""
    stop = threading.Event()

    def request_stop(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
