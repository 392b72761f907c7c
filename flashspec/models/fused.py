"""The forward of Llama-form models through the Triton kernels of `kernels/forward.py`, for one request or many on one static cache.

Loaded from the weights of a transformers model and equal to it in float32. Nothing is read by the host and every position comes from
device memory, so that a CUDA graph of a forward serves every length of text (`flashspec/graphs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flashspec.kernels import forward as source  # type: ignore[attr-defined]  # found through __path__
from flashspec.kernels import narrow as narrow_source  # type: ignore[attr-defined]
from flashspec.models.lean import head_width, joined, plain_llama
from flashspec.verifiers.base import Settings, Verdict
from flashspec.verifiers.triton import INTERPRETED, row_thresholds

ROWS = 16  # rows of a product's tile, the least that tensor cores take
KEYS = 64  # keys of an attention block
PREFILL = 64  # rows that are read at once of a prompt


class Tile(NamedTuple):
    """How one product is cut: n outputs a program, k inputs a step, lines of 128 bytes of each weight row that are asked for ahead."""

    n: int
    k: int
    warps: int = 4
    stages: int = 4
    lines: int = 0


class Tiles(NamedTuple):
    """The products of a forward. `out` and `down` add to the same x and have the same n."""

    qkv: Tile
    out: Tile
    gate_up: Tile
    down: Tile
    head: Tile


# The fastest of 36 tiles a product on an H200, one product after the other, twice. Small products wait for memory, so they ask ahead.
SMALL = Tiles(
    Tile(16, 64, stages=6, lines=2), Tile(16, 128, stages=5, lines=32), Tile(32, 64, stages=3, lines=32),
    Tile(16, 128, stages=5, lines=128), Tile(64, 64, stages=3, lines=2),
)  # fmt: skip
MEDIUM = Tiles(Tile(32, 256), Tile(32, 64, stages=6), Tile(32, 64, stages=6), Tile(32, 256), Tile(64, 128, stages=5))
LARGE = Tiles(Tile(64, 256), Tile(64, 256), Tile(64, 128, warps=8, stages=3), Tile(64, 256), Tile(64, 256))


class Cut(NamedTuple):
    """How the two launches of a narrow layer are cut, and its head."""

    shares: int = 4  # of the keys
    keys: int = 64  # of a block
    inner: int = 32  # inner columns of an MLP a program
    vocabulary: int = 64  # logits a program
    attention_warps: int = 4
    mlp_warps: int = 4
    head_warps: int = 4


NARROW_WIDTH = 256  # up to which a row of x fits a program
NARROW_ROWS = 4  # up to which reading in parts costs less than adding up


def tiles_for(hidden: int) -> Tiles:
    """By the width of the residual stream: up to 135M-like models, 1B-like ones, 8B-like ones and above."""
    return SMALL if hidden < 2048 else MEDIUM if hidden < 4096 else LARGE


class Layer(NamedTuple):
    """Weights of one decoder layer, [out, in], rows of q and k interleaved for RoPE."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    before_attention: Tensor  # [D]
    before_mlp: Tensor  # [D]


@dataclass(frozen=True)
class FusedLlama:
    """Weights and shape of a Llama-form model, shared read-only."""

    layers: tuple[Layer, ...]
    embedding: Tensor  # [V, D]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]
    frequencies: Tensor  # [W/2] float32, of RoPE
    scaling: float
    heads: int
    groups: int
    width: int
    epsilon: float
    context_length: int

    @classmethod
    def of(cls, model: Any) -> FusedLlama:
        """From a transformers model that `suits`, on its device and in its type."""
        config, base = model.config.get_text_config(), model.model
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        width = head_width(config)
        with torch.no_grad():
            return cls(
                tuple(Layer(*joined(layer, heads, groups, width)) for layer in base.layers), base.embed_tokens.weight, base.norm.weight,
                model.get_output_embeddings().weight, base.rotary_emb.inv_freq.float(), base.rotary_emb.attention_scaling, heads, groups, width,
                config.rms_norm_eps, config.max_position_embeddings,
            )  # fmt: skip

    def first(self, count: int) -> FusedLlama:
        """The early exit: the same weights, the first `count` layers."""
        return replace(self, layers=self.layers[:count])

    @property
    def vocabulary(self) -> int:
        return self.head.shape[0]


def suits(model: Any) -> bool:
    """Whether the kernels compute `model`: plain Llama on a CUDA device (or in the interpreter), heads of a power of two."""
    config = model.config.get_text_config()
    width = head_width(config)
    placed = model.device.type == ("cpu" if INTERPRETED else "cuda")
    return placed and plain_llama(model) and width & (width - 1) == 0 and (INTERPRETED or 16 <= width <= 128)


def launches_early(device: Any) -> bool:
    """Whether a kernel may come up while its predecessor ends (PDL)."""
    return not INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9


class Text(NamedTuple):
    """What B requests have written, in device memory."""

    ids: Tensor  # [B, C] int64
    length: Tensor  # [B] int64, committed tokens
    reading: Tensor  # [B] int64, where a prompt is being read

    @classmethod
    def empty(cls, batch: int, capacity: int, device: Any) -> Text:
        zeros = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(torch.zeros(batch, capacity, dtype=torch.int64, device=device), zeros, zeros.clone())


class FusedModel:
    """A model with a static cache for the B requests of `text`: [layers, 2, B, G, C, W].

    A narrow model that `only_drafts` reads few rows in parts, which rounds otherwise. A target must not: its rounding would depend on what was
    drafted.
    """

    def __init__(self, weights: FusedLlama, text: Text, only_drafts: bool = False) -> None:
        self.weights, self.text = weights, text
        batch, capacity = text.ids.shape
        self._cache = torch.zeros(
            len(weights.layers), 2, batch, weights.groups, capacity, weights.width,
            dtype=weights.head.dtype, device=weights.head.device,
        )  # fmt: skip
        places = torch.arange(capacity, dtype=torch.float32, device=weights.head.device)
        angles = torch.outer(places, weights.frequencies)
        self._cosine, self._sine = angles.cos() * weights.scaling, angles.sin() * weights.scaling
        self.tiles = tiles_for(weights.embedding.shape[1])
        self._pdl = launches_early(weights.head.device)
        self._spaces: dict[int, _Space] = {}
        self.cut = Cut()
        self._narrow = only_drafts and weights.embedding.shape[1] <= NARROW_WIDTH
        self._narrow_spaces: dict[int, _NarrowSpace] = {}

    def forward(
        self, rows: int, shift: int, drafted: Tensor, start: Tensor | None = None, out: Tensor | None = None
    ) -> None:
        """Read `rows` tokens of every request from position start + shift on.

        drafted [B, N] int64 stands behind the committed tokens. start [B]: the committed length where None. out [B, K, V] float32: gets the
        logits behind the last K rows.
        """
        start = self.text.length if start is None else start
        narrow = self._narrow and len(start) * rows <= NARROW_ROWS
        (self._forward_narrow if narrow else self._forward)(rows, shift, drafted, start, out)

    def _forward(self, rows: int, shift: int, drafted: Tensor, start: Tensor, out: Tensor | None) -> None:
        w, text, tiles = self.weights, self.text, self.tiles
        batch, capacity = text.ids.shape
        m, hidden = batch * rows, w.embedding.shape[1]
        inner = w.layers[0].down.shape[1]
        space, pdl = self._space(rows), self._pdl
        row_tiles, parts = -(-m // ROWS), -(-hidden // tiles.out.n)  # of M, of D
        most = triton.next_power_of_2(parts)
        shared = w.heads // w.groups
        queries = max(ROWS, triton.next_power_of_2(min(rows, max(1, 64 // shared)) * shared))
        query_tiles = -(-rows // (queries // shared))
        launch = {"launch_pdl": True} if pdl else {}

        def cut(tile: Tile, weight: Tensor) -> dict[str, Any]:
            lines = triton.next_power_of_2(-(-weight.shape[1] * weight.element_size() // 128))
            return {
                "BLOCK_M": ROWS, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "LINES": min(tile.lines, lines) if pdl else 0, "PDL": pdl,
                "num_warps": tile.warps, "num_stages": tile.stages, **launch,
            }  # fmt: skip

        source.embed_kernel[(m,)](
            text.ids, drafted, start, text.length, w.embedding, space.x, space.squares, capacity, drafted.shape[1], rows, shift, hidden, parts,
            triton.next_power_of_2(hidden), most, pdl, **launch,
        )  # fmt: skip
        for layer, (keys, values) in zip(w.layers, self._cache, strict=True):
            source.qkv_kernel[((w.heads + 2 * w.groups) * (w.width // tiles.qkv.n), row_tiles)](
                space.x, space.squares, layer.before_attention, layer.qkv, self._cosine, self._sine, start, space.q, keys, values, m, rows,
                shift, hidden, parts, w.heads, w.groups, capacity, w.epsilon, w.width, most, **cut(tiles.qkv, layer.qkv),
            )  # fmt: skip
            source.attention_kernel[(batch * w.groups * query_tiles, space.shares)](
                space.q, keys, values, start, space.partial, space.state, space.count, space.attended, rows, shift, w.heads, w.groups, capacity,
                query_tiles, w.width, shared, space.shares, queries, KEYS, pdl, **launch,
            )  # fmt: skip
            source.add_kernel[(parts, row_tiles)](
                space.attended,
                layer.out,
                space.x,
                space.squares,
                m,
                hidden,
                w.heads * w.width,
                parts,
                **cut(tiles.out, layer.out),
            )
            source.gate_up_kernel[(-(-inner // tiles.gate_up.n), row_tiles)](
                space.x, space.squares, layer.before_mlp, layer.gate_up, space.hidden, m, hidden, inner, parts, w.epsilon, most,
                **cut(tiles.gate_up, layer.gate_up),
            )  # fmt: skip
            source.add_kernel[(parts, row_tiles)](
                space.hidden, layer.down, space.x, space.squares, m, hidden, inner, parts, **cut(tiles.down, layer.down)
            )
        if out is not None:
            keep = out.shape[1]
            source.head_kernel[(-(-w.vocabulary // tiles.head.n), -(-batch * keep // ROWS))](
                space.x, space.squares, w.norm, w.head, out, batch * keep, rows, keep, hidden, w.vocabulary, parts, out.stride(0),
                out.stride(1), w.epsilon, most, **cut(tiles.head, w.head),
            )  # fmt: skip

    def _forward_narrow(self, rows: int, shift: int, drafted: Tensor, start: Tensor, out: Tensor | None) -> None:
        w, text, cut, pdl = self.weights, self.text, self.cut, self._pdl
        batch, capacity = text.ids.shape
        hidden, inner = w.embedding.shape[1], w.layers[0].down.shape[1]
        slices = -(-inner // cut.inner)
        if rows not in self._narrow_spaces:
            self._narrow_spaces[rows] = _NarrowSpace(w, batch * rows, cut.shares, slices)
        space = self._narrow_spaces[rows]
        block, most = triton.next_power_of_2(hidden), triton.next_power_of_2(slices)
        launch = {"launch_pdl": True} if pdl else {}
        for index, (layer, (keys, values)) in enumerate(zip(w.layers, self._cache, strict=True)):
            narrow_source.attention_kernel[(batch * w.heads, cut.shares)](
                text.ids, drafted, start, text.length, w.embedding, space.middle, space.slices, space.x, layer.before_attention, layer.qkv,
                layer.out, self._cosine, self._sine, keys, values, space.parts, space.state, capacity, drafted.shape[1], rows, shift, hidden,
                w.heads, w.groups, slices, w.epsilon, w.width, block, most, w.heads // w.groups, cut.shares, cut.keys, index == 0, pdl,
                num_warps=cut.attention_warps, **launch,
            )  # fmt: skip
            narrow_source.mlp_kernel[(slices,)](
                space.x, space.parts, space.state, space.middle, layer.before_mlp, layer.gate_up, layer.down, space.slices, batch * rows,
                hidden, inner, w.heads, slices, w.epsilon, block, cut.inner, triton.next_power_of_2(w.heads), cut.shares, pdl,
                num_warps=cut.mlp_warps, **launch,
            )  # fmt: skip
        if out is not None:
            keep = out.shape[1]
            narrow_source.head_kernel[(-(-w.vocabulary // cut.vocabulary),)](
                space.middle, space.slices, w.norm, w.head, out, batch * keep, rows, keep, hidden, w.vocabulary, slices, out.stride(0),
                out.stride(1), w.epsilon, block, cut.vocabulary, most, pdl, num_warps=cut.head_warps, **launch,
            )  # fmt: skip

    def _space(self, rows: int) -> _Space:
        if rows not in self._spaces:
            self._spaces[rows] = _Space(self.weights, self.text.ids.shape[0], rows, self.tiles.out.n)
        return self._spaces[rows]


class _Space:
    """Where a forward of `rows` rows a request keeps its intermediate results."""

    def __init__(self, weights: FusedLlama, batch: int, rows: int, part: int) -> None:
        w, m, device = weights, batch * rows, weights.head.device
        hidden = w.embedding.shape[1]
        self.shares = 4 if batch * w.groups <= 32 and rows <= ROWS else 1  # few programs: split the keys among more
        self.x = torch.empty(m, hidden, device=device)
        self.squares = torch.empty(m, -(-hidden // part), device=device)
        self.q = torch.empty(m, w.heads, w.width, dtype=w.head.dtype, device=device)
        self.partial = torch.empty(m, w.heads, self.shares, w.width, device=device)
        self.state = torch.empty(m, w.heads, self.shares, 2, device=device)
        self.count = torch.zeros(m * w.groups, dtype=torch.int32, device=device)
        self.attended = torch.empty_like(self.q)
        self.hidden = torch.empty(m, w.layers[0].down.shape[1], dtype=w.head.dtype, device=device)


class _NarrowSpace:
    """The same for a forward in parts: see `kernels/narrow.py`."""

    def __init__(self, weights: FusedLlama, m: int, shares: int, slices: int) -> None:
        w, device = weights, weights.head.device
        hidden = w.embedding.shape[1]
        self.x = torch.empty(m, hidden, device=device)
        self.middle = torch.empty_like(self.x)
        self.parts = torch.empty(m, w.heads, shares, hidden, device=device)
        self.state = torch.empty(m, w.heads, shares, 2, device=device)
        self.slices = torch.empty(m, slices, hidden, device=device)


class Draw:
    """Draws a drafter's token of every request on the device: a race with keyed noise, or the largest logit."""

    def __init__(self, batch: int, vocabulary: int, device: Any) -> None:
        tiles = -(-vocabulary // 1024)
        self._shares = 1 if INTERPRETED else min(64, tiles)
        self._tiles = 4 if INTERPRETED else 1
        self._keys = torch.empty(batch * self._shares, dtype=torch.int64, device=device)
        self._counts = torch.zeros(batch, dtype=torch.int32, device=device)
        self._threshold = torch.zeros(batch, 1, device=device)
        self._pdl = launches_early(device)

    def __call__(
        self,
        logits: Tensor,
        settings: Settings,
        seed: Tensor,
        start: Tensor,
        drafted: Tensor,
        index: int,
        shift: int,
        purpose: int,
    ) -> None:
        """logits [B, V] -> drafted[:, index]. Noise of (seed, start + shift, purpose)."""
        truncates = any(settings.cuts)
        if truncates:
            row_thresholds(logits[:, None], settings, self._threshold)
        batch, vocabulary = logits.shape
        source.draw_kernel[(batch * self._shares,)](
            logits, settings.temperature, seed, start, self._threshold, self._keys, self._counts, drafted, vocabulary, logits.stride(0),
            drafted.shape[1], index, shift, purpose, self._shares, self._tiles, triton.next_power_of_2(self._shares), truncates, self._pdl,
            **({"launch_pdl": True} if self._pdl else {}),
        )  # fmt: skip


def commit(drafted: Tensor, verdict: Verdict, active: Tensor, text: Text, out: Tensor) -> None:
    """What a verdict emits becomes text, and one row of `out` [B, 2γ+3]: drafted ids, tokens, tau, status."""
    batch, rows = verdict.tokens.shape
    source.commit_kernel[(batch,)](
        drafted, verdict.tokens, verdict.tau.int(), verdict.status.int(), active, text.ids, text.length, out, text.ids.shape[1], rows - 1,
        max(32, triton.next_power_of_2(rows)),
    )  # fmt: skip
