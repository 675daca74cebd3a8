"""The embedded default: one small Transformer learns to copy under several attentions, and shows what it attends to.

A sequence is ten random tokens, a separator, and the ten tokens again. To write the t-th token again the model has to
look at the t-th token, so a head that has learnt it has its weight on the diagonal.
"""

import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.config import changed
from attnlab.models.presets import on_meta
from attnlab.models.transformer import TransformerConfig, build
from attnlab.models.watch import record
from attnlab.recording import Record
from attnlab.report import figures
from attnlab.report.page import Command, Picture, Table, Text, page

LENGTH, TOKENS, SEPARATOR = 10, 16, 1  # ids: 0 padding, 1 separator, 2 … the tokens
MODEL = TransformerConfig(
    model="language-model", vocabulary=TOKENS + 2, layers=2, width=64, heads=4, feed_forward=128, dropout=0.0,
    positions="learned", max_length=2 * LENGTH + 1,
)  # fmt: skip


@dataclass(frozen=True)
class DemoConfig:
    attention: tuple[str, ...] = ("softmax", "realformer", "coda", "dagpam")
    steps: int = 600
    batch: int = 32
    lr: float = 3e-3
    seed: int = 0
    out: str = "runs/demo"

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, not {self.lr}")
        if not self.attention or len(set(self.attention)) < len(self.attention):
            raise ValueError("attention= takes one or more names, separated by commas, each once")
        for name in self.attention:
            on_meta(replace(MODEL, attention=name))  # what is wrong with one is said before the first is trained


@dataclass(frozen=True)
class Outcome:
    """What one attention learnt."""

    attention: str
    parameters: int
    steps: list[int]
    accuracy: list[float]  # at those steps, on sequences never trained on
    diagonal: float  # the weight that the best head puts on the token to be copied, the mean over positions
    head: str
    weights: Tensor  # (i,j) of that head, on the first example: rows write, columns are the ten tokens
    record: Record


def outcomes(config: DemoConfig, tick: Callable[[str, int], None] = lambda name, step: None) -> Iterator[Outcome]:
    """Train one model for each attention, all from the same seed on the same data."""
    for name in config.attention:
        yield _learn(name, config, tick)


def folder_of(config: DemoConfig) -> Path:
    """Where it will be written; made, and found to be writable, before anything is trained."""
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"out={config.out} cannot be written to")
    return folder


def write(config: DemoConfig, found: list[Outcome]) -> Path:
    """report.html, attention.png and one Record for each attention, into config.out."""
    folder = folder_of(config)
    tokens = [chr(ord("a") + int(token) - 2) for token in found[0].record.tokens["target"][0, :LENGTH]]
    maps = figures.as_png(
        figures.attention_maps({f"{o.attention}  {o.head}": o.weights for o in found}, tokens, tokens)
    )
    lines = {o.attention: (o.steps, o.accuracy) for o in found}
    learning = figures.as_png(figures.curves(lines, x="training steps", y="accuracy on new sequences"))
    (folder / "attention.png").write_bytes(maps)
    for outcome in found:
        outcome.record.save(folder / f"{re.sub(r'[^A-Za-z0-9+-]+', '_', outcome.attention).strip('_')}.safetensors")
    diagonal = ", ".join(f"{o.attention} {o.diagonal:.2f}" for o in found)
    names = ",".join(config.attention)
    command = f"attnlab demo attention={names} steps={config.steps} seed={config.seed}"
    sections: list[tuple[str, list[Table | Picture | Text | Command]]] = [
        ("What was learnt", [Text(" ".join((__doc__ or "").split("\n\n", 1)[1].split())), table(found)]),
        (
            "What it attends to",
            [Picture(maps, f"Attention maps of each best head. Weight on the diagonal: {diagonal}.")],
        ),
        ("How it was learnt", [Picture(learning, "Accuracy against training steps for each attention.")]),
        ("Make it again", [Command(command), Text(f"torch {torch.__version__}, Python {platform.python_version()}")]),
    ]
    report = folder / "report.html"
    report.write_text(page("attnlab: learning to copy", sections), encoding="utf-8")
    return report


def table(found: list[Outcome]) -> Table:
    columns = ["attention", "parameters", "accuracy", "95 % at step", "best head", "weight on the copied token"]
    rows = [
        [o.attention, f"{o.parameters:,}", f"{o.accuracy[-1]:.3f}", _first(o), o.head, f"{o.diagonal:.3f}"]
        for o in found
    ]
    return Table(columns, rows)


def configured(values: dict[str, str]) -> DemoConfig:
    return changed(DemoConfig(), values)


def _learn(name: str, config: DemoConfig, tick: Callable[[str, int], None]) -> Outcome:
    torch.manual_seed(config.seed)
    model = build(replace(MODEL, attention=name))
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.01)
    draw = torch.Generator().manual_seed(config.seed + 1)
    unseen = _sequences(200, torch.Generator().manual_seed(config.seed + 2))
    steps, accuracy = [], []
    for step in range(config.steps + 1):
        if step % max(1, config.steps // 15) == 0 or step == config.steps:
            steps.append(step)
            accuracy.append(_accuracy(model, unseen))
        if step == config.steps:
            break
        for group in optimiser.param_groups:
            group["lr"] = config.lr * min(1.0, (step + 1) / 50)
        sequences = _sequences(config.batch, draw)
        written = model(sequences[:, :-1])[:, LENGTH:]
        loss = F.cross_entropy(written.flatten(0, 1), sequences[:, LENGTH + 1 :].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        tick(name, step + 1)
    seen = record(model.eval(), unseen[:8, :-1])
    diagonal, layer, head = _best_head(seen)
    weights = seen.layers[layer].weights[0, head, LENGTH:, :LENGTH]
    parameters = sum(p.numel() for p in model.parameters())
    return Outcome(name, parameters, steps, accuracy, diagonal, f"layer {layer} head {head}", weights, seen)


def _sequences(count: int, draw: torch.Generator) -> Tensor:
    tokens = torch.randint(2, TOKENS + 2, (count, LENGTH), generator=draw)
    return torch.cat([tokens, torch.full((count, 1), SEPARATOR), tokens], dim=1)  # (b, 2·LENGTH + 1)


@torch.no_grad()
def _accuracy(model: torch.nn.Module, sequences: Tensor) -> float:
    model.eval()
    right = model(sequences[:, :-1])[:, LENGTH:].argmax(-1) == sequences[:, LENGTH + 1 :]
    model.train()
    return float(right.float().mean())


def _best_head(seen: Record) -> tuple[float, int, int]:
    """The head with the largest weight on the token that is to be written next: (weight, layer, head)."""
    best = (-1.0, 0, 0)
    for number, layer in enumerate(seen.layers):
        on_copied = layer.weights[:, :, LENGTH:, :LENGTH].diagonal(dim1=2, dim2=3).mean((0, 2))  # (h,)
        head = int(on_copied.argmax())
        best = max(best, (float(on_copied[head]), number, head))
    return best


def _first(outcome: Outcome) -> str:
    reached = [step for step, accuracy in zip(outcome.steps, outcome.accuracy, strict=True) if accuracy >= 0.95]
    return str(reached[0]) if reached else "–"
