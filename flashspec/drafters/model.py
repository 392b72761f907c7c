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
        missed = len(self._context) - self.model.held(self._context)
        self._logits = self._read(self._context)
        return missed if self._logits is not None else 0

    def next(self, drafted: Sequence[int]) -> Tensor | None:
        logits = self._read([*self._context, *drafted]) if drafted else self._logits
        if logits is None:
            return None
        logits = logits[0, -1, : self._vocabulary]
        missing = self._vocabulary - len(logits)
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _read(self, tokens: list[int]) -> Tensor | None:
        unread = tokens[self.model.held(tokens) :]
        if len(tokens) > self.model.context_length or any(token >= self.model.vocabulary for token in unread):
            return None
        return self.model.read(tokens)
