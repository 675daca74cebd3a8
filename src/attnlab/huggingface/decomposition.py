"""Split one logit among the input tokens, exactly: e_s·∂logit/∂e_s of the frozen model, and the parts of its biases.

    logit_w(i) = Σ_s e_s·g_s + Σ_biases b·∂logit/∂b        g_s = ∂logit_w(i)/∂e_s with frozen weights, σ and slopes

recording/freezing.py says what is frozen. e_s is the embedding of token s, with its position. The completeness error
|logit − sum of parts| is measured, not assumed. RULES has two further gradients for the same product. Their parts do
not sum to the logit: AttnLRP's (Achtibat et al. 2024), in which relevance also flows through the softmax, and the plain
gradient's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from attnlab.huggingface import dispatch, inputs
from attnlab.huggingface.intervening import find_sites, intervene
from attnlab.huggingface.projections import find_inner
from attnlab.models.embedding import InputEmbedding
from attnlab.models.model import Model
from attnlab.recording.freezing import freeze_blocks
from attnlab.recording.interventions import FreezeWeights
from attnlab.recording.probe import call_with_batch

RULES = ("frozen", "attn-lrp", "gradient")


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The parts of one logit, or of one number of a model's output."""

    tokens: Mapping[str, Tensor]  # (n,) by "source" and "target"
    biases: float
    logit: float
    position: int
    word: int

    @property
    def error(self) -> float:
        """The completeness error: |logit − sum of the parts| / (1 + |logit|)."""
        total = sum(float(x.double().sum()) for x in self.tokens.values()) + self.biases
        return abs(self.logit - total) / (1 + abs(self.logit))

    def table(self) -> pd.DataFrame:
        """Return side, position and part of the logit; the row "biases" has no position."""
        rows: list[dict[str, Any]] = [
            {"part": side, "position": place, "logit": x}
            for side, parts in self.tokens.items()
            for place, x in enumerate(parts.tolist())
        ]
        return pd.DataFrame([*rows, {"part": "biases", "position": -1, "logit": self.biases}])


def decompose(
    model: nn.Module,
    batch: Any,
    *,
    position: int | None = None,
    word: int | None = None,
    score: Callable[[Tensor], Tensor] | None = None,
    rule: str = "frozen",
    **how: Any,
) -> Decomposition:
    """Split a logit of one example.

    A model without logits needs score.

    position   of the output; None: the last. A classifier has one output, without positions
    word       the id of the logit; None: the one with the largest logit there
    score      a function from the first output, a tensor, to the number to split, instead of a logit; linear, or the
               parts do not sum
    rule       "frozen": weights, norms and slopes are constant; "attn-lrp": norms and slopes are, and the factors of
               each product get half; "gradient": the plain gradient times the input
    how        tokenizer, target and max_length for texts and Hugging Face models
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    inner = find_inner(model)
    if inner.training:
        raise ValueError(f"this {type(inner).__name__} is in training mode; call model.eval() first")
    given = batch if isinstance(inner, Model) else _build_one(inner, batch, **how)
    ours = isinstance(inner, Model)
    freezing = nullcontext() if rule == "gradient" else _freeze(model, inner, shared=rule == "attn-lrp")
    with torch.enable_grad(), _track_biases(inner) as biases, watch_leaves(inner) as leaves, freezing:
        outputs = {"logits": call_with_batch(inner, given)} if ours else dispatch.run_forward(inner, given)
        name, output = next(iter(outputs.items()))
        if score is None and "logits" not in name:
            raise ValueError(
                f"{type(inner).__name__} has no logits; its first output is {name}. Load it with a head, as with "
                "AutoModelForCausalLM, or pass score=, a linear function from that output to the number to split"
            )
        if len(output) != 1:
            raise ValueError(f"decompose reads one example, got {len(output)}; pass them one by one")
        if score is not None:
            return _split(_call_score(score, output), leaves, biases, -1, -1)
        row, place = _choose_row(output, position)
        chosen = int(row.argmax()) if word is None else word
        if not isinstance(chosen, int) or not 0 <= chosen < len(row):
            raise ValueError(f"word must be an id from 0 to {len(row) - 1}, got {word}")
        return _split(row[chosen], leaves, biases, place, chosen)


def _call_score(score: Any, output: Tensor) -> Tensor:
    """Return the number that a user's function makes of the output. Raises TypeError if it is not one."""
    if not callable(score):
        raise TypeError(f"score must be a function from the output, a tensor, to one number, got {score!r}")
    found = score(output)
    if not isinstance(found, Tensor) or found.numel() != 1:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise TypeError(f"score must return one number as a tensor, got {got}")
    return found.squeeze()


def _split(
    logit: Tensor, leaves: list[tuple[str, Tensor]], biases: list[Tensor], place: int, word: int
) -> Decomposition:
    wanted = [leaf for _, leaf in leaves] + biases
    gradients = torch.autograd.grad(logit, wanted, allow_unused=True)
    tokens: dict[str, Tensor] = {}
    for (side, leaf), gradient in zip(leaves, gradients, strict=False):
        if gradient is None:
            continue
        part = (leaf.detach().double() * gradient.double()).sum(-1).flatten()  # (n,)
        if side not in tokens:
            tokens[side] = part
        elif len(part) == len(tokens[side]):  # positions; not T5's table of distances
            tokens[side] = tokens[side] + part
    pairs = zip(biases, gradients[len(leaves) :], strict=True)
    rest = sum(float((p.detach().double() * g.double()).sum()) for p, g in pairs if g is not None)
    return Decomposition(tokens, rest, float(logit.detach()), place, word)


@contextmanager
def _track_biases(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield every bias of a model, buffers included (final_logits_bias of Marian), with gradients while it is open."""
    named = [*model.named_parameters(), *model.named_buffers()]
    biases = [x for name, x in named if name.endswith("bias") and x.is_floating_point()]
    before = [x.requires_grad for x in biases]
    try:
        yield [x.requires_grad_() for x in biases]
    finally:
        for x, own in zip(biases, before, strict=True):
            x.requires_grad_(own)


@contextmanager
def _freeze(model: nn.Module, inner: nn.Module, *, shared: bool) -> Iterator[None]:
    kinds = dict.fromkeys(site.kind for site in find_sites(inner))
    with intervene(model, *(FreezeWeights(kind=kind, shared=shared) for kind in kinds)), freeze_blocks(inner):
        yield


@contextmanager
def watch_leaves(model: Any) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut the graph after every embedding while the context is open, and yield the cut tensors with their sides."""
    leaves: list[tuple[str, Tensor]] = []
    ours = isinstance(model, Model)
    two_sided = hasattr(model, "encoder") and hasattr(model, "decoder") if ours else model.config.is_encoder_decoder
    encoder = (model.encoder if ours else model.get_encoder()) if two_sided else None
    inside: list[bool] = []

    def cut(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        leaves.append(("source" if inside else "target" if two_sided else "tokens", leaf))
        return leaf

    with ExitStack() as stack:
        if encoder is not None:
            stack.enter_context(encoder.register_forward_pre_hook(lambda *_: inside.append(True)))
            stack.enter_context(encoder.register_forward_hook(lambda *_: inside.clear()))
        for module in model.modules():
            if isinstance(module, InputEmbedding if ours else nn.Embedding):
                stack.enter_context(module.register_forward_hook(cut))
        yield leaves


def _build_one(
    model: Any, batch: Any, *, tokenizer: Any = None, target: Any = None, max_length: int | None = None
) -> Any:
    return inputs.build_batch(model, tokenizer, batch, target, max_length)


def _choose_row(output: Tensor, position: int | None) -> tuple[Tensor, int]:
    """Return the logits (words,) of one position of an output (1,i,words) or (1,classes), and the position."""
    if output.dim() == 2:
        if position is not None:
            raise ValueError(f"position={position}: this model has one output for the whole text; leave position out")
        return output[0], 0
    count = output.shape[1]
    place = count - 1 if position is None else position
    if not 0 <= place < count:
        raise ValueError(f"there is no position {position}: this pass has {count}, numbered 0 … {count - 1}")
    return output[0, place], place
