"""A lean forward for Llama-form models on the CPU: fused q/k/v and gate/up products, a static cache, few small operations.

Loaded from the weights of a transformers model and equal to it in float32. Each row of a block is computed as if it were alone, so in
int8 and bfloat16 the logits are the same bits whatever block a token was read in, and greedy text equals plain decoding id by id.

The layout of the weights is chosen by a short measurement on the machine that runs (`fastest`): int8 rows make a block of four tokens cost
little more than one, which is what speculation needs. A quantised model is then *the* target: exactness is relative to it. Where Numba is
installed one layout is its own forward (`flashspec.models.compiled`), for in a small model most of the time is PyTorch's small calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flashspec.machine import reason_without_numba
from flashspec.models.packing import quantise
from flashspec.target import Remembering

NUMBA = "numba"
LAYOUTS = (NUMBA, "int8", "bfloat16", "float32")
_PAD = 64  # keys are read in steps of this many, masked beyond the text, so that sums do not depend on the length of the block
_GROW = 256  # tokens by which a cache grows
_BLOCK = 4  # rows of the block that the measurement weighs against a single row

Product = Callable[[Tensor], Tensor]  # [n, in] float32 -> [n, out] float32


class LeanWeights(Protocol):
    """Weights laid out for our own forward, shared read-only by every model on them."""

    @property
    def layout(self) -> str:
        """Its name among `LAYOUTS`."""

    def first(self, count: int) -> LeanWeights:
        """The early exit: the same weights, the first `count` layers."""

    def cached(self, name: str) -> Remembering:
        """A model on these weights, with an empty cache of its own."""


class Layer(NamedTuple):
    """One decoder layer: four products and two norms."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    before_attention: Tensor  # [d]
    before_mlp: Tensor  # [d]


class LeanLlama:
    """Weights of a Llama-form model in one `layout`, shared read-only by any number of `LeanModel`s."""

    def __init__(self, model: Any, layout: str, layers: int | None = None) -> None:
        """Lay out a transformers model, or its first `layers` layers."""
        config = model.config.get_text_config()
        self.layout = layout
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.width: int = head_width(config)
        self.epsilon: float = config.rms_norm_eps
        self.context_length: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        product = _PRODUCTS[layout]
        base = model.model
        self.layers = [_layer(layer, self.heads, self.groups, self.width, product) for layer in base.layers[:layers]]
        self.norm = base.norm.weight.float()
        self.embedding = base.embed_tokens.weight.float()
        self.head = product(model.get_output_embeddings().weight)
        self.turns = turns(base.rotary_emb, self.context_length)[:, None]  # [C, 1, w/2]

    def first(self, count: int) -> LeanLlama:
        view = object.__new__(LeanLlama)
        view.__dict__ = {**self.__dict__, "layers": self.layers[:count]}
        return view

    def cached(self, name: str) -> LeanModel:
        return LeanModel(self, name)


class StaticModel(Remembering):
    """What models on lean weights share: a static cache [layers, 2, groups, length, width] in float32.

    The cache is zeroed when it grows: what lies behind the text is masked, but 0 · NaN would show.
    """

    def __init__(self, name: str, vocabulary: int, context_length: int, layers: int, groups: int, width: int) -> None:
        super().__init__()
        self.name, self.vocabulary, self.context_length = name, vocabulary, context_length
        self._cache = torch.empty(layers, 2, groups, 0, width)

    def _crop(self, length: int) -> None:
        return  # what lies behind the tokens held is overwritten by the next read

    def _reserve(self, length: int) -> None:
        """Room for `length` tokens."""
        have = self._cache.shape[3]
        if length > have:
            more = self._cache.new_zeros(
                *self._cache.shape[:3], -(-length // _GROW) * _GROW - have, self._cache.shape[4]
            )
            self._cache = torch.cat((self._cache, more), 3)


class LeanModel(StaticModel):
    """A `LanguageModel` on shared lean weights."""

    def __init__(self, weights: LeanLlama, name: str) -> None:
        w = self.weights = weights
        super().__init__(name, w.vocabulary, w.context_length, len(w.layers), w.groups, w.width)

    @torch.inference_mode()
    def _forward(self, chunk: list[int], keep: int) -> Tensor:
        w, n, start = self.weights, len(chunk), len(self.tokens)
        end = start + n
        self._reserve(end)
        x = w.embedding[torch.tensor(chunk)]  # [n, d]
        turns = w.turns[start:end]
        length = -(-end // _PAD) * _PAD
        mask = torch.where(torch.arange(length) <= torch.arange(start, end)[:, None], 0.0, float("-inf"))[:, None, None]
        turned = w.heads + w.groups
        for layer, (keys, values) in zip(w.layers, self._cache, strict=True):
            qkv = layer.qkv(_rms(x, layer.before_attention, w.epsilon)).view(n, turned + w.groups, w.width)
            pairs = torch.view_as_complex(qkv[:, :turned].reshape(n, turned, -1, 2))
            qk = torch.view_as_real(pairs * turns).flatten(2)  # [n, heads + groups, width]
            keys[:, start:end] = qk[:, w.heads :].transpose(0, 1)
            values[:, start:end] = qkv[:, turned:].transpose(0, 1)
            attended = F.scaled_dot_product_attention(
                qk[:, : w.heads, None], keys[:, :length].expand(n, -1, -1, -1), values[:, :length].expand(n, -1, -1, -1),
                attn_mask=mask, enable_gqa=w.heads != w.groups,
            )  # fmt: skip  # [n, heads, 1, width]
            x = x + layer.out(attended.reshape(n, -1))
            gate, up = layer.gate_up(_rms(x, layer.before_mlp, w.epsilon)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return w.head(_rms(x[-keep:], w.norm, w.epsilon))[None]


def suits(model: Any) -> bool:
    """Whether `model` has exactly the form that the lean forward computes, on the CPU."""
    return model.device.type == "cpu" and plain_llama(model)


def plain_llama(model: Any) -> bool:
    """Whether `model` is a plain Llama on one device: no bias, no quantised modules, one kind of RoPE."""
    spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    if type(model).__name__ != "LlamaForCausalLM" or getattr(model, "is_quantized", False) or spread:
        return False
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    without_bias = not config.attention_bias and not config.mlp_bias
    return without_bias and config.hidden_act == "silu" and rope.get("rope_type", "default") == "default"


def lay_out(model: Any, layout: str, layers: int | None = None) -> LeanWeights:
    """The weights of `model`, or of its first `layers` layers, in `layout`. Raises ValueError with the reason where it cannot be had."""
    if layout != NUMBA:
        return LeanLlama(model, layout, layers)
    if reason := reason_without_numba():
        raise ValueError(reason)
    from flashspec.models.compiled import CompiledLlama

    return CompiledLlama.of(model, layers)


def fastest(model: Any) -> tuple[str, dict[str, float]]:
    """The layout in which reading one token and then a block of four takes least, on the first layers of `model`: (name, seconds)."""
    size = sum(p.numel() for p in model.model.layers[0].parameters())
    layers = max(1, 2**25 // size)  # more than the caches hold, as in a whole model
    samples = {
        layout: lay_out(model, layout, layers).cached(layout)
        for layout in LAYOUTS
        if layout != NUMBA or reason_without_numba() is None
    }
    # By turns, as machines waver.
    rounds = [{layout: _time(sample) for layout, sample in samples.items()} for _ in range(5)]
    seconds = {layout: min(times[layout] for times in rounds) for layout in samples}
    return min(seconds, key=lambda name: seconds[name]), seconds


def _time(sample: Remembering) -> float:
    text = [i % sample.vocabulary for i in range(sample.context_length // 2)][: 2 * _PAD]
    sample.read(text[: -_BLOCK - 1])
    sample.cut(len(text) - _BLOCK - 1)
    began = time.perf_counter()
    sample.read(text[:-_BLOCK])
    sample.read(text, keep=_BLOCK)
    return time.perf_counter() - began


def _layer(layer: Any, heads: int, groups: int, width: int, product: Callable[[Tensor], Product]) -> Layer:
    *weights, before_attention, before_mlp = joined(layer, heads, groups, width)
    qkv, out, gate_up, down = map(product, weights)
    return Layer(qkv, out, gate_up, down, before_attention.float(), before_mlp.float())


def joined(layer: Any, heads: int, groups: int, width: int) -> tuple[Tensor, ...]:
    """Weights of a decoder layer as few products: q/k/v with rows interleaved for RoPE, out, gate/up, down; and its two norms."""
    attention, mlp = layer.self_attn, layer.mlp
    q, k = (interleave(w.weight, n, width) for w, n in ((attention.q_proj, heads), (attention.k_proj, groups)))
    return (
        torch.cat((q, k, attention.v_proj.weight)),
        attention.o_proj.weight,
        torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
        mlp.down_proj.weight,
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
    )


def head_width(config: Any) -> int:
    """Width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def turns(rotary: Any, length: int) -> Tensor:
    """RoPE as complex numbers: [length, width / 2]."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rotary.inv_freq.float())
    return torch.polar(torch.full_like(angles, rotary.attention_scaling), angles)


def interleave(weight: Tensor, heads: int, width: int) -> Tensor:
    """Rows reordered so that the two halves which RoPE turns together lie side by side, as complex numbers do: [h·w, d]."""
    return weight.view(heads, 2, width // 2, -1).transpose(1, 2).reshape(heads * width, -1)


def _rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _int8(weight: Tensor) -> Product:
    """The scale is applied to the result in float32: inside the product it would be rounded to bfloat16."""
    rows, scale = quantise(weight)
    ones = torch.ones(len(rows), dtype=torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x.bfloat16(), rows, ones) * scale


def _bfloat16(weight: Tensor) -> Product:
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().bfloat16(), _BLOCK)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x.bfloat16(), packed, None, "none", [], "").float()
    plain = weight.detach().bfloat16()
    return lambda x: F.linear(x.bfloat16(), plain).float()


def _float32(weight: Tensor) -> Product:
    plain = weight.detach().float().contiguous()
    return lambda x: F.linear(x, plain)


_PRODUCTS = {"int8": _int8, "bfloat16": _bfloat16, "float32": _float32}
