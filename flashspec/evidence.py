"""What every drafter would have done on a written text, whoever wrote it: the exact law, not an estimate.

Exact decoding makes this possible. Given the text x, a block of drafter q begun at position t has at least k tokens accepted with chance

    token rule     Π_{i<k} min(1, q(x_{t+i}) / p(x_{t+i}))
    block rule     min over j ≤ k of Π_{i<j} q(x_{t+i}) / p(x_{t+i}), at most 1
    coupled rule   1 while the drafter's race with the same noise is won by x_{t+i}, else 0

because P(first k accepted and equal to x) is the product of the rule's acceptance with q(x), and what follows has law p. One pass of the
drafter over the text therefore tells of every block length (`replay`), and of every idle drafter while decoding (full information).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashspec import rng
from flashspec.bandits import Evidence
from flashspec.drafters import Drafter, LookupDrafter, LookupElseDrafter, ModelDrafter
from flashspec.records import Arm
from flashspec.sampling import adjust, warp

if TYPE_CHECKING:
    from flashspec.engine import Request

Array = Any

REFRESH = 8  # rounds between two scorings of all drafters: every round costs more than it tells
_CHUNK = 64  # positions whose distributions are in memory at once


class Likeness(NamedTuple):
    """Drafter against target at consecutive positions of a text: q(x)/p(x) at the written token, and Σ min(p, q)."""

    ratio: Array  # [n] float64
    overlap: Array  # [n] float64


def survival(ratio: Array, depth: int, rule: str, overlap: Array | None = None) -> Array:
    """Chance of at least 1 … `depth` accepted tokens of a block begun at each position: [n] -> [n, depth]; 0 behind the end.

    With `overlap` (token rule only) the last factor is replaced by its mean given the text before it (Rao–Blackwell): the same
    expectation, less noise. The plain product of overlaps would be biased wherever the target is sampled.
    """
    n = len(ratio)
    padded = np.concatenate([ratio, np.zeros(depth)])
    reached, product, rows = np.ones(n), np.ones(n), []
    for k in range(depth):
        here = padded[k : k + n]
        if overlap is not None and rule == "token":
            rows.append(reached * np.concatenate([overlap, np.zeros(depth)])[k : k + n])
        product = product * here
        reached = np.minimum(reached, product) if rule == "block" else reached * np.minimum(here, 1)
        if overlap is None or rule != "token":
            rows.append(reached)
    return np.stack(rows, 1) if rows else np.zeros((n, 0))


def likeness(
    p_logits: Tensor, q_logits: Tensor, text: Sequence[int], prompt: int, request: Request, positions: range
) -> Likeness:
    """Compare raw logits of target and drafter [n, V] at `positions` (absolute indices) of `text`, after penalties and warp."""
    params, ratios, overlaps = request.sampling, [], []
    seed = rng.seeds(request.seed, device=p_logits.device)
    for start in range(0, len(positions), _CHUNK):
        at = positions[start : start + _CHUNK]
        written = torch.tensor(text[at.start : at.stop], device=p_logits.device)[:, None]
        p, q = (
            warp(adjust(rows[start : start + len(at)].float(), params, text[: at.start], prompt, text[at.start : at.stop - 1]), params)
            for rows in (p_logits, q_logits)
        )  # fmt: skip
        if request.rule == "coupled" and params.temperature > 0:
            noise = torch.cat([rng.exponentials(seed, torch.full_like(seed, t), p.shape[-1], rng.RACE) for t in at])
            same = (rng.race(q, noise)[:, None] == written)[:, 0].double()
            ratios.append(same)
            overlaps.append(same)
        else:
            p_x, q_x = p.gather(1, written)[:, 0].double(), q.gather(1, written)[:, 0].double()
            ratios.append(q_x / p_x.clamp(min=1e-300))
            overlaps.append(torch.minimum(p, q).sum(-1).double())
    return Likeness(torch.cat(ratios).cpu().numpy(), torch.cat(overlaps).cpu().numpy())


def lookup_evidence(lookup: LookupDrafter, text: Sequence[int], positions: range, depth: int) -> tuple[Evidence, Array]:
    """A lookup is certain: it survives as long as its proposal equals the text. Also the match length [n] at every position."""
    reader = lookup.again()
    hits, drafted, lengths = np.zeros((len(positions), depth)), np.zeros(len(positions), int), []
    for row, at in enumerate(positions):
        reader.catch_up(text[:at])
        lengths.append(reader.match_length)
        proposal = reader.block(depth)
        drafted[row] = len(proposal)
        agree = [a == b for a, b in zip(proposal, text[at : at + depth], strict=False)]
        hits[row, : len(agree)] = np.cumprod(agree) if agree else 0
    return Evidence(hits, drafted, drafted > 0), np.array(lengths, int)


def evidence(
    drafters: Mapping[str, Drafter],
    arms: Sequence[Arm],
    p_logits: Tensor,
    text: Sequence[int],
    prompt: int,
    request: Request,
    positions: range,
    average: bool = False,
) -> tuple[dict[str, Evidence], Array]:
    """Evidence of every drafter of `arms` at `positions` of `text`, and the lookup's match length there: [n].

    p_logits [n, V]: the target's raw logits for these positions. average: the Rao–Blackwell form. Model drafters read the text up to its
    last token (all positions must end there); one that cannot read it drafts nothing.
    """
    depth = max(max(arm.gamma for arm in arms), 1)
    n = len(positions)
    never = np.zeros(n, bool)
    silent = Evidence(np.zeros((n, depth)), np.zeros(n, int), never)
    known: dict[int, Evidence] = {}
    match = np.zeros(n, int)

    def of(drafter: Drafter) -> Evidence:
        nonlocal match
        if id(drafter) in known:
            return known[id(drafter)]
        if isinstance(drafter, LookupDrafter):
            found, match = lookup_evidence(drafter, text, positions, depth)
        elif isinstance(drafter, LookupElseDrafter):
            first, second = of(drafter.lookup), of(drafter.otherwise)
            hit = first.match
            rows = np.where(hit[:, None], first.survival, second.survival)
            found = Evidence(rows, np.where(hit, first.drafted, second.drafted), hit)
        elif isinstance(drafter, ModelDrafter) and (q_logits := drafter.score(text, n)) is not None:
            like = likeness(p_logits, q_logits, text, prompt, request, positions)
            rows = survival(like.ratio, depth, request.rule, like.overlap if average else None)
            found = Evidence(rows, np.full(n, depth), never)
        else:
            found = silent
        known[id(drafter)] = found
        return found

    found = {arm.drafter: of(drafters[arm.drafter]) for arm in arms if arm.gamma}
    return found, match


class Scorer:
    """Scores all drafters on the text as it grows, every REFRESH rounds; each position once, when a whole block behind it stands."""

    def __init__(self, drafters: Mapping[str, Drafter], arms: Sequence[Arm], prompt: int, request: Request) -> None:
        self._drafters, self._arms, self._prompt, self._request = drafters, arms, prompt, request
        self._depth = max(arm.gamma for arm in arms)
        self._rows: list[Tensor] = []  # the target's raw logits of positions not scored yet
        self._rounds = 0

    def add(self, logits: Tensor) -> None:
        """The target's raw logits [n, V] for the n tokens just emitted."""
        self._rows.append(logits)
        self._rounds += 1

    def due(self, text: Sequence[int]) -> dict[str, Evidence] | None:
        """Evidence on the positions that are complete, or None where it is not time yet."""
        rows = sum(len(row) for row in self._rows)
        if self._rounds % REFRESH or rows <= self._depth:
            return None
        logits = torch.cat(self._rows)
        positions = range(len(text) - rows, len(text))
        found, _ = evidence(
            self._drafters, self._arms, logits, text, self._prompt, self._request, positions, average=True
        )
        self._rows = [logits[rows - self._depth :]]
        complete = rows - self._depth
        return {name: Evidence(*(values[:complete] for values in e)) for name, e in found.items()}
