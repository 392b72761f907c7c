"""Exact replay: what every other arm and policy would have needed for the text of a Trace.

One pass of target and drafters over the text gives the chance of every acceptance (`evidence`); a dynamic programme over its positions
gives expected seconds. Nothing is sampled, nothing is estimated but the seconds of a round, which come from a cost table. So regret
is measured on the same text: the seconds that a policy took, less those of the best fixed arm on that text.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashspec.bandits import CostTable, Policy
from flashspec.bandits.baselines import hand_rule
from flashspec.bandits.costs import sources
from flashspec.bandits.simulators import TraceReplay
from flashspec.engine import Request, SpeculativeDecoder
from flashspec.evidence import REFRESH, evidence
from flashspec.records import Arm, Round, Trace
from flashspec.sampling import SamplingParams

Array = Any

REGIME = 32  # tokens: a window in which the best arm is a property of the text, not of single lucky tokens
NOTHING_TO_LEARN = 0.03


@dataclass(frozen=True)
class Regret:
    """Seconds to cover a text of N tokens, all priced by one table.

    fixed [K, N]: expected seconds of "always arm k" until the first n tokens stand. oracle [N]: the arms switched with full knowledge of
    the text, which nothing can reach. regimes: seconds of the best arm of every window of REGIME tokens, summed.
    """

    arms: tuple[Arm, ...]
    fixed: Array
    oracle: Array
    regimes: float

    @property
    def best(self) -> Arm:
        """The fixed arm that needs least for the whole text."""
        return self.arms[int(self.fixed[:, -1].argmin())]

    @property
    def best_seconds(self) -> float:
        return float(self.fixed[:, -1].min())

    @property
    def headroom(self) -> float:
        """What the best switching between windows would gain over the best fixed arm: 0.05 is 5 %."""
        return self.best_seconds / self.regimes - 1

    @property
    def clairvoyant_headroom(self) -> float:
        """The same for the oracle that knows every token in advance: an upper bound, never reached."""
        return self.best_seconds / float(self.oracle[-1]) - 1

    @property
    def verdict(self) -> str:
        """The headroom in a sentence for the page."""
        if self.headroom < NOTHING_TO_LEARN:
            return f"Nothing to learn here: switching arms could gain {self.headroom:.1%} over always {self.best}."
        return f"Switching arms could gain up to {self.headroom:.1%} over always {self.best}."


def world(
    trace: Trace, decoder: SpeculativeDecoder, arms: Sequence[Arm], costs: CostTable, prompt: Sequence[int]
) -> TraceReplay:
    """The text of `trace` as a world that any policy can play in. `prompt`: the ids that the trace continues.

    Raises ValueError where the trace was made with early stops, whose blocks have no fixed length, or is empty.
    """
    request = request_of(trace)
    if request.stop_below > 0:
        raise ValueError("A trace with early stops cannot be replayed; record it with stop_below = 0.")
    text = [*prompt, *(token for round in trace.rounds for token in round.emitted)]
    if len(text) == len(prompt):
        raise ValueError("The trace holds no token; there is nothing to replay.")
    positions = range(len(prompt), len(text))
    logits = decoder.target.read(text[:-1], keep=len(positions))[0]
    found, match = evidence(decoder.drafters, arms, logits, text, len(prompt), request, positions)
    depth, n = max(max(arm.gamma for arm in arms), 1), len(positions)
    ends = trace.rounds[-1].stop in ("length", "context")  # then the last blocks were shortened to fit
    left = np.arange(n - 1, -1, -1) if ends else np.full(n, depth)
    survive = np.stack([found[arm.drafter].survival if arm.gamma else np.zeros((n, depth)) for arm in arms])
    drafted = np.stack(
        [np.minimum(np.minimum(found[arm.drafter].drafted if arm.gamma else 0, arm.gamma), left) for arm in arms]
    )
    survive = survive * (np.arange(1, depth + 1) <= left[:, None])
    at = np.array([[costs.arms.index(arm)] for arm in arms])
    prices = costs.price(at, match > 0, drafted)
    models = [source for source in dict.fromkeys(sources(arm)[1] for arm in arms) if source]
    scoring = sum(float(costs.seconds[costs.names.index(name), 1] - costs.seconds[0, 0]) for name in models)
    return TraceReplay(arms, survive, drafted, prices, match, costs.catch_up[at[:, 0]], max(scoring, 0.0))


def request_of(trace: Trace) -> Request:
    """The settings with which a trace was made."""
    settings: Mapping[str, Any] = trace.settings
    sampling = dict(settings["sampling"])
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling.get("logit_bias", {}).items()}
    names = ("max_new_tokens", "rule", "seed", "stop_below")
    return Request(sampling=SamplingParams(**sampling), **{name: settings[name] for name in names if name in settings})


def regret(text: TraceReplay) -> Regret:
    """Expected seconds of every fixed arm and of the oracle on the text of a world, without catch-up."""
    fixed = np.stack([covering(text, np.full(text.length, k)) for k in range(len(text.arms))])
    oracle = covering(text, _clairvoyant(text))
    edges = [*range(0, text.length, REGIME), text.length]
    reached = np.concatenate([np.zeros((len(text.arms), 1)), fixed], 1)
    regimes = sum((reached[:, b] - reached[:, a]).min() for a, b in itertools.pairwise(edges))
    return Regret(text.arms, fixed, oracle, float(regimes))


def play_text(policy: Policy, texts: Sequence[TraceReplay], seed: int = 0) -> tuple[Array, Array]:
    """Let `policy` decode the texts one after another, learning all the way: seconds [runs], pulls [runs, K].

    A full-information policy is told the same evidence as while decoding, every REFRESH rounds, and pays one drafted token of every model.
    """
    seconds = np.zeros(policy.runs)
    before = policy.pulls.copy()
    for number, text in enumerate(texts):
        text.reset(policy.runs, seed * 1000 + number)
        scored, count = 0, 0
        while not text.done.all():
            chosen = policy.select(text.context())
            outcome = text.play(chosen)
            policy.update(chosen, outcome)
            seconds += outcome.seconds + outcome.catch_up
            count += 1
            if policy.feedback == "full" and count % REFRESH == 0:
                reached = int(text.position.min()) - max(arm.gamma for arm in text.arms)
                if reached > scored:
                    policy.observe(text.evidence(scored, reached))
                    seconds += text.scoring
                    scored = reached
    return seconds, policy.pulls - before


def spent(rounds: Sequence[Round]) -> Array:
    """Seconds that a trace really took until each of its N tokens stood: [N]."""
    totals = np.cumsum([round.seconds.total for round in rounds])
    return np.repeat(totals, [len(round.emitted) for round in rounds])


def hand_rule_at(text: TraceReplay, arms: Sequence[Arm]) -> Array:
    """The arm of `text` that the hand rule made of `arms` takes at every position: [N]."""
    rule = hand_rule(arms)
    lookup, otherwise = (text.arms.index(arm) for arm in rule.arms)
    return np.where(text.match_length > 0, lookup, otherwise)


def _steps(text: TraceReplay, chosen: Array) -> Array:
    """P(k + 1 tokens are emitted | round begun at t with arm chosen[t]): [N] -> [N, G+1]."""
    survive = text.survival[chosen, np.arange(text.length)]
    n = len(survive)
    reached = np.concatenate([np.ones((n, 1)), survive, np.zeros((n, 1))], 1)
    return reached[:, :-1] - reached[:, 1:]


def covering(text: TraceReplay, chosen: Array) -> Array:
    """Expected seconds until the first n tokens stand, n = 1 … N, with arm chosen[t] at position t: occupancy A(t + k) += A(t) P(k | t)."""
    steps, prices = _steps(text, chosen), text.seconds[chosen, np.arange(text.length)]
    n, width = steps.shape
    begun = np.zeros(n + width)  # chance that a round begins at t
    begun[0] = 1.0
    for t in range(n):
        begun[t + 1 : t + 1 + width] += begun[t] * steps[t]
    return np.cumsum(begun[:n] * prices)


def _clairvoyant(text: TraceReplay) -> Array:
    """The arm with which the rest of the text needs least, at every position: V(t) = min_k c_k(t) + Σ_j P_k(j | t) V(t + j + 1)."""
    n, arms = text.length, len(text.arms)
    steps = np.stack([_steps(text, np.full(n, k)) for k in range(arms)])  # [K, N, G+1]
    value = np.zeros(n + steps.shape[2])
    chosen = np.zeros(n, int)
    for t in range(n - 1, -1, -1):
        options = text.seconds[:, t] + steps[:, t] @ value[t + 1 : t + 1 + steps.shape[2]]
        chosen[t] = options.argmin()
        value[t] = options.min()
    return chosen
