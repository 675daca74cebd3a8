"""Which classes of transformers can be recorded, decided from the class alone, before weights are loaded.

Nothing here imports transformers.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnlab.huggingface import readers

STATE_SPACE, RECURRENT, CONVOLUTION = "a state-space model", "a recurrent network", "a convolutional network"
# model types without attention, and what they are instead
WITHOUT_ATTENTION = {
    "mamba": STATE_SPACE, "mamba2": STATE_SPACE, "falcon_mamba": STATE_SPACE, "rwkv": RECURRENT, "xlstm": RECURRENT,
    "fnet": "a model that mixes tokens by Fourier transforms", "poolformer": "a model that mixes patches by pooling",
    "resnet": CONVOLUTION, "regnet": CONVOLUTION, "convnext": CONVOLUTION, "convnextv2": CONVOLUTION,
    "mobilenet_v1": CONVOLUTION, "mobilenet_v2": CONVOLUTION, "efficientnet": CONVOLUTION, "bit": CONVOLUTION,
    "van": CONVOLUTION, "patchtsmixer": "a model that mixes patches by multilayer perceptrons",
}  # fmt: skip
# model types whose attention has no weight for each pair of a query and a key in one tensor
OTHER_ATTENTION = {
    "longformer": "attends in chunks of sliding windows", "led": "attends in chunks of sliding windows",
    "big_bird": "attends in sparse blocks", "bigbird_pegasus": "attends in sparse blocks",
    "reformer": "attends within hashed buckets", "nystromformer": "approximates attention by landmarks",
    "yoso": "approximates attention by hashing", "mra": "approximates attention by blocks",
    "xlnet": "attends in two streams", "prophetnet": "attends in several streams",
    "funnel": "attends from pooled queries", "perceiver": "attends from latent arrays in its own code",
    "swin": "attends within windows of a picture",
}  # fmt: skip


def check_class(kind: Any) -> None:
    """Raise ValueError if models of a class of transformers can be neither recorded nor adapted."""
    known = getattr(kind.config_class, "model_type", "") in WITHOUT_ATTENTION | OTHER_ATTENTION
    if known or (not kind._can_set_attn_implementation() and not readers.has_readers(kind)):
        raise ValueError(explain_refusal(kind))


def check_gguf(name: str, file: str) -> None:
    """Raise an error if a GGUF file is missing in a folder, or if its package is not installed."""
    if find_spec("gguf") is None:
        raise ImportError("gguf_file= needs the package gguf, which is not installed: pip install gguf")
    if Path(name).is_dir() and not (Path(name) / file).is_file():
        others = ", ".join(sorted(path.name for path in Path(name).glob("*.gguf"))) or "no .gguf file"
        raise FileNotFoundError(f"no {file} in {name}, which has {others}")


def explain_refusal(kind: Any) -> str:
    """Return in one sentence what a class is that cannot be recorded or adapted."""
    name, config = kind.__name__, getattr(kind, "config_class", None)
    model_type = getattr(config, "model_type", "")
    if (what := WITHOUT_ATTENTION.get(model_type)) is not None:
        return f"{name} has no attention to record or adapt: it is {what}"
    how = OTHER_ATTENTION.get(model_type, "computes attention in its own code, not through transformers' "
                              "AttentionInterface")  # fmt: skip
    return f"{name} is not supported: it {how}, and attnlab has no reader for it, so it cannot be recorded or adapted"
