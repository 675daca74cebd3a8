"""Many models of one shape as one: weights have a leading axis of members, and batches lie one after another.

    x (s·b,n,e): b examples of each of s members        y_m = x_m W_mᵀ + b_m, one product for all members

`stack_members` turns s ordinary models into one of the same class, whose layers compute each member's examples with its
weights. A mechanism without parameters is called once for all members while it draws nothing. On a GPU those whose
kernels read a seed and parameters of each member are called once in training, too, as softmax, sigmoid, CODA and daGPAM
(Mechanism.takes_members). Any other is called once for each member.

A member draws the dropout and noise that it draws alone. On a CPU each has its own state of torch's generator, and
nothing is drawn for padding. On a GPU each has its own seeds (mechanisms/seeding.py).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import Mechanism, Sides, WithCarry
from attnlab.mechanisms.seeding import DROPOUT
from attnlab.models.affine import apply_linear, has_kernels
from attnlab.models.dropout import Dropout
from attnlab.models.embedding import LearnedPositions, LinearReadout
from attnlab.models.transformer import Transformer

Size = tuple[int, int]  # examples, and tokens of the longest
WIDEST_NORM = 8192  # features that a kernel normalises


class Crew:
    """The members of a stacked model: their generators, and the sizes of their present batches without padding."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self.sizes: dict[str, list[Size]] = {}  # of the members' batches, by stack: "encoder", "decoder"

    def __len__(self) -> int:
        return len(self.states)

    @contextmanager
    def be_member(self, number: int) -> Iterator[None]:
        """Let torch's generator on the CPU be that of a member."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.states[number])
        try:
            yield
        finally:
            self.states[number] = torch.get_rng_state()
            torch.set_rng_state(before)

    def split(self, x: Tensor | None) -> Sequence[Any]:
        """Split (s·b,…) into the parts of the members, (b,…) each."""
        return [None] * len(self) if x is None else x.unflatten(0, (len(self), -1)).unbind()


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


class MemberMechanism(nn.Module):
    """The mechanism of each member. What it lacks is looked up in the first.

    stacks   whose tokens are the queries and the keys: "encoder" or "decoder"
    """

    def __init__(self, parts: Sequence[Mechanism], crew: Crew, stacks: tuple[str, str]) -> None:
        super().__init__()
        self.crew, self.stacks = crew, stacks
        is_alike = all(_options(x) == _options(parts[0]) for x in parts)
        is_stacked = is_alike and "takes_members" in vars(type(parts[0]))
        self.is_shared = is_alike and next(parts[0].parameters(), None) is None
        self.whole = _stack_parameters(parts) if is_stacked else None  # one with the parameters of all, (s,…)
        self.parts = nn.ModuleList([] if is_stacked else parts)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("parts", "whole"):
                raise
            return getattr(self._first(), name)

    def _first(self) -> Any:
        return self.parts[0] if self.whole is None else self.whole

    def take_seeds(self, seeds: Tensor) -> None:
        """Let each member draw from its own seeds, (2,s)."""
        if self.whole is not None:
            self.whole.take_seeds(seeds)
        for number, part in enumerate(self.parts):
            part.take_seeds(seeds[:, number : number + 1])  # type: ignore[operator]

    def query_side(self, x: Tensor) -> Tensor | None:
        return self._join("query_side", x)

    def key_side(self, x: Tensor) -> Tensor | None:
        return self._join("key_side", x)

    def _join(self, method: str, x: Tensor) -> Tensor | None:
        if self.whole is not None:
            whole: Tensor | None = getattr(self.whole, method)(x)
            return whole
        sides = [getattr(part, method)(own) for part, own in zip(self.parts, self.crew.split(x), strict=True)]
        return None if sides[0] is None else torch.cat(sides)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                sides: Sides = (None, None), **options: Any) -> WithCarry:  # fmt: skip
        first = self._first()
        each: Sequence[Any] = [first] if self.whole is not None else list(self.parts)
        draws = self.training and any(x.stochastic or x.dropout > 0 for x in each)
        if (q.is_cuda or not draws) and self._is_one_call(draws, q, k, v, **options):
            result: WithCarry = first(q, k, v, mask, carry, sides=sides, **options)
            return result
        contexts: list[Tensor] = []
        carries: list[Any] = []
        inputs = zip(*(self.crew.split(x) for x in (q, k, v, mask, carry, *sides)), strict=True)
        for member, given in enumerate(inputs):
            context, carried = self._attend(member, draws and not q.is_cuda, *given, **options)
            contexts.append(context)
            carries.append(carried)
        return torch.cat(contexts), None if carries[0] is None else torch.cat(carries)

    def _is_one_call(self, draws: bool, q: Tensor, k: Tensor, v: Tensor, *, at: Tensor | None = None,
                     bias: Tensor | None = None, **options: Any) -> bool:  # fmt: skip
        """Whether one call of the mechanism serves all members; draws: it draws noise or dropout."""
        if self.whole is not None:
            return self.whole.takes_members(q, k, v, at, bias)
        return self.is_shared and not draws

    def _call(self, member: int, *inputs: Any, **options: Any) -> WithCarry:
        """Call the mechanism of one member."""
        result: WithCarry
        if self.whole is None:
            result = self.parts[member](*inputs, **options)
            return result
        own, seeds = {name: x[member] for name, x in self.whole.named_parameters()}, self.whole.seeds
        self.whole.members, self.whole.seeds = 1, None if seeds is None else seeds[:, member : member + 1]
        try:
            result = functional_call(self.whole, own, inputs, options)
            return result
        finally:
            self.whole.members, self.whole.seeds = len(self.crew), seeds

    def _attend(self, member: int, cut: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
                carry: Tensor | None, query_side: Tensor | None, key_side: Tensor | None, **options: Any
                ) -> WithCarry:  # fmt: skip
        """Attend in one member; cut: without the padding, so that nothing is drawn for it."""
        (rows, i), (_, j) = ((len(q), x.shape[2]) for x in (q, k))
        if cut:
            (rows, i), (_, j) = (self.crew.sizes[stack][member] for stack in self.stacks)
        pairs = self._first().carry_of == "pairs"
        size = (i, j) if pairs else (j, v.shape[3])
        given = [_cut(q, rows, i), _cut(k, rows, j), _cut(v, rows, j), None if mask is None else mask[:rows, ..., :j]]
        given.append(None if carry is None else carry[:rows, :, : size[0], : size[1]])
        sides = (_cut(query_side, rows, i), _cut(key_side, rows, j))
        with self.crew.be_member(member) if cut else nullcontext():
            context, carried = self._call(member, *given, sides=sides, **options)
        context = _fill(context, len(q), q.shape[2])
        if carried is not None:
            carried = _fill(carried, len(q), *((q.shape[2], k.shape[2]) if pairs else (k.shape[2],)))
        return context, carried


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


def _options(mechanism: Mechanism) -> dict[str, Any]:
    """The plain options of a mechanism, and what its parameters are like, by name."""
    options = {name: x for name, x in vars(mechanism).items() if isinstance(x, bool | int | float | str | tuple | None)}
    return options | {name: (x.shape, x.requires_grad) for name, x in mechanism.named_parameters()}


def _stack_parameters(parts: Sequence[Mechanism]) -> Mechanism:
    """Give the first mechanism the parameters of all, (s,…), and return it."""
    whole = parts[0]
    whole.members = len(parts)
    for name, first in list(whole.named_parameters()):
        data = torch.stack([part.get_parameter(name).detach() for part in parts])
        owner, _, last = name.rpartition(".")
        setattr(whole.get_submodule(owner), last, nn.Parameter(data, requires_grad=first.requires_grad))
    return whole


def _skips(maps: Any) -> bool:
    """Return whether a layer computes without maps: it has none, or somebody looks inside."""
    return maps is None or torch.compiler.is_compiling()


def _spread(x: Tensor, y: Tensor) -> Tensor:
    """(s,e) -> (s,1,…,1,e), with as many axes as y (s,b,…,e)."""
    return x.view(len(x), *[1] * (y.dim() - 2), x.shape[1])


def _cut(x: Tensor | None, rows: int, length: int) -> Tensor | None:
    """Cut (b,·,n,·) to the first rows and tokens."""
    return None if x is None else x[:rows, :, :length]


def _fill(x: Tensor, rows: int, *lengths: int) -> Tensor:
    """Pad (b,·,n,·) with zeros to these rows, and to these sizes of the axes after the heads."""
    if (len(x), *x.shape[2 : 2 + len(lengths)]) == (rows, *lengths):
        return x
    more = [length - size for length, size in zip(lengths, x.shape[2:], strict=False)]
    more += [0] * (x.dim() - 2 - len(more))
    return F.pad(x, [n for extra in reversed((rows - len(x), 0, *more)) for n in (0, extra)])
