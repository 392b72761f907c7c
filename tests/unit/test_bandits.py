"""Every policy against known answers: golden indices, regret with its tail, forgetting, objectives. Broken policies must be rejected."""

import numpy as np
import pytest

from flashspec.bandits import (
    POLICIES,
    AcceptanceRate,
    AcceptedTokens,
    Context,
    CostTable,
    Evidence,
    Fixed,
    MeanRate,
    Outcome,
    TokensPerSecond,
    loops,
    policy,
)
from flashspec.bandits.base import Policy
from flashspec.bandits.baselines import UniformRandom, hand_rule
from flashspec.bandits.bounds import auer, auer_pulls, exp3, hedge, lai_robbins, seconds_lost
from flashspec.bandits.changing import EXP3, EXP3S, DiscountedThompson, DiscountedUCB, SlidingWindowUCB
from flashspec.bandits.costs import sources
from flashspec.bandits.full import Hedge, ThroughputGreedy
from flashspec.bandits.rates import ContextualThompson, GeometricThompson, RateThompson, RateUCB
from flashspec.bandits.simulators import Bernoulli, History, Mixture, Piecewise, geometric, play
from flashspec.bandits.stochastic import KLUCB, UCB1, UCB2, UCBV, Averaging, FollowTheLeader, ThompsonSampling, kl
from flashspec.records import Arm

RUNS = 200


class Plain:
    """Tokens themselves as reward, for worlds whose tokens are 0 or 1."""

    range = (0.0, 1.0)

    def __call__(self, chosen, outcome):
        return outcome.tokens


class TotalCountDivisor(UCB1):
    """Broken: divides by all rounds, so the bonus is the same for every arm."""

    def bonus(self):
        return np.where(
            self.pulls > 0,
            np.sqrt(2 * np.log(np.maximum(self.rounds, 1)) / np.maximum(self.rounds, 1))[:, None],
            np.inf,
        )


class Unscaled(UCB1):
    """Broken: the bonus is that of rewards in [0, 1], the rewards are in the hundreds."""

    def bonus(self):
        return np.where(self.pulls > 0, super().bonus() / 100, np.inf)


class NoLogarithm(UCB1):
    """Broken: the bonus does not grow with time."""

    def bonus(self):
        return np.where(self.pulls > 0, np.sqrt(2 / np.maximum(self.pulls, 1)), np.inf)


def game(make, world, rounds: int, runs: int = RUNS, seed: int = 0, **more) -> History:
    return play(make(world.arms, Plain(), runs=runs, seed=seed, **more), world, rounds, seed)


def regret(history: History):
    return history.lost.sum(0)


def told(make, pulls, sums):
    """A policy that has seen these statistics."""
    learner = make([Arm(f"arm {k}", 0) for k in range(len(pulls))], Plain())
    learner.pulls, learner.sums = np.array([pulls]), np.array([sums], float)
    return learner


# ------------------------------------------------------------------------------------------------------------ golden indices

PULLS, SUMS = (10, 5, 1), (7.0, 3.0, 1.0)


def test_golden_indices() -> None:
    index = told(UCB1, PULLS, SUMS).score(Context())[0]
    expected = [s / n + np.sqrt(2 * np.log(16) / n) for s, n in zip(SUMS, PULLS, strict=True)]
    assert np.abs(index - expected).max() < 1e-12
    index = told(KLUCB, PULLS, SUMS).score(Context())[0]
    for q, s, n in zip(index[:2], SUMS, PULLS, strict=False):
        assert abs(n * kl(s / n, q) - np.log(16)) < 1e-6
    assert index[2] == pytest.approx(1)
    ucbv = told(UCBV, PULLS, SUMS)
    ucbv._squares = np.array([SUMS])  # rewards of 0 or 1
    zeta = 1.2 * np.log(16)
    expected = [
        s / n + np.sqrt(2 * (s / n) * (1 - s / n) * zeta / n) + 3 * zeta / n for s, n in zip(SUMS, PULLS, strict=True)
    ]
    assert np.abs(ucbv.score(Context())[0] - expected).max() < 1e-12
    ucb2 = told(UCB2, PULLS, SUMS)
    ucb2._epochs = np.array([[3, 2, 0]])
    tau = np.ceil(1.5 ** np.array([3, 2, 0]))
    expected = np.array(SUMS) / PULLS + np.sqrt(1.5 * np.log(np.e * 16 / tau) / (2 * tau))
    assert np.abs(ucb2.score(Context())[0] - expected).max() < 1e-12


@pytest.mark.parametrize("broken", [TotalCountDivisor, Unscaled, NoLogarithm, FollowTheLeader])
def test_golden_indices_reject_broken_formulas(broken) -> None:
    expected = np.array([s / n + np.sqrt(2 * np.log(16) / n) for s, n in zip(SUMS, PULLS, strict=True)])
    assert np.abs(told(broken, PULLS, SUMS).score(Context())[0] - expected).max() > 1e-3


# ------------------------------------------------------------------------------------------------------------ regret and its tail

TWO = (0.9, 0.6)
THREE = (0.3, 0.5, 0.7)


def within_auer(history: History, means, rounds: int) -> bool:
    """Mean *and* every single run below the bound; and arms really tried."""
    lost = regret(history)
    return (
        lost.mean() <= auer(means, rounds)
        and lost.max() <= auer(means, rounds)
        and history.pulls(len(means)).min() >= 20
    )


def test_ucb1_stays_below_its_bound_in_every_run() -> None:
    history = game(UCB1, Bernoulli(TWO), 10_000)
    assert within_auer(history, TWO, 10_000)
    assert 35 <= regret(history).mean() <= 60
    assert history.pulls(2)[:, 1].mean() <= auer_pulls(0.3, 10_000)


@pytest.mark.parametrize("broken", [FollowTheLeader, TotalCountDivisor])
def test_the_tail_rejects_policies_that_do_not_explore(broken) -> None:
    history = game(broken, Bernoulli(TWO), 10_000, runs=1000)
    assert regret(history).mean() <= auer(TWO, 10_000)  # the usual test is blind to it
    assert not within_auer(history, TWO, 10_000)


def test_ucb1_on_three_arms_and_the_mutant_without_scale() -> None:
    history = game(UCB1, Bernoulli(THREE), 10_000)
    lost, pulls = regret(history), history.pulls(3)
    assert lost.mean() <= auer(THREE, 10_000)
    assert pulls.min() >= 30
    for k, gap in ((0, 0.4), (1, 0.2)):
        assert pulls[:, k].mean() <= auer_pulls(gap, 10_000)
    assert regret(game(Unscaled, Bernoulli(THREE), 10_000)).mean() > auer(THREE, 10_000)


def test_thompson_and_kl_ucb_lie_below_the_asymptotic_line_and_ucb1_above() -> None:
    lost = {
        make: regret(game(make, Bernoulli(THREE), 2000, runs=400)).mean() for make in (ThompsonSampling, KLUCB, UCB1)
    }
    assert lai_robbins(THREE, 2000) == pytest.approx(26.4, abs=0.1)
    assert lost[ThompsonSampling] <= 20
    assert lost[KLUCB] <= 24
    assert lost[UCB1] >= 45


def test_regret_grows_like_the_logarithm() -> None:
    line = lai_robbins(THREE, 10_000) - lai_robbins(THREE, 1000)
    for make, low, high in ((ThompsonSampling, 0.4, 1.2), (KLUCB, 0.8, 2.0)):
        history = game(make, Bernoulli(THREE), 10_000, runs=100)
        assert low * line <= history.lost[1000:].sum(0).mean() <= high * line, make


def test_ucb2_switches_seldom() -> None:
    history = game(UCB2, Bernoulli(TWO), 3000)
    switches = (history.chosen[1:] != history.chosen[:-1]).sum(0)
    assert switches.max() <= 60
    assert regret(history).mean() <= auer(TWO, 3000)
    assert (game(UCB1, Bernoulli(TWO), 3000).chosen[1:] != game(UCB1, Bernoulli(TWO), 3000).chosen[:-1]).sum(
        0
    ).mean() > 60


def test_ucbv_and_exp3_stay_below_their_bounds() -> None:
    assert regret(game(UCBV, Bernoulli(TWO), 3000)).max() <= auer(TWO, 3000)
    for means in (TWO, THREE):
        history = game(EXP3, Bernoulli(means), 10_000, runs=100)
        assert 10 <= regret(history).mean() <= exp3(len(means), 10_000)


def test_hedge_keeps_its_theorem_on_every_sequence() -> None:
    n, arms, runs = 2000, 4, 300
    learner = Hedge(
        [Arm(f"arm {k}", 0) for k in range(arms)], CostTable.constant({Arm(f"arm {k}", 0): 1.0 for k in range(arms)}),
        eta=np.sqrt(8 * np.log(arms) / n), share=0.0, runs=runs,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    own, each = np.zeros(runs), np.zeros((runs, arms))
    for _ in range(n):
        losses = rng.random((runs, arms)) * rng.random((runs, 1)) ** rng.integers(0, 3)
        own += (learner.weights * losses).sum(1)
        each += losses
        learner.suffer(losses)
    assert (own - each.min(1)).max() <= hedge(arms, n)
    assert (own - each.min(1)).max() > 1


CHANGES = {0: (0.8, 0.5, 0.3), 500: (0.3, 0.5, 0.8), 1000: (0.5, 0.8, 0.3), 1500: (0.8, 0.5, 0.3)}


def test_forgetting_pays_where_the_world_changes() -> None:
    lost = {
        make: regret(game(make, Piecewise(CHANGES), 2000, **more)).mean()
        for make, more in (
            (ThompsonSampling, {}), (DiscountedThompson, {"discount": 0.99}), (UCB1, {}), (SlidingWindowUCB, {"window": 500}),
            (DiscountedUCB, {"discount": 0.995}), (EXP3S, {}),
        )
    }  # fmt: skip
    chance = regret(play(UniformRandom(Piecewise(CHANGES).arms, runs=RUNS), Piecewise(CHANGES), 2000)).mean()
    assert chance == pytest.approx(533, abs=15)
    assert lost[ThompsonSampling] >= 2.5 * lost[DiscountedThompson]
    assert lost[SlidingWindowUCB] <= 0.9 * lost[UCB1]
    assert lost[DiscountedUCB] <= lost[UCB1]
    assert lost[EXP3S] < 0.7 * chance


# ------------------------------------------------------------------------------------------------------------ the objective

LOOKUP, G2, G4, BOTH = Arm("lookup", 6), Arm("model", 2), Arm("model", 4), Arm("lookup-else-model", 4)


def workload() -> Mixture:
    """A composite arm whose tokens and seconds are correlated: its mean of rates is first, its rate is not."""
    return Mixture({
        LOOKUP: [(0.42, 0.90, 6, 0.0217), (0.58, 0.0, 0, 0.0210)],
        G2: [(1.0, 0.80, 2, 0.0406)],
        G4: [(1.0, 0.80, 4, 0.0610)],
        BOTH: [(0.42, 0.95, 6, 0.0217), (0.58, 0.72, 4, 0.0640)],
    })  # fmt: skip


def costs_of(world: Mixture) -> CostTable:
    return CostTable.constant(dict(zip(world.arms, world.seconds, strict=True)))


def test_only_the_rate_finds_the_fastest_arm() -> None:
    world = workload()
    assert world.rates.argmax() == 0
    best = {}
    for name, reward in (
        ("rate", TokensPerSecond(costs_of(world))), ("tokens", AcceptedTokens(world.arms)), ("acceptance", AcceptanceRate()),
    ):  # fmt: skip
        history = play(UCB1(world.arms, reward, runs=50), world, 4000)
        best[name] = history.pulls(4)[:, 0].mean() / 4000
    for make in (RateUCB, RateThompson):
        history = play(make(world.arms, costs_of(world), runs=50), world, 5000)
        best[make.__name__] = history.pulls(4)[:, 0].mean() / 5000
    assert best["RateUCB"] >= 0.85, best
    assert best["RateThompson"] >= 0.85, best
    assert best["rate"] >= 0.4, best
    assert best["tokens"] <= 0.25, best
    assert best["acceptance"] <= 0.1, best


def test_mean_of_rates_is_inflated_where_tokens_and_seconds_correlate() -> None:
    world = workload()
    world.reset(200_000, 0)
    inflation = []
    for k in range(4):
        outcome = world.play(np.full(200_000, k))
        inflation.append((outcome.tokens / outcome.seconds).mean() / (outcome.tokens.sum() / outcome.seconds.sum()))
        assert outcome.tokens.mean() == pytest.approx(world.tokens[k], rel=0.01)
        assert outcome.seconds.mean() == pytest.approx(world.seconds[k], rel=0.01)
    assert inflation[3] > 1.08
    assert max(inflation[:3]) < 1.03
    history = play(UCB1(world.arms, MeanRate(costs_of(world)), runs=50), world, 5000)
    assert history.pulls(4)[:, 3].mean() > history.pulls(4)[:, 0].mean()  # it prefers the composite arm


def test_equal_costs_reduce_to_rounds_lost() -> None:
    world = geometric({Arm("a", 3): (0.8, 0.5), Arm("b", 3): (0.5, 0.5)})
    history = play(UniformRandom(world.arms, runs=20), world, 500)
    gap = world.tokens[0] - world.tokens[1]
    expected = 0.5 * gap / world.tokens[0] * history.pulls(2)[:, 1]
    assert np.abs(history.lost.sum(0) - expected).max() < 1e-9


def test_wall_clock_bound() -> None:
    world = geometric(
        {Arm("lookup", 6): (0.5, 1.98 / 79), Arm("model", 2): (0.8, 2.44 / 62), Arm("model", 4): (0.8, 3.36 / 50)}
    )
    costs = costs_of(world)
    reward = TokensPerSecond(costs)
    history = play(UCB1(world.arms, reward, runs=100), world, 10_000)
    bound = seconds_lost(world.rates.tolist(), world.seconds.tolist(), reward.range[1], 10_000)
    assert 1 < history.lost.sum(0).mean() <= history.lost.sum(0).max() <= bound


def test_geometric_thompson_loses_next_to_nothing() -> None:
    world = geometric(
        {Arm("lookup", 6): (0.5, 1.98 / 79), Arm("model", 2): (0.8, 2.44 / 62), Arm("model", 4): (0.8, 3.36 / 50)}
    )
    history = play(GeometricThompson(world.arms, costs_of(world), runs=RUNS), world, 10_000)
    assert history.lost.sum(0).mean() <= 1
    assert history.lost.sum(0).max() <= 3


def test_geometric_thompson_counts_one_rejection_a_block() -> None:
    arms = [Arm("model", 4), Arm("model", 2)]
    learner = GeometricThompson(arms, CostTable.constant(dict.fromkeys(arms, 1.0)), runs=2)
    learner.update(np.array([0, 1]), Outcome(*(np.array(v) for v in ([2, 3], [1.0, 1.0], [4, 2], [1, 2], [0.0, 0.0]))))
    assert learner._accepted.tolist() == [[1], [2]]
    assert learner._refused.tolist() == [[1], [0]]


def test_contextual_thompson_uses_the_match() -> None:
    """Lookup is right whenever there is a match, the model otherwise: no fixed arm can do both."""
    arms = [Arm("plain", 0), Arm("lookup", 6), Arm("model", 3)]
    table = np.array([[1.0] * 7, [1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.12], [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2]])
    rng = np.random.default_rng(0)
    runs = 50
    learner = ContextualThompson(
        arms, CostTable(arms, dict(zip(("plain", "lookup", "model"), table, strict=True))), runs=runs
    )
    alpha = {(1, True): 0.9, (2, True): 0.85, (2, False): 0.85}
    right, tokens, seconds = [], 0, 0.0
    for step in range(400):
        match = rng.random(runs) < 0.5
        chosen = learner.select(Context(np.where(match, 3, 0)))
        drafted = np.array(
            [0 if k == 0 or (k == 1 and not m) else arms[k].gamma for k, m in zip(chosen, match, strict=True)]
        )
        a = np.array([alpha.get((int(k), bool(m)), 0.0) for k, m in zip(chosen, match, strict=True)])
        accepted = np.minimum(rng.geometric(1 - np.minimum(a, 0.999)) - 1, drafted)
        cost = table[chosen, drafted]
        hits = np.minimum(rng.geometric(0.1, runs) - 1, 6)  # what lookup would have had: each token with chance 0.9
        hits = np.where(chosen == 1, accepted, np.minimum(hits, 1 + accepted)) * match
        judged = np.minimum(hits + 1, np.minimum(6, 1 + accepted)) * match
        seen = np.where(match, 3, 0)
        learner.update(chosen, Outcome(1 + accepted, cost, drafted, accepted, np.zeros(runs), hits, judged, seen))
        if step >= 200:
            right.append(np.where(match, chosen == 1, chosen == 2).mean())
            tokens, seconds = tokens + (1 + accepted).sum(), seconds + cost.sum()
    assert np.mean(right) > 0.75
    model_alone = sum(0.85**i for i in range(4)) / 1.6
    assert tokens / seconds > 1.3 * model_alone


def test_contextual_loops_give_the_same_compiled_and_as_python() -> None:
    """And what they give is the product-limit form: 1 + Σ of products of the posterior means, over the table's seconds."""
    arms = [Arm("plain", 0), Arm("lookup", 3), Arm("model", 2), Arm("lookup-else-model", 3)]
    seconds = {name: [1.0, 1.1, 1.2, 1.3] for name in ("plain", "lookup", "model")}
    table = CostTable(arms, seconds, catch_up={"model": 3.2})
    learner = ContextualThompson(arms, table, runs=2)
    rng = np.random.default_rng(4)
    for _ in range(50):
        drafted, match = rng.integers(0, 4, 2), rng.integers(0, 8, 2)
        accepted, hits = rng.integers(0, drafted + 1), rng.integers(0, 4, 2) * (match > 0)
        judged = np.minimum(hits + 1, 3) * (match > 0)
        chosen = learner.select(Context(match, rng.integers(0, 9, (2, 4))))
        learner.update(
            chosen, Outcome(accepted + 1, rng.random(2) + 1, drafted, accepted, np.zeros(2), hits, judged, match)
        )
    noise = rng.standard_normal(learner._shape)
    known = (
        learner._memory,
        learner._layout,
        table.seconds.reshape(-1),
        np.array([0, 5]),
        np.full((2, 4), 7),
        3.0,
        noise,
    )
    tokens, cost = loops.prospects(*known)
    plain = getattr(loops.prospects, "py_func", loops.prospects)(*known)
    assert np.allclose(tokens, plain[0], rtol=1e-12)
    assert np.array_equal(cost, plain[1])
    assert np.allclose(tokens[:, 0], 1.0)
    assert tokens[0, 1] == 1.0  # a lookup without a match
    assert tokens[0, 3] > tokens[0, 2] > 1.0  # both are the model, one longer
    assert tokens[1, 3] == tokens[1, 1]  # both are the lookup
    assert np.allclose(cost[0], [1.0, 1.0, 1.2 + 0.7, 1.3 + 0.7])  # unread tokens spread over 32 rounds
    assert np.allclose(cost[1], [1.0, 1.3, 1.2 + 0.7, 1.3])
    accepted, refused = learner._memory.accepted[0, 1, 0], learner._memory.refused[0, 1, 0]
    pooled = (4 + accepted.sum()) / (6 + accepted.sum() + refused.sum())
    mean = (4 * pooled + accepted) / (4 + accepted + refused)
    learner._place[:] = 0
    middle, spread = learner.components()
    assert middle[0, 2] == pytest.approx((1 + mean[0] + mean[0] * mean[1]) / table.seconds[2, 2])
    assert (spread[:, 1:] >= 0).all()
    assert spread[0, 2] > 0


def test_contextual_thompson_may_choose_before_it_learns() -> None:
    """Asked one round ahead, it still learns what a round gave in the context in which that round began."""
    arms = [Arm("plain", 0), Arm("lookup", 3), Arm("model", 3)]
    table = CostTable(arms, {name: [1.0, 1.1, 1.2, 1.3] for name in ("plain", "lookup", "model")})
    found, late = (Context(np.array([n])) for n in (3, 0))
    once = [np.array([v]) for v in (3, 1.3, 3, 2, 0.0, 1, 2, 3)]
    in_turn, ahead = ContextualThompson(arms, table), ContextualThompson(arms, table)
    in_turn.select(found)
    in_turn.update(np.array([2]), Outcome(*once))
    ahead.select(found)
    ahead.select(late)
    ahead.update(np.array([2]), Outcome(*once))
    assert np.array_equal(in_turn._memory.accepted, ahead._memory.accepted)
    assert np.array_equal(in_turn._memory.refused, ahead._memory.refused)
    other = [*once[:-1], np.array([0])]
    ahead.update(np.array([2]), Outcome(*other))
    in_turn.update(np.array([2]), Outcome(*once))
    assert not np.array_equal(in_turn._memory.accepted, ahead._memory.accepted)


def test_full_information_learns_from_arms_it_never_played() -> None:
    arms = [Arm("plain", 0), Arm("good", 3), Arm("bad", 3)]
    costs = CostTable(arms, {"plain": [1.0] * 4, "good": [1.0, 1.1, 1.2, 1.3], "bad": [1.0, 1.1, 1.2, 1.3]})
    survive = lambda a, n: Evidence(np.tile([a, a**2, a**3], (n, 1)), np.full(n, 3), np.zeros(n, bool))  # noqa: E731
    for make in (ThroughputGreedy, Hedge):
        learner = make(arms, costs, runs=100)
        for _ in range(10):
            learner.observe({"good": survive(0.9, 8), "bad": survive(0.1, 8)})
        assert (learner.select() == 1).mean() > 0.9
        for _ in range(60):
            learner.observe({"good": survive(0.1, 8), "bad": survive(0.9, 8)})
        assert (learner.select() == 2).mean() > 0.9, make


# ------------------------------------------------------------------------------------------------------------ hygiene

ARMS = [Arm("plain", 0), Arm("lookup", 6), Arm("nano", 2), Arm("nano", 4), Arm("lookup-else-nano", 4)]


def table() -> CostTable:
    return CostTable(
        ARMS,
        {
            name: [0.02 + 0.001 * g + 0.004 * g * (name == "nano") for g in range(7)]
            for name in ("plain", "lookup", "nano")
        },
        catch_up={"nano": 0.01},
    )


def fair() -> Mixture:
    return Mixture(
        {
            arm: [(1.0, 0.3 + 0.1 * k if arm.gamma else 0.0, arm.gamma, 0.02 + 0.003 * arm.gamma)]
            for k, arm in enumerate(ARMS)
        }
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("runs", [1, 3])
def test_every_policy_counts_its_pulls_repeats_itself_and_resets(name, runs) -> None:
    learner = policy(name, ARMS, table(), runs=runs, seed=5)
    games = []
    for _ in range(2):
        world = Mixture(dict(zip(learner.arms, _kinds(learner.arms), strict=True)))
        games.append(play(learner, world, 60))
        assert learner.pulls.sum() == 60 * runs
        assert learner.indices().shape == (runs, len(learner.arms))
        estimate, bonus = learner.components()
        assert estimate.shape == bonus.shape == (runs, len(learner.arms))
        learner.reset()
        assert learner.pulls.sum() == 0
        if runs == 1 and hasattr(learner, "costs"):
            learner.costs = table()  # it had gone on measuring
    assert (games[0].chosen == games[1].chosen).all()


def _kinds(arms):
    return [[(1.0, 0.6 if arm.gamma else 0.0, arm.gamma, 0.02 + 0.003 * arm.gamma)] for arm in arms]


@pytest.mark.parametrize("make", [UCB1, UCBV, KLUCB, SlidingWindowUCB, DiscountedUCB, FollowTheLeader])
def test_permuted_arms_give_permuted_indices(make) -> None:
    world, order = Bernoulli((0.2, 0.5, 0.8)), [2, 0, 1]
    one, other = make(world.arms, Plain(), runs=1), make(world.arms, Plain(), runs=1)
    rng = np.random.default_rng(3)
    for t in range(200):
        chosen = t % 3 if t < 3 else int(one.select()[0])
        reward = np.array([float(rng.random() < world.means[chosen])])
        outcome = Outcome(reward, np.ones(1), np.zeros(1, int), np.zeros(1, int), np.zeros(1))
        one.update(np.array([chosen]), outcome)
        other.update(np.array([order.index(chosen)]), outcome)
    assert np.allclose(one.score(Context())[0][order], other.score(Context())[0])


def test_rewards_outside_the_declared_range_raise() -> None:
    learner = UCB1(ARMS, TokensPerSecond(table()))
    assert learner.reward_range[1] == pytest.approx(7 / 0.023)
    with pytest.raises(ValueError, match="declared range"):
        learner.update(np.array([0]), Outcome(*(np.array([v]) for v in (50, 0.02, 0, 0, 0.0))))


@pytest.mark.parametrize("dwell", [1, 4])
def test_minimum_dwell_keeps_an_arm(dwell) -> None:
    learner = policy("random", ARMS, table(), runs=20, dwell=dwell)
    history = play(learner, fair(), 80)
    for start in range(0, 80, dwell):
        assert (history.chosen[start : start + dwell] == history.chosen[start]).all()
    assert (history.chosen[::dwell][1:] != history.chosen[::dwell][:-1]).any()


def test_bad_settings_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        policy("ucb3", ARMS, table())
    with pytest.raises(ValueError, match="at least one arm"):
        UniformRandom([])
    with pytest.raises(ValueError, match="at least 1"):
        UniformRandom(ARMS, dwell=0)
    with pytest.raises(ValueError, match="positive seconds"):
        CostTable(ARMS, dict.fromkeys(("plain", "lookup", "nano"), [0.0] * 7))
    with pytest.raises(ValueError, match="needs a lookup arm"):
        hand_rule([Arm("plain", 0)])


def test_the_hand_rule_and_the_sources_of_arms() -> None:
    rule = hand_rule(ARMS, runs=2)
    assert rule.arms == (Arm("lookup", 6), Arm("nano", 2))
    assert hand_rule([Arm("lookup", 3), Arm("tiny", 2), Arm("nano", 1), Arm("nano", 2)]).arms[1] == Arm("nano", 2)
    assert rule.select(Context(np.array([0, 3]))).tolist() == [1, 0]
    assert [sources(arm) for arm in ARMS] == [
        (None, None),
        ("lookup", None),
        ("nano", "nano"),
        ("nano", "nano"),
        ("lookup", "nano"),
    ]
    assert Fixed(ARMS[2]).select().tolist() == [0]


def test_idle_drafters_are_charged_for_catching_up() -> None:
    costs = table()
    assert costs.catch_up.tolist() == [0, 0, 0.01, 0.01, 0.01]
    for name in ("geometric", "contextual"):
        near, far = (
            policy(name, ARMS, costs, seed=1).score(Context(np.zeros(1, int), np.full((1, 5), unread)))
            for unread in (0, 200)
        )
        assert (far[0, 2:] < near[0, 2:]).all()
        assert np.allclose(far[0, :2] - near[0, :2], (far - near)[0, 0])  # arms without state: the same shift, if any


def test_cost_table_follows_the_machine() -> None:
    costs, still = table(), table()
    price = lambda which, k, drafted, match=False: float(which.price(k, match, drafted))  # noqa: E731
    for _ in range(200):
        costs.refresh(2, None, 2, 2 * price(still, 2, 2))
    assert price(costs, 2, 2) == pytest.approx(2 * price(still, 2, 2), rel=0.05)
    assert price(costs, 3, 2) == price(costs, 4, 2) == price(costs, 2, 2)  # whoever drafts with nano
    # There its lookup drafts: what one source was seen to lose, the others are thought to have lost in part.
    assert price(still, 4, 2, match=True) < price(costs, 4, 2, match=True) < 1.5 * price(still, 4, 2, match=True)
    assert costs.usual[2] == pytest.approx(2 * price(still, 2, 2), rel=0.1)
    before = costs.seconds.copy()
    costs.refresh(4, None, 2, 1.0)  # the composite arm, and nobody knows which part drafted: only its own mean moves
    assert (costs.seconds == before).all()
    slow = table()
    for k in range(400):  # a host half as fast, seen through two arms: the arms nobody plays follow
        arm, drafted = ((0, 0), (2, 2))[k % 2]
        slow.refresh(arm, None, drafted, 2 * price(still, arm, drafted))
    assert price(slow, 4, 5, match=True) > 1.4 * price(still, 4, 5, match=True)
    calm = table()
    calm.refresh(2, None, 2, 100.0)
    assert price(calm, 2, 2) < 1.05 * price(still, 2, 2)  # one hiccup decides nothing


def test_cost_table_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="no row for lookup"):
        CostTable(ARMS, {"plain": [1.0] * 7, "nano": [1.0] * 7})


def test_average_learns_means() -> None:
    learner = Averaging([Arm("a", 0), Arm("b", 0)], Plain())
    for reward in (1.0, 0.0, 1.0):
        learner.update(np.array([0]), Outcome(*(np.array([v]) for v in (reward, 1.0, 0, 0, 0.0))))
    assert learner.components()[0][0, 0] == pytest.approx(2 / 3)
    assert isinstance(learner, Policy)
