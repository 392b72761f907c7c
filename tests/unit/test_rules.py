import pytest
import torch

from flashspec import rng
from flashspec.sampling import SamplingParams
from flashspec.verifiers import reference
from flashspec.verifiers.rules import BLOCK, TOKEN


def judge(p, q, ids, rule="token", seed=0, temperature=1.0):
    logits = torch.tensor([p]).log()
    return reference.verify(
        logits,
        torch.tensor([ids]),
        torch.tensor([q]),
        SamplingParams(temperature=temperature),
        rule,
        rng.seeds(seed),
        torch.tensor([3]),
    )


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_degenerate_rows(rule) -> None:
    half = [0.5, 0.5, 0.0]
    for seed in range(50):
        # p(x) = 0, and q(x) = 0, a token that cannot have been drafted: rejected, replaced from p's support
        for ids, q in (([2], [[0.4, 0.4, 0.2]]), ([0], [[0.0, 1.0, 0.0]])):
            verdict = judge([half, half], q, ids, rule, seed)
            assert int(verdict.next_token) in (0, 1)
            if rule != "coupled":
                assert int(verdict.tau) == 0
        # p = q: always accepted by uniforms, and no residual is ever needed
        if rule != "coupled":
            assert int(judge([half, half, half], [half, half], [0, 1], rule, seed).tau) == 2


def test_equal_up_to_rounding_draws_from_p() -> None:
    """u above a ratio of 1 - 1e-7 leaves no positive residual: the next token still comes from p."""
    p = torch.tensor([[[0.6, 0.4, 0.0]] * 2])
    weights = TOKEN.replacement(p, p[:, :1] * (1 + 1e-6), torch.tensor([[0]]), torch.tensor([0]))
    assert float(weights.max()) == 0
    verdict = judge([[0.6, 0.4, 0.0]] * 2, [[0.60001, 0.40001, 0.0]], [0])
    assert int(verdict.next_token) in (0, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_rows_are_flagged_and_do_not_crash(bad) -> None:
    logits = torch.zeros(2, 3, 5)
    logits[1, 1, 2] = bad
    verdict = reference.verify(
        logits,
        torch.zeros(2, 2, dtype=torch.int64),
        torch.full((2, 2, 5), 0.2),
        SamplingParams(),
        "block",
        torch.tensor([1, 1]),
        torch.tensor([4, 4]),
    )
    assert verdict.usable.tolist() == [True, False]


def test_block_toy_of_the_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), γ = 2: thresholds by hand."""
    p = torch.tensor([[[1 / 3, 2 / 3]] * 3])
    q = torch.tensor([[[2 / 3, 1 / 3]] * 2])
    ids = torch.tensor([[0, 1]])  # ratios 1/2, 2 -> P = 1/2, 1
    # s_1 = max(1/6 - 2/3, 0) + max(1/3 - 1/3, 0) = 0 -> h_1 = 0 / (0 + 1/2); h_2 = P_2 = 1
    assert torch.allclose(BLOCK.thresholds(p, q, ids), torch.tensor([[0.0, 1.0]]), atol=1e-6)
    assert BLOCK.accepted(torch.tensor([[False, True], [True, False], [False, False]])).tolist() == [2, 1, 0]
    assert TOKEN.accepted(torch.tensor([[False, True], [True, False], [True, True]])).tolist() == [0, 1, 2]
