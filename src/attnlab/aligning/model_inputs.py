"""Load a Hugging Face model for alignment in the wanted precision, and build its inputs from token ids."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.aligning.extraction import pad_rows
from attnlab.aligning.packed_linear import pack_linears
from attnlab.huggingface.inputs import shift_right

Precision = Literal["auto", "float32", "bfloat16", "int8"]


@dataclass(frozen=True)
class ModelLoader:
    """How models are loaded: in bfloat16 on a GPU and float32 on a CPU, unless another precision is wanted."""

    device: torch.device
    allow_code: bool = False
    precision: Precision = "auto"

    def load(self, name: str) -> Any:
        """Load a model. When it has been proved, `convert_linears` makes it int8, or faster."""
        from attnlab.huggingface import pretrained

        device, precision = self.device, self.precision
        if precision == "int8" and device.type != "cpu":
            raise ValueError(
                f"--precision int8 is for a CPU, and the device is {device}: pass --device cpu or bfloat16"
            )
        half = precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
        dtype = torch.bfloat16 if half else torch.float32
        return pretrained.open_model(name, device=device, allow_code=self.allow_code, dtype=dtype)


def is_decoder_only(model: Any) -> bool:
    """Return whether a model predicts the next token without an encoder."""
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return causal and not model.config.is_encoder_decoder


def convert_linears(model: nn.Module, precision: Precision) -> None:
    """Replace linear maps of encoder and decoder in place: by int8 ones if asked, else by faster ones on a CPU."""
    parts = (model.get_encoder(), model.get_decoder()) if model.config.is_encoder_decoder else (model,)  # type: ignore
    if precision != "int8":
        for part in parts:
            pack_linears(part)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that another package will have it
        from torch.ao.quantization import quantize_dynamic

        for part in parts:
            quantize_dynamic(part, {nn.Linear}, dtype=torch.qint8, inplace=True)


def build_inputs(
    model: Any, source: Sequence[Sequence[int]], target: Sequence[Sequence[int]], padding: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of an encoder-decoder that reads both sides, and the labels (b,i) that it predicts."""
    labels = pad_rows(target, padding).to(model.device)
    batch = encode_side(model, source, padding)
    live = pad_rows([[1] * len(row) for row in target], 0).to(model.device)
    batch |= {"decoder_input_ids": shift_right(model, labels), "decoder_attention_mask": live}
    return batch, labels


def encode_side(model: Any, ids: Sequence[Sequence[int]], padding: int) -> dict[str, Tensor]:
    """Return the padded ids of one side and their mask, on the device of the model."""
    batch = {"input_ids": pad_rows(ids, padding), "attention_mask": pad_rows([[1] * len(row) for row in ids], 0)}
    return {name: x.to(model.device) for name, x in batch.items()}
