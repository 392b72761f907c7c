"""The law of the emitted tokens as rational numbers, from the functions that the engine runs."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from flashspec import rng
from flashspec.exactness import FAULTS, Case, Scheme, distance, emitted_law, outcomes, random_case, target_law
from flashspec.verifiers import rules
from flashspec.verifiers.reference import coupled
from flashspec.verifiers.rules import BLOCK, TOKEN

CASES = [
    random_case(seed, vocabulary, gamma)
    for vocabulary, gamma in ((2, 1), (3, 1), (3, 2), (2, 3), (4, 2))
    for seed in range(12)
]
SOME = [random_case(seed, 3, 2) for seed in range(10)]


def block_arrays(case: Case, ids: tuple[int, ...]):
    p = np.array([[case.p[ids[:i]] for i in range(len(ids) + 1)]], dtype=object)
    q = np.array([[case.q[ids[:i]] for i in range(len(ids))]], dtype=object)
    return p, q, np.array([ids])


def possible_blocks(case: Case):
    for ids in itertools.product(range(case.vocabulary), repeat=case.gamma):
        chance = Fraction(1)
        for i, x in enumerate(ids):
            chance *= case.q[ids[:i]][x]
        if chance:
            yield ids, chance


def mean_accepted(case: Case, rule) -> Fraction:
    total = Fraction(0)
    for ids, drawn in possible_blocks(case):
        p, q, _ = block_arrays(case, ids)
        total += sum(drawn * chance * tau for _, tau, _, chance in outcomes(rule, p, q, ids))
    return total


def test_token_rule_is_exact() -> None:
    for case in CASES:
        assert emitted_law(case, Scheme(TOKEN)) == target_law(case)


def test_block_rule_is_exact() -> None:
    for case in CASES:
        assert emitted_law(case, Scheme(BLOCK)) == target_law(case)


def test_block_rule_facts() -> None:
    for case in CASES:
        token, block = mean_accepted(case, TOKEN), mean_accepted(case, BLOCK)
        assert block >= token
        if case.gamma == 1:
            assert block == token
        for ids, _ in possible_blocks(case):  # P(tau >= i | x_1..x_i) = P_i
            p, q, array = block_arrays(case, ids)
            chain = [c[0] for c in rules.prefix_probabilities(p, q, array)]
            at_least_all = sum(chance for _, tau, _, chance in outcomes(BLOCK, p, q, ids) if tau >= case.gamma)
            assert at_least_all == chain[-1]
    third, two_thirds = Fraction(1, 3), Fraction(2, 3)
    contexts = [c for n in range(3) for c in itertools.product(range(2), repeat=n)]
    toy = Case(dict.fromkeys(contexts, (third, two_thirds)), dict.fromkeys(contexts, (two_thirds, third)), 2, 2)
    assert (mean_accepted(toy, TOKEN), mean_accepted(toy, BLOCK)) == (Fraction(10, 9), Fraction(11, 9))


def test_one_hot_drafts_make_the_rules_equal() -> None:
    for case in SOME:
        certain = case._replace(
            q={c: tuple(Fraction(v == law.index(max(law))) for v in range(3)) for c, law in case.q.items()}
        )
        assert emitted_law(certain, Scheme(TOKEN)) == emitted_law(certain, Scheme(BLOCK)) == target_law(certain)
        assert mean_accepted(certain, TOKEN) == mean_accepted(certain, BLOCK)


@pytest.mark.parametrize("rule", [TOKEN, BLOCK])
@pytest.mark.parametrize("threshold", [Fraction(1, 5), Fraction(1, 2), Fraction(1)])
def test_early_stop_is_exact_when_the_token_is_kept(rule, threshold) -> None:
    for case in CASES:
        assert emitted_law(case, Scheme(rule, stop_below=threshold)) == target_law(case)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_fail(name) -> None:
    assert any(distance(emitted_law(case, FAULTS[name]), target_law(case)) > 0 for case in SOME)


def test_the_enumeration_itself_is_a_law() -> None:
    for case in SOME:
        assert sum(target_law(case).values()) == 1
        assert sum(emitted_law(case, FAULTS["tokens kept behind a rejection"]).values()) == 1


def test_coupled_rule_emits_the_targets_choices() -> None:
    """Whatever the noise (every assignment of three values) and the draft: the emitted tokens are the target's own choices."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([0.2, 0.7, 1.9])
    noises = torch.tensor(list(itertools.product(range(3), repeat=6)))  # two positions, three tokens
    noise = values[noises].reshape(-1, 2, 3)
    for _ in range(20):
        p = torch.rand(1, 2, 3, generator=generator).expand(len(noise), -1, -1)
        wanted = rng.race(p, noise)
        for drafted in range(3):
            draft = torch.full((len(noise), 1), drafted)
            tau, token = coupled(p, draft, noise)
            first = torch.where(tau == 1, draft[:, 0], token)
            assert torch.equal(first, wanted[:, 0])
            assert torch.equal(token[tau == 1], wanted[tau == 1, 1])
            assert torch.equal(tau == 1, wanted[:, 0] == drafted)


def test_float_tensors_follow_the_rationals() -> None:
    """The same functions on float32 give what they give on Fractions."""
    for case in SOME:
        for ids, _ in possible_blocks(case):
            p, q, array = block_arrays(case, ids)
            tensors = [torch.tensor(a.astype(float), dtype=torch.float32) for a in (p, q)]
            for rule in (TOKEN, BLOCK):
                exact = rule.thresholds(p, q, array).astype(float)
                assert torch.allclose(
                    rule.thresholds(*tensors, torch.tensor(array)), torch.tensor(exact, dtype=torch.float32), atol=1e-5
                )
                for tau in range(case.gamma + 1):
                    weights = rule.replacement(p, q, array, np.array([tau])).astype(float)
                    found = rule.replacement(*tensors, torch.tensor(array), torch.tensor([tau]))
                    assert torch.allclose(found, torch.tensor(weights, dtype=torch.float32), atol=1e-5)
