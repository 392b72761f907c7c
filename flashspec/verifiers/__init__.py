"""Verification: which drafted tokens stay and what is emitted next.

`rules` holds the formulas, `reference` runs them in PyTorch and is the law, `triton` does the same in fused kernels. Nothing here knows
models, caches or text.
"""

from __future__ import annotations

import importlib.util
import os

from flashspec.verifiers.base import Verifier
from flashspec.verifiers.reference import ReferenceVerifier

NAMES = ("auto", "torch", "triton")


def load_verifier(name: str = "auto", device: str = "cpu") -> Verifier:
    """The backend `name` for logits on `device`; auto is Triton on a GPU and PyTorch elsewhere.

    Raises ValueError with the reason where Triton is asked for and cannot run.
    """
    if name not in NAMES:
        raise ValueError(f"There is no verifier {name!r}; choose one of {', '.join(NAMES)}.")
    on_gpu = device.startswith("cuda")
    if name == "torch" or (name == "auto" and (not on_gpu or reason_without_triton())):
        return ReferenceVerifier()
    if reason := reason_without_triton():
        raise ValueError(reason)
    from flashspec.verifiers.triton import TritonVerifier

    return TritonVerifier()


def reason_without_triton() -> str | None:
    """Why the Triton verifier cannot run here, in a sentence; None where it can (without a GPU: in Triton's interpreter)."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed here, so PyTorch verifies; on Linux: pip install 'flashspec[gpu]'."
    import torch

    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "1") != "1":
        return "There is no CUDA device and TRITON_INTERPRET forbids the interpreter, so PyTorch verifies."
    return None
