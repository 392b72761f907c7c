import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashspec.sampling import SamplingParams, adjust, has_usable_rows, warp


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({}, []),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"top_k": 40, "top_p": 0.6, "min_p": 0.05},
            [TopKLogitsWarper(40), TopPLogitsWarper(0.6), MinPLogitsWarper(0.05)],
        ),
    ],
)
def test_warp_matches_transformers_processors(temperature, params, warpers) -> None:
    logits = torch.randn(6, 501, generator=torch.Generator().manual_seed(1)) * 3
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    for warper in warpers:
        theirs = warper(None, theirs)
    ours = warp(logits, SamplingParams(temperature=temperature, **params))
    assert torch.allclose(ours, theirs.softmax(-1), atol=1e-6)
    assert torch.allclose(ours.sum(-1), torch.ones(6))


def test_long_nucleus_equals_full_sort() -> None:
    """The shortcut over the largest entries gives what sorting everything gives."""
    logits = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(2))
    theirs = TopPLogitsWarper(0.95)(None, logits).softmax(-1)
    ours = warp(logits, SamplingParams(top_p=0.95))
    assert (
        (ours > 0).sum(-1) - (theirs > 0).sum(-1)
    ).abs().max() <= 1  # one entry at the edge, by rounding of the sums
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_greedy_is_one_hot_at_the_first_maximum() -> None:
    assert warp(torch.tensor([[1.0, 5.0, 5.0]]), SamplingParams(temperature=0)).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_extremes_stay_finite(dtype) -> None:
    logits = torch.tensor([[6e4, -6e4, 0.0]], dtype=dtype)
    for temperature in (0.01, 1.0, 100.0):
        assert torch.isfinite(warp(logits, SamplingParams(temperature=temperature))).all()


def test_repetition_penalty_matches_transformers() -> None:
    logits, seen = torch.randn(1, 30), [3, 4, 3]
    theirs = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([seen]), logits.clone())
    assert torch.allclose(adjust(logits, SamplingParams(repetition_penalty=1.4), seen, 1, ()), theirs)


def test_penalties_see_the_block() -> None:
    """Row i is what a call with the block's first i tokens in the context gives."""
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logit_bias={2: -1.5})
    logits, context, block = torch.randn(4, 9), [1, 2, 5, 5], [5, 5, 7]
    together = adjust(logits, params, context, 2, block)
    for i in range(4):
        alone = adjust(logits[i : i + 1], params, context + block[:i], 2, ())
        assert torch.allclose(together[i], alone[0], atol=1e-6)
    assert not torch.allclose(together[1] - logits[1], together[2] - logits[2])


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(1, 4)
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.25)
    assert adjust(logits, params, [0, 0, 1, 1], 2, ()).tolist() == [[0.0, -1.5, 0.0, 0.0]]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1}, {"temperature": 1e-5}, {"temperature": float("nan")}, {"top_k": -1}, {"top_k": 2.5}, {"top_p": 1.5},
        {"min_p": -0.1}, {"repetition_penalty": 0}, {"presence_penalty": 1e9}, {"frequency_penalty": float("nan")},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: float("inf")}},
    ],
)  # fmt: skip
def test_bad_settings_get_a_sentence(bad) -> None:
    with pytest.raises(ValueError, match=r"choose|give"):
        SamplingParams(**bad)


def test_unusable_rows_are_found() -> None:
    rows = torch.tensor(
        [[0.0, 1.0], [0.0, float("nan")], [float("inf"), 0.0], [-float("inf")] * 2, [-float("inf"), 0.0]]
    )
    assert has_usable_rows(rows[:, None]).tolist() == [True, False, False, False, True]
