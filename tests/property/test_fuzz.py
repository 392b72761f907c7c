"""Whatever comes in, out comes a run or a sentence: prompts, settings, traces, files, links."""

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspec.records import trace_from_json
from flashspec.ui.live import Controls, generate, messages
from flashspec.ui.page import _from_link

BASE = Controls("Hello", "embedded", "plain", 0, "token", 0.7, 1.0, 2, 0, "torch")
STRANGE = (
    "\x00\x01\x1b[31m",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "مرحبا בעולם",
    "\u202e\u2066",
    "<|im_end|><|endoftext|>",
    "<script>alert(1)</script>",
    "a" * 100_000,
    "\ud83d",
    " \t\n",
)


def ask(**change) -> dict:
    """The last message of a run."""
    return json.loads(list(messages(replace(BASE, **change), analysed=False))[-1])


@pytest.mark.parametrize("prompt", STRANGE)
def test_strange_prompts(prompt) -> None:
    last = ask(prompt=prompt)
    assert last["done"]
    assert last["totals"]["tokens"] > 0 or last["error"].endswith((".", "”"))


@given(st.text(max_size=60))
@settings(max_examples=25, deadline=None)
def test_any_prompt(prompt) -> None:
    last = ask(prompt=prompt)
    assert last["totals"]["tokens"] > 0 or "error" in last


numbers = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-(2**70), 2**70))
words = st.sampled_from(
    ["nano", "bandit", "token", "block", "torch", "triton", "contextual", "", "../../etc/passwd", "💥"]
)


@given(st.fixed_dictionaries({}, optional={
    "drafter": words, "gamma": numbers, "rule": words, "temperature": numbers, "top_p": numbers, "seed": numbers, "max_new_tokens": numbers, "verifier": words,
    "policy": words, "top_k": numbers, "family": words,
}))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_settings(change) -> None:
    change = {"max_new_tokens": 2} | change
    if isinstance(change["max_new_tokens"], (int, float)) and change["max_new_tokens"] > 8:
        change["max_new_tokens"] = 10**9  # refused, not decoded
    last = ask(**change)
    assert last["done"]
    assert last["totals"]["tokens"] > 0 or last["error"].strip()


@given(st.one_of(st.binary(max_size=200), st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=8).map(lambda v: json.dumps(v).encode())))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_any_file_is_a_trace_or_a_sentence(data) -> None:
    with pytest.raises(ValueError, match="trace"):
        trace_from_json(data)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_broken_traces(data) -> None:
    """A good trace with one thing replaced by another is read or refused, never a traceback of another kind."""
    tree = json.loads(_good())
    node, key = tree, data.draw(st.sampled_from(sorted(tree)))
    while isinstance(node[key], (dict, list)) and node[key] and data.draw(st.booleans()):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    node[key] = data.draw(st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=3), st.just([]), st.just({})))
    with contextlib.suppress(ValueError):
        trace_from_json(json.dumps(tree).encode())


@given(st.dictionaries(st.sampled_from(["prompt", "family", "drafter", "gamma", "rule", "temperature", "top_p", "tokens", "seed", "verifier", "policy", "top_k", "x"]), st.text(max_size=12)))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_any_link(query) -> None:
    class Request:
        query_params = query

    assert len(_from_link(Request())) == 12


_TRACE: list[bytes] = []


def _good() -> bytes:
    if not _TRACE:
        _TRACE.append(generate(replace(BASE, drafter="nano", gamma=2, max_new_tokens=6)).to_json())
    return _TRACE[0]
