"""LSTM classifier with attention over its words (Snell et al. 2021, §2.4, after Wiegreffe & Pinter 2019).

    a_l = v·ReLU(Q h_l + b) + b_v        α = mechanism(a)        context = Σ_l α_l h_l                  eq. 7
    p(positive) = σ(w·context + b_w)                                                                    eq. 8

The paper prints no biases; its code and its parameter count have them. b_v has no effect under softmax. The logit is
linear in the context, so with β_l = σ((2y − 1)(w·h_l + b_w)) of eq. 9, p(correct) = σ(Σ_l α_l σ⁻¹(β_l)), eq. 12.

For the mechanism, the query is v, the keys are ReLU(Q h_l + b), the values are h_l, and b_v is the bias of the logits.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import Mechanism, widen
from attnlab.models.attention import Attention
from attnlab.models.embedding import LinearReadout, Readout
from attnlab.models.lstm_config import LSTMConfig
from attnlab.models.lstm_layers import LSTMStack
from attnlab.models.model import Model


class WordAttention(Attention):
    """Attention of one learnt query v to the words of a text.

    In a Record: kind "cross" with one query and one head; inputs v; values h_l; context and outputs Σ_l α_l h_l. So the
    output weight is the identity.
    """

    kind, index = "cross", 0

    def __init__(self, mechanism: Mechanism, memory: int) -> None:
        super().__init__()
        if type(mechanism).finish is not Mechanism.finish and memory != mechanism.head_dim:
            raise ValueError(
                f"{type(mechanism).__name__} transforms contexts of size {mechanism.head_dim}, that of its keys, but "
                f"encoder states have size {memory}; set bidirectional=false, or choose another attention"
            )
        reject_layered(mechanism)
        self.mechanism, self.memory = mechanism, memory
        self.key = nn.Linear(memory, mechanism.head_dim)  # Q, b
        self.score = nn.Linear(mechanism.head_dim, 1)  # v, b_v

    def forward(self, question: Tensor, memory: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Map question (b,1,e) and memory (b,j,m), with a mask to (b,1,1,j), to context (b,1,m) and the carry."""
        k, v = self.key(memory).relu().unsqueeze(1), memory.unsqueeze(1)  # (b,1,j,e), (b,1,j,m)
        offset = self.score.bias.view(1, 1, 1, 1)
        context, carry = self.mechanism(question.unsqueeze(1), k, v, mask, None, causal=False, at=None, bias=offset)
        return context.squeeze(1), carry

    def output_projection(self) -> tuple[Tensor, None]:
        return torch.eye(self.memory, dtype=self.key.weight.dtype, device=self.key.weight.device).unsqueeze(0), None


def reject_layered(mechanism: Mechanism) -> None:
    """Raise ValueError for a mechanism that needs more than the queries, keys and values of an LSTM."""
    if mechanism.needs_layer:
        raise ValueError(
            f"{type(mechanism).__name__} reads the input or the projections of a Transformer's layer, "
            "which an LSTM does not have; choose another attention"
        )


class BinaryReadout(Readout):
    """Two classes from one logit z = w·hidden + b: softmax of (0, z) is (1 − σ(z), σ(z))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.positive = nn.Linear(width, 1)

    @property
    def weight(self) -> Tensor:
        """(2,e); the first row is 0."""
        return F.pad(self.positive.weight, (0, 0, 1, 0))

    @property
    def bias(self) -> Tensor:
        return F.pad(self.positive.bias, (1, 0))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.pad(self.positive(hidden), (1, 0))

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Return log σ(−z) and log σ(z). Their order is kept even where the probabilities round to 1."""
        z = widen(self.positive(hidden))
        return F.logsigmoid(torch.cat([-z, z], dim=-1))

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return -self.log_prob(hidden).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


class LSTMClassifier(Model):
    """p(class | tokens)."""

    def __init__(self, encoder: LSTMStack, attention: WordAttention, readout: Readout, *, padding: int = 0) -> None:
        super().__init__()
        self.encoder, self.attention, self.readout, self.padding = encoder, attention, readout, padding

    def hidden(self, tokens: Tensor) -> Tensor:
        """Map tokens (b,n) to the input of the readout (b,m)."""
        live = tokens != self.padding
        memory, _ = self.encoder(tokens, live)
        question = self.attention.score.weight.expand(len(tokens), 1, -1)  # v for each example, (b,1,e)
        context, _ = self.attention(question, memory, live[:, None, None, :])
        return context.squeeze(1)

    def sequences(self, tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"source": (tokens, tokens != self.padding)}


def build_classifier(config: LSTMConfig, encoder: LSTMStack) -> LSTMClassifier:
    """Build the classifier of a configuration. Two classes have one logit; more classes have one logit each."""
    memory = config.memory_width
    attention = WordAttention(config.build_mechanism(config.width), memory)
    readout: Readout = BinaryReadout(memory)
    if config.classes > 2:
        linear = nn.Linear(memory, config.classes)
        readout = LinearReadout(linear.weight, linear.bias)
    return LSTMClassifier(encoder, attention, readout, padding=config.padding)
