"""What the tests of adapted Hugging Face models share: tiny models in double precision, and their attention modules."""

from functools import cache

import tiny_models
import torch
import transformers
from torch.overrides import TorchFunctionMode

from attnlab.huggingface import carries
from attnlab.mechanisms import Mechanism

MODELS = ("bert", "gpt2", "llama", "marian", "t5")
CARRYING = ("realformer", "coda")
EXACT = {"rtol": 0, "atol": 1e-9}


def tiny(name: str, **options) -> transformers.PreTrainedModel:
    return make_double(getattr(tiny_models, name)(**options))


def make_double(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Compute in float64 throughout: norms of transformers cast to float32, which rounds small differences away."""
    for module in model.modules():
        if type(module).__module__.startswith("transformers") and type(module).__name__.endswith("Norm"):
            module.__class__ = keep_double(type(module))
    return model.double()


@cache
def keep_double(kind: type) -> type:
    def forward(self, states):
        with StayDouble():
            return kind.forward(self, states)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})


class StayDouble(TorchFunctionMode):
    """Leaves out the casts of a tensor to float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float or (function is torch.Tensor.to and torch.float32 in args):
            return args[0]
        return function(*args, **(kwargs or {}))


def output(model, batch) -> torch.Tensor:
    """The first output at the tokens, not at the padding."""
    with torch.no_grad():
        return model(**batch)[0][batch.get("decoder_attention_mask", batch["attention_mask"]).bool()]


def attention_modules(model) -> list:
    return [module for module in model.modules() if hasattr(module, "attnlab_place")]


def place(module) -> carries.Place:
    return module.attnlab_place


def shake(model) -> None:
    """Away from where the mechanisms' parameters begin."""
    torch.manual_seed(3)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Mechanism):
                for parameter in module.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
