"""Models whose attention turns the context of each query: by a number, by one for each element, by a matrix."""

from small_models import LM, made
from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, split_heads
from attnlab.mechanisms.softmax import Softmax
from attnlab.models.attention import MultiHead
from attnlab.models.transformer import Transformer, TransformerConfig

TURNINGS = ("head", "element", "matrix")


class TurnsByAMatrix(Softmax):
    """It removes the direction of the query's input from the context of each head: A = 1 − nᵀn."""

    def query_side(self, x: Tensor) -> Tensor:
        n = split_heads(x, self.heads)
        return n / n.norm(dim=-1, keepdim=True)

    def turn(self, context, v, at, sides):
        return context - (context * sides[0]).sum(-1, keepdim=True) * sides[0]


def made_of(kind: type[Mechanism], config: TransformerConfig = LM) -> Transformer:
    """A small model whose attentions are all of a class."""
    model = made(config)
    for part in (module for module in model.modules() if isinstance(module, MultiHead)):
        part.mechanism = kind(part.mechanism.heads, part.mechanism.head_dim).double().eval()
    return model


def made_turning(which: str, config: TransformerConfig = LM) -> Transformer:
    """A small model of one of TURNINGS."""
    if which == "matrix":
        return made_of(TurnsByAMatrix, config)
    return made(config, "gated", attention_options={"per": which})
