"""The bag-of-words proxy: how a model learns single words while its attention is uniform (Snell et al. 2021, §2.3–2.4).

    p = softmax(1/L Σ_l W e_{x_l})                 eq. 5, the same for every output position
    θ(i,o) = softmax(W e_i)_o                      eq. 13
    β(t,l) = θ(x_l, y_t)                           eq. 6

A classifier of two classes has one output and the logistic function instead of softmax: p = σ(1/L Σ_l w·e_{x_l}),
β(l) = σ((2y−1) w·e_{x_l}) (eq. 9).

Positions are ranked by β, so `beta` returns logit β = log β − log(1 − β), on which distinct values stay distinct. With
o the target and γ = W e_{x_l}, it is γ_o − log Σ_{w≠o} exp γ_w; of two classes, (2y−1) w·e_{x_l}. In float32 β itself,
and log β where it is near 0, are equal for dozens of words of a long text.

Ids are padded with 0 on the right. authors=True is the form behind the published numbers. It has PyTorch's default
initialization, an output bias that the probe leaves out, and it also predicts <s> and all padding of a batch, which is
half of all outputs on Multi30k.
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD, BEGIN = 0, 1


class Proxy(nn.Module):
    """e (source types, d) and W (outputs, d), each N(0, 1/d) as in §4.1; with one output, a binary classifier."""

    def __init__(self, source_types: int, outputs: int, width: int = 256, *, authors: bool = False) -> None:
        super().__init__()
        for name, size in (("source_types", source_types), ("outputs", outputs), ("width", width)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        spread = 1.0 / math.sqrt(width)
        linear = torch.empty(outputs, width + 1).uniform_(-spread, spread)  # initialization of nn.Linear
        self.embedding = nn.Parameter(torch.randn(source_types, width) * (1.0 if authors else spread))
        self.weight = nn.Parameter(linear[:, :-1].clone() if authors else torch.randn(outputs, width) * spread)
        self.bias = nn.Parameter(linear[:, -1].clone()) if authors else None

    def forward(self, source: Tensor) -> Tensor:
        """Return the logits (b, outputs) of the mean embedding of padded sources (b,n)."""
        real = source != PAD
        if not bool(real.any(1).all()):
            raise ValueError(f"source {int((~real.any(1)).int().argmax())} of the batch is empty")
        total = F.embedding_bag(source, self.embedding, mode="sum", padding_idx=PAD)  # (b,d)
        return F.linear(total / real.sum(1, keepdim=True), self.weight, self.bias)

    def theta(self) -> Tensor:
        """Return θ(i,o), (source types, outputs): softmax(W e_i), without bias; with one output, the logits w·e_i."""
        logits = self.embedding @ self.weight.T
        return logits if len(self.weight) == 1 else logits.softmax(-1)

    @torch.no_grad()
    def beta(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logit β: (b,t,l) for targets (b,t), or (b,l) for labels 0 and 1 (b,); −∞ at padding of either."""
        embedded = F.embedding(source, self.embedding)  # (b,l,d)
        if len(self.weight) == 1:
            return polarity(embedded @ self.weight[0], target).masked_fill(source == PAD, -torch.inf)
        gamma = F.linear(embedded, self.weight).double()  # (b,l,outputs)
        largest, likeliest = gamma.max(-1, keepdim=True)
        others = gamma.scatter(-1, likeliest, -torch.inf).logsumexp(-1)  # (b,l), without the likeliest word
        words = target[:, None].expand(-1, source.shape[1], -1)  # (b,l,t)
        log_p = gamma.log_softmax(-1).gather(2, words)
        below_half = log_p - (-log_p.exp()).log1p()  # exact for all words but the likeliest
        logit = torch.where(words == likeliest, largest - others[..., None], below_half).mT  # (b,t,l)
        return logit.masked_fill((source == PAD)[:, None] | (target == PAD)[..., None], -torch.inf)


def polarity(logits: Tensor, labels: Tensor) -> Tensor:
    """Return logit β(l) = (2y−1) γ_l (eq. 9), (b,l), of logits γ (b,l) and labels (b,), 0 or 1."""
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError("labels must be 0 or 1: eq. 9 is for a binary classifier")
    return (2 * labels - 1)[:, None] * logits


def proxy_loss(model: Proxy, source: Tensor, target: Tensor, *, authors: bool = False) -> Tensor:
    """Return −Σ log p of all outputs of a batch (eq. 14): targets (b,t) without padding, or labels (b,)."""
    logits = model(source)
    if len(model.weight) == 1:
        return F.binary_cross_entropy_with_logits(logits[:, 0], target.to(logits.dtype), reduction="sum")
    if authors:
        target = F.pad(target, (1, 0), value=BEGIN)
    taken = logits.log_softmax(-1).gather(1, target)  # (b,t)
    return -(taken if authors else taken.masked_fill(target == PAD, 0.0)).sum()


def train_proxy(
    source: Tensor,
    target: Tensor,
    *,
    source_types: int,
    outputs: int,
    width: int = 256,
    epochs: int = 30,
    batch: int = 64,
    lr: float = 1e-3,
    seed: int = 0,
    authors: bool = False,
    valid: tuple[Tensor, Tensor] | None = None,
) -> Proxy:
    """Train with Adam on eq. 14; a pure function of its arguments.

    source   (m,n), padded with 0        target   (m,t), padded with 0 and without <s>; or labels 0 and 1, (m,)
    valid    sources and targets for validation; the result has the weights of the epoch with the lowest loss on them
    """
    _check(source, target, source_types, outputs)
    rng = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Proxy(source_types, outputs, width, authors=authors).to(source.device)
    torch.random.set_rng_state(rng)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=lr, fused=source.is_cuda)
    best, best_weights = math.inf, None
    for _ in range(epochs):
        for indices in torch.randperm(len(source), generator=generator).to(source.device).split(batch):
            optimiser.zero_grad()
            proxy_loss(model, source[indices], _trim_padding(target[indices]), authors=authors).backward()
            optimiser.step()
        if valid is not None and (now := _total_loss(model, *valid, batch)) < best:
            best, best_weights = now, copy.deepcopy(model.state_dict())
    if best_weights is not None:
        model.load_state_dict(best_weights)
    return model


def _trim_padding(ids: Tensor) -> Tensor:
    """Drop the columns that are padding in every row; labels (b,) do not change."""
    return ids if ids.dim() == 1 else ids[:, : int((ids != PAD).sum(1).max())]


@torch.no_grad()
def _total_loss(model: Proxy, source: Tensor, target: Tensor, batch: int) -> float:
    return sum(float(proxy_loss(model, x, y)) for x, y in zip(source.split(batch), target.split(batch), strict=True))


def _check(source: Tensor, target: Tensor, source_types: int, outputs: int) -> None:
    if source.dim() != 2 or target.dim() != (1 if outputs == 1 else 2) or len(source) != len(target) or not len(source):
        wanted = "labels (m,)" if outputs == 1 else "targets (m,t)"
        raise ValueError(f"expected sources (m,n) and {wanted}, got {tuple(source.shape)} and {tuple(target.shape)}")
    for name, ids, types in (("source", source, source_types), ("target", target, max(outputs, 2))):
        if int(ids.min()) < 0 or int(ids.max()) >= types:
            raise ValueError(f"{name} ids must be from 0 to {types - 1}, got {int(ids.min())} to {int(ids.max())}")
    if bool((source == PAD).all(1).any()):
        raise ValueError(f"source {int((source == PAD).all(1).int().argmax())} is empty")
