"""The lean forward against transformers, and its own promise: the same bits whatever block a token is read in."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import llama, needs_numba

from flashspec.machine import reason_without_numba
from flashspec.models.catalog import load_family
from flashspec.models.lean import LAYOUTS, NUMBA, fastest, lay_out, suits
from flashspec.models.packing import quantise
from flashspec.target import CachedModel

IDS = [(7 * i + 3) % 97 for i in range(150)]


LAYOUTS_HERE = [pytest.param(layout, marks=needs_numba if layout == NUMBA else ()) for layout in LAYOUTS]


def tiny_llama(**more):
    return llama(sharp=20.0, **more)


def rounded_llama(**more):
    """Its matrices are int8 rows already, so that laying them out as such loses nothing."""
    model = tiny_llama(**more)
    for linear in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        rows, scale = quantise(linear.weight)
        linear.weight.copy_(rows * scale[:, None])
    return model


@pytest.mark.parametrize("layout", ["float32", pytest.param(NUMBA, marks=needs_numba)])
@pytest.mark.parametrize(
    "more", [{}, {"head_dim": 16}, {"rope_theta": 500.0}, {"num_key_value_heads": 4}, {"rms_norm_eps": 0.1}]
)
def test_a_lean_forward_equals_transformers(layout, more) -> None:
    """On weights that the layout can hold, the same function, up to what rounding to int16 takes from an activation."""
    model = rounded_llama(**more) if layout == NUMBA else tiny_llama(**more)
    lean, reference = lay_out(model, layout).cached("lean"), CachedModel(model, "reference")
    near = 1e-3 if layout == NUMBA else 1e-4
    for tokens, keep in ((IDS[:70], 3), (IDS[:71], 1), ([*IDS[:60], 5, 6], 2), (IDS, 10), (IDS[:1], 1)):
        assert torch.allclose(lean.read(tokens, keep), reference.read(tokens, keep), atol=near)
        assert lean.tokens == tokens


@needs_numba
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(1, 1), (3, 1), (4, 2)]), st.sampled_from([2, 4, 10]), st.integers(1, 67), st.integers(1, 41),
    st.integers(1, 9),
)  # fmt: skip
def test_compiled_loops_fit_any_shape(heads, width, mlp, vocabulary, length) -> None:
    """No width, count or length that is a multiple of anything is taken for granted."""
    more = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": width, "hidden_size": 12}
    model = rounded_llama(vocabulary=vocabulary, intermediate_size=mlp, **more)
    ids = [i % vocabulary for i in range(length)]
    wanted = CachedModel(model, "reference").read(ids, keep=length)
    assert torch.allclose(lay_out(model, NUMBA).cached("numba").read(ids, keep=length), wanted, atol=1e-3)


@needs_numba
def test_products_of_the_largest_numbers_are_exact() -> None:
    """The heaviest row against the largest activations, all of one sign: the sum is just below 2³¹. One step more would overflow."""
    from flashspec.models import compiled

    weight = torch.full((1, 1600), 127.0)
    rows, _, most = compiled._matrix(weight)
    assert most == (2**31 - 1) // (127 * 1600)
    for sign, beyond in ((1, 0), (-1, 0), (1, 1)):
        x = np.full((4, 1600), sign * (int(most) + beyond), np.int16)
        y = np.empty((4, 1), np.float32)
        compiled._product(x, np.ones(4, np.float32), rows, np.ones(1, np.float32), y)
        assert (y == np.float32(sign * 127 * 1600 * (int(most) + beyond))).all() == (not beyond)


@needs_numba
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(odd) -> None:
    model = tiny_llama()
    model.model.embed_tokens.weight[3, 0] = odd
    assert torch.isfinite(lay_out(model, NUMBA).cached("numba").read([1, 2])).all()
    assert not torch.isfinite(lay_out(model, NUMBA).cached("numba").read([1, 2, 3]).amax(-1)).any()


@needs_numba
def test_exp_is_as_exact_as_float32() -> None:
    from flashspec.lanes import exp

    x = np.linspace(-87, 88, 20_001).astype(np.float32)
    got = np.array([exp(v) for v in x])
    assert np.abs(got / np.exp(x.astype(float)) - 1).max() < 4e-7
    assert exp(np.float32(-200)) < 1e-37
    assert np.isnan(exp(np.float32("nan")))


@needs_numba
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 20), st.sampled_from([1, 15, 16, 33, 64, 80, 145]))
def test_weighted_rows_are_added_whatever_their_number(q, n, m) -> None:
    """Four queries together and fewer, blocks of 32 and 16 columns and what is left; what was there stays; each query as if alone."""
    from flashspec.lanes import add_rows

    generator = np.random.default_rng(n + 100 * m)
    weights, rows, y = (generator.standard_normal(shape).astype(np.float32) for shape in ((q, n), (n, m), (q, m)))
    wanted, alone = y + weights.astype(float) @ rows, y.copy()
    add_rows(weights, rows, y)
    for i in range(q):
        add_rows(weights[i : i + 1], rows, alone[i : i + 1])
    assert np.allclose(y, wanted, atol=1e-5)
    assert (y == alone).all()


@needs_numba
def test_the_highest_score_is_found_by_its_bits() -> None:
    from flashspec.models.compiled import _highest

    for x in ([1, 2, -3], [-1, -2.5], [-np.inf, -5], [0.0, -0.0], [np.inf, 3], [-np.inf]):
        assert _highest(np.array(x, np.float32)) == max(x)
    assert np.isnan(_highest(np.array([1, np.nan], np.float32)))


@needs_numba
def test_compiled_models_may_run_in_several_threads() -> None:
    weights = lay_out(tiny_llama(), NUMBA)
    alone = [weights.cached("alone").read(IDS[: 20 + i], keep=5) for i in range(8)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda i: weights.cached("together").read(IDS[: 20 + i], keep=5), range(8)))
    assert all(map(torch.equal, alone, together))


def test_without_numba_the_page_says_why_and_pytorch_serves(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "pip install 'flashspec[cpu]'" in reason_without_numba()
    assert NUMBA not in fastest(tiny_llama())[1]
    with pytest.raises(ValueError, match="Numba is not installed"):
        load_family("embedded", layout=NUMBA)


@pytest.mark.parametrize("layout", LAYOUTS_HERE[:3])
def test_blocks_give_the_same_bits_as_single_tokens(layout) -> None:
    """Also across the steps in which keys are read (64) and in which the cache grows (256)."""
    weights = lay_out(tiny_llama(), layout)
    ids = (IDS * 2)[:270]
    single, block = weights.cached("single"), weights.cached("block")
    for begin in (58, 250):
        for model in (single, block):
            model.cut(0)
            model.read(ids[:begin])
        rows = torch.cat([single.read(ids[:end]) for end in range(begin + 1, begin + 13)], 1)
        for length in (2, 3, 4, 6, 12):
            block.cut(begin)
            blocks = [block.read(ids[:end], keep=length) for end in range(begin + length, begin + 13, length)]
            assert torch.equal(torch.cat(blocks, 1), rows)


@pytest.mark.parametrize("layout", LAYOUTS_HERE)
def test_layouts_stay_close_to_float32(embedded_float32, layout) -> None:
    """bfloat16 activations move probabilities a little, int16 ones a hundredth of that; the embedded models are int8 rows already."""
    module = embedded_float32.models["nano"]
    prompt = embedded_float32.encode("Write a short story about a fox and a river.")
    exact = CachedModel(module, "nano").read(prompt, keep=8).softmax(-1)
    got = lay_out(module, layout).cached("nano").read(prompt, keep=8).softmax(-1)
    distance = (got - exact).abs().sum(-1).max() / 2
    if layout in ("float32", NUMBA):
        assert distance < (5e-4 if layout == NUMBA else 1e-4)
    else:
        assert 1e-4 < distance < 0.03


@pytest.mark.parametrize("layout", LAYOUTS_HERE)
def test_early_exit_reads_the_first_layers(layout) -> None:
    whole, cut = lay_out(tiny_llama(layers=3), layout), lay_out(tiny_llama(layers=3), layout, 1)
    shallow = whole.first(1).cached("early-exit").read(IDS[:9])
    assert torch.equal(shallow, cut.cached("first layer").read(IDS[:9]))
    assert not torch.allclose(shallow, whole.cached("whole").read(IDS[:9]), atol=1e-3)


def test_only_plain_llama_on_a_cpu_suits() -> None:
    assert suits(tiny_llama())
    assert not suits(tiny_llama(attention_bias=True))
    assert not suits(tiny_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))
    from transformers import GPT2Config, GPT2LMHeadModel

    assert not suits(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)))


def test_the_fastest_layout_is_measured_and_taken(embedded_float32) -> None:
    name, seconds = fastest(embedded_float32.models["nano"])
    assert seconds.keys() == set(LAYOUTS) - (set() if reason_without_numba() is None else {NUMBA})
    assert seconds[name] == min(seconds.values())
    assert load_family("embedded").layout in LAYOUTS
    assert load_family("embedded", layout="bfloat16").layout == "bfloat16"
    assert embedded_float32.layout == "transformers"


def test_a_layout_that_cannot_be_had_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="choose one of auto, transformers"):
        load_family("embedded", layout="int2")


@pytest.mark.parametrize("layout", LAYOUTS_HERE)
def test_a_failed_read_leaves_an_empty_cache(layout) -> None:
    weights = lay_out(tiny_llama(), layout)
    model = weights.cached("nano")
    model.read([1, 2, 3])
    with pytest.raises(IndexError):
        model.read([1, 2, 10**6])
    assert model.tokens == []
    assert torch.equal(model.read([1, 2, 3]), weights.cached("nano").read([1, 2, 3]))
