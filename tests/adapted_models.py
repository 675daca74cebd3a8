"""What the tests of adapted Hugging Face models share: tiny models in double precision, and their attention modules."""

import functools

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


@functools.cache
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


@torch.no_grad()
def assert_decodes(model, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Decoding in steps of 4, 1, 1, 2, 1 … tokens with a growing and a static cache gives the logits of one pass."""
    length = tokens.shape[1]
    mask = torch.ones_like(tokens) if mask is None else mask
    positions = torch.arange(length)[None]
    whole = model(tokens, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    ends = [end for end in (4, 5, 6, 8, *range(9, length)) if end < length] + [length]
    for cache in (
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=length + 2),
    ):
        steps = [
            model(
                tokens[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
                use_cache=True,
            ).logits
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        torch.testing.assert_close(torch.cat(steps, 1)[mask.bool()], whole, rtol=0, atol=1e-10)


@torch.no_grad()
def assert_translates(model, batch) -> None:
    """One token at a time with the caches of an encoder-decoder model gives the logits of one pass."""
    inputs = {name: value for name, value in batch.items() if not name.startswith("decoder")}
    targets = batch["decoder_input_ids"]
    whole = model(**inputs, decoder_input_ids=targets).logits
    memory = model.get_encoder()(**inputs)
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    how = {"encoder_outputs": memory, "attention_mask": batch["attention_mask"], "past_key_values": cache}
    steps = [model(**how, decoder_input_ids=targets[:, [n]], use_cache=True).logits for n in range(targets.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-10)
