"""Many models of one shape as one: weights have a leading axis of members, and batches lie one after another.

    x (s·b,n,e): b examples of each of s members        y_m = x_m W_mᵀ + b_m, one product for all members

`stack_members` turns s ordinary models into one of the same class, whose layers compute each member's examples with its
weights. Mechanisms are in member_mechanism.py.

A member draws the dropout and noise that it draws alone. On a CPU each has its own state of torch's generator, and
nothing is drawn for padding. On a GPU each has its own seeds (mechanisms/seeding.py).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import Mechanism
from attnlab.mechanisms.seeding import DROPOUT
from attnlab.models.affine import apply_linear, has_kernels
from attnlab.models.crew import Crew
from attnlab.models.dropout import Dropout
from attnlab.models.embedding import LearnedPositions, LinearReadout
from attnlab.models.member_mechanism import MemberMechanism
from attnlab.models.transformer import Transformer

WIDEST_NORM = 8192  # features that a kernel normalises


class MemberLinear(nn.Module):
    """scale · (x_m W_mᵀ + b_m)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, scale: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = weight, bias, scale  # (s,o,i), (s,o)
        self.maps: Any = None  # a member_maps.Maps of this layer alone, in training

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        y = apply_linear(x, self.weight, self.bias) if _skips(self.maps) else self.maps(x)
        return y if self.scale == 1 else self.scale * y


class MemberNorm(nn.Module):
    """A layer norm or RMS norm with the gain, and offset, of each member."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias, self.shape, self.eps = weight, bias, list(norm.normalized_shape), norm.eps or 0.0
        self.is_centred = isinstance(norm, nn.LayerNorm)
        self.maps: Any = None  # as of MemberLinear

    def forward(self, x: Tensor) -> Tensor:
        if has_kernels(x) and x.shape[-1] <= WIDEST_NORM:
            from attnlab.models.member_kernel import normalise

            parts, options = x.reshape(len(self.weight), -1, x.shape[-1]), (self.eps, self.is_centred)
            y: Tensor
            if _skips(self.maps):
                y = normalise(parts, self.weight, self.bias, *options)
            else:
                y = self.maps.normalise(parts, *options)
            return y.view(x.shape)
        if self.is_centred:
            normed = F.layer_norm(x, self.shape, eps=self.eps)
        else:
            normed = F.rms_norm(x, self.shape, eps=self.eps)
        y = normed.unflatten(0, (len(self.weight), -1))
        y = y * _spread(self.weight, y)
        return (y if self.bias is None else y + _spread(self.bias, y)).flatten(0, 1)


class MemberEmbedding(nn.Module):
    """The vectors of tokens (s·b,n), each from the table of its member."""

    def __init__(self, weight: nn.Parameter, padding: int | None) -> None:
        super().__init__()
        self.weight, self.padding = weight, padding  # (s,vocabulary,e)

    def forward(self, tokens: Tensor) -> Tensor:
        members, words, _ = self.weight.shape
        first = words * torch.arange(members, device=tokens.device)
        places = (tokens.unflatten(0, (members, -1)) + first[:, None, None]).flatten(0, 1)
        vectors = F.embedding(places, self.weight.flatten(0, 1))
        return vectors if self.padding is None else vectors.masked_fill((tokens == self.padding).unsqueeze(-1), 0.0)


class MemberPositions(nn.Module):
    """The position vectors of each member, from position 0 on: (s·b,n,e)."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table = MemberEmbedding(weight, None)

    def forward(self, x: Tensor, start: int | Tensor) -> Tensor:
        members, limit, _ = self.table.weight.shape
        if x.shape[1] > limit:
            raise ValueError(f"the sequence has {x.shape[1]} tokens, but max_length={limit}")
        return self.table.weight[:, : x.shape[1]].repeat_interleave(len(x) // members, dim=0)


class MemberReadout(LinearReadout):
    """Logits of each member's words or classes; weight (s,vocabulary,e), bias (s,vocabulary)."""

    maps: Any = None  # as of MemberLinear

    def forward(self, hidden: Tensor) -> Tensor:
        logits = apply_linear(hidden, self.weight, self.bias) if _skips(self.maps) else self.maps(hidden)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class MemberDropout(nn.Module):
    """Dropout of each member's part of x (s·b,n,e), at its own rate."""

    def __init__(self, parts: Sequence[Dropout], crew: Crew, stack: str) -> None:
        super().__init__()
        self.parts, self.crew, self.stack = nn.ModuleList(parts), crew, stack
        self.rates = [part.p for part in parts]
        self.sources: tuple[Tensor, Tensor] | None = None  # seeds and rates, (s,) each, on a GPU
        self.bias: Any = None  # a member_maps.Maps whose bias is added to what `add` drops

    def take_seeds(self, seeds: Tensor) -> None:
        """Draw from these seeds on a GPU, (2,s)."""
        self.sources = seeds[DROPOUT], torch.tensor(self.rates, device=seeds.device)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not any(self.rates):
            return x
        if x.is_cuda:
            return self._draw(x, None)
        return torch.cat([self._drop(m, part) for m, part in enumerate(self.crew.split(x))])

    def add(self, x: Tensor, part: Tensor) -> Tensor:
        """Return x + dropout(part), with the bias that the layer of `part` has deferred."""
        draws = self.training and any(self.rates) and x.is_cuda
        if not _skips(self.bias):
            if draws and has_kernels(x):
                y: Tensor = self.bias.add_dropped(x, part, *self._find_sources())
                return y
            (bias,) = self.bias.biases
            parts = part.unflatten(0, (len(bias), -1))
            part = (parts + _spread(bias, parts)).flatten(0, 1)
        return self._draw(part, x) if draws else x + self(part)

    def _draw(self, x: Tensor, added: Tensor | None) -> Tensor:
        from attnlab.models.dropout_kernel import drop_tokens

        return drop_tokens(x, added, *self._find_sources())

    def _find_sources(self) -> tuple[Tensor, Tensor]:
        if self.sources is None:
            raise ValueError("members on a GPU draw dropout from seeds: make seeding.Seeds of the stacked model first")
        return self.sources

    def _drop(self, member: int, x: Tensor) -> Tensor:
        rows, width = self.crew.sizes[self.stack][member]
        with self.crew.be_member(member):
            dropped: Tensor = self.parts[member](x[:rows, :width])
        return F.pad(dropped, (0, 0, 0, x.shape[1] - width, 0, len(x) - rows))


def stack_members(models: Sequence[Transformer], crew: Crew) -> Transformer:
    """Return a model of the same class that computes the batches of all models, with their weights (s,…)."""
    stacked = copy.deepcopy(models[0])
    shared: dict[int, nn.Parameter] = {}  # a weight that is used twice stays one

    def stack(name: str) -> nn.Parameter | None:
        parts = [_get(model, name) for model in models]
        if parts[0] is None:
            return None
        if len({part.shape for part in parts}) > 1:
            shapes = " and ".join(str(tuple(part.shape)) for part in parts[:2])
            raise ValueError(f"members must have the same sizes, but {name} is {shapes}")
        if id(parts[0]) not in shared:
            data = torch.stack([part.detach() for part in parts])
            shared[id(parts[0])] = nn.Parameter(data, requires_grad=parts[0].requires_grad)
        return shared[id(parts[0])]

    inside: tuple[str, ...] = ()
    for name, module in models[0].named_modules():
        if not name.startswith(inside) or not inside:
            same = [model.get_submodule(name) for model in models]
            if (made := _make_member(name, module, same, crew, stack)) is not None:
                stacked.set_submodule(name, made)
                inside += (f"{name}.",)
    known = {id(x) for part in stacked.modules() if isinstance(part, MEMBERS) for x in part.parameters()}
    for name, parameter in stacked.named_parameters():
        if id(parameter) not in known:
            raise ValueError(f"{name}: models with such a layer cannot train as one population")
    return stacked


def unstack_member(stacked: nn.Module, number: int) -> dict[str, Tensor]:
    """Return the weights of one member, by the names that they have in an ordinary model."""
    own = {}
    for name, x in stacked.named_parameters():
        before, _, after = name.partition(".mechanism.parts.")
        if not after:
            own[name.replace(".mechanism.whole.", ".mechanism.")] = x[number]
        elif after.startswith(f"{number}."):
            own[f"{before}.mechanism.{after.split('.', 1)[1]}"] = x
    return own


def _make_member(
    name: str, module: nn.Module, same: Sequence[Any], crew: Crew, stack: Callable[[str], Any]
) -> nn.Module | None:
    """Return the form of a layer for all members, or None if it has none of its own; same: those of all models."""
    side = name.split(".")[0]
    if isinstance(module, Mechanism):
        return MemberMechanism([copy.deepcopy(x) for x in same], crew, (side, "encoder" if ".cross." in name else side))
    if isinstance(module, Dropout):
        return MemberDropout(same, crew, side)
    if isinstance(module, nn.Linear):
        return MemberLinear(stack(f"{name}.weight"), stack(f"{name}.bias"), getattr(module, "scale", 1.0))
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        bias = stack(f"{name}.bias") if isinstance(module, nn.LayerNorm) else None
        return MemberNorm(module, stack(f"{name}.weight"), bias)
    if isinstance(module, LearnedPositions):
        return MemberPositions(stack(f"{name}.table.weight"))
    if isinstance(module, nn.Embedding):
        return MemberEmbedding(stack(f"{name}.weight"), module.padding_idx)
    if isinstance(module, LinearReadout):
        return MemberReadout(stack(f"{name}.weight"), stack(f"{name}.bias"), cap=module.cap)
    return None


MEMBERS = (MemberLinear, MemberNorm, MemberEmbedding, MemberReadout, MemberMechanism)


def _get(model: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last)


def _skips(maps: Any) -> bool:
    """Return whether a layer computes without maps: it has none, or somebody looks inside."""
    return maps is None or torch.compiler.is_compiling()


def _spread(x: Tensor, y: Tensor) -> Tensor:
    """(s,e) -> (s,1,…,1,e), with as many axes as y (s,b,…,e)."""
    return x.view(len(x), *[1] * (y.dim() - 2), x.shape[1])
