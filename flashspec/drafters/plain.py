"""No drafting: every round emits the one token that the target samples (γ = 0), the baseline of everything."""

from __future__ import annotations

from collections.abc import Sequence


class PlainDrafter:
    """Never proposes anything."""

    def catch_up(self, context: Sequence[int]) -> int:
        return 0

    def unread(self, context: Sequence[int]) -> int:
        return 0

    def next(self, drafted: Sequence[int]) -> None:
        return None
