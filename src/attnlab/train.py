"""The training loop: one function, on Accelerate, for any task and any model.

Batches are a pure function of (seed, epoch): process r of w takes batches r, r+w, … of each update, so an interrupted
run goes on where it stood, and w processes do what one does with w times the accumulation. A run that is killed and
started again ends, on a CPU, bit-identical to one that was not.
"""

import math
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from attnlab import optimise
from attnlab.score import perplexity, score_batches
from attnlab.stepping import Captured, Eager, Flat, Objective, Stepper, fit, ladder
from attnlab.store import Checkpoint, Metrics, RunFolder, read_checkpoint, write_checkpoint
from attnlab.tasks.task import PAD, Batch, Task

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
    warmup: int = 400
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
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), not {self.label_smoothing}")
        if self.lr <= 0 or self.clip < 0 or self.warmup < 0:
            raise ValueError(
                f"lr must be above 0, clip and warmup not below: lr={self.lr} clip={self.clip} warmup={self.warmup}"
            )

    def schedule_of(self) -> optimise.Schedule:
        period = self.period or max(1, self.steps - self.warmup)
        restarts = (self.period_multiply, self.period_shrink, self.min_lr)
        return optimise.Schedule(self.schedule, self.lr, self.warmup, self.warmup_start, period, *restarts)


@dataclass
class Position:
    """Where a run stands: after `step` updates, the next being number `index` of the epoch."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    best: float = math.inf  # validation loss, nats a target
    best_step: int = 0
    since_best: int = 0  # evaluations
    metrics_length: int = 0
    loss: float = 0.0  # summed since the last line of the metrics, over so many targets
    targets: int = 0
    finished: bool = False


@dataclass(frozen=True)
class Outcome:
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
) -> Outcome:
    """Train the model on the task until config.steps, from where folder stands; report is given every measurement."""
    device, main = accelerator.device, accelerator.is_main_process
    _seed(config.seed + accelerator.process_index)
    model.to(device)
    position = Position()
    stepper = _stepper(model, config, accelerator)
    if (checkpoint := folder.resume()) is not None:
        position = _restore(checkpoint, model, stepper, accelerator.process_index)
    metrics = Metrics(folder.metrics_file, position.metrics_length) if main else None
    batches = _Batches(task, config, accelerator, padded=isinstance(stepper, Captured))
    schedule, history = config.schedule_of(), folder.metrics() if main else []

    def measured(values: dict[str, Any]) -> None:
        history.append(values)
        if metrics is not None:
            metrics.append(values)
            position.metrics_length = metrics.length()
            report(values)

    def save() -> None:
        accelerator.wait_for_everyone()
        position.loss = float(stepper.loss)
        state = _checkpoint(position, model, stepper, accelerator)
        if main:
            folder.save(state)
            if config.keep_last:
                _keep(folder, position, model, stepper, config)

    recent: deque[tuple[int, int, list[int]]] = deque(maxlen=max(LOOK_EVERY, config.log_every))
    clock, timed, began = time.perf_counter(), 0, position.step
    with _asked_to_stop() as stop:
        while position.step < config.steps and not position.finished:
            epoch = position.epoch
            update = batches.update(position)
            recent.append((position.step + 1, epoch, [index for batch in update for index in batch.indices]))
            total = batches.targets_of_all(update)
            for batch in update:
                stepper.accumulate(batch.inputs, batch.targets, accelerator.num_processes / total)
            optimise.set_rate(stepper.optimizer, schedule(position.step + 1))
            stepper.apply()
            position.step += 1
            position.targets, timed = position.targets + total, timed + total
            last = position.step == config.steps
            saving = position.step % config.checkpoint_every == 0 or last or stop.is_set()
            if (position.step % LOOK_EVERY == 0 or saving) and stepper.bad:
                raise NotFiniteError(_where_it_went_wrong(folder, recent, began + int(stepper.updates) + 1, config))
            if position.step % config.log_every == 0 or last:
                loss = batches.sum_over_processes(stepper.read_loss()) / position.targets
                speed = timed / (time.perf_counter() - clock)
                rate = {"lr": schedule(position.step), "norm": float(stepper.norm), "tokens_per_second": speed}
                measured({"step": position.step, "epoch": epoch, "loss": loss} | rate)
                clock, timed, position.targets = time.perf_counter(), 0, 0
            kept = position.step in config.evaluate_at
            if position.step % config.evaluate_every == 0 or kept or last:
                values = evaluate(model, task, config, accelerator)
                measured({"step": position.step, "epoch": epoch} | values)
                _note_best(position, values["valid_loss"], config)
                if main and position.since_best == 0:
                    write_checkpoint(_weights(model, stepper, position), folder.best)
                if main and kept:
                    write_checkpoint(_weights(model, stepper, position), folder.kept(position.step))
                clock, timed = time.perf_counter(), 0
            position.finished = position.finished or last
            if saving or position.finished:
                save()
                clock, timed = time.perf_counter(), 0
            if stop.is_set() and not position.finished:
                break
    if metrics is not None:
        metrics.close()
    return Outcome(
        position.step, position.best, position.best_step, position.finished, type(stepper).__name__.lower(), history
    )


def evaluate(
    model: nn.Module, task: Task, config: TrainConfig, accelerator: Any, part: str = "valid"
) -> dict[str, float]:
    """Loss in nats a target, perplexity and accuracy on a part, without label smoothing, noise or dropout."""
    model.eval()
    plan = task.plan(part, tokens=config.batch_tokens, shuffle=False)
    mine = (task.batch(part, indices) for indices in plan[accelerator.process_index :: accelerator.num_processes])
    batches = (([x.to(accelerator.device) for x in b.inputs], b.targets.to(accelerator.device)) for b in mine)
    scored = score_batches(model, batches, padding=None if task.architecture == "classification" else PAD)
    model.train()
    sums = torch.tensor([scored.nll_sum, scored.correct, scored.count], dtype=torch.float64, device=accelerator.device)
    nll, correct, count = accelerator.reduce(sums).tolist()
    return {"valid_loss": nll / count, "valid_perplexity": perplexity(nll, count), "valid_accuracy": correct / count}


class _Batches:
    """The batches of each update, made from the plan of its epoch."""

    def __init__(self, task: Task, config: TrainConfig, accelerator: Any, *, padded: bool) -> None:
        self.task, self.config, self.accelerator = task, config, accelerator
        self.widths = ladder(np.maximum.reduce(task.lengths("train")), config.rungs) if padded else None
        self.epoch, self.plan = -1, list[list[int]]()

    def update(self, position: Position) -> list[Batch]:
        """This process's batches of the next update; moves the position on."""
        each = self.config.accumulate * self.accelerator.num_processes
        if position.epoch != self.epoch:
            self.epoch, self.plan = position.epoch, self._plan(position.epoch)
            if len(self.plan) < each:
                raise ValueError(
                    f"an update needs {each} batches but an epoch has {len(self.plan)}; "
                    "lower batch_tokens= or accumulate="
                )
        start = position.index * each + self.accelerator.process_index
        chosen = self.plan[start : (position.index + 1) * each : self.accelerator.num_processes]
        position.index += 1
        if (position.index + 1) * each > len(self.plan):
            position.epoch, position.index = position.epoch + 1, 0
        return [self._made(indices) for indices in chosen]

    def targets_of_all(self, update: list[Batch]) -> int:
        """How many targets all processes score in this update."""
        return round(self.sum_over_processes(sum(batch.count for batch in update)))

    def sum_over_processes(self, value: float) -> float:
        if self.accelerator.num_processes == 1:
            return value
        return float(self.accelerator.reduce(torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)))

    def _plan(self, epoch: int) -> list[list[int]]:
        examples = self.config.batch_examples
        tokens = self.config.batch_tokens if examples is None else None
        seed = self.config.seed
        return self.task.plan("train", tokens=tokens, examples=examples, seed=seed, epoch=epoch, widths=self.widths)

    def _made(self, indices: list[int]) -> Batch:
        batch = self.task.batch("train", indices)
        if self.widths is None:
            return batch
        longest = max(x.shape[1] for x in (*batch.inputs, batch.targets) if x.dim() == 2)
        width = int(self.widths[np.searchsorted(self.widths, longest)])
        rows = self.config.batch_examples or self.config.batch_tokens // width
        *inputs, targets = (x.pin_memory() for x in fit([*batch.inputs, batch.targets], rows, width))
        return replace(batch, inputs=tuple(inputs), targets=targets)


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
    optimizer = optimise.optimiser(flat.master, config.optimiser, **how)  # type: ignore[arg-type]
    return (Captured if captured else Eager)(wrapped, flat, optimizer, clip=config.clip)


def _note_best(position: Position, loss: float, config: TrainConfig) -> None:
    if loss < position.best:
        position.best, position.best_step, position.since_best = loss, position.step, 0
    else:
        position.since_best += 1
        if config.patience is not None and position.since_best >= config.patience:
            position.finished = True


def _weights(model: nn.Module, stepper: Stepper, position: Position) -> Checkpoint:
    return Checkpoint(_tensors(model, stepper), {"step": position.step, "best": position.best})


def _tensors(model: nn.Module, stepper: Stepper) -> dict[str, Tensor]:
    """Every parameter and buffer once; the trained ones in float32, as the master has them."""
    named = {name: x.detach() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    return {f"model/{name}": x for name, x in (named | stepper.flat.views(stepper.flat.master.data)).items()}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put saved weights into a model, each of them, and nothing else."""
    own = dict([*model.named_parameters(), *model.named_buffers()])
    if set(own) != set(tensors):
        missing, extra = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
        raise ValueError(f"the weights are of another model: missing {missing[:3]}, unknown {extra[:3]}")
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(tensors[name])


def _keep(folder: RunFolder, position: Position, model: nn.Module, stepper: Stepper, config: TrainConfig) -> None:
    """Keep the weights of this checkpoint, and of no more than the last config.keep_last."""
    write_checkpoint(_weights(model, stepper, position), folder.kept(position.step))
    steps = sorted(int(path.stem) for path in folder.kept(0).parent.glob("*.safetensors"))
    for old in [step for step in steps if step not in config.evaluate_at][: -config.keep_last]:
        folder.kept(old).unlink()


def averaged(folder: RunFolder, count: int) -> dict[str, Tensor]:
    """The mean of the weights kept at the last so many checkpoints."""
    paths = sorted(folder.kept(0).parent.glob("*.safetensors"))[-count:]
    if len(paths) < count:
        raise ValueError(
            f"{folder.path} keeps {len(paths)} checkpoints, fewer than the {count} to average; train with keep_last="
        )
    parts = [read_checkpoint(path).part("model/") for path in paths]
    return {
        name: torch.stack([part[name].float() for part in parts]).mean(0).to(x.dtype) for name, x in parts[0].items()
    }


def _checkpoint(position: Position, model: nn.Module, stepper: Stepper, accelerator: Any) -> Checkpoint:
    from accelerate.utils import gather_object

    tensors = _tensors(model, stepper)
    tensors |= {f"optimiser/{key}": x for key, x in optimise.state_tensors(stepper.optimizer).items()}
    plain = []
    for rank, (torch_states, rest) in enumerate(gather_object([_random_state()])):
        tensors |= {f"random/{rank}/{name}": x for name, x in torch_states.items()}
        plain.append(rest)
    return Checkpoint(tensors, vars(position) | {"random": plain})


def _restore(checkpoint: Checkpoint, model: nn.Module, stepper: Stepper, rank: int) -> Position:
    state = dict(checkpoint.state)
    plain = state.pop("random")
    weights = checkpoint.part("model/")
    for name, view in stepper.flat.views(stepper.flat.master.data).items():
        view.copy_(weights[name])
    load_weights(model, weights)
    optimise.load_state(stepper.optimizer, checkpoint.part("optimiser/"))
    if rank < len(plain):
        _set_random_state(checkpoint.part(f"random/{rank}/"), plain[rank])
    position = Position(**state)
    stepper.loss.fill_(position.loss)
    return position


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    kind, keys, *rest = cast(Any, np.random.get_state(legacy=True))
    torch_states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        torch_states["cuda"] = torch.cuda.get_rng_state()
    version, numbers, gauss = random.getstate()
    return torch_states, {"numpy": [kind, keys.tolist(), *rest], "python": [version, list(numbers), gauss]}


def _set_random_state(torch_states: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch_states["torch"])
    if torch.cuda.is_available() and "cuda" in torch_states:
        torch.cuda.set_rng_state(torch_states["cuda"])
    kind, keys, *rest = plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, numbers, gauss = plain["python"]
    random.setstate((version, tuple(numbers), gauss))


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
def _asked_to_stop() -> Iterator[threading.Event]:
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
