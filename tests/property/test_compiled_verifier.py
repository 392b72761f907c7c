"""The loops that verify and draw on a CPU, against PyTorch."""

import pytest
import torch
from cases import FORMS, PLAIN, RULES, block, differing, params
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import cached, decoder, ids, needs_numba, run

from flashspec import rng, sampling
from flashspec.engine import Request
from flashspec.machine import reason_without_numba
from flashspec.sampling import SamplingParams
from flashspec.verifiers import load_verifier
from flashspec.verifiers.base import BAD_ID, UNUSABLE_ROW, Draft, Settings
from flashspec.verifiers.reference import ReferenceVerifier

pytestmark = needs_numba
REFERENCE = ReferenceVerifier()
COMPILED = None if reason_without_numba() else load_verifier("numba")

slots = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=3)
vocabularies = st.one_of(st.integers(1, 40), st.integers(250, 260), st.integers(1000, 1100), st.integers(2000, 2600))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(1, 3), st.integers(0, 6), vocabularies, st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(RULES), st.sampled_from(FORMS), st.booleans(), st.lists(params, min_size=3, max_size=3),
    st.sampled_from([0.0, 0.05, 0.7, 3.0]),
)  # fmt: skip
def test_same_tokens_as_the_reference(batch, gamma, vocabulary, seed, dtype, rule, form, ragged, some, noise) -> None:
    logits, drafts, setting, keys, places = block(batch, gamma, vocabulary, seed, some[:batch], dtype, ragged, noise)
    found, wanted = (v.verify(logits, drafts[form], setting, rule, keys, places) for v in (COMPILED, REFERENCE))
    assert differing(found, wanted) == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", ["probabilities", "one-hot"])
def test_many_requests(rule, form) -> None:
    """Enough that every part of a rule decides some."""
    logits, drafts, setting, keys, places = block(150, 3, 9, 11, PLAIN, noise=2.0)
    found, wanted = (v.verify(logits, drafts[form], setting, rule, keys, places) for v in (COMPILED, REFERENCE))
    assert int(((wanted.tau > 0) & (wanted.tau < 3)).sum()) > 20
    assert differing(found, wanted) == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("whole_row", [True, False])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_bad_rows_get_a_status_and_a_token_in_range(rule, bad, whole_row, temperature) -> None:
    for row in (0, 1, 3):
        logits, drafts, setting, keys, places = block(2, 3, 700, 7, SamplingParams(temperature=temperature), noise=0.0)
        logits[1, row, slice(None) if whole_row else 5] = bad
        found = COMPILED.verify(logits, drafts["logits"], setting, rule, keys, places)
        assert ((found.tokens >= -1) & (found.tokens < 700)).all()
        assert int(found.status[0]) == 0
        if row < 3:
            assert bool(found.status[1] & UNUSABLE_ROW) == (whole_row or bad != -float("inf"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_foreign_ids_are_rejected(rule, temperature) -> None:
    for form in ("probabilities", "one-hot"):
        logits, drafts, setting, keys, places = block(3, 3, 50, 3, SamplingParams(temperature=temperature), noise=0.0)
        draft = drafts[form]
        draft.ids[0, 0], draft.ids[1, 1], draft.ids[2, 2] = 50, -1, 10**9
        found, wanted = (v.verify(logits, draft, setting, rule, keys, places) for v in (COMPILED, REFERENCE))
        assert (found.status == BAD_ID).all()
        assert differing(found, wanted) == []


def test_an_unknown_rule_is_left_to_the_reference(monkeypatch) -> None:
    from flashspec.verifiers import rules

    monkeypatch.setitem(rules.RULES, "mine", rules.TOKEN)
    logits, drafts, setting, keys, places = block(2, 3, 30, 3, PLAIN)
    mine = COMPILED.verify(logits, drafts["probabilities"], setting, "mine", keys, places)
    assert differing(mine, COMPILED.verify(logits, drafts["probabilities"], setting, "token", keys, places)) == []


@given(
    slots, vocabularies, st.integers(0, 20), st.sampled_from([rng.ACCEPT, rng.RACE, rng.DRAFT]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_numba_and_torch_draw_the_same_bits(slots, vocabulary, offset, purpose) -> None:
    """Uniforms bit by bit; exponentials up to the last places of the logarithm."""
    seed, position = (torch.tensor(column, dtype=torch.int64) for column in zip(*slots, strict=True))
    count = min(vocabulary, 9)
    asked = [(rng.uniforms, count), (rng.exponentials, vocabulary)]
    compiled = [draw(seed, position, n, purpose, offset) for draw, n in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "compiled_loops", lambda _: None)
        plain = [draw(seed, position, n, purpose, offset) for draw, n in asked]
    assert torch.equal(compiled[0], plain[0])
    assert torch.allclose(compiled[1], plain[1], rtol=4e-7, atol=0)


@given(vocabularies, st.integers(1, 3), st.integers(0, 10**6), st.floats(0.05, 20), st.sampled_from([0, 1, 7]))
@settings(max_examples=60, deadline=None)
def test_numba_and_torch_warp_alike(vocabulary, rows, seed, temperature, top_k) -> None:
    """Probabilities up to the last places, and the same where a row cannot be sampled."""
    logits = 9 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    logits[0, 1::3] = float("-inf")
    params = SamplingParams(temperature=temperature, top_k=top_k)
    for odd in (0.0, float("nan"), float("inf"), float("-inf")):
        logits[-1, 0] = odd
        compiled = sampling.warp(logits, params), sampling.has_usable_rows(logits[:, None])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "compiled_loops", lambda _: None)
            plain = sampling.warp(logits, params), sampling.has_usable_rows(logits[:, None])
        assert torch.allclose(compiled[0], plain[0], rtol=1e-4, atol=1e-12, equal_nan=True)
        assert compiled[1].tolist() == plain[1].tolist()


@given(slots, st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_a_token_is_chosen_with_its_own_uniform(slots, offset) -> None:
    seed, position = (torch.tensor(column, dtype=torch.int64) for column in zip(*slots, strict=True))
    weights = torch.rand(len(slots), 300, generator=torch.Generator().manual_seed(offset))
    wanted = rng.inverse(weights, rng.uniforms(seed, position, 1, rng.DRAFT, offset))
    assert rng.choose(weights, seed, position, rng.DRAFT, offset).tolist() == wanted.tolist()


@given(vocabularies, st.integers(0, 10**6), st.floats(1e-9, 1))
@settings(max_examples=60, deadline=None)
def test_numba_and_torch_draw_the_same_token(vocabulary, seed, uniform) -> None:
    weights = torch.rand(1, vocabulary, generator=torch.Generator().manual_seed(seed)) ** 8
    weights[0, 1::3] = 0
    drawn = int(rng.inverse(weights, torch.tensor([[uniform]])))
    below = weights[0].double().cumsum(-1) / weights.double().sum()
    assert weights[0, drawn] > 0
    assert below[drawn] >= uniform - 1e-6
    assert drawn == 0 or below[drawn - 1] <= uniform + 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_whole_runs_are_the_same_in_both(rule) -> None:
    request = Request(60, SamplingParams(temperature=0.9, top_p=0.95), rule, seed=4)
    texts = []
    for name in ("torch", "numba"):
        made = decoder(cached(0), {"draft": cached(1)})
        made.verifier = load_verifier(name)
        rounds = run(made, [3, 1, 4], request, "draft", 3)
        assert {round.backend for round in rounds} == {name}
        texts.append(ids(rounds))
    assert texts[0] == texts[1]


def test_settings_of_each_request_are_its_own() -> None:
    some = [SamplingParams(temperature=0), SamplingParams(temperature=0.5, top_k=3), SamplingParams(temperature=1.4)]
    logits, drafts, setting, keys, places = block(3, 2, 300, 5, some, noise=0.3)
    together = COMPILED.verify(logits, drafts["probabilities"], setting, "block", keys, places).tokens
    for b in range(3):
        one, draft = slice(b, b + 1), drafts["probabilities"]
        alone = COMPILED.verify(
            logits[one], Draft(draft.ids[one], draft.q[one]), Settings.of(some[b], 1, "cpu"), "block", keys[one], places[one]
        )  # fmt: skip
        assert torch.equal(alone.tokens[0], together[b])
