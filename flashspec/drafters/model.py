"""A smaller causal language model as drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashspec.target import LanguageModel


class ModelDrafter:
    """Proposes with `model`, whose padded vocabulary may differ from the target's in either direction.

    Where the model cannot read the text (an id beyond its vocabulary, or its context is full) it proposes nothing and the
    round decodes plainly.
    """

    def __init__(self, model: LanguageModel, vocabulary: int) -> None:
        self.model = model
        self._vocabulary = vocabulary  # the target's
        self._context: list[int] = []
        self._logits: Tensor | None = None

    def catch_up(self, context: Sequence[int]) -> int:
        self._context = list(context)
        missed = self.unread(context)
        self._logits = self._read(self._context)
        return missed if self._logits is not None else 0

    def next(self, drafted: Sequence[int]) -> Tensor | None:
        logits = self._read([*self._context, *drafted]) if drafted else self._logits
        if logits is None:
            return None
        return self._fit(logits[0])[-1]

    def unread(self, context: Sequence[int]) -> int:
        return len(context) - self.model.held(context)

    def score(self, text: Sequence[int], count: int) -> Tensor | None:
        """Logits [count, V] that it would have had for each of the last `count` tokens of `text`; None where it cannot read them."""
        logits = self._read(list(text[:-1]), count)
        return None if logits is None else self._fit(logits[0])

    def _fit(self, logits: Tensor) -> Tensor:
        """Its vocabulary cut or padded to the target's: [n, V'] -> [n, V]."""
        logits = logits[:, : self._vocabulary]
        missing = self._vocabulary - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _read(self, tokens: list[int], keep: int = 1) -> Tensor | None:
        unread = tokens[self.model.held(tokens) :]
        if len(tokens) > self.model.context_length or any(token >= self.model.vocabulary for token in unread):
            return None
        return self.model.read(tokens, keep)
