"""Start-up measurement of a cost table: a few real rounds of every arm on this machine, with the settings that will be used."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from flashspec.bandits import CostTable
from flashspec.bandits.baselines import RoundRobin
from flashspec.engine import Request, SpeculativeDecoder
from flashspec.records import Arm, Round

TEXT = "The quick brown fox jumps over the lazy dog. " * 4  # repeats itself, so that a lookup drafts in every round


def measure_costs(decoder: SpeculativeDecoder, arms: Sequence[Arm], request: Request, passes: int = 3) -> CostTable:
    """Play every drafter's arms twice in a row, `passes` times, after one turn for warming up, and take medians.

    The decoder should be one that nothing else uses. The seconds spent are a few dozen rounds.
    """
    endless = copy.copy(decoder)
    endless.eos = frozenset()
    prompt = decoder.tokenizer.encode(TEXT)
    single = [arm for arm in arms if not arm.drafter.startswith("lookup-else-")]  # its parts are measured
    played = [arm for arm in single for _ in range(2)]  # the first round of a pair catches up, the second has not to
    wanted = len(played) * (passes + 1)
    room = decoder.target.context_length - len(prompt)
    longest = max(arm.gamma for arm in arms) + 1
    request = replace(request, max_new_tokens=min(wanted * longest + longest, room), stop=(), stop_below=0.0)
    policy, rounds = RoundRobin(played), list[Round]()
    while len(rounds) < wanted:  # a small context may end before every arm had its turns
        rounds += islice(endless.rounds(prompt, request, policy), wanted - len(rounds))
        request = replace(request, seed=request.seed + 1)
    return CostTable.measured(arms, rounds[len(played) :])
