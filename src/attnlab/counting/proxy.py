"""The bag-of-words proxy of how single words are learnt while attention is still even (Snell et al. 2021, §2.3–2.4).

    p = softmax(1/L Σ_l W e_{x_l})                 eq. 5, the same for every output position
    θ(i,o) = softmax(W e_i)_o                      eq. 13
    β(t,l) = θ(x_l, y_t)                           eq. 6

A classifier of two classes has one output, and the logistic function in the place of softmax: p = σ(1/L Σ_l w·e_{x_l}),
β(l) = σ((2y−1) w·e_{x_l}) (eq. 9). Beside it, a logistic regression on the share of each word in the text.

Ids are padded with 0 on the right. authors=True is the form that made the published numbers: PyTorch's default
initialisation, an output bias, which the probe leaves out, and <s> and every padding of a batch among the outputs to
predict; that is half of all outputs on Multi30k.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sparse
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F

PAD, BEGIN = 0, 1
STRENGTHS = (1e-5, *(m * 10.0**e for e in range(-5, 4) for m in (5, 10)))  # the 19 values of C that the authors try


class Proxy(nn.Module):
    """e (source types, d) and W (outputs, d), each N(0, 1/d) as in §4.1; one output is a binary classifier."""

    def __init__(self, source_types: int, outputs: int, width: int = 256, *, authors: bool = False) -> None:
        super().__init__()
        for name, size in (("source_types", source_types), ("outputs", outputs), ("width", width)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        spread = 1.0 / math.sqrt(width)
        even = torch.empty(outputs, width + 1).uniform_(-spread, spread)  # nn.Linear's
        self.embedding = nn.Parameter(torch.randn(source_types, width) * (1.0 if authors else spread))
        self.weight = nn.Parameter(even[:, :-1].clone() if authors else torch.randn(outputs, width) * spread)
        self.bias = nn.Parameter(even[:, -1].clone()) if authors else None

    def forward(self, source: Tensor) -> Tensor:
        """Logits (b, outputs) of padded sources (b,n): those of the mean embedding."""
        seen = source != PAD
        if not bool(seen.any(1).all()):
            raise ValueError(f"source {int((~seen.any(1)).int().argmax())} of the batch is empty: it has no mean")
        total = F.embedding_bag(source, self.embedding, mode="sum", padding_idx=PAD)  # (b,d)
        return F.linear(total / seen.sum(1, keepdim=True), self.weight, self.bias)

    def theta(self) -> Tensor:
        """θ(i,o), (source types, outputs): softmax(W e_i), without the bias. One output: the logits w·e_i."""
        logits = self.embedding @ self.weight.T
        return logits if len(self.weight) == 1 else logits.softmax(-1)

    @torch.no_grad()
    def beta(self, source: Tensor, target: Tensor) -> Tensor:
        """β(t,l) (b,t,l) for targets (b,t); or for labels 0 and 1 (b,), β(l) (b,l). 0 where either is padding."""
        embedded = F.embedding(source, self.embedding)  # (b,l,d)
        if len(self.weight) == 1:
            return polarity(embedded @ self.weight[0], target).masked_fill(source == PAD, 0.0)
        log_p = F.linear(embedded, self.weight).log_softmax(-1)  # (b,l,outputs)
        taken = log_p.gather(2, target[:, None].expand(-1, source.shape[1], -1)).exp().mT  # (b,t,l)
        return taken.masked_fill((source == PAD)[:, None] | (target == PAD)[..., None], 0.0)


def polarity(logits: Tensor, labels: Tensor) -> Tensor:
    """β(l) = σ((2y−1) γ_l) (eq. 9): logits (b,l) and labels (b,), 0 or 1, -> (b,l)."""
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError("labels must be 0 or 1: the probe of eq. 9 is that of a binary classifier")
    return ((2 * labels - 1)[:, None] * logits).sigmoid()


def loss(model: Proxy, source: Tensor, target: Tensor, *, authors: bool = False) -> Tensor:
    """−Σ log p of all outputs of a batch (eq. 14): targets (b,t), padding excluded, or labels (b,)."""
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
    """Adam on eq. 14; a pure function of its arguments. With valid=, the weights of the epoch that does best on it.

    source   (m,n), padded with 0        target   (m,t), padded with 0 and without <s>; or labels 0 and 1, (m,)
    """
    _check(source, target, source_types, outputs)
    rng = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Proxy(source_types, outputs, width, authors=authors).to(source.device)
    torch.random.set_rng_state(rng)
    draw = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=lr, fused=source.is_cuda)
    best, kept = math.inf, None
    for _ in range(epochs):
        for some in torch.randperm(len(source), generator=draw).to(source.device).split(batch):
            optimiser.zero_grad()
            loss(model, source[some], _trimmed(target[some]), authors=authors).backward()
            optimiser.step()
        if valid is not None and (now := _total(model, *valid, batch)) < best:
            best, kept = now, copy.deepcopy(model.state_dict())
    if kept is not None:
        model.load_state_dict(kept)
    return model


@dataclass(frozen=True, eq=False)
class Logistic:
    """σ(bias + Σ_w weights_w · share of w in the text)."""

    weights: np.ndarray  # (types,)
    bias: float

    def logits(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        return shares(texts, len(self.weights)) @ self.weights + self.bias

    def beta(self, source: Tensor, labels: Tensor) -> Tensor:
        """β(l) = σ((2y−1) weights_{x_l}), (b,l), of padded texts and labels 0 and 1; 0 where padding."""
        weights = torch.from_numpy(self.weights)
        return polarity(weights[source], labels).masked_fill(source == PAD, 0.0)


def logistic(texts: Sequence[Sequence[int]], labels: Sequence[int], *, types: int, strength: float = 1.0) -> Logistic:
    """Minimise ½‖w‖² + strength · Σ −log p(label) by L-BFGS; the bias is free. texts: ids without padding."""
    y = np.asarray(labels)
    if len(y) != len(texts) or not set(y.tolist()) == {0, 1}:
        raise ValueError(f"{len(texts)} texts need as many labels, and both 0 and 1 among them; got {len(y)}: {set(y)}")
    if not strength > 0.0:
        raise ValueError(f"strength must be above 0, not {strength}")
    features, signs = shares(texts, types), 2.0 * y - 1.0

    def cost(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        w, b = parameters[:-1], parameters[-1]
        margin = signs * (features @ w + b)
        pull = -strength * signs / (1.0 + np.exp(np.minimum(margin, 700.0)))  # ∂/∂logit
        slope = np.append(w + features.T @ pull, pull.sum())
        return 0.5 * float(w @ w) + strength * float(np.logaddexp(0.0, -margin).sum()), slope

    found = minimize(cost, np.zeros(types + 1), jac=True, method="L-BFGS-B", options={"maxiter": 1000, "gtol": 1e-6})
    return Logistic(found.x[:-1], float(found.x[-1]))


def best_logistic(
    train: tuple[Sequence[Sequence[int]], Sequence[int]],
    valid: tuple[Sequence[Sequence[int]], Sequence[int]],
    *,
    types: int,
    strengths: Sequence[float] = STRENGTHS,
) -> tuple[Logistic, float]:
    """The regression whose strength does best on validation texts (the first such), and that strength."""
    fits = [logistic(*train, types=types, strength=strength) for strength in strengths]
    right = [np.mean((model.logits(valid[0]) > 0) == np.asarray(valid[1])) for model in fits]
    return fits[int(np.argmax(right))], strengths[int(np.argmax(right))]


def shares(texts: Sequence[Sequence[int]], types: int) -> sparse.csr_array:
    """How often each type occurs in each text, divided by the text's length, (texts, types)."""
    lengths = np.array([len(text) for text in texts])
    if not lengths.all():
        raise ValueError(f"text {int(lengths.argmin())} is empty")
    ids = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    if ids.min() < 0 or ids.max() >= types:
        raise ValueError(f"ids go from {ids.min()} to {ids.max()}; there are {types} types")
    values = np.repeat(1.0 / lengths, lengths)
    table = sparse.csr_array((values, ids, np.concatenate([[0], np.cumsum(lengths)])), shape=(len(texts), types))
    table.sum_duplicates()
    return table


def _trimmed(ids: Tensor) -> Tensor:
    """Without the columns in which every row is padding; labels (b,) as they are."""
    return ids if ids.dim() == 1 else ids[:, : int((ids != PAD).sum(1).max())]


@torch.no_grad()
def _total(model: Proxy, source: Tensor, target: Tensor, batch: int) -> float:
    return sum(float(loss(model, x, y)) for x, y in zip(source.split(batch), target.split(batch), strict=True))


def _check(source: Tensor, target: Tensor, source_types: int, outputs: int) -> None:
    if source.dim() != 2 or target.dim() != (1 if outputs == 1 else 2) or len(source) != len(target) or not len(source):
        wanted = "labels (m,)" if outputs == 1 else "targets (m,t)"
        raise ValueError(f"expected sources (m,n) and {wanted}; got {tuple(source.shape)} and {tuple(target.shape)}")
    for name, ids, types in (("source", source, source_types), ("target", target, max(outputs, 2))):
        if int(ids.min()) < 0 or int(ids.max()) >= types:
            raise ValueError(f"{name} ids go from {int(ids.min())} to {int(ids.max())}; there are {types} types")
    if bool((source == PAD).all(1).any()):
        raise ValueError(f"source {int((source == PAD).all(1).int().argmax())} is empty: it has no mean embedding")
