"""10,000 samples from the engine that generates text, a hard gate, and faults that it must reject."""

import numpy as np
import pytest
import torch
from worlds import ScriptedModel, needs_numba, random_logits

from flashspec import rng
from flashspec.check import ALPHA, planted, restricted, run_gate
from flashspec.drafters import ModelDrafter
from flashspec.engine import Block, Request, SpeculativeDecoder
from flashspec.exactness import Bench, gate, impossible
from flashspec.records import Arm
from flashspec.sampling import SamplingParams
from flashspec.verifiers import load_verifier

SAMPLES = 10_000
VOCABULARY = 5
CELLS = [
    ("block", "nano", 0.7),
    ("block", "nano", 1.3),
    ("token", "nano", 1.0),
    ("block", "lookup-else-nano", 1.0),
    ("coupled", "early-exit", 1.3),
]
LIMIT = ALPHA / (5 * len(CELLS))


def small_bench(verifier: str = "torch", spread: float = 1.5) -> Bench:
    target = ScriptedModel(random_logits(VOCABULARY, 1, spread), VOCABULARY)
    return Bench(
        target,
        {"draft": ModelDrafter(ScriptedModel(random_logits(VOCABULARY, 2, spread), VOCABULARY), VOCABULARY)},
        (1, 2),
        load_verifier(verifier),
    )


def smallest_p(
    bench: Bench,
    rule: str = "token",
    gamma: int = 2,
    tokens: int = 3,
    temperature: float = 0.7,
    truth: Bench | None = None,
) -> float:
    params = SamplingParams(temperature=temperature, top_p=0.95)
    texts = bench.sample(
        Arm("draft", gamma), Request(max_new_tokens=tokens, sampling=params, rule=rule, seed=7), SAMPLES
    )
    if impossible(truth or bench, texts, params):
        return 0.0
    return min(result.p_value for result in gate(truth or bench, texts, params))


@pytest.fixture(scope="module")
def embedded_bench(embedded) -> Bench:
    return restricted(embedded)


@pytest.mark.parametrize(("rule", "drafter", "temperature"), CELLS)
def test_embedded_family_passes_the_gate(embedded_bench, rule, drafter, temperature) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9)
    verdict = run_gate(embedded_bench, drafter, rule, params, SAMPLES, LIMIT)
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("verifier", ["torch", pytest.param("numba", marks=needs_numba)])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_scripted_worlds_pass_the_gate(rule, verifier) -> None:
    assert smallest_p(small_bench(verifier), rule) >= LIMIT


class TemperedTarget(ScriptedModel):
    """The temperature that did nothing: multiplying by it undoes the division in the verifier."""

    def read(self, tokens, keep=1):
        return super().read(tokens, keep) * 0.7


class WrongQ(SpeculativeDecoder):
    """Draws from q and tells the verifier another."""

    def _draft(self, *arguments) -> Block:
        block = super()._draft(*arguments)
        if block.q is None:
            return block
        flat = block.q.sqrt()
        return block._replace(q=flat / flat.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    "fault",
    [
        "replacement from p, not the residual",
        "block rule stops at the first failure",
        "block rule without clipping",
        "last accepted token overwritten, no bonus",
    ],
)
def test_planted_faults_fail_the_gate(fault) -> None:
    with planted(fault) as rule:
        assert smallest_p(small_bench(), rule, temperature=1.0) < LIMIT


def test_a_temperature_that_does_nothing_fails_the_gate() -> None:
    bench = small_bench()
    broken = Bench(TemperedTarget(random_logits(VOCABULARY, 1), VOCABULARY), bench.drafters, bench.prompt)
    assert smallest_p(broken, truth=bench) < LIMIT


def test_a_wrong_q_fails_the_gate() -> None:
    bench = small_bench()
    object.__setattr__(bench, "decoder", WrongQ(bench.target, bench.drafters, bench.decoder.tokenizer, ()))
    assert smallest_p(bench) < LIMIT


def test_reused_noise_is_caught(monkeypatch) -> None:
    """Keyed by the token's own position, the block rule would meet again noise that an earlier round has looked at."""
    uniforms = rng.uniforms

    def by_position(seed, position, count, purpose=rng.ACCEPT, offset=0):
        if count == 0:
            return uniforms(seed, position, 0)
        return torch.cat([uniforms(seed, position + offset + i, 1, purpose) for i in range(count)], -1)

    # The target is a fair coin. A first draft of 0 has P_1 = 1/2, the second, drawn from q = p, then fails with u_2 > 1/2; after the
    # replacement 1 the drafter says 0 again, to be accepted with u <= 1/2: never, if that u is u_2.
    coin, biased = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.98, 0.02, 0.0]).log()
    draft = ScriptedModel(lambda context: coin if context[-1] == 0 else biased, 3)
    bench = Bench(
        ScriptedModel(lambda context: coin, 3), {"draft": ModelDrafter(draft, 3)}, (1, 2), load_verifier("torch")
    )
    assert smallest_p(bench, "block") >= LIMIT
    monkeypatch.setattr(rng, "uniforms", by_position)
    assert smallest_p(bench, "block") < LIMIT


def test_the_statistics_have_the_right_level() -> None:
    """Under the null the p-values are uniform: samples from the law itself, 200 times."""
    bench, params = small_bench(), SamplingParams()
    generator = np.random.default_rng(0)
    laws = {(): bench.law((), params)} | {(v,): bench.law((v,), params) for v in range(VOCABULARY)}
    small: list[bool] = []
    for repeat in range(200):
        first = generator.choice(VOCABULARY, p=laws[()] / laws[()].sum(), size=300)
        texts = np.array([[x, generator.choice(VOCABULARY, p=laws[(int(x),)] / laws[(int(x),)].sum())] for x in first])
        small += [result.p_value < 0.05 for result in gate(bench, texts, params, seed=repeat)]
    assert 0.02 < np.mean(small) < 0.09
