"""Lookup if the text offers a match, else a model: two lines that are hard to beat."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashspec.drafters.base import Drafter
from flashspec.drafters.lookup import LookupDrafter


class LookupElseDrafter:
    """The model reads nothing in rounds where the lookup has a match; it catches up when it is needed."""

    def __init__(self, lookup: LookupDrafter, otherwise: Drafter) -> None:
        self._lookup = lookup
        self._otherwise = otherwise
        self._active: Drafter = lookup

    def catch_up(self, context: Sequence[int]) -> int:
        self._lookup.catch_up(context)
        self._active = self._lookup if self._lookup.match_length else self._otherwise
        return self._otherwise.catch_up(context) if self._active is self._otherwise else 0

    def next(self, drafted: Sequence[int]) -> Tensor | int | None:
        return self._active.next(drafted)
