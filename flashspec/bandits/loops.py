"""The arithmetic of the contextual policy in plain loops, which Numba compiles where it is installed.

A choice is made in every round, beside models that leave nothing in the processor's caches. There a dozen numpy calls cost a tenth of a
small model's round, and one compiled call costs little. Without Numba the same functions run as Python.

S sources that draft, K arms, G the longest block. A cell is a source in a context; its counts are by depth: [G].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any

PRIOR = 4.0  # imagined observations of a depth, spread by the acceptance of all depths of its cell
# Imagined acceptances and refusals of a cell: a drafter worth having is right two times of three.
RIGHT, WRONG = 4.0, 2.0


def compiled(function: Callable[..., Any]) -> Any:
    """`function` as Numba compiles it, or as it stands where Numba is not installed or has no folder for its code."""
    try:
        from numba import njit

        return njit(cache=True)(function)
    except (ImportError, RuntimeError):
        return function


class Layout(NamedTuple):
    """What does not change while arms are compared."""

    who: Array  # [2, K] the source that drafts, without a lookup match and with one; −1: nothing is drafted
    gammas: Array  # [K]
    is_lookup: Array  # [S] a lookup sees how long the match is, a model only whether there is one
    prices: Array  # [2, K] where in the flattened cost table the round of an arm stands
    asleep: Array  # [2, K] seconds an arm is charged for each token that its drafter has not read


class Memory(NamedTuple):
    """What was seen. Discounted counts of drafted tokens by run, source, context and depth, given that all before were accepted."""

    accepted: Array  # [runs, S, contexts, G]
    refused: Array
    tokens: Array  # [runs] what the policy itself delivers
    seconds: Array


@compiled
def _cell(place: int, is_lookup: bool) -> int:
    return place if is_lookup else min(place, 1)


@compiled
def _chances(memory: Memory, run: int, place: int, is_lookup: Array, sharpness: float, noise: Array) -> Array:
    """Chance that a token is accepted, by source and depth: the posterior's mean and so many of its deviations, [S, G] -> [S, G].

    The posterior is Beta; depths without data lean on the acceptance of all depths of the cell.
    """
    chances = np.empty(noise.shape)
    for s in range(noise.shape[0]):
        cell = _cell(place, is_lookup[s])
        accepted, refused = memory.accepted[run, s, cell], memory.refused[run, s, cell]
        right, wrong = RIGHT + accepted.sum(), WRONG + refused.sum()
        prior = PRIOR * right / (right + wrong)
        for d in range(noise.shape[1]):
            a, b = sharpness * (prior + accepted[d]), sharpness * (PRIOR - prior + refused[d])
            deviation = math.sqrt(a * b / (a + b + 1)) / (a + b)
            chances[s, d] = min(max(a / (a + b) + noise[s, d] * deviation, 0.0), 1.0)
    return chances


@compiled
def _tokens(chances: Array, who: Array, gammas: Array) -> Array:
    """Tokens expected of a round of every arm: [S, G], [K], [K] -> [K]."""
    expected = np.ones(len(who))
    for k in range(len(who)):
        reached = 1.0
        for d in range(gammas[k] if who[k] >= 0 else 0):
            reached *= chances[who[k], d]
            expected[k] += reached
    return expected


@compiled
def _seconds(layout: Layout, table: Array, match: int, unread: Array) -> Array:
    """Seconds of the round of every arm: [K]."""
    cost = np.empty(len(unread))
    for k in range(len(unread)):
        cost[k] = table[layout.prices[match, k]] + layout.asleep[match, k] * unread[k]
    return cost


@compiled
def prospects(
    memory: Memory, layout: Layout, table: Array, place: Array, unread: Array, sharpness: float, noise: Array
) -> tuple[Array, Array]:
    """Tokens and seconds expected of the next round of every arm: [runs, K] twice.

    table: seconds, flattened; place [runs]: the context; unread [runs, K]; noise [runs, S, G]: deviations added to what is believed.
    """
    tokens, seconds = np.empty(unread.shape), np.empty(unread.shape)
    for run in range(len(place)):
        match = min(place[run], 1)
        chances = _chances(memory, run, place[run], layout.is_lookup, sharpness, noise[run])
        tokens[run] = _tokens(chances, layout.who[match], layout.gammas)
        seconds[run] = _seconds(layout, table, match, unread[run])
    return tokens, seconds


@compiled
def advantages(tokens: Array, seconds: Array, memory: Memory) -> Array:
    """E[Y] − ρ·c of every arm: [runs, K]. ρ is the rate delivered so far; before there is one, what the best arm promises."""
    index = np.empty(tokens.shape)
    for run in range(len(tokens)):
        rho = (tokens[run] / seconds[run]).max()
        if memory.seconds[run] > 0:
            rho = memory.tokens[run] / memory.seconds[run]
        index[run] = tokens[run] - rho * seconds[run]
    return index


@compiled
def _count(accepted: Array, refused: Array, right: int, judged: int, discount: float) -> None:
    """Add to the counts of a cell [G] that `right` leading tokens were accepted of those judged."""
    if judged == 0:
        return
    for d in range(len(accepted)):
        accepted[d] = discount * accepted[d] + (d < right)
        refused[d] = discount * refused[d] + (d == right and right < judged)


@compiled
def learn(
    memory: Memory,
    layout: Layout,
    chosen: Array,
    place: Array,
    counts: Array,
    seconds: Array,
    discount: float,
    keep: float,
) -> None:
    """One round of every run. counts [runs, 5]: tokens, drafted, accepted and, of the lookup's proposal, hits and judged; seconds [runs].

    What lookup would have done is seen in every round, whoever drafted, its own rounds included.
    """
    for run in range(len(place)):
        tokens, drafted, accepted, hits, judged = counts[run]
        source = layout.who[min(place[run], 1), chosen[run]]
        for s in range(len(layout.is_lookup)):
            cell = _cell(place[run], layout.is_lookup[s])
            to = memory.accepted[run, s, cell], memory.refused[run, s, cell]
            if layout.is_lookup[s]:
                _count(*to, hits, judged, discount)
            elif s == source:
                _count(*to, accepted, drafted, discount)
        memory.tokens[run] = keep * memory.tokens[run] + tokens
        memory.seconds[run] = keep * memory.seconds[run] + seconds[run]
