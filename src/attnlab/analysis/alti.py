"""ALTI: which tokens bring a state to where it is, by distances (Ferrando et al. 2022), and its logit form (2023).

A block's state is a sum of vectors T_i(x_j), one for each token, and of biases: y_i = Σ_j T_i(x_j) + T_i(b), where T is
the attention with its residual and, in a post-norm block, the norm after them (`mixing` defines c_ij and N_i):

    T_i(x_j) = N_i(c_ij) in a post-norm block, c_ij in a pre-norm one
    a_ij     = max(0, ‖y_i‖₁ − ‖y_i − T_i(x_j)‖₁)         normalized: each row sums to 1

A token that brings the state close to y_i has a large share; one whose vector points elsewhere has none. The norm's own
bias β belongs to no token and is left out of y. rollout(record, "alti") multiplies the layers.

The logit form splits the logit of a word in a pre-norm language model. With N_f the final norm, its σ kept,

    logit_i = U_w · N_f(x_i⁰ + Σ_l (Σ_j c^l_ij + b^l + F^l_i)) + bias

    tokens_is = [i=s] U_w·N_f(x_i⁰) + Σ_l Σ_j U_w·N_f(c^l_ij) · R^{l−1}_js       R: the rollout of the layers below
    feed_forward_i = Σ_l U_w·N_f(F^l_i)        biases_i = the output biases, N_f's own and the readout's

All parts sum to the logit; the completeness error says how exactly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.analysis.block import apply_norm, read_part
from attnlab.analysis.contribution import check_linear
from attnlab.analysis.vectors import read_vectors
from attnlab.mechanisms.mechanism import widen
from attnlab.records.record import KINDS, Layer, Record


def alti_shares(layer: Layer) -> tuple[Tensor, Tensor]:
    """Return the shares (b,i,j) of the keys, and (b,i) of the query's own residual in a cross attention, else 0."""
    check_linear(layer)
    query, key = KINDS[layer.kind]
    residual = widen(read_part(layer, "residual"))
    post = torch.equal(residual, widen(layer.inputs))
    whole = residual + widen(layer.outputs)
    sizes = residual.new_empty(*residual.shape[:2], layer.grouped_values.shape[2])
    own = residual.new_zeros(residual.shape[:2])
    for rows, c in read_vectors(layer):
        parts = torch.cat([c, residual[:, rows, None]], dim=2)  # (b,·,j+1,e)
        y = whole[:, rows, None]
        if query == key:
            c[:, :, rows].diagonal(dim1=1, dim2=2).add_(residual[:, rows].mT)
            parts = c
        if post:
            parts, y = (apply_norm(layer, "norm", x, rows=rows) for x in (parts, y))
        near = (y.abs().sum(-1) - (y - parts).abs().sum(-1)).clamp_min(0)  # (b,·,j)
        near = near / near.sum(-1, keepdim=True).clamp_min(torch.finfo(near.dtype).tiny)
        sizes[:, rows] = near[..., : sizes.shape[2]]
        if query != key:
            own[:, rows] = near[..., -1]
    return sizes, own


@dataclass(frozen=True, eq=False)
class LogitShares:
    """What each part adds to the logit of one word at each position."""

    tokens: Tensor  # (b,i,s)
    feed_forward: Tensor  # (b,i)
    biases: Tensor  # (b,i)
    logit: Tensor  # (b,i) the model's own

    @property
    def error(self) -> float:
        """The completeness error: the largest |sum of all parts − logit|, relative to 1 + the largest |logit|."""
        total = self.tokens.sum(-1) + self.feed_forward + self.biases
        return float((total - self.logit).abs().max() / (1 + self.logit.abs().max()))


def alti_logit(record: Record, words: Tensor) -> LogitShares:
    """Split the logits of words (b,i), ids of the vocabulary, in a pre-norm language model.

    The record needs the feed-forward (feed_forward=True), which shows where the final norm is.
    """
    layers = list(record.layers)
    if set(record.kinds) != {"decoder-self"} or "weight" not in record.readout:
        raise ValueError("alti_logit needs a language model: decoder-self layers and a readout of words")
    _check_words(record, words)
    last = layers[-1]
    if not bool(read_part(last, "feed_forward.pre")):
        raise ValueError(f"{last.name}: alti_logit needs a pre-norm model, whose state is a sum; this one is post-norm")
    top = widen(read_part(last, "closing.input"))
    states = [widen(read_part(layer, "residual")) for layer in layers] + [top]
    unembedding = widen(record.readout["weight"])[words]  # (b,i,e)

    def read_logit(x: Tensor) -> Tensor:
        """Compute U_w·N_f(x) of vectors x (b,i,k,e) -> (b,i,k)."""
        return (apply_norm(last, "closing", x) * unembedding[:, :, None]).sum(-1)

    tokens = torch.diag_embed(read_logit(states[0][:, :, None])[..., 0])
    b, n, _ = tokens.shape
    below = torch.eye(n, dtype=tokens.dtype, device=tokens.device).expand(b, n, n)
    feed_forward, biases = torch.zeros_like(tokens[..., 0]), torch.zeros_like(tokens[..., 0])
    for layer, state, following in zip(layers, states, states[1:], strict=False):
        direct = torch.cat([_read_rows(last, unembedding, rows, c) for rows, c in read_vectors(layer)], dim=1)
        tokens = tokens + direct @ below
        below = alti_shares(layer)[0] @ below
        feed_forward = feed_forward + read_logit((following - state - widen(layer.outputs))[:, :, None])[..., 0]
        if layer.output_bias is not None:
            biases = biases + read_logit(widen(layer.output_bias).expand_as(state)[:, :, None])[..., 0]
    biases = biases + unembedding @ widen(read_part(last, "closing.bias"))
    logit = (widen(record.readout["hidden"]) * unembedding).sum(-1)
    if "bias" in record.readout:
        extra = widen(record.readout["bias"])[words]
        biases, logit = biases + extra, logit + extra
    return LogitShares(tokens, feed_forward, biases, logit)


def _check_words(record: Record, words: Tensor) -> None:
    shape, vocabulary = tuple(record.readout["hidden"].shape[:2]), len(record.readout["weight"])
    if not isinstance(words, Tensor) or tuple(words.shape) != shape or words.is_floating_point():
        got = f"{words.dtype} {tuple(words.shape)}" if isinstance(words, Tensor) else repr(words)
        raise ValueError(f"words must be a tensor of ids of shape {shape}, one word for each position, got {got}")
    if not 0 <= int(words.min()) <= int(words.max()) < vocabulary:
        raise ValueError(f"words must be ids from 0 to {vocabulary - 1}, got {int(words.min())} to {int(words.max())}")


def _read_rows(last: Layer, unembedding: Tensor, rows: slice, c: Tensor) -> Tensor:
    return (apply_norm(last, "closing", c, rows=rows) * unembedding[:, rows, None]).sum(-1)
