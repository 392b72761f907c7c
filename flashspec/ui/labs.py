"""The experiments of the page: each takes a question's settings and returns what came out, as text and a Plotly figure. Knows no Gradio.

Draws are made by the verifier that the engine runs, thousands of requests at once; a fault is planted by exchanging one of its formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from flashspec import bandits, rng
from flashspec.bandits import CostTable
from flashspec.bandits.bounds import seconds_lost
from flashspec.bandits.simulators import geometric, play
from flashspec.exactness import FAULTS, SMALLEST, chi_square
from flashspec.records import Arm
from flashspec.sampling import SamplingParams, warp
from flashspec.ui.figures import BLUE, COLOURS, GREY, RED, dressed
from flashspec.verifiers import rules
from flashspec.verifiers.base import Draft, Settings
from flashspec.verifiers.reference import ReferenceVerifier
from flashspec.verifiers.rules import RULES, TOKEN, Rule

ALPHA = 0.001  # a test below this rejects: one false alarm in a thousand

SOUND = "none: the verifier as it is"
_RULE_FAULTS = {  # faults of exactness.FAULTS that are an exchanged formula, with the rule that they spoil
    "replacement from p, not the residual": "token",
    "last accepted token overwritten, no bonus": "token",
    "block rule with the ordinary residual": "block",
    "block rule stops at the first failure": "block",
    "block rule without clipping": "block",
}
_TEMPERATURE = "temperature never applied to the target"
_STATED = "temperature missing in the stated q"
_ARGMAX = "argmax draft that states a soft q"
PLANTED = (SOUND, *_RULE_FAULTS, _TEMPERATURE, _STATED, _ARGMAX)


@dataclass(frozen=True)
class Draws:
    """Pairs of emitted tokens [n, 2], the law that they should have [V], and what two tests say of them."""

    pairs: np.ndarray
    law: np.ndarray
    chi_square: float
    kolmogorov: float
    accepted: float  # share of drafted tokens

    @property
    def rejected(self) -> bool:
        return min(self.chi_square, self.kolmogorov) < ALPHA

    @property
    def first(self) -> np.ndarray:
        """Shares of the first token: [V]."""
        return np.bincount(self.pairs[:, 0], minlength=len(self.law)) / len(self.pairs)


def draw(
    p: Sequence[float],
    q: Sequence[float],
    *,
    gamma: int = 2,
    rule: str = "token",
    temperature: float = 1.0,
    fault: str = SOUND,
    samples: int = 10_000,
    seed: int = 0,
) -> Draws:
    """`samples` rounds of a target p and a drafter q (weights over V tokens, the same at every position), and tests of what they emit.

    Raises ValueError with a sentence for weights or settings that make no distribution.
    """
    if len(p) != len(q) or len(p) < 2:
        raise ValueError("Give p and q the same number of tokens, at least 2.")
    if min(*p, *q) < 0 or max(p) <= 0 or max(q) <= 0:
        raise ValueError("A distribution needs weights of 0 or more, and one above 0; raise a bar.")
    if fault not in PLANTED:
        raise ValueError(f"There is no planted fault {fault!r}; choose one of the list.")
    if rule not in RULES:
        raise ValueError(f"There is no rule {rule!r}; choose one of {', '.join(RULES)}.")
    rule = _RULE_FAULTS.get(fault, rule)
    params = SamplingParams(temperature=temperature)
    seeds = torch.arange(samples) + 1_000_003 * seed
    position = torch.zeros(samples, dtype=torch.int64)
    target, drafter = (torch.tensor(w, dtype=torch.float32).log() for w in (p, q))
    law, stated = warp(target[None], params)[0], warp(drafter[None], params)[0]
    drawn = stated
    if fault == _STATED:
        stated = warp(drafter[None], SamplingParams())[0]
    if fault == _ARGMAX:
        drawn = torch.nn.functional.one_hot(stated.argmax(), len(p)).float()
    ids = torch.stack([_drawn(drawn, seeds, position, i) for i in range(gamma)], 1)  # [n, γ]
    if rule == "coupled":
        noise = [rng.exponentials(seeds, position + i, len(p), rng.RACE) for i in range(gamma)]
        ids = torch.stack([rng.race(drawn.expand(samples, -1), n) for n in noise], 1)
    seen = target * temperature if fault == _TEMPERATURE else target  # the verifier divides by the temperature
    settings = Settings.of(params, samples, "cpu")
    draft = Draft(ids, stated.expand(samples, gamma, -1).contiguous())
    logits = seen.expand(samples, gamma + 1, -1).contiguous()
    verdict = ReferenceVerifier(_formulas(fault)).verify(logits, draft, settings, rule, seeds, position)
    # A round that emits one token is followed by another round; plain sampling is as good, since the law is known.
    second = _drawn(law, seeds, position + 999, 0)
    pairs = torch.stack([verdict.tokens[:, 0], torch.where(verdict.tau > 0, verdict.tokens[:, 1], second)], 1).numpy()
    chi, ks = _tests(pairs, law.double().numpy(), seed)
    return Draws(pairs, law.numpy(), chi, ks, float(verdict.tau.float().mean()) / gamma)


def _formulas(fault: str) -> Mapping[str, Rule | None]:
    return {**RULES, _RULE_FAULTS[fault]: FAULTS[fault].rule} if fault in _RULE_FAULTS else RULES


def _drawn(law: Tensor, seeds: Tensor, position: Tensor, offset: int) -> Tensor:
    """A token of `law` [V] for every seed: [n]."""
    return rng.choose(law.expand(len(seeds), -1), seeds, position, rng.DRAFT, offset)


def _tests(pairs: np.ndarray, law: np.ndarray, seed: int) -> tuple[float, float]:
    """p-values of chi-square on the joint law of two tokens and of Kolmogorov-Smirnov on its randomised integral transform."""
    samples, vocabulary = len(pairs), len(law)
    joint = np.outer(law, law).ravel() / law.sum() ** 2
    cell = pairs[:, 0] * vocabulary + pairs[:, 1]
    counts = np.bincount(cell, minlength=vocabulary**2)
    if counts[joint == 0].any():
        return 0.0, 0.0  # a text that the target never writes
    large = samples * joint >= SMALLEST
    chi = chi_square(counts[large].tolist(), (samples * joint[large]).tolist(), samples)
    below = np.concatenate([[0.0], np.cumsum(joint)])
    spread = np.random.default_rng(seed).random(samples)
    return chi, float(stats.kstest(below[cell] + spread * joint[cell], "uniform").pvalue)


# ------------------------------------------------------------------------------------------------------------ experiments


def exactness(
    p: Sequence[float], q: Sequence[float], gamma: int, rule: str, temperature: float, fault: str
) -> tuple[str, Any]:
    """10,000 draws against the target, with or without a planted fault."""
    found = draw(p, q, gamma=int(gamma), rule=rule, temperature=temperature, fault=fault)
    verdict = (
        "**Rejected**: this is not the target's distribution."
        if found.rejected
        else "**Passed**: nothing tells these draws from the target's own."
    )
    text = (
        f"{verdict} 10,000 rounds; chi-square p = {found.chi_square:.2g}, Kolmogorov–Smirnov p = {found.kolmogorov:.2g}, rejected below {ALPHA:g}. "
        f"{found.accepted:.0%} of the drafted tokens were accepted."
    )
    if fault in _RULE_FAULTS and _RULE_FAULTS[fault] != rule:
        text += f" (This fault is one of the {_RULE_FAULTS[fault]} rule, which was used.)"
    if not found.rejected and fault != SOUND:
        text += " The fault is there and was not seen: this p and q hardly show it. Drag the bars apart, or change γ or the temperature."
    return text, _bars(found, "first emitted token")


def temperature_lab(temperature: float) -> tuple[str, Any]:
    """A target whose temperature is never applied, at 1.0 and at another temperature."""
    p, q = (8, 4, 2, 1, 1), (4, 4, 4, 2, 2)
    at_one, other = (draw(p, q, temperature=t, fault=_TEMPERATURE) for t in (1.0, temperature))
    seen = "rejects" if other.rejected else "does not reject"
    text = (
        f"At T = 1.0 chi-square gives p = {at_one.chi_square:.2g}: the fault is **invisible**, dividing by 1 changes nothing. "
        f"At T = {temperature:g} it gives p = {other.chi_square:.2g} and **{seen}** the very same code. Test values that are not the default."
    )
    return text, _bars(other, f"first token at T = {temperature:g}")


def samples_lab(error: float) -> tuple[str, Any]:
    """How often the two tests catch a target that is `error` percent too warm, with 1,000 and with 10,000 samples."""
    if not 0 <= error <= 50:
        raise ValueError("Choose an error between 0 and 50 %.")
    p = np.array([8.0, 4.0, 2.0, 1.0, 1.0])
    law = p / p.sum()
    wrong = p ** (1 / (1 + error / 100))
    wrong /= wrong.sum()
    generator = np.random.default_rng(0)
    power: dict[tuple[str, int], float] = {}
    repeats = 200
    for n in (1_000, 10_000):
        chi, ks = [], []
        for _ in range(repeats):
            tokens = generator.choice(len(p), size=(n, 2), p=wrong)
            a, b = _tests(tokens, law, int(generator.integers(2**31)))
            chi.append(a < ALPHA)
            ks.append(b < ALPHA)
        power["chi-square", n], power["Kolmogorov–Smirnov", n] = float(np.mean(chi)), float(np.mean(ks))
    text = (
        f"A temperature {error:g} % too high, {repeats} experiments of each size. 1,000 samples catch it in **{power['chi-square', 1_000]:.0%}** (chi-square) and "
        f"{power['Kolmogorov–Smirnov', 1_000]:.0%} (KS) of them, 10,000 in **{power['chi-square', 10_000]:.0%}** and {power['Kolmogorov–Smirnov', 10_000]:.0%}."
        + (" With no error, what is left are false alarms: about one in a thousand." if error == 0 else "")
    )
    import plotly.graph_objects as go

    names = ("chi-square", "Kolmogorov–Smirnov")
    bars = [
        go.Bar(name=f"{n:,} samples", x=list(names), y=[power[name, n] for name in names], marker_color=colour, text=[f"{power[name, n]:.0%}" for name in names])
        for n, colour in ((1_000, GREY), (10_000, BLUE))
    ]  # fmt: skip
    return text, dressed(go.Figure(bars), "experiments that catch it", percent=True)


Shape = tuple[int, int, int]  # B, γ, V
_TRIED = ["try", "B", "γ", "V", "verdict"]


def shape_lab(seed: int = 0) -> tuple[str, str]:
    """Search for a planted off-by-one: shapes that people test, until one fails, then smaller ones. What was tried, as an HTML table."""

    def never_the_last(passes: Any) -> Any:
        return rules.leading(passes[:, :-1]) if passes.shape[1] > 1 else passes[:, 0] * 0

    broken = ReferenceVerifier({"token": replace(TOKEN, accepted=never_the_last)})
    tried: list[list[Any]] = []

    def fails(shape: Shape, draws: int) -> bool:
        differs = any(_differ(broken, shape, seed) for seed in range(draws))
        tried.append([len(tried) + 1, *shape, "differs" if differs else "same tokens"])
        return differs

    generator = np.random.default_rng(seed)
    shape: Shape = (0, 0, 0)
    while shape == (0, 0, 0) or not fails(shape, 1):
        batch, gamma, vocabulary = generator.integers((1, 6, 8), (5, 13, 65)).tolist()
        shape = (batch, gamma, vocabulary)
    found, count = shape, len(tried)
    smaller: Shape | None = shape
    while smaller:  # the first smaller shape that still fails, until none does
        shape = smaller
        smaller = next((candidate for candidate in _smaller(shape) if fails(candidate, 16)), None)
    text = (
        f"The planted fault never accepts the last drafted token. Only try {count} found it, at B = {found[0]}, γ = {found[1]}, V = {found[2]}: a whole block must be "
        f"accepted to show it. The search then shrank it to **B = {shape[0]}, γ = {shape[1]}, V = {shape[2]}**, the smallest shape that fails, in {len(tried)} tries. "
        "Had anyone tested γ = 1, the first try would have shown it."
    )
    return text, table(_TRIED, tried)


def _smaller(shape: Shape) -> Iterator[Shape]:
    """Shapes with one side smaller: the smallest first, then half, then one less."""
    for side, least in enumerate((1, 1, 2)):
        for size in dict.fromkeys((least, shape[side] // 2, shape[side] - 1)):
            if least <= size < shape[side]:
                smaller = [*shape]
                smaller[side] = size
                yield smaller[0], smaller[1], smaller[2]


def _differ(broken: ReferenceVerifier, shape: Shape, seed: int) -> bool:
    """Whether `broken` emits other tokens than the reference on random logits of that shape (B, γ, V)."""
    batch, gamma, vocabulary = shape
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, gamma + 1, vocabulary, generator=generator)
    q = (logits[:, :gamma] + torch.randn(batch, gamma, vocabulary, generator=generator)).softmax(-1)  # a fair drafter
    ids = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(batch, gamma)
    seeds, position = torch.arange(batch), torch.full((batch,), seed)
    some = Settings.of(SamplingParams(), batch, "cpu")
    a, b = (v.verify(logits, Draft(ids, q), some, "token", seeds, position) for v in (ReferenceVerifier(), broken))
    return not torch.equal(a.tokens, b.tokens)


POLICIES = (
    "contextual",
    "geometric",
    "rate-thompson",
    "rate-ucb",
    "ucb1",
    "thompson",
    "exp3",
    "epsilon-greedy",
    "random",
)


def arena(
    alphas: Sequence[float], costs: Sequence[float], policies: Sequence[str], rounds: int = 400, runs: int = 48
) -> tuple[str, Any]:
    """Policies on invented arms: acceptance of a drafted token and milliseconds of a round for plain decoding, a small and a larger drafter.

    Raises ValueError with a sentence for settings outside their range.
    """
    if not policies:
        raise ValueError("Choose at least one policy.")
    if any(not 0 <= a <= 1 for a in alphas) or any(c <= 0 for c in costs):
        raise ValueError("Acceptance lies between 0 and 1, and a round takes more than 0 ms.")
    arms = [Arm("plain", 0), Arm("nano", 3), Arm("tiny", 3)]
    world = geometric({arm: (a, c / 1000) for arm, a, c in zip(arms, (0.0, *alphas), costs, strict=True)})
    table = CostTable.constant({arm: c / 1000 for arm, c in zip(arms, costs, strict=True)})
    rates = world.rates
    best = int(rates.argmax())
    gap = float(np.sort(rates)[-1] / np.sort(rates)[-2] - 1)
    import plotly.graph_objects as go

    figure, finals = go.Figure(), dict[str, float]()
    at = np.arange(rounds)
    for name, colour in zip(policies, COLOURS, strict=False):
        history = play(bandits.policy(name, arms, table, runs=runs), world, rounds)
        lost = 1000 * history.lost.cumsum(0)
        finals[name] = float(lost[-1].mean())
        figure.add_scatter(x=at, y=lost.mean(1), name=name, mode="lines", line_color=colour)
    bound = seconds_lost(rates.tolist(), [c / 1000 for c in costs], 4.0, rounds) if gap > 1e-9 else 0.0
    listed = ", ".join(f"{arm} {rate:.0f}" for arm, rate in zip(arms, rates, strict=True))
    winner = min(finals, key=lambda name: finals[name])
    text = f"Tokens per second of always the same arm: {listed}. Best: **{arms[best]}**, {gap:.1%} ahead of the next. "
    if gap < 0.03:
        text += "**Nothing to learn here**: whatever a policy finds out is worth less than 3 %. All it can do is lose what trying costs. "
    text += f"After {rounds} rounds {winner} has lost least, {finals[winner]:.0f} ms on average over {runs} games. "
    if gap > 1e-9:
        text += (
            f"UCB1's guarantee for these arms allows {1000 * bound:,.0f} ms: true for it, and far from what happens."
        )
    return text, dressed(figure, "milliseconds lost (mean)", x="rounds")


def kernel_lab() -> tuple[str, Any]:
    """Triton against PyTorch by shape: measured here on a GPU, else the saved measurement."""
    from flashspec.bench import report, verify
    from flashspec.models.catalog import assets

    if torch.cuda.is_available():
        result = verify.run(gammas=(1, 4), vocabularies=(32_000, 151_936), compile_shapes=0, keep=lambda _: None)
        where = "Measured here, just now"
    else:
        result = report.load(assets() / "benchmarks" / "verify_h200.json")
        where = "There is no GPU here, so this is the saved measurement"
    rows = [row for row in result["rows"] if row["gamma"] == 4]
    slower = [row for row in rows if row["graph"]["triton"] > row["graph"]["eager"]]
    names = [f"{row['B']} × {row['V']:,}" for row in rows]
    ratios = [row["graph"]["eager"] / row["graph"]["triton"] for row in rows]
    import plotly.graph_objects as go

    figure = go.Figure(
        [
            go.Scatter(
                name=label, x=names, y=[row["graph"][key] for row in rows], mode="lines+markers", line_color=colour
            )
            for key, label, colour in (("triton", "Triton", BLUE), ("eager", "PyTorch", RED))
        ]
    )
    figure.update_yaxes(type="log")
    losers = ", ".join(f"{row['B']} × {row['V']:,}" for row in slower)
    text = (
        f"{where}: {result['device']}, {result['date']}. Token rule, γ = 4, one verification inside a CUDA graph. Triton is {min(ratios):.1f} to {max(ratios):.1f} times as fast as eager "
        f"PyTorch; **slower at: {losers or 'no shape'}**."
    )
    return text, dressed(figure, "µs a verification", x="requests × vocabulary")


def capabilities() -> str:
    """What this machine can do and the command that adds what is missing, as an HTML table."""
    import importlib.util
    import platform

    from flashspec.machine import reason_without_numba
    from flashspec.models.catalog import FAMILIES, is_local
    from flashspec.verifiers import reason_without_triton

    cuda = torch.cuda.is_available()
    reason = reason_without_triton()
    triton = (
        "yes"
        if cuda and reason is None
        else "in its interpreter only, slow and meant for tests"
        if reason is None
        else f"no: {reason}"
    )
    slow = reason_without_numba()
    quantised = importlib.util.find_spec("bitsandbytes") is not None
    rows = [
        ["Python and system", f"{platform.python_version()}, {platform.system()}", ""],
        ["PyTorch", f"{torch.__version__}, {torch.get_num_threads()} threads", ""],
        ["GPU", torch.cuda.get_device_name() if cuda else "no CUDA device", "" if cuda else "run on a machine with one, e.g. a Colab T4"],
        ["Triton verifier", triton, "" if reason is None else "pip install 'flashspec[gpu]'  (Linux)"],
        ["compiled loops (CPU)", "yes" if slow is None else f"no: {slow}", "" if slow is None else "pip install 'flashspec[cpu]'"],
        ["4-bit targets", "yes" if quantised else "no: bitsandbytes is not installed", "" if quantised else "pip install 'flashspec[gpu]'"],
    ]  # fmt: skip
    for name, entry in FAMILIES.items():
        here = is_local(name)
        rows.append(
            [
                f"family {name}",
                entry.about if here else "not on this machine",
                "" if here else f"flashspec pull {entry.target}",
            ]
        )
    return table(["what", "here", "to add it"], rows)


# ----------------------------------------------------------------------------------------------------------------- figures


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """HTML of a table that scrolls where it is wider than the page."""
    line = lambda tag, cells: "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"  # noqa: E731
    body = "".join(line("td", row) for row in rows)
    return f'<div class="fs-scroll" tabindex="0"><table class="fs-table"><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>'


def _bars(found: Draws, title: str) -> Any:
    """Drawn shares beside the law, with the 99.9 % band of honest draws."""
    import plotly.graph_objects as go

    names = [chr(ord("a") + i) for i in range(len(found.law))]
    band = 3.29 * np.sqrt(found.law * (1 - found.law) / len(found.pairs))
    figure = go.Figure(
        [
            go.Bar(name="target, with the band of honest draws", x=names, y=found.law, marker_color=GREY, error_y={"array": band, "color": GREY}),
            go.Bar(name="10,000 draws", x=names, y=found.first, marker_color=RED if found.rejected else BLUE),
        ]
    )  # fmt: skip
    return dressed(figure, "share", x=title)
