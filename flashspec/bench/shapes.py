"""`flashspec bench shapes`: what a round costs at the shapes of large models, and what acceptance would pay for it. A cost model.

The weights are random: times are real, texts would not be. All layers of a model share the weights of one, which is larger than the GPU's
cache, so that memory is read as in the whole model. Break-even is the chance of acceptance, the same at every position, at which a
round's expected tokens, (1 − α^(γ+1)) / (1 − α), just pay for its time against plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from flashspec.engine import Request
from flashspec.sampling import SamplingParams
from flashspec.verifiers import reason_without_triton

if TYPE_CHECKING:
    from flashspec.models.fused import FusedLlama

TEXT = 512  # tokens that stand in the caches
GAMMAS = (1, 2, 3, 5, 8)


class Shape(NamedTuple):
    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    width: int
    vocabulary: int


SHAPES = {
    "8B": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "70B": Shape(80, 8192, 28672, 64, 8, 128, 128256),
    "1B": Shape(16, 2048, 8192, 32, 8, 64, 128256),
}
PAIRS = (("8B", "1B"), ("70B", "1B"), ("70B", "8B"))


def run(
    write: Callable[[str], None] = print, repeats: int = 20, shapes: dict[str, Shape] | None = None
) -> dict[str, Any]:
    """Measure and print. Raises ValueError with a sentence without a GPU."""
    if shapes is None and not torch.cuda.is_available():
        raise ValueError("These shapes are measured on a GPU, and there is none here.")
    if reason := reason_without_triton():
        raise ValueError(reason)
    shapes, device = shapes or SHAPES, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write("Cost model: random weights, real times, no text. ms a round; break-even: acceptance that pays for it.\n")
    write(f"{'target':>7}{'drafter':>9}{'γ':>4}{'plain':>9}{'draft':>9}{'target':>9}{'verify':>9}{'break-even':>12}")
    lines = []
    for target, drafter in PAIRS:
        plain, rounds = _times(shapes[target], shapes[drafter], device, repeats)
        for gamma, (draft, read, verify) in rounds.items():
            even = break_even((draft + read + verify) / plain, gamma)
            lines.append(
                {
                    "target": target, "drafter": drafter, "gamma": gamma, "plain": plain, "draft": draft, "read": read, "verify": verify,
                    "break_even": even,
                }
            )  # fmt: skip
            shown = f"{even:.2f}" if even is not None else "never"
            figures = "".join(f"{seconds * 1000:9.3f}" for seconds in (plain, draft, read, verify))
            write(f"{target:>7}{drafter:>9}{gamma:>4}{figures}{shown:>12}")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    machine = {"device": name, "torch": str(torch.__version__), "dtype": "bfloat16"}
    return {
        "family": "shapes", "prompts": "none", "temperature": 0.8, "machine": machine, "date": date.today().isoformat(),
        "text": TEXT, "shapes": {name: shape._asdict() for name, shape in shapes.items()}, "lines": lines,
    }  # fmt: skip


def break_even(cost: float, gamma: int) -> float | None:
    """The α at which 1 + α + … + α^γ = cost, a round's time in times of a plain step; None where no α pays."""
    if cost > gamma + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(gamma + 1)) < cost else (low, middle)
    return high if cost > 1 else 0.0


def _times(
    target: Shape, drafter: Shape, device: torch.device, repeats: int
) -> tuple[float, dict[int, Sequence[float]]]:
    """Median seconds of a plain step, and of draft, target and verification by γ, as the device itself counts them."""
    from flashspec.graphs import Board
    from flashspec.verifiers.triton import TritonVerifier

    models = {"target": random_llama(target, device), "draft": random_llama(drafter, device)}
    board = Board(models, TritonVerifier(), 1, 2 * TEXT, device)
    board.prepare([[1, 2]], [Request(8, SamplingParams(temperature=0.8))])
    found: dict[int, Sequence[float]] = {}
    for gamma in (0, *GAMMAS):
        rows = []
        for _ in range(repeats + 3):
            board.text.length.fill_(TEXT)
            _, seconds = board.land(board.launch("draft" if gamma else None, [], gamma, catch_up=False))
            rows.append(seconds[1:])
        found[gamma] = [float(v) for v in np.median(rows[3:], axis=0)]
    plain = found.pop(0)
    return plain[1] + plain[2], found


def random_llama(shape: Shape, device: torch.device) -> FusedLlama:
    """A model of that shape whose layers share the weights of one."""
    from flashspec.models.fused import FusedLlama, Layer

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def weight(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(std=0.02)

    ones = torch.ones(shape.hidden, dtype=dtype, device=device)
    rows = (shape.heads + 2 * shape.groups) * shape.width
    layer = Layer(
        weight(rows, shape.hidden), weight(shape.hidden, shape.heads * shape.width), weight(2 * shape.inner, shape.hidden),
        weight(shape.hidden, shape.inner), ones, ones,
    )  # fmt: skip
    frequencies = 10_000.0 ** -(torch.arange(0, shape.width, 2, device=device) / shape.width)
    return FusedLlama(
        (layer,) * shape.layers, weight(shape.vocabulary, shape.hidden), ones, weight(shape.vocabulary, shape.hidden), frequencies, 1.0,
        shape.heads, shape.groups, shape.width, 1e-5, 2 * TEXT,
    )  # fmt: skip
