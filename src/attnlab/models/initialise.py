"""Random initialization of a Transformer. Parameters inside a mechanism keep the values that the mechanism gave them.

"fairseq" (the release of January 2021, which CODA's authors used):
    words, positions and an untied readout   N(0, size^−½), the padding row 0
    query, key, value                        Xavier uniform with gain 1/√2; biases as in torch
    output of an attention                   Xavier uniform, bias 0
    adaptive projections and classes         Xavier uniform
    feed-forward                             as in torch's linear layer: U(±fan_in^−½), bias too

"normal" (GPT-2):
    words, positions, readouts, linears      N(0, 0.02), biases and the padding row 0
    outputs of attentions and feed-forwards  N(0, 0.02 / √(2 · layers of the stack))
"""

from torch import nn

from attnlab.mechanisms.mechanism import Mechanism
from attnlab.models.attention import MultiHead
from attnlab.models.blocks import FeedForward, Stack
from attnlab.models.embedding import AdaptiveEmbedding, AdaptiveReadout, LinearReadout


def initialise(model: nn.Module, scheme: str) -> None:
    """Set every weight outside the mechanisms; scheme is "fairseq" or "normal"."""
    inside = {part for module in model.modules() if isinstance(module, Mechanism) for part in module.modules()}
    modules = [module for module in model.modules() if module not in inside]
    {"fairseq": _initialise_fairseq, "normal": _initialise_normal}[scheme](modules)
    for module in modules:
        if isinstance(module, AdaptiveEmbedding):
            nn.init.zeros_(module.words[0][module.padding])
        elif isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])


def _initialise_fairseq(modules: list[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, LinearReadout | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        elif isinstance(module, AdaptiveEmbedding):
            for words, projection in zip(module.words, module.projections, strict=True):
                nn.init.normal_(words, std=words.shape[1] ** -0.5)
                nn.init.xavier_uniform_(projection)
        elif isinstance(module, AdaptiveReadout):
            nn.init.xavier_uniform_(module.classes.weight)
        elif isinstance(module, MultiHead):
            for linear in (module.query, module.key, module.value):
                nn.init.xavier_uniform_(linear.weight, gain=2**-0.5)
            nn.init.xavier_uniform_(module.output.weight)
            if module.output.bias is not None:
                nn.init.zeros_(module.output.bias)


def _initialise_normal(modules: list[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, nn.Linear | nn.Embedding | LinearReadout):
            nn.init.normal_(module.weight, std=0.02)
            if not isinstance(module, nn.Embedding) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, AdaptiveEmbedding):
            for weight in (*module.words, *module.projections):
                nn.init.normal_(weight, std=0.02)
    for stack in (module for module in modules if isinstance(module, Stack)):
        std = 0.02 / (2 * len(stack.blocks)) ** 0.5
        for part in (part for part in stack.modules() if isinstance(part, MultiHead | FeedForward)):
            nn.init.normal_(part.output.weight, std=std)
