"""The engine on boards, graphs and fused forwards against the plain engine: on a CPU in Triton's interpreter, on a GPU as CUDA graphs."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import decoder, ids, llama, run

from flashspec import rng
from flashspec.bandits import Fixed, Policy
from flashspec.bandits.baselines import RoundRobin
from flashspec.drafters import LookupDrafter, LookupElseDrafter
from flashspec.engine import Request, SpeculativeDecoder
from flashspec.records import Arm
from flashspec.sampling import SamplingParams, warp
from flashspec.target import CachedModel
from flashspec.verifiers import load_verifier, reason_without_triton
from flashspec.verifiers.reference import ReferenceVerifier

pytestmark = pytest.mark.skipif(reason_without_triton() is not None, reason=str(reason_without_triton()))
if reason_without_triton() is None:
    from flashspec.graphs import Board, GraphDecoder, Pool
    from flashspec.models.fused import FusedLlama, FusedModel, Text

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4, 1]
WARM = SamplingParams(temperature=0.8)


def small(seed: int = 0, layers: int = 1, sharp: float = 8.0):
    """Heads of 16, the least that a GPU takes; two of them share their keys."""
    return llama(
        layers=layers, seed=seed, sharp=sharp, hidden_size=48, num_attention_heads=3, num_key_value_heads=1, head_dim=16
    ).to(DEVICE)


@pytest.fixture(scope="module")
def models():
    target, draft = small(0, layers=2), small(1)
    draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    draft.lm_head.weight.copy_(target.lm_head.weight)  # alike enough for acceptance
    return {"target": target, "draft": draft}


@pytest.fixture
def engines(models):
    """The engine on a board, and the plain one on the same models."""
    plain = decoder(CachedModel(models["target"], "target"), {"draft": CachedModel(models["draft"], "draft")})
    plain.drafters["lookup-else-draft"] = LookupElseDrafter(LookupDrafter(), plain.drafters["draft"])
    plain.device = DEVICE
    pool = Pool({name: FusedLlama.of(model) for name, model in models.items()}, DEVICE)
    pool.is_ready = lambda *_: True  # compile at once
    graph = GraphDecoder(plain.target, plain.drafters, plain.tokenizer, (), pool, load_verifier("triton", str(DEVICE)))
    return graph, plain


@pytest.mark.parametrize(
    ("lengths", "rows", "narrow"),
    [
        ((7,), 1, False), ((70, 3), 5, False), ((1, 20, 9), 2, False),
        ((7,), 1, True), ((1,), 2, True), ((300,), 2, True), ((70, 1), 2, True),
    ],
)  # fmt: skip
def test_fused_forward_equals_transformers(models, lengths, rows, narrow) -> None:
    model = models["target"]
    generator = torch.Generator().manual_seed(sum(lengths))
    text = Text.empty(len(lengths), 512, DEVICE)
    text.ids.copy_(torch.randint(0, 97, text.ids.shape, generator=generator))
    text.length.copy_(torch.tensor(lengths))
    drafted = torch.randint(0, 97, (len(lengths), rows - 1), generator=generator).to(DEVICE)
    fused = FusedModel(FusedLlama.of(model), text, only_drafts=narrow)
    fused.forward(
        max(lengths), 0, drafted[:, :0], start=text.reading
    )  # some read beyond their end: what is there does not matter
    logits = torch.empty(len(lengths), rows, 97, device=DEVICE)
    fused.forward(rows, -1, drafted, out=logits)
    for b, n in enumerate(lengths):
        wanted = model(torch.cat((text.ids[b, :n], drafted[b]))[None]).logits[0, n - 1 :]
        assert (logits[b] - wanted).abs().max() < 1e-3


def test_a_drafter_reads_on_from_what_it_drafted(models) -> None:
    """Token by token: the keys of a step are there for the next."""
    model = models["target"]
    text = Text.empty(1, 256, DEVICE)
    text.ids[0, :5].copy_(torch.tensor(PROMPT[:5]))
    text.length.fill_(5)
    drafted = torch.tensor([PROMPT[5:9]], device=DEVICE)
    fused = FusedModel(FusedLlama.of(model), text, only_drafts=True)
    fused.forward(4, 0, drafted, start=text.reading)
    logits = torch.empty(1, 1, 97, device=DEVICE)
    for i in range(5):
        fused.forward(1, i - 1, drafted, out=logits)
    wanted = model(torch.tensor([PROMPT[:9]], device=DEVICE)).logits[0, -1]
    assert (logits[0, 0] - wanted).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("drafter", "gamma", "sampling", "candidates"),
    [
        ("draft", 1, WARM, 0),
        ("draft", 3, SamplingParams(temperature=1.2, top_p=0.8, top_k=40), 0),
        ("lookup-else-draft", 3, WARM, 6),
        ("draft", 4, SamplingParams(temperature=0), 0),
        ("plain", 0, WARM, 0),
    ],
)
def test_coupled_and_greedy_texts_are_those_of_the_plain_engine(engines, drafter, gamma, sampling, candidates) -> None:
    graph, plain = engines
    request = Request(9, sampling, "coupled", seed=5, candidates=candidates)
    found, wanted = (run(engine, PROMPT, request, drafter, gamma) for engine in (graph, plain))
    assert ids(found) == ids(wanted)
    assert [round.tau for round in found] == [round.tau for round in wanted]
    assert [[token.verdict for token in round.drafted] for round in found] == [
        [token.verdict for token in round.drafted] for round in wanted
    ]
    if candidates:
        p, q = ([(token.p, token.q) for round in rounds for token in round.drafted] for rounds in (found, wanted))
        assert torch.allclose(torch.tensor(p), torch.tensor(q), atol=1e-4)


class Racing(SpeculativeDecoder):
    """The plain engine, whose drafters draw as they do on a board."""

    def _sample(self, logits, request, seed, position, offset):
        row = warp(logits, request.sampling)
        return int(rng.race(row, rng.exponentials(seed, position, row.shape[-1], rng.DRAFT, offset))), row


@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampled_texts_are_those_of_the_plain_engine_with_the_same_draws(engines, rule) -> None:
    graph, plain = engines
    racing = Racing(plain.target, plain.drafters, plain.tokenizer, (), DEVICE)
    for seed in range(2):
        request = Request(10, WARM, rule, seed=seed, candidates=0)
        found, wanted = (run(engine, PROMPT, request, "draft", 2) for engine in (graph, racing))
        assert ids(found) == ids(wanted)
        assert 0 < sum(round.tau for round in found) < sum(round.gamma for round in found)


class Cycle(Policy):
    """One arm after another, asked one round ahead; arms [K] may come several times."""

    waits = False

    def score(self, context):
        self.asked = getattr(self, "asked", -1) + 1
        return -((np.arange(len(self.arms)) - self.asked) % len(self.arms))[None]

    def learn(self, chosen, outcome) -> None:
        assert (outcome.drafted <= self.arms[int(chosen[0])].gamma).all()


def test_rounds_that_start_before_the_last_one_landed_change_nothing(engines, monkeypatch) -> None:
    """Drafters, lengths and plain rounds by turns: the same texts as from the plain engine that plays the same arms."""
    graph, plain = engines
    racing = Racing(plain.target, plain.drafters, plain.tokenizer, (), DEVICE)
    names = ["draft", "draft", "plain", "draft", "lookup", "draft", "lookup-else-draft"]
    arms = [Arm(name, gamma) for name, gamma in zip(names, (2, 1, 0, 3, 2, 2, 2), strict=True)]
    early: list[bool] = []
    look = GraphDecoder._look_ahead
    monkeypatch.setattr(GraphDecoder, "_look_ahead", lambda *given: early.append((a := look(*given)) is not None) or a)
    for seed in range(2):
        request = Request(26, WARM, "block", seed=seed, candidates=0)
        found = list(graph.rounds(PROMPT, request, Cycle(arms)))
        played = iter([round.arm for round in found])
        script = Cycle(list(dict.fromkeys(arms)))
        script.select = lambda context, script=script, played=played: np.array([script.arms.index(next(played))])
        wanted = list(racing.rounds(PROMPT, request, script))
        assert ids(found) == ids(wanted)
        assert [(r.arm, r.tau, len(r.drafted)) for r in found] == [(r.arm, r.tau, len(r.drafted)) for r in wanted]
    assert sum(early) > 4
    assert not all(early)


def test_nothing_reads_the_device_but_the_landing(engines, monkeypatch) -> None:
    """One number read from a tensor would wait for the round that is under way."""
    graph, _ = engines
    readers: list[str] = []

    def watched(name: str):
        read = getattr(torch.Tensor, name)

        def reading(*given):
            caller = sys._getframe(1).f_code
            if Path(caller.co_filename).name in ("engine.py", "graphs.py"):
                readers.append(caller.co_name)
            return read(*given)

        return reading

    rounds = graph.rounds(PROMPT, Request(12, WARM, "block", candidates=0), Fixed(Arm("draft", 2)))
    next(rounds)
    for name in ("__int__", "__float__", "__bool__", "item", "tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    list(rounds)
    assert set(readers) == {"land"}


def test_a_batch_equals_each_alone(engines) -> None:
    graph, plain = engines
    prompts = [PROMPT, [8], PROMPT[:4]]
    settings = [WARM, SamplingParams(temperature=0), SamplingParams(temperature=1.1, top_k=20)]
    requests = [Request(n, s, "coupled", seed=n, candidates=0) for n, s in zip((7, 5, 2), settings, strict=True)]
    found: dict[int, list] = {0: [], 1: [], 2: []}
    for row, round in graph.batch(prompts, requests, "draft", [2, 1, 3]):
        found[row].append(round)
    for row, (prompt, request, gamma) in enumerate(zip(prompts, requests, (2, 1, 3), strict=True)):
        assert ids(found[row]) == ids(run(plain, prompt, request, "draft", gamma))
        assert found[row][-1].stop == "length"
        assert max(len(round.drafted) for round in found[row]) <= gamma
    [board] = graph.pool._spare
    assert board.text.length.tolist() == [len(text) for text in board.known]  # a finished row stands still


def test_a_batch_that_cannot_be_gets_a_sentence(engines) -> None:
    graph, _ = engines
    with pytest.raises(ValueError, match="a model or plain"):
        next(graph.batch([PROMPT], [Request(4)], "lookup", [2]))
    with pytest.raises(ValueError, match="one rule"):
        next(graph.batch([PROMPT] * 2, [Request(4), Request(4, rule="block")], "draft", [2, 2]))


def test_pytorch_verifies_on_a_board_with_the_settings_of_each_run(engines) -> None:
    """One board, two runs: the second must not be judged with the first one's temperature."""
    graph, plain = engines
    graph.verifier = ReferenceVerifier()
    for sampling in (SamplingParams(temperature=0.3), SamplingParams(temperature=1.6), SamplingParams(temperature=0)):
        request = Request(6, sampling, "coupled", seed=4, candidates=0)
        found = run(graph, PROMPT, request, "draft", 2)
        assert ids(found) == ids(run(plain, PROMPT, request, "draft", 2))
        assert found[0].backend == "torch"


def test_triton_verifies_on_a_board_with_the_settings_of_each_run(engines) -> None:
    graph, plain = engines
    for sampling in (SamplingParams(temperature=0.3), SamplingParams(temperature=1.6)):
        request = Request(5, sampling, "coupled", seed=4, candidates=0)
        assert ids(run(graph, PROMPT, request, "draft", 2)) == ids(run(plain, PROMPT, request, "draft", 2))
    assert len(graph.pool._spare) == 1


def test_what_graphs_do_not_serve_runs_through_pytorch(engines) -> None:
    graph, plain = engines
    request = Request(6, SamplingParams(temperature=0.8, repetition_penalty=1.3), "coupled", seed=2, candidates=0)
    assert ids(run(graph, PROMPT, request, "draft", 2)) == ids(run(plain, PROMPT, request, "draft", 2))
    assert not graph.pool._spare  # no board was taken


def test_a_run_moves_to_the_board_as_soon_as_the_kernels_are_there(engines) -> None:
    graph, plain = engines
    asked = iter([False, False, False] + [True] * 99)
    graph.pool.is_ready = lambda *_: next(asked)
    request = Request(9, WARM, "coupled", seed=5, candidates=0)
    assert ids(run(graph, PROMPT, request, "draft", 2)) == ids(run(plain, PROMPT, request, "draft", 2))
    assert graph.pool._spare


def test_a_policy_and_a_closed_run_leave_the_board_ready(engines) -> None:
    graph, plain = engines
    arms = (Arm("plain", 0), Arm("draft", 2), Arm("lookup", 2), Arm("lookup-else-draft", 1))
    request = Request(9, WARM, "coupled", seed=5, candidates=0)
    rounds = graph.rounds(PROMPT, request, Fixed(Arm("draft", 2)))
    next(rounds)
    rounds.close()
    assert len(graph.pool._spare) == 1
    mixed = ids(graph.rounds(PROMPT, request, RoundRobin(arms)))
    assert mixed == ids(run(plain, PROMPT, request))


def test_the_prefix_of_the_last_text_is_not_read_again(models) -> None:
    fused = {name: FusedLlama.of(model) for name, model in models.items()}
    board = Board(fused, load_verifier("triton", str(DEVICE)), 1, 256, DEVICE)
    board.prepare([PROMPT], [Request(4)])
    assert board.read("target", 1) == 0  # read by prepare
    assert board.read("draft", 2) == len(PROMPT) - 2
    board.prepare([[*PROMPT[:8], 7, 7, 7]], [Request(4)])
    assert board.held == {"target": [10], "draft": [8]}
    assert board.read("draft", 2) == 1


def test_logits_that_are_not_finite_get_a_sentence(models, engines) -> None:
    graph, _ = engines
    broken = small(0, layers=2)
    broken.lm_head.weight[5] = float("nan")
    graph.pool.fused = graph.pool.fused | {"target": FusedLlama.of(broken)}
    with pytest.raises(ValueError, match="not finite"):
        run(graph, PROMPT, Request(4, candidates=0))


def test_kernels_are_compiled_once_for_every_arm(monkeypatch) -> None:
    """Whoever plays an arm next finds its kernels; only what is new is compiled."""
    compiled: list[list[Arm]] = []

    def compile_now(self, done, request, arms, drafters) -> None:
        compiled.append(list(arms))
        done.set()

    class Now:
        def __init__(self, target, args, daemon) -> None:
            self.start = lambda: target(*args)

    monkeypatch.setattr(Pool, "_compile", compile_now)
    monkeypatch.setattr("threading.Thread", Now)
    pool, one, two = Pool({}, torch.device("cuda")), Arm("draft", 1), Arm("draft", 2)
    assert pool.is_ready(Request(4), [one, two], {})
    assert pool.is_ready(Request(4), [two, one, two], {})
    assert pool.is_ready(Request(4), [one, Arm("plain", 0)], {})
    assert pool.is_ready(Request(4, rule="block"), [one], {})
    assert compiled == [[one, two], [Arm("plain", 0)], [one]]
