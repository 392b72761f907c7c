"""What this run ran on: hardware and versions, written into every Trace and benchmark."""

from __future__ import annotations

import platform
from typing import Any

import torch
import transformers


def describe(model: Any, layout: str = "transformers") -> dict[str, str]:
    """Device, threads and versions, as words."""
    dtype = str(model.dtype).removeprefix("torch.")
    cuda = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device)
        if cuda
        else f"{_processor()}, {torch.get_num_threads()} threads",
        "dtype": dtype
        if layout == "transformers"
        else f"{dtype}, CUDA graphs"
        if layout == "graphs"
        else "int8 weights, compiled by Numba"
        if layout == "numba"
        else f"{layout} weights, lean forward",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "system": platform.system(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
