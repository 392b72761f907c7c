"""Replay and full information against the truth: enumeration, a language with known laws, and really running the other drafter."""

import itertools
from dataclasses import asdict

import numpy as np
import pytest
from worlds import ByteTokenizer, ScriptedModel, cached, decoder, ids, random_logits, run

from flashspec.bandits import Context, CostTable, Fixed, policy
from flashspec.bandits.base import Outcome
from flashspec.bandits.full import ThroughputGreedy
from flashspec.bandits.simulators import MarkovLanguage, TraceReplay
from flashspec.calibration import measure_costs
from flashspec.drafters import LookupDrafter, LookupElseDrafter
from flashspec.engine import Request
from flashspec.evidence import REFRESH, lookup_evidence, survival
from flashspec.records import Arm, Trace, totals, trace_from_json
from flashspec.replay import play_text, regret, spent, world
from flashspec.sampling import SamplingParams

LANGUAGE = MarkovLanguage.random(6, {"near": 0.3, "far": 0.7}, seed=1)


# ------------------------------------------------------------------------------------------------- the law of acceptance given the text


def text_world(ratio, arms, rule="token", seconds=1.0) -> TraceReplay:
    depth = max(arm.gamma for arm in arms)
    n = len(ratio)
    survive = np.stack([survival(ratio, depth, rule) if arm.gamma else np.zeros((n, depth)) for arm in arms])
    drafted = np.array([[arm.gamma] * n for arm in arms])
    return TraceReplay(arms, survive, drafted, np.full((len(arms), n), seconds), np.zeros(n, int))


@pytest.mark.parametrize(("drafter", "gamma"), [("near", 1), ("near", 2), ("near", 4), ("far", 2)])
def test_replay_equals_really_running_the_other_drafter(drafter, gamma) -> None:
    length = 60
    needed = LANGUAGE.rounds(drafter, gamma, length, runs=4000, seed=2)
    ratios, _ = LANGUAGE.realised(drafter, LANGUAGE.write(length, 1500, seed=3))
    replayed = np.array([regret(text_world(row, [Arm(drafter, gamma)])).fixed[0, -1] for row in ratios])
    error = np.hypot(needed.std() / np.sqrt(len(needed)), replayed.std() / np.sqrt(len(replayed)))
    assert abs(needed.mean() - replayed.mean()) < 4 * error
    assert replayed.std() < 0.8 * needed.std()  # and with less noise
    # Acceptances that are a few per cent too small are found out.
    wrong = np.array(
        [regret(text_world(np.minimum(row, 1) ** 1.25, [Arm(drafter, gamma)])).fixed[0, -1] for row in ratios]
    )
    assert abs(needed.mean() - wrong.mean()) > 4 * error


def test_expected_seconds_equal_enumeration() -> None:
    """Every way a block of γ = 3 can fall on 6 positions, added up by hand."""
    ratio = np.array([0.9, 0.4, 1.3, 0.2, 0.7, 0.5])
    for rule, gamma in itertools.product(("token", "block"), (1, 2, 3)):
        rows = survival(ratio, gamma, rule)

        def cost_from(t: int, rows=rows, gamma=gamma) -> float:
            if t >= 6:
                return 0.0
            reached = [1.0, *rows[t], 0.0]
            return 2.0 + sum((reached[k] - reached[k + 1]) * cost_from(t + k + 1) for k in range(gamma + 1))

        result = regret(text_world(ratio, [Arm("x", gamma)], rule, seconds=2.0))
        assert result.fixed[0, -1] == pytest.approx(cost_from(0), abs=1e-12)
        curve = [regret(text_world(ratio, [Arm("x", gamma)], rule, seconds=2.0)).fixed[0, n] for n in range(6)]
        assert np.all(np.diff(curve) >= 0)


def test_the_oracle_equals_trying_every_switching() -> None:
    rng = np.random.default_rng(4)
    ratio = rng.random(6) * 1.2
    arms = [Arm("plain", 0), Arm("x", 1), Arm("x", 3)]
    prices = np.array([[1.0] * 6, [1.3] * 6, [1.9] * 6])
    base = text_world(ratio, arms)
    text = TraceReplay(arms, base.survival, base.drafted, prices, np.zeros(6, int))

    def cost(plan, t=0):
        if t >= 6:
            return 0.0
        k = plan[t]
        reached = [1.0, *text.survival[k, t], 0.0]
        return prices[k, t] + sum((reached[j] - reached[j + 1]) * cost(plan, t + j + 1) for j in range(4))

    best = min(cost(plan) for plan in itertools.product(range(3), repeat=6))
    result = regret(text)
    assert result.oracle[-1] == pytest.approx(best, abs=1e-12)
    assert result.oracle[-1] <= result.regimes + 1e-12 <= result.best_seconds + 1e-9
    assert result.headroom <= result.clairvoyant_headroom


# ------------------------------------------------------------------------------------------------- full information


def test_rao_blackwell_is_unbiased_and_the_product_of_overlaps_is_not() -> None:
    for drafter, gamma in (("near", 4), ("far", 3)):
        text = LANGUAGE.write(gamma + 1, 120_000, seed=5)
        truth = LANGUAGE.expected_tokens(drafter, gamma)[0]
        ratio, overlap = LANGUAGE.realised(drafter, text)
        realised = 1 + np.cumprod(ratio[:, :gamma], 1).sum(1)
        prefix = np.concatenate([np.ones((len(text), 1)), np.cumprod(ratio, 1)[:, : gamma - 1]], 1)
        blackwell = 1 + (prefix * overlap[:, :gamma]).sum(1)
        product = 1 + np.cumprod(overlap[:, :gamma], 1).sum(1)
        for estimate in (realised, blackwell):
            assert abs(estimate.mean() - truth) < 4 * estimate.std() / np.sqrt(len(text))
        assert blackwell.std() < realised.std()
        assert abs(product.mean() - truth) > 6 * product.std() / np.sqrt(len(text))
        one = survival(ratio[0], gamma, "token", overlap[0])
        assert np.allclose(1 + one[0].sum(), blackwell[0])


def test_the_product_is_right_for_a_greedy_target() -> None:
    greedy = MarkovLanguage(np.eye(6)[LANGUAGE.target.argmax(1)], LANGUAGE.drafters)
    text = greedy.write(5, 10)
    ratio, overlap = greedy.realised("near", text)
    assert np.allclose(ratio, overlap)
    assert 1 + np.cumprod(overlap[0, :4]).sum() == pytest.approx(greedy.expected_tokens("near", 4)[0])


def test_lookup_evidence_counts_matching_tokens() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 4, 8]
    found, match = lookup_evidence(LookupDrafter(), text, range(7, 10), 3)
    assert match.tolist() == [2, 3, 4]
    assert found.drafted.tolist() == [3, 3, 3]
    assert found.survival.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]


# ------------------------------------------------------------------------------------------------- the engine's own traces

PROMPT = [3, 1, 4, 1, 5]
VOCABULARY = 9


def engine(sharp=1.5):
    made = decoder(
        ScriptedModel(random_logits(VOCABULARY, 1, sharp), VOCABULARY),
        {
            name: ScriptedModel(random_logits(VOCABULARY, seed, sharp), VOCABULARY)
            for name, seed in (("one", 2), ("two", 3))
        },
    )
    made.drafters["lookup-else-one"] = LookupElseDrafter(LookupDrafter(), made.drafters["one"])
    return made


def trace(rounds, request) -> Trace:
    return Trace("test", "", len(PROMPT), asdict(request), {}, tuple(rounds))


def costs(arms) -> CostTable:
    rows = {
        name: [1.0 + (0.1 + 0.2 * (name in ("one", "two"))) * g for g in range(9)]
        for name in ("plain", "lookup", "one", "two")
    }
    return CostTable(arms, rows)


ARMS = [Arm("plain", 0), Arm("lookup", 4), Arm("one", 1), Arm("one", 3), Arm("two", 2), Arm("lookup-else-one", 3)]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("arm", [Arm("one", 3), Arm("two", 2), Arm("lookup-else-one", 3)])
def test_replay_of_a_trace_equals_running_another_arm(rule, arm) -> None:
    """Texts written plainly, replayed for `arm`, against `arm` really run: expected rounds agree, for every rule and a warp."""
    sampling = SamplingParams(temperature=0.8, top_k=6, presence_penalty=0.3)
    made, length, runs = engine(), 16, 100
    ran, replayed = [], []
    for seed in range(runs):
        request = Request(length, sampling, rule, seed=seed, candidates=0)
        ran.append(len(run(made, PROMPT, request, arm.drafter, arm.gamma)))
        other = Request(length, sampling, rule, seed=seed + (0 if rule == "coupled" else 10_000), candidates=0)
        written = trace(run(made, PROMPT, other), other)
        table = CostTable([arm], dict.fromkeys(("plain", "lookup", "one", "two"), [1.0] * 9))
        replayed.append(regret(world(written, made, [arm], table, PROMPT)).fixed[0, -1])
    if rule == "coupled":
        assert ran == pytest.approx(replayed)  # the seed decides everything, so replay is exact run by run
    else:
        error = np.hypot(np.std(ran), np.std(replayed)) / np.sqrt(runs)
        assert abs(np.mean(ran) - np.mean(replayed)) < 4 * error


def test_regret_of_a_real_run_and_its_parts() -> None:
    request = Request(60, SamplingParams(temperature=0.7), "block", seed=3)
    made = engine()
    table = costs(ARMS)
    written = trace(made.rounds(PROMPT, request, policy("geometric", ARMS, table)), request)
    loaded = trace_from_json(written.to_json())
    assert loaded.rounds == written.rounds
    assert loaded.rounds[5].estimates.keys() == {str(arm) for arm in ARMS}
    fresh = costs(ARMS)
    result = regret(world(loaded, made, ARMS, fresh, PROMPT))
    assert result.fixed.shape == (6, 60)
    text = world(loaded, made, ARMS, fresh, PROMPT)
    assert np.allclose(text.seconds[3, :57], 1.9)  # a block of its own γ, not of the longest
    assert text.seconds[3, -1] == 1.0  # no room for a block before the last token
    assert result.fixed[0, -1] == pytest.approx(60)  # plain: one round a token
    assert result.best_seconds <= 60
    assert result.oracle[-1] <= result.regimes <= result.best_seconds
    seconds = spent(loaded.rounds)
    assert len(seconds) == 60
    assert seconds[-1] == pytest.approx(totals(loaded.rounds).seconds)
    assert ("Nothing to learn" in result.verdict) == (result.headroom < 0.03)


def test_policies_play_a_text_and_stop_at_its_end() -> None:
    request = Request(80, SamplingParams(temperature=0.7), seed=1)
    made = engine()
    written = trace(run(made, PROMPT, request), request)
    text = world(written, made, ARMS, costs(ARMS), PROMPT)
    fixed = regret(text).fixed[:, -1]
    for k in (0, 3):
        text.reset(400, 0)
        only = Fixed(ARMS[k], runs=400)
        alone = text.only([ARMS[k]])
        seconds, _ = play_text(only, [alone])
        assert abs(seconds.mean() - fixed[k]) <= 4 * seconds.std() / 20 + 1e-9
    for name in ("geometric", "throughput-greedy", "hedge", "contextual", "ucb1"):
        seconds, pulls = play_text(policy(name, ARMS, costs(ARMS), runs=20), [text, text])
        assert (seconds > 2 * regret(text).oracle[-1] * 0.9).all()
        assert (pulls.sum(1) > 0).all()


def test_traces_that_cannot_be_replayed_get_a_sentence() -> None:
    made = engine()
    early = Request(5, stop_below=0.1)
    with pytest.raises(ValueError, match="early stops"):
        world(trace(run(made, PROMPT, early), early), made, ARMS, costs(ARMS), PROMPT)
    with pytest.raises(ValueError, match="nothing to replay"):
        world(trace([], Request(5)), made, ARMS, costs(ARMS), PROMPT)


# ------------------------------------------------------------------------------------------------- policies inside the engine


class Noting(ThroughputGreedy):
    """Keeps what it is told."""

    def reset(self):
        super().reset()
        self.contexts: list[Context] = []
        self.outcomes: list[Outcome] = []
        self.evidence: list = []

    def score(self, context):
        self.contexts.append(context)
        return super().score(context)

    def learn(self, chosen, outcome):
        self.outcomes.append(outcome)
        super().learn(chosen, outcome)

    def observe(self, evidence):
        self.evidence.append(evidence)
        super().observe(evidence)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_the_engine_offers_evidence_on_every_position_once(rule) -> None:
    made = engine()
    noting = Noting(ARMS, costs(ARMS))
    request = Request(100, SamplingParams(temperature=0.9), rule, seed=2)
    rounds = list(made.rounds(PROMPT, request, noting))
    text = world(trace(rounds, request), made, ARMS, costs(ARMS), PROMPT)
    scored = 0
    for told in noting.evidence:
        n = len(told["one"].drafted)
        assert told.keys() == {"lookup", "one", "two", "lookup-else-one"}
        expected = text.survival[3, scored : scored + n, :3]
        if rule == "token":  # Rao–Blackwell: the last factor is averaged, so only the mean agrees
            assert not np.allclose(told["one"].survival[:, :3], expected)
        else:
            assert np.allclose(told["one"].survival[:, :3], expected, atol=1e-6)
        assert (told["lookup"].survival == text.survival[1, scored : scored + n]).all()
        scored += n
    assert scored > 100 - 2 * REFRESH * 5
    assert sum(outcome.tokens[0] for outcome in noting.outcomes) == 100
    assert any(context.match_length[0] > 0 for context in noting.contexts)
    assert any(context.unread[0, 4] > 0 for context in noting.contexts)
    assert len(rounds) == len(noting.outcomes)


def test_evidence_does_not_change_the_text() -> None:
    request = Request(60, SamplingParams(temperature=0.9), "coupled", seed=4)
    made = engine()
    texts = {
        tuple(ids(list(made.rounds(PROMPT, request, policy(name, ARMS, costs(ARMS))))))
        for name in ("hedge", "geometric", "contextual", "ucb1")
    }
    assert texts == {tuple(ids(run(engine(), PROMPT, request)))}


def test_unknown_drafters_of_a_policy_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="no drafter 'three'"):
        list(engine().rounds(PROMPT, Request(5), Fixed(Arm("three", 2))))


class Words(ByteTokenizer):
    def encode(self, text, add_special_tokens=True):
        return [3, 1, 4, 1, 5, 9, 2, 6] * 3


def test_costs_are_measured_on_real_rounds() -> None:
    made = decoder(cached(0), {"one": cached(1), "two": cached(2)}, tokenizer=Words())
    arms = [Arm("plain", 0), Arm("lookup", 3), Arm("one", 1), Arm("one", 4), Arm("lookup-else-one", 3), Arm("two", 2)]
    table = measure_costs(made, arms, Request(sampling=SamplingParams(temperature=0.7)))
    assert table.names == ("plain", "lookup", "one", "two")
    assert table.seconds.shape == (4, 5)
    assert table.catch_up[0] == table.catch_up[1] == 0
    assert table.catch_up[2] == table.catch_up[3] == table.catch_up[4]
    assert (
        table.seconds[2, 4] > table.seconds[2, 1] > table.seconds[0, 0]
    )  # four drafts cost more than one, one more than none
    assert table.price(4, True, 3) == table.price(1, True, 3) < table.price(4, False, 3)


def test_costs_need_a_round_of_every_arm() -> None:
    rounds = run(decoder(cached(0)), PROMPT, Request(4))
    with pytest.raises(ValueError, match="No round of one"):
        CostTable.measured([Arm("plain", 0), Arm("one", 1)], rounds)
