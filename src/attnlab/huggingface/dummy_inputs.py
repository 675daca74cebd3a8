"""A few tokens, a picture or a sound that make every attention module of a model run once, for a dry run.

Shapes come from the config of the model. Nothing here imports transformers.
"""

from typing import Any

import torch
from torch import Tensor

FRAMES = 6  # of a sound after the convolutions before a model


def build_dummy_batch(model: Any) -> dict[str, Tensor]:
    """Return a small batch on the model's device. Raises ValueError if the model reads something else."""
    reads, config = model.main_input_name, model.config
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    shape = find_shape(model)
    if shape is None and (reads != "input_ids" or vocabulary is None):
        what = "only models that read tokens, pictures (pixel_values) or sounds can be adapted"
        raise ValueError(f"{type(model).__name__} reads {reads}, but {what}")
    batch: dict[str, Tensor] = {}
    if shape is not None:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        batch["pixel_values" if reads == "input_ids" else reads] = drawn.to(model.device, model.dtype)
    if vocabulary is None:
        return batch
    ids = torch.arange(2, 12, device=model.device).reshape(2, 5) % vocabulary
    if reads == "input_ids":
        batch["input_ids"] = ids
        batch["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], device=model.device)
    return batch | {"decoder_input_ids": ids[:, 1:4]} if config.is_encoder_decoder else batch


def find_shape(model: Any) -> tuple[int, ...] | None:
    """Return the shape of the pictures or sounds that a model needs, two of them; None if it needs none or others."""
    reads, config = model.main_input_name, model.config
    vision = getattr(config, "vision_config", config)
    needs_both = vision is not config and hasattr(config, "text_config") and not model.can_generate()  # as CLIP
    size = getattr(vision, "image_size", None)
    if (reads == "pixel_values" or (reads == "input_ids" and needs_both)) and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        return 2, getattr(vision, "num_channels", 3), height, width
    if reads == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return 2, config.num_mel_bins, 2 * config.max_source_positions  # Whisper halves the length once
    if reads == "input_values" and hasattr(config, "conv_kernel"):
        length = FRAMES
        for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
            length = (length - 1) * stride + kernel
        return 2, length
    return None
