"""The protocol that every drafter follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Drafter(Protocol):
    """Proposes one token after another. The engine calls catch_up once a round, then next until the block is full."""

    def catch_up(self, context: Sequence[int]) -> int:
        """Get ready to continue `context` (prompt and committed output).

        Returns how many tokens had to be read. Whatever the drafter saw before, rejected tokens included, must not show.
        """

    def unread(self, context: Sequence[int]) -> int:
        """How many tokens `catch_up` would have to read now."""

    def next(self, drafted: Sequence[int]) -> Tensor | int | None:
        """What follows `context` + `drafted`.

        Logits [V] of the target's vocabulary, -inf for ids it cannot propose, from which the engine samples; an id that the
        drafter is certain of (q is one-hot); or None to end the block.
        """
