"""Lookup if the text offers a match, else a model: two lines that are hard to beat."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashspec.drafters.base import Drafter
from flashspec.drafters.lookup import LookupDrafter


class LookupElseDrafter:
    """The model reads nothing in rounds where the lookup has a match; it catches up when it is needed."""

    def __init__(self, lookup: LookupDrafter, otherwise: Drafter) -> None:
        self.lookup = lookup
        self.otherwise = otherwise
        self._active: Drafter = lookup

    def catch_up(self, context: Sequence[int]) -> int:
        self.lookup.catch_up(context)
        self._active = self.lookup if self.lookup.match_length else self.otherwise
        return self.otherwise.catch_up(context) if self._active is self.otherwise else 0

    def unread(self, context: Sequence[int]) -> int:
        return self.otherwise.unread(context)

    def next(self, drafted: Sequence[int]) -> Tensor | int | None:
        return self._active.next(drafted)
