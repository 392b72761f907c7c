"""From token ids to text as it arrives: whole characters only, and nothing of a stop string.

Knows the tokenizer and nothing else. The released pieces joined are the decoded text, up to a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNDECIDED = 3  # an unfinished UTF-8 character has at most three bytes, shown as at most three U+FFFD


class TextStream:
    """Incremental decoder of one output.

    push(id) returns the text that became certain; finish() returns what was still held. After `stopped` nothing more is
    released.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._anchor = 0  # decoding starts here, one stretch back, so that a tokenizer which strips a first space strips known text
        self._read = 0  # all text of the ids before this is out
        self._shown = 0  # characters of the decoding from the anchor that are out
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._release(self._new_text(final=False))

    def finish(self) -> str:
        text = self._release(self._new_text(final=True))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _new_text(self, final: bool) -> str:
        """Decoded text behind what is out already, without the end that the next bytes may still change.

        A literal or broken U+FFFD looks like an unfinished character: it delays the last characters, it never stops the stream.
        """
        text = self._decode(self._ids[self._anchor :])
        undecided = 0 if final else min(_UNDECIDED, len(text) - len(text.rstrip("\ufffd")))
        new = text[self._shown : len(text) - undecided]
        self._shown += len(new)
        if not undecided:
            self._anchor, self._read = self._read, len(self._ids)
            self._shown = len(self._decode(self._ids[self._anchor :]))
        return new

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""


class Labels:
    """How to show a single token: its text inside a sentence, `<0xE2>` for part of a character, the name of a special one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._lead = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._cache: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._cache:
            self._cache[token] = self._label(token)
        return self._cache[token]

    def _label(self, token: int) -> str:
        name = self._tokenizer.convert_ids_to_tokens(token) if token < len(self._tokenizer) else None
        if name is None:
            return f"<{token}>"  # padding of the vocabulary, no token at all
        if token in self._special:
            return name
        # Behind another token, so that a tokenizer which drops a leading space at the start keeps it here.
        lead = self._tokenizer.decode(self._lead, clean_up_tokenization_spaces=False)
        text = self._tokenizer.decode([*self._lead, token], clean_up_tokenization_spaces=False)[len(lead) :]
        return name if "\ufffd" in text else text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
