"""Whether two tokenizers mean the same by the same ids: the condition under which one model may draft for another."""

from __future__ import annotations

from typing import Any

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def difference(target: Any, drafter: Any) -> str | None:
    """None where the tokenizers agree, else what differs first, in words.

    Token strings must agree for every id that both have; sizes may differ only by padding. Equal size proves nothing.
    """
    mine = {id: token for token, id in target.get_vocab().items()}
    yours = {id: token for token, id in drafter.get_vocab().items()}
    for id in sorted(mine.keys() & yours.keys()):
        if mine[id] != yours[id]:
            return f"id {id} is {mine[id]!r} for the target and {yours[id]!r} for the drafter"
    if mine.keys() != yours.keys():
        extra = min(mine.keys() ^ yours.keys())
        return f"id {extra} ({mine.get(extra) or yours.get(extra)!r}) exists on one side only"
    for name in _SPECIAL:
        left, right = getattr(target, f"{name}_id", None), getattr(drafter, f"{name}_id", None)
        if name == "eos_token" and left != right:
            return f"{name} is id {left} for the target and {right} for the drafter"
    return None
