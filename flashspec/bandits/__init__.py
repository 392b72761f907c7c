"""Policies: which arm (drafter, γ) the next round uses. numpy, compiled by Numba where it is there; no torch, no models.

Begin with `base` (what a policy is), then `rates` (the policies that fit the task); `stochastic` and `changing` are the classics,
`full` learns from all drafters at once, `baselines` is what they have to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashspec.bandits.base import Context, Evidence, Outcome, Policy, outcome_of
from flashspec.bandits.baselines import Fixed, LookupElseDraft, RoundRobin, UniformRandom, hand_rule
from flashspec.bandits.changing import EXP3, EXP3S, DiscountedThompson, DiscountedUCB, SlidingWindowUCB
from flashspec.bandits.costs import CostTable
from flashspec.bandits.full import Hedge, ThroughputGreedy
from flashspec.bandits.rates import ContextualThompson, GeometricThompson, RateThompson, RateUCB
from flashspec.bandits.rewards import AcceptanceRate, AcceptedTokens, MeanRate, TokensPerSecond
from flashspec.bandits.stochastic import KLUCB, UCB1, UCB2, UCBV, EpsilonGreedy, FollowTheLeader, ThompsonSampling
from flashspec.records import Arm

DEFAULT = "contextual"

_REWARDED = {
    "follow-the-leader": FollowTheLeader,
    "epsilon-greedy": EpsilonGreedy,
    "ucb1": UCB1,
    "ucb2": UCB2,
    "ucb-v": UCBV,
    "kl-ucb": KLUCB,
    "thompson": ThompsonSampling,
    "exp3": EXP3,
    "exp3.s": EXP3S,
    "sliding-window-ucb": SlidingWindowUCB,
    "discounted-ucb": DiscountedUCB,
    "discounted-thompson": DiscountedThompson,
}
_RATED = {
    "rate-ucb": RateUCB,
    "rate-thompson": RateThompson,
    "geometric": GeometricThompson,
    "contextual": ContextualThompson,
    "throughput-greedy": ThroughputGreedy,
    "hedge": Hedge,
}
POLICIES = ("random", "round-robin", "rule", *_REWARDED, *_RATED)


def check_name(name: str) -> None:
    """Raises ValueError, with a sentence, where there is no policy of that name."""
    if name not in POLICIES:
        raise ValueError(f"There is no policy {name!r}; choose one of {', '.join(POLICIES)}.")


def policy(name: str, arms: Sequence[Arm], costs: CostTable, *, runs: int = 1, seed: int = 0, dwell: int = 1) -> Policy:
    """The policy of that name on `arms`, rewarded by tokens ÷ tabled cost. Raises ValueError, with a sentence, for another name."""
    check_name(name)
    if name == "random":
        return UniformRandom(arms, runs=runs, seed=seed, dwell=dwell)
    if name == "round-robin":
        return RoundRobin(arms, runs=runs, dwell=dwell)
    if name == "rule":
        return hand_rule(arms, runs)
    if name in _REWARDED:
        make: Callable[..., Policy] = _REWARDED[name]
        return make(arms, TokensPerSecond(costs), runs=runs, seed=seed, dwell=dwell)
    make = _RATED[name]
    return make(arms, costs, runs=runs, seed=seed, dwell=dwell)


__all__ = [
    "DEFAULT",
    "POLICIES",
    "AcceptanceRate",
    "AcceptedTokens",
    "Context",
    "CostTable",
    "Evidence",
    "Fixed",
    "LookupElseDraft",
    "MeanRate",
    "Outcome",
    "Policy",
    "TokensPerSecond",
    "check_name",
    "outcome_of",
    "policy",
]
