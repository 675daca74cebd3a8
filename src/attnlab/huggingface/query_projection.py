"""Further query heads, for a mechanism that has more of them than the model: a second query projection.

The projection of the queries is the linear map, or the part of a fused one, that the queries depend on. The attention
module then runs once more for each further group of heads, with that part replaced by a map of its own, only until its
queries are computed. So whatever the model does to queries (norms, rotary positions) happens to all of them. Nothing
here imports transformers.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.huggingface import layer_inputs
from attnlab.huggingface.layer_inputs import CapturedQueryError, LayerInputs
from attnlab.huggingface.native import AttentionCall
from attnlab.recording.around import is_linear


@dataclass(frozen=True, eq=False)
class QueryProjection:
    """The linear map of the queries of an attention module."""

    linear: nn.Module
    name: str  # of the linear map in the attention module
    features: Tensor  # (h·d,) the outputs that become queries
    width: int  # number of its inputs


class QueryProbe:
    """The attention function of a pass that finds the query projections: it asks for the gradient of each query."""

    def __init__(self) -> None:
        self.found: dict[nn.Module, QueryProjection] = {}
        self.outputs: dict[nn.Module, tuple[Tensor, int]] = {}

    @contextmanager
    def watch_linears(self, modules: Collection[nn.Module]) -> Iterator[None]:
        """Note the outputs of all linear maps inside the attention modules while the context is open."""
        with ExitStack() as stack:
            for linear in {part for module in modules for part in module.modules() if is_linear(part)}:
                stack.callback(linear.register_forward_hook(self._note_output).remove)
            yield

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        inside = [(name, part) for name, part in call.module.named_modules() if part in self.outputs]
        outputs = [self.outputs[part][0] for _, part in inside]
        matches = []
        if outputs and call.query.requires_grad:
            direction = torch.linspace(1, 2, call.query.numel()).view_as(call.query).to(call.query)
            gradients = torch.autograd.grad((call.query * direction).sum(), outputs, allow_unused=True)
            for (name, part), gradient in zip(inside, gradients, strict=True):
                features = [] if gradient is None else gradient.flatten(0, -2).any(0).nonzero()[:, 0]
                if len(features) == call.query.shape[1] * call.query.shape[3]:
                    matches.append(QueryProjection(part, name, features.cpu(), self.outputs[part][1]))
        if len(matches) == 1:  # a sum of several, as in an adapter that is not merged, is no linear map to replace
            self.found[call.module] = matches[0]
        self.outputs.clear()
        return call.run_eager(None)[0].detach(), None

    def _note_output(self, linear: nn.Module, args: tuple, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()  # cut off from earlier maps: the last one before the queries is found
        self.outputs[linear] = leaf, args[0].shape[-1]
        return leaf


def build_projection(found: QueryProjection, times: int, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """Return the map of `times` further groups of queries, initialized like the model's own."""
    outputs = times * len(found.features)
    linear = nn.Linear(found.width, outputs, bias=found.linear.bias is not None, dtype=dtype, device=device)
    own: Any = found.linear.weight
    nn.init.normal_(linear.weight, std=float(own.detach().float().std()))
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def compute_queries(inputs: LayerInputs, args: tuple, named: Mapping[str, Any]) -> None:
    """Run the attention module for each further group of queries, without its cache, and note them."""
    check_projection(inputs.module)
    times = inputs.mechanism.query_heads // inputs.mechanism.heads
    args, named = tuple(_drop_cache(x) for x in args), {name: _drop_cache(x) for name, x in named.items()}
    for inputs.group in range(times - 1):
        try:
            inputs.module.forward(*args, **named)
        except CapturedQueryError:
            continue
        finally:
            inputs.group = None


def check_projection(module: Any) -> None:
    """Raise ValueError if the query projection was wrapped or replaced after its further queries were installed."""
    place = module.attnlab_place
    now: Any = dict(module.named_modules()).get(place.query_projection)
    if now is None or replace_queries not in now._forward_hooks.values():
        what = f"{place.name}.{place.query_projection} was wrapped in or replaced by {type(now).__name__}"
        raise ValueError(f"{what}, so its further queries would be wrong: merge the adapter, or restore the linear map")


def replace_queries(linear: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
    """Replace the part of a projection that becomes queries while further ones are computed (a forward hook)."""
    inputs = layer_inputs.find_running_inputs()
    if inputs is None or inputs.group is None:
        return None
    module: Any = inputs.module
    features = module.attnlab_place.query_features
    more = module.attnlab_queries(args[0])
    part = more[..., inputs.group * len(features) : (inputs.group + 1) * len(features)]
    return output.index_copy(-1, features.to(output.device), part.to(output.dtype))


def join_groups(query: Tensor, further: list[Tensor], bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return (b,m·h,i,d) with the m queries of each head side by side, and the bias (b,h,i,j) of each of them."""
    joined = torch.stack([query, *further], dim=2).flatten(1, 2)
    if bias is not None and bias.shape[1] > 1:
        bias = bias.repeat_interleave(1 + len(further), dim=1)
    return joined, bias


def _drop_cache(x: Any) -> Any:
    return None if layer_inputs.find_cache({"": x}) is not None else x
