"""Train an alignment layer on unaligned parallel text, with the agreement of both directions as the target.

The teacher aligns each batch by the soft maps of the translators, and keeps mutual links only: A(s,t) ∈ {0, 1}. The
layer on the frozen encoders learns to find them from both sides at once (as Chen et al. 2020 and Dou & Neubig 2021 do):

    loss = − Σ_(s,t) A(s,t) [log F(s,t) + log B(s,t)] / 2 Σ A

Each batch of the teacher is learnt together with earlier ones from a buffer of bounded size, so memory does not grow
with the text.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.aligning.extraction import Tick, plan_pairs
from attnlab.aligning.map_aligner import MapAligner
from attnlab.aligning.model_inputs import ModelLoader
from attnlab.aligning.request import AlignmentRequest, Pairs
from attnlab.aligning.side_encoders import open_sides
from attnlab.aligning.trained_aligner import AlignmentLayer, TrainedAligner, TrainedView, find_live
from attnlab.config import Natural, Positive, check_fields
from attnlab.training.runs import choose_device

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # x (b,S,e), y (b,T,e), links (b,S,T), live (b,S,T)


@dataclass(frozen=True)
class AlignerConfig:
    """How an alignment layer is trained."""

    width: Natural = 256  # d
    learning_rate: Positive = 1e-3
    batch_tokens: Natural | None = None  # padded tokens of a batch; default: what suits the device
    replays: Natural = 3  # earlier batches that are learnt again with each new one
    buffer: Natural = 2**30  # bytes of the batches that are kept for that
    seed: Natural = 0

    def __post_init__(self) -> None:
        check_fields(self)


def train_aligner(
    models: list[str],
    pairs: Pairs,
    request: AlignmentRequest,
    config: AlignerConfig | None = None,
    *,
    tick: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> TrainedAligner:
    """Train on these pairs. models: a translator of each direction, or one model that reads both languages."""
    config = config or AlignerConfig()
    torch.manual_seed(config.seed)
    device = choose_device(request.device)
    teacher = MapAligner.open(models[0], _ask_teacher(request, models), models[1] if len(models) > 1 else None)
    silent: Tick = lambda done, of: None  # noqa: E731
    teacher.choose(pairs, silent)
    sides = open_sides(models, ModelLoader(device, request.allow_code, request.precision), request.get_languages(0))
    about = {"pairs": len(pairs[0]), "teacher": teacher.notes, "languages": request.languages}
    aligner = TrainedAligner(models, sides, AlignmentLayer(1, 1, 1), about)
    view = TrainedView(aligner, *pairs)
    batches = plan_pairs(view.readable, view.lengths, config.batch_tokens or view.batch_tokens)
    if not batches:
        raise ValueError("no pair has words on both sides, so there is nothing to learn from")
    rng = random.Random(config.seed)
    rng.shuffle(batches)
    learner: AlignmentLearner | None = None
    done = 0
    for numbers in batches:
        batch = _read_batch(teacher, view, pairs, numbers)
        if learner is None:
            aligner.layer = AlignmentLayer(batch[0].shape[-1], batch[1].shape[-1], config.width).to(device)
            learner = AlignmentLearner(aligner.layer, config, len(batches), rng)
        loss = learner.learn(batch)
        done += len(numbers)
        tick(done, int(view.readable.sum()), f"loss {loss:.3f}")
    aligner.layer.eval()
    return aligner


def _ask_teacher(request: AlignmentRequest, models: list[str]) -> AlignmentRequest:
    """Return the request of the teacher: mutual links of high precision."""
    return replace(request, decide="mutual", null=request.null if request.null is not None else 0.1)


def _read_batch(teacher: MapAligner, view: TrainedView, pairs: Pairs, numbers: list[int]) -> Batch:
    found = teacher.align(([pairs[0][k] for k in numbers], [pairs[1][k] for k in numbers]))
    x, y = (each.detach() for each in view.read_vectors(numbers))
    sizes = x.shape[1], y.shape[1]
    links = torch.zeros(len(numbers), *sizes)
    for k, own in enumerate(found):
        for link in own:
            links[k][link] = 1.0
    return x, y, links.to(x.device), find_live(view.words, numbers, sizes, x.device)


class AlignmentLearner:
    """Updates an alignment layer, one batch and some earlier ones at a time; the learning rate falls to 0."""

    def __init__(self, layer: AlignmentLayer, config: AlignerConfig, batches: int, rng: random.Random) -> None:
        self.layer, self.config, self.rng = layer, config, rng
        self.kept: list[Batch] = []
        self.size = 0  # bytes of what is kept
        self.optimiser = torch.optim.AdamW(layer.parameters(), lr=config.learning_rate, weight_decay=0.01)
        steps = batches * (1 + config.replays)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda step: min((step + 1) / 50, max(1 - step / steps, 0.0))
        )

    def learn(self, batch: Batch) -> float:
        """Learn a new batch and some earlier ones. Return the loss on the new batch before it is learnt."""
        again = self.rng.sample(self.kept, min(self.config.replays, len(self.kept)))
        losses = [self._update(each) for each in (batch, *again)]
        self.kept.append(batch)
        self.size += _count_bytes(batch)
        while self.size > self.config.buffer and len(self.kept) > 1:
            self.size -= _count_bytes(self.kept.pop(self.rng.randrange(len(self.kept) - 1)))
        return losses[0]

    def _update(self, batch: Batch) -> float:
        x, y, links, live = batch
        if not links.any():
            return 0.0
        loss = compute_loss(self.layer(x, y), links, live)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.schedule.step()
        return float(loss.detach())


def _count_bytes(batch: Batch) -> int:
    return sum(each.element_size() * each.nelement() for each in batch)


def compute_loss(logits: Tensor, links: Tensor, live: Tensor) -> Tensor:
    """Return the mean over links of −(log F + log B)/2, from logits (b,S,T)."""
    hidden = logits.masked_fill(~live, -1e4)
    both = hidden.log_softmax(1) + hidden.log_softmax(2)
    return -(both * links).sum() / (2 * links.sum())
