"""Packed small models: every matrix as int8 rows with one float32 scale a row, in one safetensors file.

`NAME` holds int8 [rows, columns] and `NAME.scale` float32 [rows]; w = int8 * scale[:, None]. Vectors stay float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.int8.safetensors"
_SCALE = ".scale"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] of any float type as int8 rows and the float32 scale [out] of each."""
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8).contiguous(), scale


def pack(state: dict[str, Tensor], path: Path) -> None:
    """Write `state` (matrices and vectors of any float type) to `path`."""
    packed: dict[str, Tensor] = {}
    for name, weight in state.items():
        if weight.ndim == 2:
            packed[name], packed[name + _SCALE] = quantise(weight)
        else:
            packed[name] = weight.float().contiguous()
    save_file(packed, path)


def unpack(path: Path) -> dict[str, Tensor]:
    """Read a packed file back as float32."""
    packed = load_file(path)
    return {
        name: weight.float() * packed[name + _SCALE][:, None] if name + _SCALE in packed else weight.float()
        for name, weight in packed.items()
        if not name.endswith(_SCALE)
    }


def load_packed(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers causal language model from `folder` (config.json and WEIGHTS).

    Raises ValueError where a tensor is missing or of another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    missing, unexpected = model.load_state_dict(unpack(folder / WEIGHTS), strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ())
    if unexpected or set(missing) - tied:
        raise ValueError(
            f"{folder / WEIGHTS} does not fit its config.json: missing {missing}, unexpected {unexpected}."
        )
    model.tie_weights()
    return model.eval().requires_grad_(False)
