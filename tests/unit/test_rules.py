import pytest
import torch

from flashspec import rng
from flashspec.sampling import SamplingParams
from flashspec.verifiers.base import Draft, Settings
from flashspec.verifiers.reference import ReferenceVerifier
from flashspec.verifiers.rules import BLOCK, TOKEN


def judge(p, q, ids, rule="token", seed=0, temperature=1.0):
    settings = Settings.of(SamplingParams(temperature=temperature), 1, "cpu")
    draft = Draft(torch.tensor([ids]), torch.tensor([q]))
    return ReferenceVerifier().verify(
        torch.tensor([p]).log(), draft, settings, rule, rng.seeds(seed), torch.tensor([3])
    )


def next_token(verdict) -> int:
    return int(verdict.tokens[0, int(verdict.tau)])


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_degenerate_rows(rule) -> None:
    half = [0.5, 0.5, 0.0]
    for seed in range(50):
        # p(x) = 0, and q(x) = 0, a token that cannot have been drafted: rejected, replaced from p's support
        for ids, q in (([2], [[0.4, 0.4, 0.2]]), ([0], [[0.0, 1.0, 0.0]])):
            verdict = judge([half, half], q, ids, rule, seed)
            assert next_token(verdict) in (0, 1)
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
    assert next_token(verdict) in (0, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_rows_are_flagged_and_do_not_crash(bad) -> None:
    logits = torch.zeros(2, 3, 5)
    logits[1, 1, 2] = bad
    draft = Draft(torch.zeros(2, 2, dtype=torch.int64), torch.full((2, 2, 5), 0.2))
    settings = Settings.of(SamplingParams(), 2, "cpu")
    verdict = ReferenceVerifier().verify(logits, draft, settings, "block", torch.tensor([1, 1]), torch.tensor([4, 4]))
    assert verdict.status.tolist() == [0, 1]


def test_block_toy_of_the_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), γ = 2: thresholds by hand."""
    p = torch.tensor([[[1 / 3, 2 / 3]] * 3])
    q = torch.tensor([[[2 / 3, 1 / 3]] * 2])
    ids = torch.tensor([[0, 1]])  # ratios 1/2, 2 -> P = 1/2, 1
    # s_1 = max(1/6 - 2/3, 0) + max(1/3 - 1/3, 0) = 0 -> h_1 = 0 / (0 + 1/2); h_2 = P_2 = 1
    assert torch.allclose(BLOCK.thresholds(p, q, ids), torch.tensor([[0.0, 1.0]]), atol=1e-6)
    assert BLOCK.accepted(torch.tensor([[False, True], [True, False], [False, False]])).tolist() == [2, 1, 0]
    assert TOKEN.accepted(torch.tensor([[False, True], [True, False], [True, True]])).tolist() == [0, 1, 2]
