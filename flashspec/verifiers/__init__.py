"""Verification: which drafted tokens stay and what is emitted next.

`rules` holds the formulas, `reference` runs them in PyTorch and is the law; `triton` does the same in fused kernels, `compiled` in loops
for a CPU. Nothing here knows models, caches or text.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import torch

from flashspec.machine import reason_without_numba
from flashspec.verifiers.base import Verifier
from flashspec.verifiers.reference import ReferenceVerifier

NAMES = ("auto", "torch", "triton", "numba")

# Without a GPU the kernels run in Triton's interpreter. Triton reads this when it is first imported, which a model of transformers may
# do long before a verifier is chosen.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def load_verifier(name: str = "auto", device: str = "cpu") -> Verifier:
    """The backend `name` for logits on `device`; auto is Triton on a GPU and Numba elsewhere, PyTorch where they are not installed.

    Raises ValueError with the reason where a backend is asked for and cannot run.
    """
    if name not in NAMES:
        raise ValueError(f"There is no verifier {name!r}; choose one of {', '.join(NAMES)}.")
    wanted = name if name != "auto" else "triton" if device.startswith("cuda") else "numba"
    reason = _REASONS[wanted]() if wanted in _REASONS else None
    if reason and name != "auto":
        raise ValueError(reason)
    if reason or wanted == "torch":
        return ReferenceVerifier()
    if wanted == "triton":
        from flashspec.verifiers.triton import TritonVerifier

        return TritonVerifier()
    from flashspec.verifiers.compiled import CompiledVerifier

    return CompiledVerifier()


def on_gpu() -> bool:
    """Whether there is a CUDA device here."""
    return torch.cuda.is_available()


def reason_without_triton() -> str | None:
    """Why the Triton verifier cannot run here, in a sentence; None where it can (without a GPU: in Triton's interpreter)."""
    if sys.modules.get("triton", "") is None or importlib.util.find_spec("triton") is None:
        return "Triton is not installed here, so PyTorch verifies; on Linux: pip install 'flashspec[gpu]'."
    if not on_gpu() and os.environ.get("TRITON_INTERPRET") != "1":
        return "There is no CUDA device, and Triton was set up without its interpreter (TRITON_INTERPRET=1), so PyTorch verifies."
    return None


_REASONS = {"triton": reason_without_triton, "numba": reason_without_numba}
