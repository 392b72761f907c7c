"""Small worlds for tests: random transformers models, scripted models, byte tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flashspec.bandits import Fixed
from flashspec.drafters import LookupDrafter, ModelDrafter, PlainDrafter
from flashspec.engine import Request, SpeculativeDecoder
from flashspec.machine import reason_without_numba
from flashspec.records import Arm, Round
from flashspec.target import CachedModel

needs_numba = pytest.mark.skipif(reason_without_numba() is not None, reason=str(reason_without_numba()))


def llama(
    vocabulary: int = 97, layers: int = 2, seed: int = 0, context: int = 1024, sharp: float = 60.0, **more: Any
) -> LlamaForCausalLM:
    """A random Llama whose logits are spread enough for its choices to matter."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": context, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    config = LlamaConfig(**(shape | more))
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(sharp)
    return model


class ScriptedModel:
    """A `LanguageModel` whose next logits are a function of the context, and which counts its reads."""

    def __init__(
        self, next_logits: Callable[[tuple[int, ...]], Tensor], vocabulary: int, context: int = 10_000
    ) -> None:
        self.name, self.vocabulary, self.context_length = "scripted", vocabulary, context
        self.tokens: list[int] = []
        self.reads = 0
        self._next = next_logits

    def held(self, tokens: Sequence[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(self.tokens, tokens, strict=False)) if a != b),
            min(len(self.tokens), len(tokens)),
        )

    def read(self, tokens: Sequence[int], keep: int = 1) -> Tensor:
        self.reads += 1
        self.tokens = list(tokens)
        return torch.stack([self._next(tuple(tokens[:end])) for end in range(len(tokens) - keep + 1, len(tokens) + 1)])[
            None
        ]

    def cut(self, length: int) -> None:
        self.tokens = self.tokens[:length]


def says(text: Sequence[int], vocabulary: int, prompt: int, sharp: float = 30.0) -> Callable[[tuple[int, ...]], Tensor]:
    """Logits of a model that writes `text` behind a prompt of that length, then repeats its last id."""

    def next_logits(context: tuple[int, ...]) -> Tensor:
        logits = torch.zeros(vocabulary)
        logits[text[min(len(context) - prompt, len(text) - 1)]] = sharp
        return logits

    return next_logits


def random_logits(vocabulary: int, seed: int, spread: float = 1.5) -> Callable[[tuple[int, ...]], Tensor]:
    """Context-dependent random logits, the same every time."""

    def next_logits(context: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *context)) % 2**31)
        return torch.randn(vocabulary, generator=generator) * spread

    return next_logits


class ByteTokenizer:
    """One id a byte; 256 is the end of text."""

    all_special_ids = (256,)
    eos_token_id = 256
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **more: Any) -> str:
        return bytes(id for id in ids if id < 256).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, id: int) -> str:
        return f"<0x{id:02X}>"

    def __len__(self) -> int:
        return 257


def decoder(
    target: Any, drafters: dict[str, Any] | None = None, eos: Sequence[int] = (), tokenizer: Any = None
) -> SpeculativeDecoder:
    """A decoder with plain, lookup and the given model drafters (LanguageModels)."""
    named = {name: ModelDrafter(model, target.vocabulary) for name, model in (drafters or {}).items()}
    return SpeculativeDecoder(
        target, {"plain": PlainDrafter(), "lookup": LookupDrafter(), **named}, tokenizer or ByteTokenizer(), eos
    )


def run(
    engine: SpeculativeDecoder, prompt: Sequence[int], request: Request, drafter: str = "plain", gamma: int = 4
) -> list[Round]:
    return list(engine.rounds(prompt, request, Fixed(Arm(drafter, 0 if drafter == "plain" else gamma))))


def ids(rounds: Sequence[Round]) -> list[int]:
    return [token for round in rounds for token in round.emitted]


def cached(seed: int = 0, **more: Any) -> CachedModel:
    return CachedModel(llama(seed=seed, **more), f"llama-{seed}")
