"""What the tests of adapted Hugging Face models share: tiny models in double precision, and their attention modules."""

import tiny_models
import torch
import transformers

from attnlab.huggingface import carries
from attnlab.mechanisms import Mechanism

MODELS = ("bert", "gpt2", "llama", "marian", "t5")
CARRYING = ("realformer", "coda")
EXACT = {"rtol": 0, "atol": 1e-9}


def tiny(name: str) -> transformers.PreTrainedModel:
    return getattr(tiny_models, name)().double()


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
