"""LSTM encoder and decoder with attention (Snell et al. 2021, §2.1 and A.1; the form of the authors' code).

    h_l    encoder states of the source                 s_t    decoder states of the target, started from the encoder
    q_t = W s_t + b        α_t = mechanism(q_t, h)        c_t = Σ_l α_{t,l} h_l                        eq. 1
    p_t = softmax(W_v act(W_n [s_t, P c_t + p] + b_n) + b_v)                                           eq. 2
    p_t = softmax(W_v (s_t + P c_t + p) + b_v)                                            combine=add, eq. 32

The paper has neither b nor P; its code and its parameter counts have both. The context does not feed the recurrence.
With several heads, each head has its own W and b. Their contexts are added (eq. 21), or each head has its own P and the
projections are averaged (join=mean, as in the authors' multi-head study). The decoder starts from the mean over
directions of the encoder's last h and c, layer by layer. All weights have torch's random initialization.

`build` builds the model of a configuration: this one, or the classifier of `lstm_classifier.py`.
"""

from collections.abc import Callable, Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn

from attnlab.mechanisms.kernels.launch import is_mapped
from attnlab.mechanisms.mechanism import Mechanism
from attnlab.models.affine import SumOfMaps
from attnlab.models.attention import Attention
from attnlab.models.embedding import InputEmbedding, LinearReadout, Readout
from attnlab.models.lstm_classifier import build_classifier, reject_layered
from attnlab.models.lstm_config import LSTMConfig
from attnlab.models.lstm_decoding import LSTMDecoding
from attnlab.models.lstm_layers import LSTMLayer, LSTMStack, State
from attnlab.models.model import Model


class StateAttention(Attention):
    """Attention of decoder states to encoder states, which are the keys and values of every head.

    In a Record: kind "cross"; inputs s_t; values h_l, one group for all heads; context c_t of each head; output weight
    P for every head with join=sum, P_k / heads with join=mean; outputs are the vectors that are combined with s_t.
    """

    kind, index = "cross", 0

    def __init__(self, mechanism: Mechanism, width: int, *, join: Literal["sum", "mean"] = "sum") -> None:
        super().__init__()
        if mechanism.self_only:
            raise ValueError(
                f"{type(mechanism).__name__} is defined for self-attention only, and an LSTM has only cross attention; "
                "choose another attention"
            )
        reject_layered(mechanism)
        heads, memory = mechanism.heads, mechanism.head_dim
        self.mechanism, self.join = mechanism, join
        self.query = nn.Linear(width, heads * memory)
        self.outputs = nn.ModuleList(nn.Linear(memory, width) for _ in range(heads if join == "mean" else 1))

    def forward(
        self, states: Tensor, memory: Tensor, mask: Tensor | None = None, *, at: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map states (b,i,e) and memory (b,j,m), with a mask to (b,1,i,j), to the output (b,i,e) and the carry."""
        context, carry = self.mix(states, memory, mask, at=at)
        if self.join == "sum":
            return self.outputs[0](_sum_heads(context)), carry
        weight, bias = self.output_projection()
        return torch.einsum("bhid,hde->bie", context, weight) + bias, carry

    def mix(
        self, states: Tensor, memory: Tensor, mask: Tensor | None = None, *, at: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context of each head (b,h,i,m), before P, and the carry."""
        h = memory.unsqueeze(1)  # (b,1,j,m)
        mixed: tuple[Tensor, Tensor | None] = self.mechanism(
            self.queries(states), h, h, mask, None, causal=False, at=at
        )
        return mixed

    def queries(self, states: Tensor) -> Tensor:
        """Map states (b,i,e) to queries (b,h,i,m)."""
        return self.query(states).unflatten(-1, (self.mechanism.heads, -1)).transpose(1, 2)

    def output_projection(self) -> tuple[Tensor, Tensor]:
        heads, linears = self.mechanism.heads, cast(list[nn.Linear], self.outputs)
        weight = torch.stack([linear.weight.T for linear in linears])  # (1 or h,m,e)
        bias = torch.stack([linear.bias for linear in linears]).mean(0)
        return (weight.expand(heads, -1, -1), bias) if self.join == "sum" else (weight / heads, bias)


class Concatenation(nn.Module):
    """act(W [s, context] + b), the hidden layer of N in eq. 2 (combine=concatenate)."""

    def __init__(self, width: int, activation: Literal["relu", "tanh"]) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * width, width)
        self.activation = nn.ReLU() if activation == "relu" else nn.Tanh()

    def forward(self, states: Tensor, context: Tensor) -> Tensor:
        return self.activation(self.inner(torch.cat([states, context], dim=-1)))

    def project_and_join(self, states: Tensor, context: Tensor, output: nn.Linear) -> Tensor:
        """Return act(W [s, P c + p] + b) as act(W₁ s + W₂P c + W₂p + b), where P and p are of `output`."""
        own, rest = self.inner.weight.split([states.shape[-1], output.out_features], dim=1)
        bias, flat = self.inner.bias + rest @ output.bias, (-1, context.shape[-1])
        given = (bias[None], states.reshape(-1, states.shape[-1]), own, context.reshape(flat), rest @ output.weight)
        joined: Tensor = SumOfMaps.apply(*(x.unsqueeze(0) for x in given))
        return self.activation(joined.view(*states.shape[:-1], -1))


class LSTMTranslator(Model):
    """p(target_t | source, target_1 … target_{t−1})."""

    def __init__(
        self,
        encoder: LSTMStack,
        decoder: LSTMStack,
        attention: StateAttention,
        combine: Callable[[Tensor, Tensor], Tensor],
        readout: Readout,
        *,
        padding: int = 0,
    ) -> None:
        super().__init__()
        self.encoder, self.decoder, self.attention, self.combine = encoder, decoder, attention, combine
        self.readout, self.padding = readout, padding

    def hidden(self, source: Tensor, target: Tensor) -> Tensor:
        """Map source (b,j) and decoder input (b,i) to the input of the readout (b,i,e).

        In a population no context is projected, and none is copied beside its state.
        """
        memory, mask, start = self.encode(source)
        states, _ = self.decoder(target, None, start)  # needs no mask: padding follows every token
        attention, combine = self.attention, self.combine
        if is_mapped(states) and attention.join == "sum" and isinstance(combine, Concatenation):
            context = _sum_heads(attention.mix(states, memory, mask)[0])
            return combine.project_and_join(states, context, cast(nn.Linear, attention.outputs[0]))
        return combine(states, attention(states, memory, mask)[0])

    def sequences(self, source: Tensor, target: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"source": (source, source != self.padding), "target": (target, target != self.padding)}

    @torch.no_grad()
    def start(self, source: Tensor, *, static: int | None = None) -> LSTMDecoding:
        """Encode the source and start decoding. No tensor grows with the target, so static= has no effect."""
        memory, mask, (h, c) = self.encode(source)
        return LSTMDecoding(memory, mask, h, c)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: LSTMDecoding) -> Tensor:
        """Return logits (b,n,vocabulary) after the next n target tokens (b,n), as a Transformer does."""
        at = state.positions(tokens)
        states, last = self.decoder(tokens, None, (state.h, state.c))
        context, _ = self.attention(states, state.memory, state.mask, at=at)
        state.advance(last, tokens.shape[1])
        return self.readout(self.combine(states, context))

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, State]:
        """Return the memory (b,j,m), its mask (b,1,1,j) and the decoder's first state (layers,1,b,e)."""
        live = source != self.padding
        memory, (h, c) = self.encoder(source, live)
        return memory, live[:, None, None, :], (h.mean(1, keepdim=True), c.mean(1, keepdim=True))


def _sum_heads(context: Tensor) -> Tensor:
    return context.sum(1) if context.shape[1] > 1 else context.squeeze(1)


def build(config: LSTMConfig) -> Model:
    """Build the model of a configuration, with random initialization."""
    if not isinstance(config, LSTMConfig):
        raise TypeError(f"build needs an LSTMConfig, as in attnlab.models.lstm_config.SETTINGS, got {config!r}")
    words = _build_words(config, config.vocabulary)
    encoder = _build_stack(config, words, directions=2 if config.bidirectional else 1)
    if config.model == "classifier":
        model: Model = build_classifier(config, encoder)
    else:
        vocabulary = config.target_vocabulary or config.vocabulary
        target = _share_parameter(words) if config.share_embeddings else _build_words(config, vocabulary)
        attention = StateAttention(config.build_mechanism(config.memory_width), config.width, join=config.join)
        combine = Concatenation(config.width, config.activation) if config.combine == "concatenate" else torch.add
        linear = nn.Linear(config.width, vocabulary)
        readout = LinearReadout(linear.weight, linear.bias)
        decoder = _build_stack(config, target, directions=1)
        model = LSTMTranslator(encoder, decoder, attention, combine, readout, padding=config.padding)
    if config.trained == "attention":
        model.requires_grad_(False).attention.requires_grad_(True)
    return model


def load_backbone(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Copy the weights of another model by name, except those of the attention (A.6, with trained=attention)."""
    own = {name: x for name, x in model.named_parameters() if not name.startswith("attention.")}
    if missing := sorted(name for name, x in own.items() if name not in tensors or tensors[name].shape != x.shape):
        raise ValueError(f"the weights do not fit the model: {', '.join(missing[:3])} is missing or has another shape")
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(tensors[name])


def _build_words(config: LSTMConfig, vocabulary: int) -> nn.Embedding:
    return nn.Embedding(vocabulary, config.embedding_width, config.padding)


def _share_parameter(words: nn.Embedding) -> nn.Embedding:
    """Return another module with the same parameter: functional_call does not restore a module that occurs twice."""
    other = nn.Embedding(words.num_embeddings, words.embedding_dim, words.padding_idx, device="meta")
    other.weight = words.weight
    return other


def _build_stack(config: LSTMConfig, words: nn.Embedding, *, directions: int) -> LSTMStack:
    sizes = [config.embedding_width] + [directions * config.width] * (config.layers - 1)
    layers = [LSTMLayer(size, config.width, directions=directions) for size in sizes]
    return LSTMStack(InputEmbedding(words, None), layers, dropout=config.dropout)
