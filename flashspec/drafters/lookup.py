"""Prompt lookup: continue as the text continued the last time its final n-gram occurred (Saxena 2023).

No model and no state but an index of n-grams, so proposals cost microseconds; they are certain, hence q is one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 6, 2  # tokens of an n-gram that is looked for


class LookupDrafter:
    """Looks for the longest of the last `longest` … `shortest` tokens, most recent occurrence first."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"Lookup needs 1 <= shortest <= longest n-gram, not {shortest} and {longest}.")
        self._lengths = range(longest, shortest - 1, -1)
        self._context: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token behind its latest occurrence
        self._match: int | None = None
        self.match_length = 0

    def catch_up(self, context: Sequence[int]) -> int:
        context = list(context)
        known = len(self._context)
        if context[:known] != self._context:
            known, self._after = 0, {}
        # An n-gram enters the index once the token behind it is known, so the final one never finds itself.
        for behind in range(max(known, 1), len(context)):
            for n in self._lengths:
                if behind >= n:
                    self._after[tuple(context[behind - n : behind])] = behind
        self._context = context
        self._match, self.match_length = None, 0
        for n in self._lengths:
            if len(context) >= n and (at := self._after.get(tuple(context[-n:]))) is not None:
                self._match, self.match_length = at, n
                break
        return 0

    def unread(self, context: Sequence[int]) -> int:
        return 0

    def block(self, longest: int) -> list[int]:
        """The whole proposal, up to `longest` tokens."""
        drafted: list[int] = []
        while len(drafted) < longest and (token := self.next(drafted)) is not None:
            drafted.append(token)
        return drafted

    def again(self) -> LookupDrafter:
        """Another one with the same settings and nothing read."""
        return LookupDrafter(self._lengths[0], self._lengths[-1])

    def next(self, drafted: Sequence[int]) -> int | None:
        if self._match is None:
            return None
        at = self._match + len(drafted)
        # A match that reaches the end of the text goes on with its own proposals: repetition with a period.
        return self._context[at] if at < len(self._context) else drafted[at - len(self._context)]
