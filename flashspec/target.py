"""A causal language model with a cache that knows which tokens it holds.

Used for the target and, by the model drafters, for theirs. Knows nothing about drafting, sampling or text: token ids in,
logits out. The module itself is shared and never changed; the cache belongs to one CachedModel alone.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

PREFILL_CHUNK = 512  # tokens read at once, so that a long prompt needs no long attention matrix


class LanguageModel(Protocol):
    """What the engine asks of its target, and a model drafter of its model."""

    name: str
    vocabulary: int
    context_length: int

    def read(self, tokens: Sequence[int], keep: int = 1) -> Tensor:
        """Logits [1, keep, V] behind the last `keep` tokens, all of `tokens` being in the cache afterwards."""

    def held(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of `tokens` need not be read again."""

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""


class Remembering(ABC):
    """A `LanguageModel` that knows which `tokens` its cache holds, in order. Subclasses own the cache and the forward."""

    name: str
    vocabulary: int
    context_length: int

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @abstractmethod
    def _forward(self, chunk: list[int], keep: int) -> Tensor:
        """Read `chunk` behind the tokens held and return the logits behind its last `keep` tokens: [1, keep, V]."""

    @abstractmethod
    def _crop(self, length: int) -> None:
        """Cut the cache back to its first `length` tokens."""

    def read(self, tokens: Sequence[int], keep: int = 1) -> Tensor:
        """Bring the cache to `tokens` and return the logits behind the last `keep`: [1, keep, V].

        What the cache already holds of `tokens` is not read again, whoever wrote it: the prefix of the last chat turn, or
        what an idle drafter saw before. Raises ValueError where a token or the length does not fit the model.
        """
        if len(tokens) > self.context_length:
            raise ValueError(f"{len(tokens)} tokens do not fit {self.name}: its context ends at {self.context_length}.")
        self.cut(max(min(self.held(tokens), len(tokens) - keep), 0))
        missing = list(tokens[len(self.tokens) :])
        logits: list[Tensor] = []
        for start in range(0, len(missing), PREFILL_CHUNK):
            chunk = missing[start : start + PREFILL_CHUNK]
            behind = len(missing) - start - len(chunk)  # tokens of later chunks
            try:
                logits.append(self._forward(chunk, max(1, min(len(chunk), keep - behind))))
            except BaseException:
                self.cut(0)  # some layers may have read the chunk and others not
                raise
            self.tokens += chunk
        return (torch.cat(logits, 1) if len(logits) > 1 else logits[0])[:, -keep:]

    def held(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of `tokens` are in the cache."""
        return common(self.tokens, list(tokens))

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        if length < len(self.tokens) or length == 0:
            self._crop(length)
            del self.tokens[length:]


def common(known: list[int], wanted: list[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(known), len(wanted))
    if known[:high] == wanted[:high]:  # nearly always
        return high
    while low < high:  # bisection: comparing slices runs in C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if known[:middle] == wanted[:middle] else (low, middle - 1)
    return low


class CachedModel(Remembering):
    """A transformers `model` with a key/value cache of its own."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name
        config = model.config.get_text_config()
        self.vocabulary = model.get_output_embeddings().weight.shape[0]
        self.context_length = getattr(config, "max_position_embeddings", None) or 2**31
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_argument = cache_argument(parameters)
        self._keep_argument = "logits_to_keep" in parameters
        self._cache = DynamicCache()

    def _crop(self, length: int) -> None:
        if length == 0:
            self._cache = DynamicCache()
        else:  # a negative count means the same from transformers 5.17 to 5.24
            self._cache.crop(length - len(self.tokens))

    @torch.inference_mode()
    def _forward(self, chunk: list[int], keep: int) -> Tensor:
        arguments: dict[str, Any] = {self._cache_argument: self._cache, "use_cache": True}
        if self._keep_argument:
            arguments["logits_to_keep"] = keep
        ids = torch.tensor([chunk], device=self.model.device)
        logits: Tensor = self.model(input_ids=ids, **arguments).logits
        return logits[:, -keep:].to(ids.device)  # a model over several GPUs ends on another one


def cache_argument(parameters: Any) -> str:
    """The name under which a forward takes its cache: `cache` in newer transformers, `past_key_values` before.

    Raises ValueError where there is neither: the model keeps its state in another way.
    """
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ValueError("the model takes no key/value cache")


def probe(model: Any, name: str) -> None:
    """Check that the model's state can be cut back, by cutting it back once.

    A cache without a configuration keeps every token of every layer, also of those with a sliding window, so these are
    handled. Recurrent or convolutional state is not: it raises ValueError with a sentence.
    """
    refusal = (
        f"{name} cannot be used: speculative decoding must take back rejected tokens, and this model keeps state that cannot be "
        "cut back (a recurrent, convolutional or hybrid model). Choose a model with attention layers only."
    )
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = [(7 * i + 3) % vocabulary for i in range(12)]
    wanted = ids[:4] + ids[7:]
    try:
        cached = CachedModel(model, name)
        cached.read(ids[:9])
        again = cached.read(wanted, keep=2)
        with torch.inference_mode():
            fresh = model(input_ids=torch.tensor([wanted], device=model.device), use_cache=False).logits[:, -2:]
    except Exception as error:  # a model with another kind of state fails in ways of its own
        raise ValueError(f"{refusal} ({type(error).__name__}: {error})") from error
    off = (again.float() - fresh.float()).abs().max() / fresh.float().std().clamp(min=1e-6)
    if not off < (1e-2 if again.dtype == torch.float32 else 0.3):
        raise ValueError(f"{refusal} (after a cut its logits are off by {float(off):.2g} standard deviations)")
