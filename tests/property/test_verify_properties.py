"""Integer parameters that shape arrays: B, γ (0 and 1 included), V, for every rule."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspec.sampling import SamplingParams
from flashspec.verifiers.base import Draft, Settings
from flashspec.verifiers.reference import ReferenceVerifier

RULES = st.sampled_from(["token", "block", "coupled"])


def inputs(batch, gamma, vocabulary, one_hot, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(batch, gamma + 1, vocabulary, generator=generator) * 2).to(dtype)
    ids = torch.randint(0, vocabulary, (batch, gamma), generator=generator)
    q = torch.randn(batch, gamma, vocabulary, generator=generator).softmax(-1)
    if one_hot:
        q = torch.nn.functional.one_hot(ids, vocabulary).float()
    keys = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    places = torch.randint(0, 10_000, (batch,), generator=generator)
    return logits, ids, q, keys, places


def verify(logits, ids, q, params, rule, keys, places):
    return ReferenceVerifier().verify(logits, Draft(ids, q), Settings.of(params, len(ids), "cpu"), rule, keys, places)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4), st.integers(0, 6), st.integers(1, 70), st.booleans(), st.integers(0, 10**6), RULES,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([0.5, 1.0]),
)  # fmt: skip
def test_a_batch_equals_each_request_alone(
    batch, gamma, vocabulary, one_hot, seed, rule, dtype, temperature, top_p
) -> None:
    logits, ids, q, keys, places = inputs(batch, gamma, vocabulary, one_hot, seed, dtype)
    params = SamplingParams(temperature=temperature, top_p=top_p)
    together = verify(logits, ids, q, params, rule, keys, places)
    assert ((together.tau >= 0) & (together.tau <= gamma)).all()
    assert (together.tokens < vocabulary).all()
    assert torch.equal((together.tokens >= 0).sum(-1), together.tau + 1)
    for b in range(batch):
        one = slice(b, b + 1)
        alone = verify(logits[one], ids[one], q[one], params, rule, keys[one], places[one])
        assert torch.equal(together.tokens[b], alone.tokens[0])
        tau = int(alone.tau)
        explained = ReferenceVerifier().explain(
            logits, Draft(ids, q), Settings.of(params, batch, "cpu"), rule, keys, places
        )
        assert float(explained.grounds.p[b, tau, int(alone.tokens[0, tau])]) > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(2, 40), st.integers(0, 10**6), RULES)
def test_greedy_accepts_exactly_the_argmax_prefix(gamma, vocabulary, seed, rule) -> None:
    logits, _, _, keys, places = inputs(1, gamma, vocabulary, True, seed, torch.float32)
    best = logits.argmax(-1)
    wrong_at = seed % (gamma + 1)
    ids = best[:, :gamma].clone()
    if wrong_at < gamma:
        ids[0, wrong_at] = (ids[0, wrong_at] + 1) % vocabulary
    q = torch.nn.functional.one_hot(ids, vocabulary).float()
    verdict = verify(logits, ids, q, SamplingParams(temperature=0), rule, keys, places)
    assert int(verdict.tau) == wrong_at
    assert int(verdict.tokens[0, wrong_at]) == int(best[0, wrong_at])


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4), st.integers(0, 5), st.integers(2, 9), st.sampled_from(["q", "logits", "certain"]), st.booleans(), st.booleans(),
    st.integers(0, 10**6), RULES, st.sampled_from([torch.float32, torch.float16]),
)  # fmt: skip
def test_the_short_way_of_greedy_equals_the_formulas(
    batch, gamma, vocabulary, form, foreign, ragged, seed, rule, dtype
) -> None:
    """Few values, so that ties, impossible tokens and hits are frequent; ids outside the vocabulary and blocks of different length too."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape, high: torch.randint(0, high, shape, generator=generator)  # noqa: E731
    logits = draw(batch, gamma + 1, vocabulary, high=3).to(dtype)
    ids = torch.where(draw(batch, gamma, high=3) > 0, logits[:, :gamma].argmax(-1), draw(batch, gamma, high=vocabulary))
    if foreign and gamma:
        ids[0, -1] = vocabulary + 3
    q = draw(batch, gamma, vocabulary, high=3).float() + 1e-9 * (draw(batch, gamma, vocabulary, high=2) > 0)
    q = q / q.sum(-1, keepdim=True).clamp(min=1e-9)
    count = draw(batch, high=gamma + 1).int() if ragged else None
    parts = {"q": {"q": q}, "logits": {"logits": draw(batch, gamma, vocabulary, high=3).to(dtype)}, "certain": {}}[form]
    draft = Draft(ids, num_draft=count, **parts)
    keys, places = draw(batch, high=2**40), draw(batch, high=1000)
    given = (logits, draft, Settings.of(SamplingParams(temperature=0.0), batch, "cpu"), rule, keys, places)
    short, long = ReferenceVerifier().verify(*given), ReferenceVerifier().explain(*given)
    assert short.grounds is None
    for name in ("tokens", "tau", "status"):
        assert torch.equal(getattr(short, name).long(), getattr(long, name).long()), name
