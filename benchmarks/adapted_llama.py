"""A Llama of 135M parameters with random weights, adapted to a mechanism: one step forward and backward.

The sizes are those of SmolLM-135M: 30 layers, 9 heads of which 3 for keys and values. Nothing is downloaded.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnlab

SIZES = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
TINY = SIZES | {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
TOKENS, TINY_TOKENS = (4, 2048), (2, 12)


def make_step(name: str | None, *, device: str, dtype: torch.dtype, tiny: bool, seed: int) -> Callable[[], Any]:
    """Return a training step of the model with a mechanism, or with its own attention if name is None."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**(TINY if tiny else SIZES), attn_implementation="sdpa"))
        ids = torch.randint(64, TINY_TOKENS if tiny else TOKENS)
    if name is not None:
        attnlab.adapt(model.eval(), name)
    model.to(dtype).train()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return step
