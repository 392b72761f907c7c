"""The lean forward against transformers, and its own promise: the same bits whatever block a token is read in."""

import pytest
import torch
from worlds import llama

from flashspec.models.catalog import load_family
from flashspec.models.lean import LAYOUTS, LeanLlama, LeanModel, fastest, suits
from flashspec.target import CachedModel

IDS = [(7 * i + 3) % 97 for i in range(150)]


def tiny_llama(**more):
    return llama(sharp=20.0, **more)


@pytest.mark.parametrize("more", [{}, {"head_dim": 16}, {"rope_theta": 500.0}])
def test_float32_equals_transformers(more) -> None:
    model = tiny_llama(**more)
    lean, reference = LeanModel(LeanLlama(model, "float32"), "lean"), CachedModel(model, "reference")
    for tokens, keep in ((IDS[:70], 3), (IDS[:71], 1), ([*IDS[:60], 5, 6], 2), (IDS, 10), (IDS[:1], 1)):
        assert torch.allclose(lean.read(tokens, keep), reference.read(tokens, keep), atol=1e-4)
        assert lean.tokens == tokens


@pytest.mark.parametrize("layout", ["int8", "bfloat16"])
def test_blocks_give_the_same_bits_as_single_tokens(layout) -> None:
    """Also across the steps in which keys are read (64) and in which the cache grows (256)."""
    weights = LeanLlama(tiny_llama(), layout)
    ids = (IDS * 2)[:270]
    single, block = LeanModel(weights, "single"), LeanModel(weights, "block")
    for begin in (58, 250):
        for model in (single, block):
            model.cut(0)
            model.read(ids[:begin])
        rows = torch.cat([single.read(ids[:end]) for end in range(begin + 1, begin + 13)], 1)
        for length in (2, 3, 4, 6, 12):
            block.cut(begin)
            blocks = [block.read(ids[:end], keep=length) for end in range(begin + length, begin + 13, length)]
            assert torch.equal(torch.cat(blocks, 1), rows)


def test_layouts_stay_close_to_float32(embedded_float32) -> None:
    """int8 rows and bfloat16 activations move probabilities a little, and it is this little."""
    module = embedded_float32.models["nano"]
    prompt = embedded_float32.encode("Write a short story about a fox and a river.")
    exact = CachedModel(module, "nano").read(prompt, keep=8).softmax(-1)
    for layout, limit in (("float32", 1e-4), ("bfloat16", 0.03), ("int8", 0.03)):
        got = LeanModel(LeanLlama(module, layout), "nano").read(prompt, keep=8).softmax(-1)
        distance = (got - exact).abs().sum(-1).max() / 2
        assert distance < limit, layout
        assert layout == "float32" or distance > 1e-4


def test_early_exit_shares_weights_and_reads_fewer_layers() -> None:
    weights = LeanLlama(tiny_llama(layers=3), "float32")
    shallow = weights.first(1)
    assert len(shallow.layers) == 1
    assert len(weights.layers) == 3
    assert shallow.layers[0] is weights.layers[0]
    assert not torch.allclose(LeanModel(shallow, "a").read(IDS[:9]), LeanModel(weights, "b").read(IDS[:9]), atol=1e-3)


def test_only_plain_llama_on_a_cpu_suits() -> None:
    assert suits(tiny_llama())
    assert not suits(tiny_llama(attention_bias=True))
    assert not suits(tiny_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))
    from transformers import GPT2Config, GPT2LMHeadModel

    assert not suits(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)))


def test_the_fastest_layout_is_measured_and_taken(embedded_float32) -> None:
    name, seconds = fastest(embedded_float32.models["nano"])
    assert seconds.keys() == set(LAYOUTS)
    assert seconds[name] == min(seconds.values())
    assert load_family("embedded").layout in LAYOUTS
    assert load_family("embedded", layout="bfloat16").layout == "bfloat16"
    assert embedded_float32.layout == "transformers"


def test_a_layout_that_cannot_be_had_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="choose one of auto, transformers"):
        load_family("embedded", layout="int2")


def test_a_failed_read_leaves_an_empty_cache(embedded) -> None:
    model = LeanModel(embedded.lean["nano"], "nano")
    model.read([1, 2, 3])
    with pytest.raises(IndexError):
        model.read([1, 2, 10**6])
    assert model.tokens == []
    assert torch.equal(model.read([1, 2, 3]), LeanModel(embedded.lean["nano"], "nano").read([1, 2, 3]))
