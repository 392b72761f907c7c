"""Proofs and tests that the emitted text has the target's distribution, and the faults that they must catch.

1. Enumeration in exact rationals: the very functions that the engine runs (`verifiers.rules`, `engine.ends_block`) are given
   tables of Fractions, and the law of the emitted tokens is compared with the target's by `==`.
2. The gate: 10,000 runs of the real engine, Kolmogorov-Smirnov and chi-square against the joint law of three tokens.
3. Planted faults, by name, for both.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from flashspec.bandits import Fixed
from flashspec.drafters.base import Drafter
from flashspec.engine import Request, SpeculativeDecoder, ends_block
from flashspec.records import Arm
from flashspec.sampling import SamplingParams, adjust, warp
from flashspec.target import LanguageModel
from flashspec.verifiers import load_verifier, rules
from flashspec.verifiers.base import Verifier
from flashspec.verifiers.rules import BLOCK, TOKEN, Rule

Law = tuple[Fraction, ...]  # probabilities over the vocabulary
Table = Mapping[tuple[int, ...], Law]  # one law for each context
Joint = dict[tuple[int, ...], Fraction]  # probabilities of token sequences

# ------------------------------------------------------------------------------------------------------ 1. enumeration


class Case(NamedTuple):
    """A tiny world: p and q for every context up to γ tokens."""

    p: Table
    q: Table
    vocabulary: int
    gamma: int


def _same(law: Law) -> Law:
    return law


@dataclass(frozen=True)
class Scheme:
    """How a round is carried out. The defaults are right; a fault exchanges one part."""

    rule: Rule = TOKEN
    target: Callable[[Law], Law] = _same  # the p that the verifier works with
    drawn: Callable[[Law], Law] = _same  # the q that tokens are really drawn from
    stated: Callable[[Law], Law] = _same  # the q that the verifier is told
    stop_below: Fraction = Fraction(0)
    drop_unsure: bool = False  # drop the token that ends a block early instead of keeping it
    keep_behind: bool = False  # keep drafted tokens behind a rejection whose own test passed


def random_case(seed: int, vocabulary: int = 3, gamma: int = 2) -> Case:
    """Random context-dependent laws, zeros included."""
    generator = np.random.default_rng(seed)

    def law() -> Law:
        weights = [int(w) for w in generator.integers(0, 6, vocabulary)]
        total = sum(weights)
        return tuple(Fraction(w, total) for w in weights) if total else law()

    contexts = [c for n in range(gamma + 1) for c in itertools.product(range(vocabulary), repeat=n)]
    return Case({c: law() for c in contexts}, {c: law() for c in contexts}, vocabulary, gamma)


def target_law(case: Case) -> Joint:
    """Plain sampling of γ+1 tokens from p."""
    return _completed({(): Fraction(1)}, case)


def emitted_law(case: Case, scheme: Scheme) -> Joint:
    """Law of the first γ+1 tokens when one speculative round is followed by plain sampling."""
    law: Joint = defaultdict(Fraction)
    for ids, drawn in _blocks(case, scheme):
        prefixes = [ids[:i] for i in range(len(ids) + 1)]
        p = _array([scheme.target(case.p[c]) for c in prefixes])
        q = _array([scheme.stated(case.q[c]) for c in prefixes[:-1]])
        for passes, tau, weights, chance in outcomes(scheme.rule, p, q, ids):
            total = sum(weights)
            for token, weight in enumerate(weights):
                if weight:
                    tail = tuple(
                        x
                        for x, kept in zip(ids[tau + 1 :], passes[tau + 1 :], strict=True)
                        if kept and scheme.keep_behind
                    )
                    law[(*ids[:tau], token, *tail)] += drawn * chance * weight / total
    return _completed(law, case)


def outcomes(
    rule: Rule, p: Any, q: Any, ids: tuple[int, ...]
) -> Iterator[tuple[tuple[bool, ...], int, list[Fraction], Fraction]]:
    """All verdicts on one block: (passes, tau, weights of the next token, probability)."""
    block = np.array([ids], dtype=np.int64)
    if not ids:
        yield (), 0, list(p[0, 0]), Fraction(1)
        return
    thresholds = [min(h, Fraction(1)) for h in rule.thresholds(p, q, block)[0]]
    for passes in itertools.product((True, False), repeat=len(ids)):
        chance = Fraction(1)
        for passed, h in zip(passes, thresholds, strict=True):
            chance *= h if passed else 1 - h
        if chance:
            tau = rule.accepted(np.array([passes]))
            yield passes, int(tau[0]), list(rule.replacement(p, q, block, tau)[0]), chance


def _blocks(case: Case, scheme: Scheme) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every block that can be drafted, with its probability."""

    def grow(ids: tuple[int, ...], chance: Fraction) -> Iterator[tuple[tuple[int, ...], Fraction]]:
        if len(ids) == case.gamma:
            yield ids, chance
            return
        law = scheme.drawn(case.q[ids])
        for token, q_x in enumerate(law):
            if q_x == 0:
                continue
            if ends_block(q_x, scheme.stop_below):
                yield (ids if scheme.drop_unsure else (*ids, token)), chance * q_x
            else:
                yield from grow((*ids, token), chance * q_x)

    return grow((), Fraction(1))


def _completed(law: Joint, case: Case) -> Joint:
    """Cut or extend every sequence to γ+1 tokens, extending with p."""
    done: Joint = defaultdict(Fraction)
    waiting = list(law.items())
    while waiting:
        sequence, chance = waiting.pop()
        if len(sequence) > case.gamma:
            done[sequence[: case.gamma + 1]] += chance
        else:
            waiting += [((*sequence, v), chance * x) for v, x in enumerate(case.p[sequence]) if x]
    return dict(done)


def _array(laws: list[Law]) -> Any:
    """[n] laws -> object array [1, n, V]."""
    return np.array([laws], dtype=object) if laws else np.empty((1, 0, 0), dtype=object)


def distance(one: Joint, other: Joint) -> Fraction:
    """Total variation."""
    return (
        sum((abs(one.get(k, Fraction(0)) - other.get(k, Fraction(0))) for k in one.keys() | other.keys()), Fraction(0))
        / 2
    )


# ------------------------------------------------------------------------------------------------------------- 2. faults


def _unclipped(p: Any, q: Any, ids: Any) -> Any:
    """Block thresholds from the plain product of the ratios."""
    ratio = rules.ratios(p, q, ids)
    chain = [p[:, 0].sum(-1) * 0 + 1]
    for i in range(ratio.shape[1]):
        chain.append(chain[-1] * ratio[:, i])
    h = []
    for i in range(1, ids.shape[1]):
        s = (chain[i][:, None] * p[:, i] - q[:, i]).clip(0).sum(-1)
        rest = s + 1 - chain[i].clip(None, 1)
        h.append((s + (rest == 0)) / (rest + (rest == 0)))
    return rules.stack([*h, chain[-1]]).clip(0, 1)


def _target_itself(p: Any, q: Any, ids: Any, tau: Any) -> Any:
    return rules.row(p, tau)


def _last_overwritten(passes: Any) -> Any:
    """tau that leaves no place for the bonus: the last accepted token is drawn again from the residual."""
    return rules.leading(passes).clip(None, passes.shape[1] - 1)


def _argmax(law: Law) -> Law:
    best = law.index(max(law))
    return tuple(Fraction(v == best) for v in range(len(law)))


def squared(law: Law) -> Law:
    """Temperature 1/2, exactly."""
    total = sum(x * x for x in law)
    return tuple(x * x / total for x in law)


def top_2(law: Law) -> Law:
    """Top-k with k = 2, ties kept."""
    smallest = sorted(law)[-2]
    total = sum(x for x in law if x >= smallest)
    return tuple(x / total if x >= smallest else Fraction(0) for x in law)


FAULTS: dict[str, Scheme] = {
    "block rule with the ordinary residual": Scheme(Rule(BLOCK.thresholds, BLOCK.accepted, TOKEN.replacement)),
    "block rule stops at the first failure": Scheme(replace(BLOCK, accepted=TOKEN.accepted)),
    "block rule without clipping": Scheme(replace(BLOCK, thresholds=_unclipped)),
    "replacement from p, not the residual": Scheme(replace(TOKEN, replacement=_target_itself)),
    "unsure drafted token dropped": Scheme(stop_below=Fraction(1, 2), drop_unsure=True),
    "argmax draft that states a soft q": Scheme(drawn=_argmax),
    "temperature missing on the target": Scheme(
        target=squared
    ),  # the wanted law is p: a square is a temperature too many
    "temperature missing in the stated q": Scheme(drawn=squared),
    "top-k missing in the stated q": Scheme(drawn=top_2),
    "top-k on the target only in the verifier": Scheme(target=top_2),
    "last accepted token overwritten, no bonus": Scheme(replace(TOKEN, accepted=_last_overwritten)),
    "tokens kept behind a rejection": Scheme(keep_behind=True),
}

# --------------------------------------------------------------------------------------------------------------- 3. the gate


@dataclass(frozen=True)
class TestResult:
    """One statistical test: what was compared and how likely such a difference is by chance."""

    name: str
    p_value: float


class RestrictedModel:
    """A real model whose vocabulary is cut to `ids`: its own conditional distributions, at the cost of a table.

    A `CachedModel` as far as the engine and the drafters use one; logits are kept for every context that was visited.
    """

    def __init__(self, model: LanguageModel, ids: Sequence[int]) -> None:
        self.name = model.name
        self.vocabulary = len(ids)
        self.context_length = model.context_length
        self._model = model
        self._ids = list(ids)
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def read(self, tokens: Sequence[int], keep: int = 1) -> Tensor:
        ends = range(len(tokens) - keep + 1, len(tokens) + 1)
        return torch.stack([self._row(tuple(tokens[:end])) for end in ends])[None]

    def held(self, tokens: Sequence[int]) -> int:
        return len(tokens) - 1

    def cut(self, length: int) -> None:
        return None

    def _row(self, context: tuple[int, ...]) -> Tensor:
        if context not in self._rows:
            self._rows[context] = self._model.read([self._ids[t] for t in context])[0, -1, self._ids].float().cpu()
        return self._rows[context]


class IdTokenizer:
    """Stands in for a tokenizer where only ids matter."""

    all_special_ids: tuple[int, ...] = ()
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return "".join(f" {id}" for id in ids)

    def convert_ids_to_tokens(self, id: int) -> str:
        return str(id)

    def __len__(self) -> int:
        return 2**31


@dataclass(frozen=True)
class Bench:
    """A target over a small vocabulary, its drafters, and a prompt: what the gate samples from."""

    target: LanguageModel
    drafters: Mapping[str, Drafter]
    prompt: tuple[int, ...]
    verifier: Verifier = field(default_factory=load_verifier)
    decoder: SpeculativeDecoder = field(init=False)

    def __post_init__(self) -> None:
        decoder = SpeculativeDecoder(self.target, self.drafters, IdTokenizer(), eos=(), verifier=self.verifier)
        object.__setattr__(self, "decoder", decoder)

    def law(self, output: tuple[int, ...], params: SamplingParams) -> np.ndarray:
        """p behind prompt + output: [V] float64."""
        context = [*self.prompt, *output]
        logits = adjust(self.target.read(context)[0], params, context, len(self.prompt), ())
        return warp(logits, params)[0].double().numpy()

    def sample(self, arm: Arm, request: Request, samples: int) -> np.ndarray:
        """`samples` texts from the engine, seeds counted up from the request's: [samples, max_new_tokens] ids."""
        texts = []
        for k in range(samples):
            rounds = self.decoder.rounds(self.prompt, replace(request, seed=request.seed + k, candidates=0), Fixed(arm))
            texts.append([token for round in rounds for token in round.emitted])
        return np.array(texts)


def gate(bench: Bench, texts: np.ndarray, params: SamplingParams, seed: int = 0) -> list[TestResult]:
    """Test `texts` [N, n] against the target's joint law.

    KS on the randomised probability integral transform, which makes the statistic continuous (on raw ids KS is nearly powerless):
    of the joint law in lexicographic order, and of each token given those before it. Chi-square on the joint law, cells of
    expected count >= 5, the rest pooled.
    """
    samples, length = texts.shape
    laws: dict[tuple[int, ...], np.ndarray] = {}

    def law(output: tuple[int, ...]) -> np.ndarray:
        if output not in laws:
            laws[output] = bench.law(output, params)
        return laws[output]

    spread = np.random.default_rng(seed).random((samples,))
    below, width = np.zeros(samples), np.ones(samples)
    results = []
    transformed = np.empty((samples, length))
    for k, text in enumerate(texts.tolist()):
        for i, token in enumerate(text):
            p = law(tuple(text[:i]))
            before = p[:token].sum()
            transformed[k, i] = before + spread[k] * p[token]
            below[k] += width[k] * before
            width[k] *= p[token]
    columns = {"KS joint": below + spread * width} | {f"KS token {i + 1}": transformed[:, i] for i in range(length)}
    for name, values in columns.items():
        results.append(TestResult(name, float(stats.kstest(values, "uniform").pvalue)))
    return [*results, TestResult("chi-square joint", _chi_square(texts, law))]


SMALLEST = 5.0  # expected count of a cell that stands alone in a chi-square test


def _chi_square(texts: np.ndarray, law: Callable[[tuple[int, ...]], np.ndarray]) -> float:
    samples, length = texts.shape
    expected: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        output, chance = waiting.pop()
        if len(output) == length:
            expected[output] = samples * chance
        else:
            waiting += [
                ((*output, v), chance * x) for v, x in enumerate(law(output)) if samples * chance * x >= SMALLEST
            ]
    observed = dict.fromkeys(expected, 0)
    for text in map(tuple, texts.tolist()):
        if text in observed:
            observed[text] += 1
    return chi_square(list(observed.values()), list(expected.values()), samples)


def chi_square(counts: list[float], means: list[float], samples: int) -> float:
    """p-value of the counts in the cells that stand alone, given their means, the rest of the samples being one more cell."""
    rest = samples - sum(means)
    if rest >= SMALLEST:
        counts, means = [*counts, samples - sum(counts)], [*means, rest]
    elif samples > sum(counts) and rest < 1e-6 * samples:
        return 0.0  # a text that the target never writes
    if len(counts) < 2:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in zip(counts, means, strict=True))
    return float(stats.chi2.sf(statistic, len(counts) - 1))


def impossible(bench: Bench, texts: np.ndarray, params: SamplingParams) -> int:
    """How many texts have a token to which the target gives probability 0."""
    return sum(
        any(bench.law(tuple(t[:i]), params)[t[i]] == 0 for i in range(len(t)))
        for t in map(tuple, {*map(tuple, texts.tolist())})
    )
