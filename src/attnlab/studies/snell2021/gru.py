"""GRU encoder and decoder with several heads, as in the authors' multi-head study (Snell et al. 2021, their code).

    r, z = σ(W_i x_t + b_i + W_h h_{t−1} + b_h)                     reset and update gate, one W and b each
    n = tanh(V_i x_t + a_i + r (V_h h_{t−1} + a_h))        h_t = (1 − z) n + z h_{t−1}        torch's form

    h_l    encoder states        s_t    decoder states, started from the encoder's last
    α_t^k = softmax_l((W^k s_t + b^k) · h_l)        c_t = 1/K Σ_k Σ_l α_{t,l}^k (V^k h_l + v^k)
    p_t = softmax(W_v tanh(W_n [s_t, c_t] + b_n) + b_v)

Each head k has a value projection V^k, and the heads are averaged; the paper has neither (eq. 20 and 21). A row of α
sums to 1, so V^k is applied to the context Σ_l α_{t,l} h_l, with fewer products. Source and target have their own
embeddings. All weights have torch's random initialization. Sequences have no padding.

The recurrence is a loop over positions, because `nn.GRU` has no batching rule for torch.func.vmap.
"""

import torch
from torch import Tensor, nn

from attnlab.mechanisms import attention
from attnlab.models.embedding import LinearReadout
from attnlab.models.lstm import Concatenation, StateAttention


class GRU(nn.Module):
    """Embedding and one layer with the parameters of nn.GRU, initialized from U(±size^−½); rows are r, z and n."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, size)
        self.inputs, self.recurrent = nn.Linear(size, 3 * size), nn.Linear(size, 3 * size)

    def forward(self, tokens: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map tokens (b,n) and the state before them (b,e), by default 0, to all states (b,n,e) and the last (b,e)."""
        x = self.inputs(self.words(tokens))  # (b,n,3e)
        h = x.new_zeros(len(x), x.shape[-1] // 3) if start is None else start
        states = []
        for of_input in x.unbind(1):
            input_rz, input_n = of_input.tensor_split([2 * h.shape[-1]], dim=-1)
            state_rz, state_n = self.recurrent(h).tensor_split([2 * h.shape[-1]], dim=-1)
            r, z = (input_rz + state_rz).sigmoid().chunk(2, dim=-1)
            h = torch.lerp((input_n + r * state_n).tanh(), h, z)
            states.append(h)
        return torch.stack(states, dim=1), h


class GRUTranslator(nn.Module):
    """p(target_t | source, target_1 … target_{t−1})."""

    def __init__(self, vocabulary: int, width: int, *, heads: int) -> None:
        super().__init__()
        self.encoder, self.decoder = GRU(vocabulary, width), GRU(vocabulary, width)
        self.combine = Concatenation(width, "tanh")
        linear = nn.Linear(width, vocabulary)
        self.readout = LinearReadout(linear.weight, linear.bias)
        mechanism = attention("dot", heads=heads, head_dim=width, scale=1.0)
        self.attention = StateAttention(mechanism, width, join="mean")  # last: the rest is the same for any heads

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Map source (b,j) and decoder input (b,i) to logits (b,i,vocabulary)."""
        memory, mask, start = self.encode(source)
        states, _ = self.decoder(target, start=start)
        context, _ = self.attention(states, memory, mask)
        return self.readout(self.combine(states, context))

    def encode(self, source: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return the encoder states (b,j,e), no mask, and the decoder's first state (b,e)."""
        memory, last = self.encoder(source)
        return memory, None, last
