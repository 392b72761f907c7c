"""On a CUDA device only: schedules, waiting programs, no host reads, CUDA graphs, and the kernels on the generation path."""

import pytest
import torch
from cases import FORMS, PLAIN, block, differing
from worlds import cached, decoder, ids, run

from flashspec.bandits import Fixed
from flashspec.engine import Request
from flashspec.records import Arm
from flashspec.sampling import SamplingParams
from flashspec.verifiers import load_verifier
from flashspec.verifiers.base import Draft, Settings
from flashspec.verifiers.reference import ReferenceVerifier

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the interpreter tests run instead"
)
RULES = ("token", "block", "coupled")
if torch.cuda.is_available():
    from flashspec.verifiers.triton import TritonVerifier

    VERIFIERS = {schedule: TritonVerifier(schedule) for schedule in ("fused", "split")}
SHAPES = [(1, 4, 151_936), (3, 7, 4097), (32, 4, 32_000), (128, 3, 32_000)]


@pytest.mark.parametrize(("batch", "gamma", "vocabulary"), SHAPES)
def test_all_schedules_equal_the_reference(batch, gamma, vocabulary) -> None:
    mixed = [SamplingParams(temperature=(0, 0.7, 1.2)[b % 3]) for b in range(batch)]
    cut = [
        SamplingParams(temperature=(0.7, 1.2)[b % 2], top_p=0.9, top_k=(0, 50)[b % 2], min_p=0.001)
        for b in range(batch)
    ]
    total = different = 0
    for some, ragged in ((mixed, False), (cut, True))[: 2 if batch < 8 else 1]:
        logits, drafts, setting, keys, places = block(
            batch, gamma, vocabulary, gamma, some, torch.bfloat16, ragged, device="cuda"
        )
        for rule in RULES:
            for form in FORMS[:3]:
                wanted = ReferenceVerifier().verify(logits, drafts[form], setting, rule, keys, places)
                for verifier in VERIFIERS.values():
                    found = verifier.verify(logits, drafts[form], setting, rule, keys, places)
                    total += batch
                    different += len(differing(found, wanted))
    assert different <= total / 1000  # a key or a cumulative sum within rounding of another


def test_programs_that_wait_for_each_other_never_hang() -> None:
    verifier = VERIFIERS["fused"]
    inputs = [block(batch, 4, 32_000, batch, PLAIN, torch.bfloat16, device="cuda") for batch in (1, 37, 128)]
    first: list[list] = [[], [], []]
    for repeat in range(100):
        for k, (logits, drafts, setting, keys, places) in enumerate(inputs):
            tokens = verifier.verify(logits, drafts["logits"], setting, "block", keys, places).tokens.tolist()
            if repeat == 0:
                first[k] = tokens
            assert tokens == first[k]


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_read_by_the_host(rule) -> None:
    verifier = load_verifier("triton", "cuda")
    for some in (PLAIN, SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01)):
        logits, drafts, setting, keys, places = block(2, 4, 32_000, 3, some, torch.bfloat16, device="cuda")
        verifier.verify(logits, drafts["logits"], setting, rule, keys, places)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            verifier.verify(logits, drafts["logits"], setting, rule, keys, places)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", RULES)
def test_a_cuda_graph_follows_seed_and_position(rule) -> None:
    verifier = load_verifier("triton", "cuda")
    logits, drafts, setting, keys, places = block(2, 4, 32_000, 3, PLAIN, torch.bfloat16, device="cuda")
    draft = drafts["probabilities"]
    verifier.verify(logits, draft, setting, rule, keys, places)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = verifier.verify(logits, draft, setting, rule, keys, places)
    for step in range(20):
        places.fill_(1000 + step)
        graph.replay()
        wanted = ReferenceVerifier().verify(logits, draft, setting, rule, keys, places)
        assert differing(captured, wanted) == []


def test_the_engine_runs_the_kernels() -> None:
    """A profile of a run: the kernels are there, PyTorch's softmax and sort are not inside verification."""
    target, draft = cached(0, vocabulary=32_000), cached(1, vocabulary=32_000)
    for model in (target, draft):
        model.model.cuda()
    engine = decoder(target, {"draft": draft})
    engine.device, engine.verifier = torch.device("cuda"), load_verifier("auto", "cuda")
    request = Request(max_new_tokens=24, sampling=SamplingParams(temperature=0.8), rule="block", candidates=0)
    run(engine, [3, 1, 4], request, "draft", 3)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        rounds = list(engine.rounds([3, 1, 4], request, Fixed(Arm("draft", 3))))
    assert {round.backend for round in rounds} == {"triton"}
    kernels = [
        event.key for event in profile.key_averages() if "verify_kernel" in event.key or "choose_kernel" in event.key
    ]
    assert kernels
    assert len(ids(rounds)) == 24


def test_a_bound_call_gives_the_same() -> None:
    logits, drafts, setting, keys, places = block(2, 4, 32_000, 3, PLAIN, torch.bfloat16, device="cuda")
    bound = load_verifier("triton", "cuda").bind(logits, drafts["logits"], setting, "block", keys, places)
    for step in range(5):
        places.fill_(step)
        wanted = ReferenceVerifier().verify(logits, drafts["logits"], setting, "block", keys, places)
        assert differing(bound(), wanted) == []


def test_statistics_of_emitted_tokens() -> None:
    """200,000 requests of the same block: the law of the first token is p, by chi-square."""
    from scipy import stats

    logits = torch.tensor([[[1.0, 0.2, -0.5, 0.0]] * 3], device="cuda")
    draft_logits = torch.tensor([[[0.0, 1.0, 0.0, -1.0]] * 2], device="cuda")
    batch, some = 2000, SamplingParams(temperature=0.7)
    p = (logits[0, 0] / 0.7).softmax(-1).cpu().double()
    q = (draft_logits[0] / 0.7).softmax(-1)
    for rule in ("token", "block"):
        counts = torch.zeros(4, dtype=torch.int64)
        verifier = load_verifier("triton", "cuda")
        for step in range(100):
            generator = torch.Generator("cuda").manual_seed(step)
            drawn = torch.multinomial(q, batch, replacement=True, generator=generator).T.contiguous()
            draft = Draft(drawn, logits=draft_logits.expand(batch, -1, -1))
            keys = torch.arange(batch, device="cuda") + step * batch
            places = torch.full((batch,), 9, device="cuda")
            found = verifier.verify(
                logits.expand(batch, -1, -1), draft, Settings.of(some, batch, "cuda"), rule, keys, places
            )
            counts += torch.bincount(found.tokens[:, 0].cpu(), minlength=4)
        assert stats.chisquare(counts, p / p.sum() * counts.sum()).pvalue > 1e-4
