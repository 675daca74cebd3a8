"""Output projections of Hugging Face models as matrices: plain ones, with adapters (PEFT), and quantised ones.

A plain linear map has its weight. Any other is read by what it does: W = f(I) − f(0), in its own number format, so a
quantised weight is dequantised as the model itself does, and adapters are applied. Whether the map is linear is proved
on the context of each pass. Nothing here imports transformers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.recording.around import is_linear, weight_matrix
from attnlab.recording.watch import unwrap_model
from attnlab.records.tolerance import TOLERANCE

SIZES = (("in_features", "out_features"), ("infeatures", "outfeatures"))  # as quantised linear maps call them


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a linear map: a Linear, a Conv1D, one with adapters, or a quantised one."""
    if is_linear(module) or has_adapters(module):
        return True
    return any(all(isinstance(getattr(module, name, None), int) for name in names) for names in SIZES)


def has_adapters(module: nn.Module) -> bool:
    """Return whether a linear map has adapters beside it (PEFT calls the map base_layer)."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def unwrap_adapters(model: Any) -> Any:
    """Return the model inside a PEFT model, which has its adapters in it; any other model as it is.

    Raises ValueError if an adapter adds tokens or attention that only the outer model knows.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model
    for config in model.peft_config.values():
        if getattr(config, "is_prompt_learning", False) or getattr(config, "is_adaption_prompt", False):
            kind = str(getattr(config, "peft_type", "this adapter")).rpartition(".")[2]
            raise ValueError(f"{kind} adds tokens beside the text, which a record cannot show: record the base model")
    return model.get_base_model()


def find_inner(model: nn.Module) -> Any:
    """Return the model inside its wrappers: of Accelerate, of torch.compile, and of PEFT with its adapters in it."""
    return unwrap_adapters(unwrap_model(model))


def describe_adapters(model: Any) -> dict[str, str]:
    """Return the entry of the Record's meta that names the adapters (PEFT) of a model that are applied, if any are."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return {}
    layers = [module for module in model.modules() if has_adapters(module) and hasattr(module, "disable_adapters")]
    active = {name for layer in layers if not layer.disable_adapters for name in layer.active_adapters}
    kinds = {name: str(getattr(config, "peft_type", "adapter")).rpartition(".")[2] for name, config in configs.items()}
    applied = [f"{name} ({kind})" for name, kind in kinds.items() if not layers or name in active]
    return {"adapters": ", ".join(applied)} if applied else {}


def list_projections(model: nn.Module) -> list[nn.Module]:
    """Return the linear maps of a model, but not those inside another, which are its adapters."""
    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if is_projection(module):
            found.append(module)
        else:
            waiting += module.children()
    return found


def is_plain(module: nn.Module) -> bool:
    """Return whether the map is its weight: no adapters, and stored as it is computed."""
    weight: Any = getattr(module, "weight", None)
    return is_linear(module) and type(weight) in (Tensor, nn.Parameter) and weight.dtype in TOLERANCE


def describe_projection(module: nn.Module) -> str:
    """Return what was done to get the map as a matrix, or "" for a plain one."""
    if has_adapters(module):
        inner = describe_projection(module.base_layer)  # type: ignore[arg-type]
        family = type(module).__module__.split(".")[-2:][0]  # peft.tuners.lora.layer
        return f"with its adapters ({family})" + (f", {inner}" if inner else "")
    if is_plain(module):
        return ""
    stored = module.weight if type(module) is nn.Linear else module
    return f"dequantised from {type(stored).__name__}"


def find_tolerance(module: nn.Module, dtype: torch.dtype) -> float:
    """Return how far a map may be from linear, relative to 1 + its largest output.

    Some quantised maps also round their inputs (LLM.int8). The Record's meta says how much that changes.
    """
    return TOLERANCE[dtype] if is_plain(module) or has_adapters(module) else TOLERANCE[torch.bfloat16]


def read_projection(module: Any, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the matrix (in,out) and bias (out,) of a linear map, copied. inputs: some input that it has read."""
    if is_plain(module):
        bias = module.bias
        return weight_matrix(module).clone(), None if bias is None else bias.detach().clone()
    width = inputs.shape[-1]
    identity = torch.eye(width, dtype=inputs.dtype, device=inputs.device)
    with torch.no_grad():
        offset = module.forward(torch.zeros_like(identity[:1]))[0]
        matrix = module.forward(identity) - offset
    return matrix.clone(), offset.clone() if offset.any() else None
