"""The Triton kernels against the PyTorch reference, on a CPU in Triton's interpreter (on a GPU: compiled)."""

import pytest
import torch
from cases import FORMS, PLAIN, RULES, block, differing, params
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import cached, decoder, ids, run

from flashspec import rng
from flashspec.engine import Request
from flashspec.sampling import SamplingParams, warp
from flashspec.verifiers import load_verifier, reason_without_triton
from flashspec.verifiers.base import BAD_ID, UNUSABLE_ROW, Draft, Settings
from flashspec.verifiers.reference import ReferenceVerifier

pytestmark = pytest.mark.skipif(reason_without_triton() is not None, reason=str(reason_without_triton()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = ReferenceVerifier()


@pytest.fixture(scope="module")
def triton():
    return load_verifier("triton", DEVICE)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.integers(1, 3), st.integers(0, 6), st.one_of(st.integers(1, 40), st.integers(1000, 1100), st.integers(2000, 2600)), st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from(RULES), st.sampled_from(FORMS), st.booleans(),
    st.lists(params, min_size=3, max_size=3), st.sampled_from([0.0, 0.05, 0.7, 3.0]),
)  # fmt: skip
def test_same_tokens_as_the_reference(batch, gamma, vocabulary, seed, dtype, rule, form, ragged, some, noise) -> None:
    logits, drafts, setting, keys, places = block(
        batch, gamma, vocabulary, seed, some[:batch], dtype, ragged, noise, DEVICE
    )
    wanted = REFERENCE.verify(logits, drafts[form], setting, rule, keys, places)
    for schedule in ("auto", "split"):
        found = TRITON[schedule].verify(logits, drafts[form], setting, rule, keys, places)
        assert differing(found, wanted) == []


if reason_without_triton() is None:
    from flashspec.verifiers.triton import TritonVerifier

    TRITON = {schedule: TritonVerifier(schedule) for schedule in ("auto", "split")}


@pytest.mark.parametrize("rule", RULES)
def test_tokens_do_not_depend_on_the_batch_slot(triton, rule) -> None:
    logits, drafts, setting, keys, places = block(4, 3, 1500, 5, PLAIN, device=DEVICE)
    draft = drafts["probabilities"]
    together = triton.verify(logits, draft, setting, rule, keys, places).tokens.clone()
    for b in (3, 0, 2):
        one = slice(b, b + 1)
        alone = triton.verify(
            logits[one],
            Draft(draft.ids[one].contiguous(), draft.q[one]),
            Settings.of(PLAIN, 1, DEVICE),
            rule,
            keys[one].clone(),
            places[one].clone(),
        )
        assert torch.equal(alone.tokens[0], together[b])


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_that_do_not_lie_side_by_side(triton, rule) -> None:
    logits, drafts, setting, keys, places = block(2, 3, 999, 6, PLAIN, device=DEVICE)
    wide = torch.zeros(2, 4, 1003, device=DEVICE)
    wide[..., 2:1001] = logits
    view = wide[..., 2:1001]
    wanted = REFERENCE.verify(logits, drafts["one-hot"], setting, rule, keys, places)
    assert differing(triton.verify(view, drafts["one-hot"], setting, rule, keys, places), wanted) == []
    with pytest.raises(ValueError, match="contiguous"):
        triton.verify(
            logits.transpose(1, 2).contiguous().transpose(1, 2), drafts["one-hot"], setting, rule, keys, places
        )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("whole_row", [True, False])
@pytest.mark.parametrize("row", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_bad_rows_get_a_status_and_a_token_in_range(triton, rule, bad, whole_row, row, temperature) -> None:
    some = SamplingParams(temperature=temperature)
    logits, drafts, setting, keys, places = block(2, 3, 700, 7, some, noise=0.0, device=DEVICE)
    logits[1, row, slice(None) if whole_row else 5] = bad
    found = triton.verify(logits, drafts["logits"], setting, rule, keys, places)
    assert ((found.tokens >= -1) & (found.tokens < 700)).all()
    assert (found.tokens[torch.arange(2), found.tau.long()] >= 0).all()
    wanted = REFERENCE.verify(logits, drafts["logits"], setting, rule, keys, places)
    assert int(found.status[0]) == 0
    harmless = bad == -float("inf") and not whole_row
    if row < 3:  # a row of a drafted token; the bonus row counts where it is reached
        assert bool(found.status[1] & UNUSABLE_ROW) == bool(wanted.status[1] & UNUSABLE_ROW) == (not harmless)


@pytest.mark.parametrize("rule", RULES)
def test_foreign_ids_are_rejected_and_reported(triton, rule) -> None:
    for foreign in (-1, 700, 2**40):
        logits, drafts, setting, keys, places = block(2, 3, 700, 8, PLAIN, noise=0.0, device=DEVICE)
        ids = drafts["logits"].ids.clone()
        ids[1, 1] = foreign
        draft = Draft(ids, logits=drafts["logits"].logits)
        found = triton.verify(logits, draft, setting, rule, keys, places)
        wanted = REFERENCE.verify(logits, draft, setting, rule, keys, places)
        assert found.status.tolist() == wanted.status.tolist() == [0, BAD_ID]
        assert int(found.tau[1]) <= 1
        assert differing(found, wanted) == []


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_distributions_accept_everything(triton, rule) -> None:
    logits, drafts, setting, keys, places = block(3, 5, 800, 9, PLAIN, noise=0.0, device=DEVICE)
    assert triton.verify(logits, drafts["logits"], setting, rule, keys, places).tau.tolist() == [5, 5, 5]


def test_workspaces_are_left_ready(triton) -> None:
    for plan in triton._plans.values():
        assert int(plan.counts.abs().sum()) == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=60),
    params,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_thresholds_keep_what_the_warp_keeps(row, some, dtype) -> None:
    """Integers, so that ties are common; the same entries stay."""
    from flashspec.verifiers.triton import row_thresholds

    logits = torch.tensor([[row]], dtype=dtype, device=DEVICE) / 2
    kept = logits[0, 0].float() >= row_thresholds(logits, Settings.of(some, 1, DEVICE))[0, 0]
    wanted = warp(logits[0, 0], some) > 0
    if some.temperature == 0:
        assert kept.all()
    elif not torch.equal(kept, wanted):  # a cumulative sum that meets top_p exactly may round either way, by one value
        edge = logits[0, 0][kept ^ wanted].unique()
        assert len(edge) == 1


@pytest.mark.parametrize("rule", RULES)
def test_engine_writes_the_same_text_with_either_backend(rule) -> None:
    request = Request(max_new_tokens=40, sampling=SamplingParams(temperature=0.8, top_p=0.9), rule=rule, seed=4)
    texts = []
    for name in ("torch", "triton"):
        engine = decoder(cached(0), {"draft": cached(1)})
        engine.verifier = load_verifier(name)
        rounds = run(engine, [3, 1, 4, 1, 5], request, "draft", 3)
        texts.append(ids(rounds))
        assert {round.backend for round in rounds} == {engine.verifier.name}
        assert all(d.p is not None for round in rounds for d in round.drafted)
    assert texts[0] == texts[1]
    assert load_verifier("triton").name.startswith("triton")


def test_both_backends_draw_the_same_uniforms() -> None:
    """Acceptance of a one-hot draft with p(x) = 1/2 happens exactly where the reference's uniform is at most 1/2."""
    logits = torch.zeros(1, 9, 2, device=DEVICE)
    draft = Draft(torch.zeros(1, 8, dtype=torch.int64, device=DEVICE))
    for seed in range(12):
        keys, places = rng.seeds(seed, device=DEVICE), torch.tensor([seed * 2**33 + 5], device=DEVICE)
        found = load_verifier("triton", DEVICE).verify(
            logits, draft, Settings.of(SamplingParams(), 1, DEVICE), "token", keys, places
        )
        assert int(found.tau) == int((rng.uniforms(keys.cpu(), places.cpu(), 8) <= 0.5).long().cumprod(-1).sum())


def test_unknown_and_unavailable_backends_get_a_sentence(monkeypatch) -> None:
    import sys

    with pytest.raises(ValueError, match="choose one of auto, torch, triton, numba"):
        load_verifier("cuda")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="not installed"):
        load_verifier("triton")
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ValueError, match="Numba is not installed"):
        load_verifier("numba")
    assert load_verifier("auto").name == load_verifier("auto", "cuda").name == "torch"


@pytest.mark.parametrize("form", ["probabilities", "logits", "one-hot"])
def test_block_rule_on_many_requests(triton, form) -> None:
    """Enough requests that every part of the block rule decides some: the clipped chain, the surplus of the right row, P_tau in the residual."""
    logits, drafts, setting, keys, places = block(150, 3, 9, 11, PLAIN, noise=2.0, device=DEVICE)
    wanted = REFERENCE.verify(logits, drafts[form], setting, "block", keys, places)
    inside = (wanted.tau > 0) & (wanted.tau < 3)
    assert int(inside.sum()) > 20  # replacements behind accepted tokens
    assert differing(triton.verify(logits, drafts[form], setting, "block", keys, places), wanted) == []
