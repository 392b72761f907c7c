"""A model writes many chats at once, both sides, on a static cache: the corpus of the distillation.

On a GPU each step of all rows is one CUDA graph, by lengths of the cache in use. Turns are driven by a small state machine on the device:
where a turn ends, the words that open the next one are dictated; everything else is sampled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
_BUCKET = 128  # the cache is read in multiples of this

KINDS = {
    "talk": ["", "", "", "", "Can you", "How do I", "What is", "Why do", "I feel", "Tell me about", "Explain", "Give me", "What are"],
    "stories": ["Write a short story about a", "Tell me a story about two", "Write a poem about", "Write a letter to", "Continue the story:"],
    "code": [
        "Write a Python function that", "Write a JavaScript function", "Write a class in Python", "Explain this code:\n\n```python\n",
        "Rewrite this code with better names:\n\n```python\ndef", "Add a method to this class:\n\n```python\nclass", "Write an SQL query",
        "Write an HTML page", "Fix this function:\n\n```python\ndef",
    ],
    "lists": ["List ten", "Give me a list of", "Name five", "Make a table of", "Write a recipe for", "What are the steps to"],
    "numbers": ["Calculate", "What is 12", "Count from", "Solve the equation", "A train", "If I have 3", "Write the multiplication table of"],
    "reports": [
        "Write a short report about", "Explain what a", "Write an introduction to", "Describe how to", "Explain how to use Python to",
        "Compare", "Explain in words what", "Give a tutorial about", "What is the difference between",
    ],
    "copying": [
        "Print this code again, but", "Repeat this code and rename the", "Copy this list and add", "Add a comment to every line:\n\n```",
        "Here is a Python function:\n\n```python\ndef", "Write the same query for", "Which facts does this text give?\n\n", "Repeat after me:",
    ],
    "rewriting": ["Rewrite this text",
        "Summarize this text:\n\n", "Correct this sentence:", "Shorten this message:\n\n", "Translate into simple words:\n\n"],
}  # fmt: skip


def openings(tokenizer: Any, rows: int, seed: int) -> list[list[int]]:
    """How each chat begins: the system's turn, then a user's turn with the first words of some kind of request, or none."""
    rng = np.random.default_rng(seed)
    begin = tokenizer.encode(SYSTEM + USER)
    kinds = list(KINDS)
    chosen = [KINDS[kinds[i]] for i in rng.integers(len(kinds), size=rows)]
    words = [kind[rng.integers(len(kind))] for kind in chosen]
    return [[*begin, *(tokenizer.encode(word) if word else [])] for word in words]


class Scribe:
    """Writes `batch` rows of `length` tokens with the Llama-form `model`."""

    def __init__(self, model: Any, tokenizer: Any, batch: int, length: int) -> None:
        config = model.config
        self.batch, self.length, self.device = batch, length, model.device
        self.cuda = self.device.type == "cuda"
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._width = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._epsilon = config.rms_norm_eps
        self._layers = [tuple(w.detach().to(dtype) for w in _weights(layer)) for layer in model.model.layers]
        self._norm = model.model.norm.weight.detach().to(dtype)
        self._embedding = model.model.embed_tokens.weight.detach().to(dtype)
        self._head = model.lm_head.weight.detach().to(dtype)
        angles = torch.outer(torch.arange(length, device=self.device).float(), model.model.rotary_emb.inv_freq.float())
        self._cos, self._sin = (torch.cat((f, f), -1).to(dtype) for f in (angles.cos(), angles.sin()))
        padded = -(-length // _BUCKET) * _BUCKET
        shape = (len(self._layers), 2, batch, self._groups, padded, self._width)
        self._cache = torch.zeros(shape, device=self.device, dtype=dtype)
        self._places = torch.arange(padded, device=self.device)
        # What opens the other side's turn, behind the end of a turn (row 0: the user spoke, row 1: the assistant did).
        turns = [tokenizer.encode("\n" + words) for words in (ASSISTANT, USER)]
        wide = max(map(len, turns))
        self._turns = torch.tensor([[*turn, *[-1] * (wide - len(turn))] for turn in turns], device=self.device)
        self._turn_lengths = torch.tensor([len(turn) for turn in turns], device=self.device)
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._text = torch.zeros(batch, length, dtype=torch.int64, device=self.device)
        self._given = torch.full((batch, length), -1, dtype=torch.int64, device=self.device)
        self._temperature = torch.ones(batch, 1, device=self.device)
        self._at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._role = torch.zeros(batch, dtype=torch.int64, device=self.device)
        # Place in the opening of a turn; -1: speaks freely.
        self._dictated = torch.full((batch,), -1, dtype=torch.int64, device=self.device)
        self._graphs: dict[int, Any] = {}

    @torch.no_grad()
    def write(self, begins: list[list[int]], seed: int) -> Tensor:
        """Rows that begin with `begins`, sampled at T = 1 and 0.7 by turns: [batch, length] int64."""
        torch.manual_seed(seed)
        self._given.fill_(-1)
        for row, ids in enumerate(begins):
            self._given[row, : len(ids)] = torch.tensor(ids[: self.length], device=self.device)
        self._text[:, 0] = self._given[:, 0]
        self._temperature.fill_(1.0)
        self._temperature[1::2] = 0.7
        self._at.zero_()
        self._role.zero_()
        self._dictated.fill_(-1)
        for t in range(self.length - 1):
            reach = (t // _BUCKET + 1) * _BUCKET
            if self.cuda:
                self._graph(reach).replay()
            else:
                self._step(reach)
        return self._text.clone()

    def _graph(self, reach: int) -> Any:
        if reach not in self._graphs:
            state = [x.clone() for x in (self._text, self._at, self._role, self._dictated)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(reach)
            torch.cuda.current_stream().wait_stream(stream)
            self._graphs[reach] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[reach]):
                self._step(reach)
            for x, old in zip((self._text, self._at, self._role, self._dictated), state, strict=True):
                x.copy_(old)
        return self._graphs[reach]

    def _step(self, reach: int) -> None:
        """One token of every row: from `_text` at `_at` to the next place."""
        logits = self._forward(self._text.index_select(1, self._at)[:, 0], reach)
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_().neg_()
        drawn = (logits.float() / self._temperature + noise).argmax(-1)
        speaks = self._dictated < 0
        words = self._turns[self._role].gather(1, self._dictated.clamp(min=0)[:, None])[:, 0]
        token = torch.where(speaks, drawn, words)
        given = self._given.index_select(1, self._at + 1)[:, 0]
        token = torch.where(given >= 0, given, token)
        over = ~speaks & (self._dictated + 1 >= self._turn_lengths[self._role])
        begins = speaks & (token == self._end) & (given < 0)
        self._dictated.copy_(torch.where(begins, 0, torch.where(over, -1, torch.where(speaks, -1, self._dictated + 1))))
        self._role.copy_(torch.where(over, 1 - self._role, self._role))
        self._at += 1
        self._text.index_copy_(1, self._at, token[:, None])

    def _forward(self, token: Tensor, reach: int) -> Tensor:
        """Logits [batch, V] behind `token` [batch] at `_at`, attending to the first `reach` places of the cache."""
        b, width = self.batch, self._width
        x = self._embedding[token]
        cos, sin = self._cos.index_select(0, self._at)[:, None], self._sin.index_select(0, self._at)[:, None]
        hidden = torch.where(self._places[:reach] <= self._at, 0.0, float("-inf")).to(x.dtype)
        for layer, (first, qkv_w, out_w, second, gate_up_w, down_w) in enumerate(self._layers):
            qkv = F.linear(self._rms(x, first), qkv_w).view(b, self._heads + 2 * self._groups, width)
            turned = qkv[:, : self._heads + self._groups]
            half = width // 2
            turned = turned * cos + torch.cat((-turned[..., half:], turned[..., :half]), -1) * sin
            keys, values = self._cache[layer]
            keys.index_copy_(2, self._at, turned[:, self._heads :, None])
            values.index_copy_(2, self._at, qkv[:, self._heads + self._groups :, None])
            q = turned[:, : self._heads].reshape(b, self._groups, -1, width)
            weights = (q @ keys[:, :, :reach].transpose(2, 3)) * width**-0.5 + hidden
            mixed = weights.float().softmax(-1).to(x.dtype) @ values[:, :, :reach]
            x = x + F.linear(mixed.reshape(b, -1), out_w)
            gate, up = F.linear(self._rms(x, second), gate_up_w).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down_w)
        return F.linear(self._rms(x, self._norm), self._head)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._epsilon)


def _weights(layer: Any) -> tuple[Tensor, ...]:
    """Norm, q/k/v, output, norm, gate/up, down."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        layer.input_layernorm.weight,
        torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        mlp.down_proj.weight,
    )
