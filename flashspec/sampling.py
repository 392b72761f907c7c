"""The warp: from raw logits to the distribution that is actually sampled, the same function for p and for q.

Knows nothing about models, drafting or acceptance. Order: penalties, bias (`adjust`), then temperature, top-k, top-p,
min-p (`warp`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashspec.machine import compiled_loops

_NEVER = float("-inf")


@dataclass(frozen=True)
class SamplingParams:
    """What turns logits into probabilities. The defaults sample the model's own distribution.

    Raises ValueError, with a sentence that says what to do, for values that make no distribution.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # drop what is below min_p times the largest probability
    repetition_penalty: float = 1.0  # on prompt and output (Keskar et al. 2019)
    presence_penalty: float = 0.0  # once for every token already in the output
    frequency_penalty: float = 0.0  # for every occurrence in the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = [
            ("temperature", self.temperature == 0 or 0.01 <= self.temperature <= 100, "0 (greedy) or 0.01 to 100"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 to keep every token"),
            ("top_p", 0 <= self.top_p <= 1, "between 0 and 1 (1 keeps every token)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1 (0 keeps every token)"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0 and at most 100 (1 does nothing)"),
            ("presence_penalty", abs(self.presence_penalty) <= 100, "between -100 and 100 (0 does nothing)"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 100, "between -100 and 100 (0 does nothing)"),
        ]
        for name, holds, wanted in checks:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose {wanted}.")
        for token, bias in self.logit_bias.items():
            if token < 0 or math.isnan(bias) or bias == math.inf:
                raise ValueError(
                    f"logit_bias {token}: {bias} is not usable; give a token id and a finite number or -inf."
                )

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` does anything."""
        return bool(self.logit_bias) or (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1,
            0,
            0,
        )


def adjust(logits: Tensor, params: SamplingParams, context: Sequence[int], prompt: int, block: Sequence[int]) -> Tensor:
    """Penalties and bias for consecutive positions: [n, V] float32 -> [n, V].

    Row i predicts the token after context + block[:i], so a drafted token counts for the positions behind it. `prompt` is
    the number of prompt tokens in `context`. Formulas: repetition as in Keskar et al. 2019 (logits divided when positive,
    multiplied when negative), presence and frequency subtracted as in the OpenAI API.
    """
    if not params.adjusts:
        return logits
    n, vocabulary = logits.shape
    logits = logits.clone()
    output = _counts(context[prompt:], vocabulary, logits.device)
    seen = _counts(context[:prompt], vocabulary, logits.device) + output
    for i in range(n):
        if i:
            output[block[i - 1]] += 1
            seen[block[i - 1]] += 1
        row = logits[i]
        penalised = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        row = torch.where(seen > 0, penalised, row)
        logits[i] = row - params.presence_penalty * (output > 0) - params.frequency_penalty * output
    for token, bias in params.logit_bias.items():
        if token < vocabulary:
            logits[:, token] += bias
    return logits


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p, min-p: [..., V] logits of any float type -> [..., V] float32 probabilities.

    Greedy (temperature 0) is one-hot at the first maximum. Truncations keep ties, so they depend on values, never on order.
    """
    logits = logits.float()
    if params.temperature == 0:
        greedy = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, greedy, 1.0)
    vocabulary = logits.shape[-1]
    if 0 < params.top_k < vocabulary:
        smallest = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, _NEVER)
    probabilities = _softmax(logits, params.temperature)
    if params.top_p < 1:
        probabilities = probabilities * (probabilities >= _nucleus_threshold(probabilities, params.top_p))
    if params.min_p > 0:
        probabilities = probabilities * (probabilities >= params.min_p * probabilities.amax(-1, keepdim=True))
    if params.top_p < 1 or params.min_p > 0:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def _softmax(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last axis."""
    if loops := compiled_loops(logits):
        rows = logits.reshape(-1, logits.shape[-1]).contiguous().numpy()
        return torch.from_numpy(loops.softmax(rows, temperature)).view(logits.shape)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature).softmax(-1)


def has_usable_rows(logits: Tensor) -> Tensor:
    """Whether every row of a request can be sampled: [B, n, V] -> [B] bool. NaN, +inf and all -inf rows cannot."""
    if loops := compiled_loops(logits):
        return torch.tensor([loops.are_usable(rows) for rows in logits.float().contiguous().numpy()])
    return torch.isfinite(logits.amax(-1)).all(-1)  # amax hands NaN and +inf on, and is -inf only where all are


def _nucleus_threshold(probabilities: Tensor, top_p: float) -> Tensor:
    """Smallest probability in the shortest sorted prefix whose mass reaches top_p: [..., V] -> [..., 1]."""
    vocabulary = probabilities.shape[-1]
    # A full sort of 49,152 entries costs several ms on a CPU. The nucleus is nearly always short, and reading whether it
    # was long enough is free there; on a GPU that read would wait for the device, so it sorts at once.
    widths = [256, 4096] if probabilities.device.type == "cpu" else []
    for width in [w for w in widths if w < vocabulary] + [vocabulary]:
        largest = probabilities.topk(width, dim=-1).values
        before = largest.cumsum(-1) - largest
        if width == vocabulary or bool((before[..., -1] >= top_p).all()):
            break
    kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    return largest.gather(-1, kept - 1)


def _counts(tokens: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    ids = torch.tensor([t for t in tokens if t < vocabulary], dtype=torch.int64)
    return torch.bincount(ids, minlength=vocabulary).to(device)
