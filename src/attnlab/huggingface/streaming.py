"""Read a Hugging Face model layer by layer: each layer is reduced to its totals as soon as it has run, then forgotten.

So memory is that of the forward pass and of the totals, whatever the number of layers. The pass runs on torch's fused
attention, which also returns the logsumexp of each row. Rows of every layer are compared with the model's own eager
attention (CHECKED of them).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attnlab.analysis.sinks import Activations, measure_activations
from attnlab.analysis.totals import Totals, totals
from attnlab.huggingface import (
    dispatch,
    layer_inputs,
    pretrained,  # noqa: F401 (registers the attention functions)
    support,
)
from attnlab.huggingface.capture import Capture
from attnlab.huggingface.native import AttentionCall
from attnlab.mechanisms.mechanism import Impl, widen
from attnlab.records.record import Layer
from attnlab.records.visibility import SoftmaxScores

CHECKED = 4  # rows of a layer that are compared with the model's own attention
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float64: 1e-6}  # of a row's numbers


@dataclass(frozen=True, eq=False)
class StreamedLayer:
    """The totals of one layer and the states that enter its block."""

    totals: Totals
    activations: Activations | None  # None if the block cannot be found
    layer: Layer  # rows of its weights can be read while it is visited


Visit = Callable[[StreamedLayer], None]


def stream_layers(
    model: Any, batch: Mapping[str, Any], visit: Visit, *, links: int = 0, block: int | None = None,
    impl: Impl = "auto", check: bool = True,
) -> Tensor:  # fmt: skip
    """Run one forward pass without padding, call `visit` for each layer, and return the first output of the pass.

    links   number of strongest links of each head
    block   tokens of a block of the level; without it, there is none
    impl    of attnlab.analysis.totals
    check   compare some rows of each layer with the model's own eager attention; raises ValueError if they differ
    """
    return Stream(model, visit, links=links, block=block, impl=impl, check=check).run(batch)


class Stream(Capture):
    """The attention function of a streamed model. It keeps no layer."""

    def __init__(
        self, model: Any, visit: Visit, *, links: int = 0, block: int | None = None, impl: Impl = "auto",
        check: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model, lazy=True)
        self.visit, self.links, self.block, self.impl, self.check, self.visited = visit, links, block, impl, check, 0
        self._parents = {name: module for module, name in self.calls.names.items()}
        self._activations: Activations | None = None

    @torch.no_grad()
    def run(self, batch: Mapping[str, Any]) -> Tensor:
        """Run one forward pass and return its first output."""
        with dispatch.switch_attention(self.model, dispatch.WATCHED_BOOL, self.attend), self.watch_pass():
            output: Tensor = dispatch.run_forward(self.model, batch)[0]
        if not self.visited:
            raise ValueError(support.explain_refusal(type(self.model)))
        return output

    @contextmanager
    def watch_pass(self) -> Iterator[dict[str, Tensor]]:
        with self.watch_layers():
            yield {}

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        self._activations = self._measure_states(call)
        return super().attend(call)

    def run_fused(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if call.is_plain_softmax() and (found := run_flash(call)) is not None:
            return found
        return super().run_fused(call)

    def keep_layer(self, layer: Layer) -> None:
        found = totals(layer, links=self.links, block=self.block, impl=self.impl)
        if self.check and found.how != "rows":
            check_rows(layer, found)
        self.visited += 1
        self._weights.clear()  # W_O of a layer is read once
        self.visit(StreamedLayer(found, self._activations, layer))

    def _measure_states(self, call: AttentionCall) -> Activations | None:
        """Measure the states that enter the block around an attention: the argument of the module that holds it."""
        parent = self._parents.get(self.calls.names[call.module].rpartition(".")[0])
        if parent is None or parent not in self.calls.arguments:
            return None
        try:
            states = layer_inputs.find_states(self.calls.arguments[parent])
        except (ValueError, KeyError, StopIteration):
            return None
        return measure_activations(states)


def run_flash(call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """Run the fused attention that torch chooses for this call, such that it also returns the logsumexp.

    Returns the context (b,i,h,d) and the logsumexp (b,h,i), or None if torch would choose one without it.
    """
    query, key, value = call.query, call.key, call.value
    causal, scale = call.is_causal() and query.shape[2] > 1, call.find_scale()
    if causal and query.shape[2] != key.shape[2]:
        return None
    shared = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=shared)
    ops = torch.ops.aten
    try:
        if query.device.type == "cpu" and chosen == SDPBackend.FLASH_ATTENTION.value:
            output, lse = ops._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        elif query.is_cuda and chosen == SDPBackend.FLASH_ATTENTION.value and query.shape[3] % 8 == 0:
            output, lse = ops._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
        elif query.is_cuda and chosen == SDPBackend.CUDNN_ATTENTION.value:
            how = (None, True, 0.0, causal, False)
            output, lse = ops._scaled_dot_product_cudnn_attention(query, key, value, *how, scale=scale)[:2]
        else:
            return None
    except (RuntimeError, NotImplementedError):  # a shape or a build that it does not cover
        return None
    b, h, i, _ = query.shape
    return (output.transpose(1, 2), lse.reshape(b, h, i)) if lse.numel() == b * h * i else None


def check_rows(layer: Layer, found: Totals) -> None:
    """Raise ValueError if the totals of some queries differ from those of the model's own eager attention."""
    queries = layer.context.shape[2]
    wide = TOLERANCE[layer.context.dtype]
    assert isinstance(layer.attended, SoftmaxScores)
    for row in sorted({round(k * (queries - 1) / (CHECKED - 1)) for k in range(CHECKED)}):
        weights = widen(layer.rows(row, row + 1))[:, :, 0]  # (b,h,j)
        taken, entropy = (weights * found.vector).sum(-1), torch.special.entr(weights).sum(-1)
        for what, ours, own in (
            ("norm", found.taken_norm[..., row], taken),
            ("entropy", found.entropy[..., row], entropy),
        ):
            error, scale = float((ours - own).abs().max()), 1.0 + float(own.abs().max())
            if not error <= wide * scale:
                raise ValueError(
                    f"{layer.name}: the streamed {what} of query {row} differs from the model's own attention by "
                    f"{error:.2g} (allowed: {wide * scale:.2g})"
                )
