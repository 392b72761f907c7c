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

TEXT = " ".join(["The quick brown fox jumps over the lazy dog."] * 4)  # repeats itself, so that a lookup drafts at once
IDLE = 5  # plain rounds that a drafter misses


def measure_costs(decoder: SpeculativeDecoder, arms: Sequence[Arm], request: Request, passes: int = 3) -> CostTable:
    """Play every drafter's arms behind the same text, `passes` times after one for warming up, and take medians.

    Each arm plays at once, where a lookup has a match and a model little to read, and again, the first of every drafter after some plain
    rounds, which a model has to catch up with. The decoder should be one that nothing else uses. The seconds spent are about a hundred rounds.
    """
    decoder.wait_until_ready(request, arms)
    endless = copy.copy(decoder)
    endless.eos = frozenset()
    prompt = decoder.tokenizer.encode(TEXT)
    room = decoder.target.context_length - len(prompt)
    rounds: list[Round] = []
    for turn in range(passes + 1):
        met: set[str] = set()
        for arm in arms:
            if arm.drafter.startswith("lookup-else-"):  # its parts are measured
                continue
            idle = [] if arm.drafter in met else [Arm("plain", 0)] * IDLE
            met.add(arm.drafter)
            longest = min(2 * arm.gamma + IDLE + 3, room)  # so that no round ends the text
            some = replace(request, max_new_tokens=longest, seed=request.seed + turn, stop=(), stop_below=0.0)
            played = list(islice(endless.rounds(prompt, some, RoundRobin([arm, *idle, arm])), len(idle) + 2))
            rounds += played if turn else []
    return CostTable.measured(arms, rounds)
