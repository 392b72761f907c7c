"""What this run ran on: hardware and versions, written into every Trace and benchmark."""

from __future__ import annotations

import ctypes
import importlib
import platform
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch


def describe(model: Any, layout: str = "transformers") -> dict[str, str]:
    """Device, threads and versions, as words."""
    dtype = str(model.dtype).removeprefix("torch.")
    words = {"transformers": dtype, "graphs": f"{dtype}, CUDA graphs", "numba": "int8 weights, compiled by Numba"}
    cuda = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device)
        if cuda
        else f"{_processor()}, {torch.get_num_threads()} threads",
        "dtype": words.get(layout, f"{layout} weights, lean forward"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "system": platform.system(),
    }


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    A round frees tensors as large as a vocabulary and wants the same again in the next; by default they go back to the system, and
    every page of them is given out anew: as much time as the arithmetic on it.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3  # names of mallopt's parameters, from malloc.h
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, 1 << 28)
        library.mallopt(mmap_threshold, 1 << 25)


def reason_without_numba() -> str | None:
    """Why no loops can be compiled here, in a sentence; None where they can."""
    if sys.modules.get("numba", "") is None or find_spec("numba") is None:
        return "Numba is not installed here, so PyTorch computes all in many small calls; pip install 'flashspec[cpu]'."
    try:
        import flashspec.loops  # noqa: F401
    except (ImportError, RuntimeError) as error:  # a numpy that it does not know; no folder for its compiled code
        return f"Numba does not run here ({error}), so PyTorch computes all in many small calls."
    return None


def compiled_loops(like: torch.Tensor) -> Any:
    """`flashspec.loops`, for a tensor on a CPU and where Numba is installed; else None."""
    return _loops() if like.device.type == "cpu" else None


@cache
def _loops() -> Any:
    return None if reason_without_numba() else importlib.import_module("flashspec.loops")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
