"""Train several runs as one: models of one shape with their own seeds, and with their own numbers if these differ.

Every run has the batches that it has alone, in the same order. Its folder gets what it gets alone: metrics, the best
weights, and a last checkpoint from which it can go on alone. While they train, one checkpoint holds all of them. A run
whose loss or gradient is not finite stops with its last good weights, and stays unfinished.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.mechanisms.seeding import Seeds
from attnlab.models.crew import Crew
from attnlab.models.members import stack_members, unstack_member
from attnlab.models.transformer import Transformer
from attnlab.tasks.task import PAD, Batch, Task
from attnlab.training import optimisers as optimise
from attnlab.training.batches import Batches
from attnlab.training.checkpoints import Position, keep_weights, read_random_state
from attnlab.training.loop import CHECK_EVERY, TrainConfig, catch_stop, describe_scores, note_best
from attnlab.training.member_step import CapturedMembers, EagerMembers, MemberFlat, build_row_optimisers
from attnlab.training.objective import Objective, compute_nll
from attnlab.training.processes import SingleProcess
from attnlab.training.run_folder import Checkpoint, DamagedError, Metrics, RunFolder, read_checkpoint, write_checkpoint
from attnlab.training.step import COMPILE_AFTER, pad_tensors

FILE = "together.safetensors"
SAVE_S = 60.0  # most seconds between two checkpoints of all runs; each takes gigabytes
LEAST_S = 10.0  # least seconds between two that checkpoint_every= asks for
OWN = {  # what may differ between the runs
    "seed", "lr", "betas", "eps", "momentum", "weight_decay", "schedule", "warmup", "warmup_start", "period",
    "period_multiply", "period_shrink", "decay", "min_lr", "clip", "label_smoothing", "z_loss",
}  # fmt: skip
Report = Callable[[int, dict[str, Any]], None]  # number of the run, and its measurement


@dataclass
class JointRun:
    """One of the runs: what it trains by, where it leaves its results, and how far it is."""

    config: TrainConfig
    folder: RunFolder
    position: Position = field(default_factory=Position)
    has_ended: bool = False  # stopped early by patience, or failed
    has_failed: bool = False


class JointTraining:
    """Training of several runs up to config.steps, resumed from `file` if it is there."""

    def __init__(
        self, task: Task, models: Sequence[Transformer], runs: Sequence[JointRun], *, device: torch.device, file: Path,
        report: Report,
    ) -> None:  # fmt: skip
        configs = [run.config for run in runs]
        check_configs(configs)
        self.task, self.runs, self.file, self.report, self.device = task, runs, file, report, device
        self.config, self.crew = configs[0], Crew([config.seed for config in configs])
        torch.manual_seed(self.config.seed)
        self.model = stack_members(models, self.crew).to(device).train()
        self.stepper = self._build_stepper(configs)
        self.seeds = Seeds(self.model, len(runs), device) if device.type == "cuda" else None
        captured = isinstance(self.stepper, CapturedMembers)
        self.batches = [Batches(task, config, SingleProcess(device), padded=captured) for config in configs]
        self._resume()
        self.metrics = [Metrics(run.folder.metrics_file, run.position.metrics_length) for run in runs]
        self.clock, self.timed, self.saved = time.perf_counter(), 0, time.perf_counter()

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return self.runs[0].position.step

    def run(self) -> list[bool]:
        """Train to the end. Return which runs are finished; KeyboardInterrupt if the user stops it before."""
        with ExitStack() as files, catch_stop() as stop:
            for metrics in self.metrics:
                files.enter_context(closing(metrics))
            if self.step == 0 and 0 in self.config.evaluate_at:
                self._validate()
            while self.step < self.config.steps and not all(run.has_ended for run in self.runs):
                self._update()
                if self._is_due(self.config.evaluate_every) or self.step in self.config.evaluate_at:
                    self._validate()
                if self._is_due(self.config.checkpoint_every):
                    self._keep_weights()
                elapsed = time.perf_counter() - self.saved
                is_asked = self._is_due(self.config.checkpoint_every) and elapsed > LEAST_S
                if stop.is_set() or is_asked or elapsed > SAVE_S:
                    self._save()
                if stop.is_set() and self.step < self.config.steps:
                    raise KeyboardInterrupt
            for number, run in enumerate(self.runs):
                if not run.has_failed:
                    run.position.finished = True
                    run.folder.save(self._make_checkpoint(number))
        self.file.unlink(missing_ok=True)
        return [not run.has_failed for run in self.runs]

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

    def _build_stepper(self, configs: Sequence[TrainConfig]) -> Any:
        on_gpu, clips = self.device.type == "cuda", [config.clip for config in configs]
        captured = on_gpu and self.config.capture != "no"
        numbers = {"smoothing": [c.label_smoothing for c in configs], "z_loss": [c.z_loss for c in configs]}
        objective = Objective(self.model, **numbers, padding=PAD)
        half = self.config.precision == "bf16" or (self.config.precision == "auto" and on_gpu)
        if captured and self.config.compile == "dynamic":
            objective.compile_parts(dynamic=True)
        flat = MemberFlat(self.model, len(configs), torch.bfloat16 if half else torch.float32)
        optimisers = build_row_optimisers(flat, configs)
        if not captured:
            return EagerMembers(objective, flat, optimisers, clips=clips)
        compile_after = COMPILE_AFTER.get(self.config.compile)
        return CapturedMembers(objective, flat, optimisers, clips=clips, compile_after=compile_after)

    def _update(self) -> None:
        epoch = self.runs[0].position.epoch
        passes = self._make_passes()
        targets = [sum(own[n].count for own in passes if own[n] is not None) for n in range(len(self.runs))]
        scale = torch.tensor([1 / max(count, 1) for count in targets])
        for number, batches in enumerate(passes):
            if self.seeds is not None:
                self.seeds.set_batch([run.config.seed for run in self.runs], self.step, number)
            self.stepper.accumulate(*self._join(batches), scale)
        rates = [optimise.compute_learning_rate(run.config, self.step) for run in self.runs]
        self.stepper.optimizer.set_rates(rates)
        self.stepper.apply()
        for run, count in zip(self.runs, targets, strict=True):
            run.position.step += 1
            run.position.targets += count
        self.timed += sum(targets)
        if self._is_due(CHECK_EVERY):
            self._note_failures()
        if self._is_due(self.config.log_every):
            self._log(epoch, rates)

    def _make_passes(self) -> list[list[Any]]:
        """Return the batches of the next update: for each pass, that of each run, or None if it has no more."""
        pairs = list(zip(self.batches, self.runs, strict=True))
        if self.config.batch_examples is not None:
            return [list(own) for own in zip_longest(*(batches(run.position) for batches, run in pairs))]
        passes = []
        for chosen in zip(*(batches.choose(run.position) for batches, run in pairs), strict=True):
            made = self.task.make_batch("train", [index for indices in chosen for index in indices])  # one call for all
            counts = [len(indices) for indices in chosen]
            columns = [x.split(counts) for x in (*made.inputs, made.targets)]
            own = []
            for indices, *inputs, goals in zip(chosen, *columns, strict=True):
                count = len(goals) if goals.dim() == 1 else int((goals != PAD).sum())
                own.append(Batch(tuple(inputs), goals, count, indices))
            passes.append(own)
        return passes

    def _join(self, batches: Sequence[Batch | None]) -> tuple[list[Tensor], Tensor]:
        """Join the members' batches to one, (s·b,…), padded to the same sizes; a missing one is all padding."""
        given = [[] if batch is None else [*batch.inputs, batch.targets] for batch in batches]
        count = max(map(len, given))
        rows = max(len(own[0]) for own in given if own)
        wide = [max((own[n].shape[1] for own in given if own and own[n].dim() == 2), default=0) for n in range(count)]
        if self.config.batch_examples is None and (shape := self.batches[0].find_shape(max(wide))):
            rows, wide = shape[0], [shape[1]] * count
        joined = []
        for n in range(count):
            parts = [own[n] if own else torch.zeros(0, 0, dtype=torch.long) for own in given]
            joined.append(torch.cat([pad_tensors([part], rows, wide[n], PAD)[0] for part in parts]))
        sizes = [[(len(x), x.shape[1]) for x in own[:-1]] or [(0, 0)] for own in given]
        self.crew.sizes = {"encoder": [own[0] for own in sizes], "decoder": [own[-1] for own in sizes]}
        *inputs, goals = (x.pin_memory() if self.device.type == "cuda" else x for x in joined)
        return inputs, goals

    def _note_failures(self) -> None:
        bad = self.stepper.bad.tolist()
        for run, flag, updates in zip(self.runs, bad, self.stepper.updates.tolist(), strict=True):
            if flag and not run.has_ended:
                run.has_ended = run.has_failed = True
                warnings.warn(f"{run.folder.path}: the loss or a gradient was not finite at step {updates + 1}; the "
                              "other runs go on without it", stacklevel=2)  # fmt: skip

    def _log(self, epoch: int, rates: Sequence[float]) -> None:
        speed = self.timed / (time.perf_counter() - self.clock)
        losses, norms = self.stepper.read_losses(), self.stepper.norm.tolist()
        for number, run in enumerate(self.runs):
            values = {"lr": rates[number], "norm": norms[number], "tokens_per_second": speed / len(self.runs)}
            values |= {"loss": losses[number] / max(run.position.targets, 1)}
            run.position.targets = 0
            self._measure(number, {"step": self.step, "epoch": epoch, **values})
        self.clock, self.timed = time.perf_counter(), 0

    def _validate(self) -> None:
        self._note_failures()
        position = self.runs[0].position
        epoch = position.epoch - (position.index == 0 and position.epoch > 0)
        for number, values in enumerate(score_members(self.model, len(self.runs), self.task, self.config, self.device)):
            run = self.runs[number]
            if run.has_ended:
                continue
            self._measure(number, {"step": self.step, "epoch": epoch} | values)
            note_best(run.position, values["valid_loss"], run.config)
            if run.position.since_best == 0:
                write_checkpoint(self._collect_weights(number), run.folder.best)
            if self.step in self.config.evaluate_at:
                write_checkpoint(self._collect_weights(number), run.folder.step_file(self.step))
            if run.position.finished:  # by patience: its weights stay
                run.has_ended = True
                self.stepper.bad[number] = 1.0
        self.clock, self.timed = time.perf_counter(), 0

    def _keep_weights(self) -> None:
        for number, run in enumerate(self.runs if self.config.keep_last else ()):
            if not run.has_ended:
                keep_weights(run.folder, self._collect_weights(number), run.config)

    def _measure(self, number: int, values: dict[str, Any]) -> None:
        run, metrics = self.runs[number], self.metrics[number]
        if run.has_ended:
            return
        metrics.append(values)
        run.position.metrics_length = metrics.length()
        self.report(number, values)

    def _weights(self, number: int) -> dict[str, Tensor]:
        own = unstack_member(self.model, number) | self.stepper.flat.views(self.stepper.flat.master, number)
        return {f"model/{name}": x.detach() for name, x in own.items()}

    def _collect_weights(self, number: int) -> Checkpoint:
        position = self.runs[number].position
        return Checkpoint(self._weights(number), {"step": position.step, "best": position.best})

    def _make_checkpoint(self, number: int) -> Checkpoint:
        """Return what a run needs to go on alone."""
        state = self.stepper.optimizer.read_state(number)
        tensors = self._weights(number) | {f"optimiser/{key}": x for key, x in state.items()}
        with self.crew.be_member(number):
            torch_states, plain = read_random_state()
        tensors |= {f"random/0/{name}": x for name, x in torch_states.items()}
        return Checkpoint(tensors, vars(self.runs[number].position) | {"random": [plain]})

    def _save(self) -> None:
        """Write one checkpoint of all runs."""
        for metrics in self.metrics:
            metrics.sync()
        for run, loss in zip(self.runs, self.stepper.loss.tolist(), strict=True):
            run.position.loss = loss
        write_checkpoint(
            Checkpoint(self._list_state(), {"runs": [self._describe(run) for run in self.runs]}), self.file
        )
        self.saved = time.perf_counter()

    def _list_state(self) -> dict[str, Tensor]:
        stepper = self.stepper
        kept = {
            "master": stepper.flat.to_ordinary(stepper.flat.master),
            "bad": stepper.bad,
            "updates": stepper.updates,
            "loss": stepper.loss,
        }
        kept |= {"generators": torch.stack(self.crew.states)}
        if self.device.type == "cuda":
            kept["cuda"] = torch.cuda.get_rng_state(self.device)
        for number in range(len(self.runs)):
            kept |= {f"optimiser.{number}.{key}": x for key, x in stepper.optimizer.read_state(number).items()}
        return kept

    def _describe(self, run: JointRun) -> dict[str, Any]:
        return {
            "path": str(run.folder.path.resolve()),
            "has_ended": run.has_ended,
            "has_failed": run.has_failed,
        } | vars(run.position)

    def _resume(self) -> None:
        if not self.file.exists():
            return
        try:
            kept = read_checkpoint(self.file)
        except DamagedError as error:
            warnings.warn(f"{error}; these runs start from step 0", stacklevel=2)
            return
        for run, state in zip(self.runs, kept.state["runs"], strict=True):
            if state.pop("path") != str(run.folder.path.resolve()):
                raise ValueError(f"{self.file} holds other runs: delete it, or use another folder")
            run.has_ended, run.has_failed = state.pop("has_ended"), state.pop("has_failed")
            run.position = Position(**state)
        stepper, tensors = self.stepper, kept.tensors
        for name in ("bad", "updates", "loss"):
            getattr(stepper, name).copy_(tensors[name])
        stepper.flat.master.copy_(stepper.flat.from_ordinary(tensors["master"]))
        stepper.flat.publish()
        self.crew.states = [state.clone() for state in tensors["generators"]]
        if "cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["cuda"].cpu(), self.device)
        for number in range(len(self.runs)):
            stepper.optimizer.write_state(number, kept.part(f"optimiser.{number}."))


def check_configs(configs: Sequence[TrainConfig]) -> None:
    """Raise ValueError if runs with these settings cannot train as one."""
    first = configs[0]
    for name in [item.name for item in fields(TrainConfig) if item.name not in OWN]:
        values = list(dict.fromkeys(getattr(config, name) for config in configs))
        if len(values) > 1:
            raise ValueError(f"{name}={values[0]} and {name}={values[1]}: runs that train as one share their {name}")
    if first.optimiser == "muon":
        raise ValueError("optimiser=muon cannot train several runs as one; train them one by one")


@torch.no_grad()
def score_members(
    model: Transformer, members: int, task: Task, config: TrainConfig, device: torch.device
) -> list[dict[str, float]]:
    """Return what `loop.evaluate` returns, for each member."""
    longest = int(np.maximum.reduce(task.get_lengths("valid")).max())
    plan = task.plan_batches("valid", tokens=max(config.batch_tokens, longest), shuffle=False)
    is_classes = task.architecture == "classification"
    sums = torch.zeros(members, 3, dtype=torch.float64, device=device)  # nats, right, targets
    model.eval()
    for indices in plan:
        batch = task.make_batch("valid", indices)
        inputs = [x.to(device).repeat(members, 1) for x in batch.inputs]
        goals = batch.targets.to(device).repeat(members, *[1] * (batch.targets.dim() - 1))
        scored = torch.ones_like(goals, dtype=torch.bool) if is_classes else goals != PAD
        logits = model.readout(model.hidden(*inputs))
        nll = compute_nll(logits, goals).double() * scored
        right = (logits.argmax(-1) == goals) & scored
        sums += torch.stack([x.reshape(members, -1).sum(1).double() for x in (nll, right, scored)], dim=1)
    model.train()
    size = task.count_bytes("valid")
    return [describe_scores(nll, right, int(count), size) for nll, right, count in sums.tolist()]
