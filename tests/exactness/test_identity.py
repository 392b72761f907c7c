"""Where the text must be the same id by id."""

from dataclasses import replace

import pytest
import torch
from worlds import cached, decoder, ids, llama, run

from flashspec.bandits import Fixed
from flashspec.bandits.baselines import RoundRobin
from flashspec.engine import Request
from flashspec.models.catalog import Family
from flashspec.records import Arm
from flashspec.sampling import SamplingParams, adjust, warp
from flashspec.target import CachedModel

PROMPTS = ("Explain why the sky is blue.", "one two three one two three one two")


def text(family: Family, prompt: str, arm: Arm, request: Request) -> list[int]:
    return ids(list(family.decoder().rounds(family.encode(prompt), request, Fixed(arm))))


def hopping(names) -> RoundRobin:
    """A policy that never stays: drafters idle, catch up and idle again."""
    arms = [Arm(name, 0 if name == "plain" else gamma) for gamma in (1, 3, 8) for name in names]
    return RoundRobin([arms[i * 7 % len(arms)] for i in range(len(arms))])


def generated(family: Family, prompt: str, length: int) -> list[int]:
    """Greedy ids of transformers' own generate."""
    inputs = torch.tensor([family.encode(prompt)])
    mask = torch.ones_like(inputs)
    output = family.target.generate(inputs, attention_mask=mask, do_sample=False, max_new_tokens=length)
    return output[0, inputs.shape[1] :].tolist()


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("layout", ["int8", "transformers"])
def test_greedy_ids_equal_plain_decoding(embedded, embedded_float32, layout, gamma) -> None:
    """Bit for bit: in float32 equal to transformers' generate, in int8 to our own plain decoding on the same weights."""
    family = embedded if layout == "int8" else embedded_float32
    for prompt in PROMPTS:
        request = Request(max_new_tokens=24, sampling=SamplingParams(temperature=0))
        wanted = text(family, prompt, Arm("plain", 0), request) if layout == "int8" else generated(family, prompt, 24)
        for rule in ("token", "block", "coupled"):
            request = replace(request, rule=rule, seed=gamma)
            for name in family.drafters if rule == "block" else ("nano",):
                arm = Arm(name, gamma if name != "plain" else 0)
                assert text(family, prompt, arm, request) == wanted, (name, rule)


def test_coupled_text_depends_on_the_seed_alone(embedded) -> None:
    for seed in (1, 2):
        request = Request(
            max_new_tokens=24, sampling=SamplingParams(temperature=0.8, top_p=0.9), rule="coupled", seed=seed
        )
        wanted = text(embedded, PROMPTS[0], Arm("plain", 0), request)
        for name in embedded.drafters:
            for gamma in (1, 5):
                assert text(embedded, PROMPTS[0], Arm(name, gamma), request) == wanted, (name, gamma)
        rounds = embedded.decoder().rounds(embedded.encode(PROMPTS[0]), request, hopping(embedded.drafters))
        assert ids(list(rounds)) == wanted


def test_plain_decoding_is_the_same_under_every_rule(embedded) -> None:
    texts = [
        text(embedded, PROMPTS[0], Arm("plain", 0), Request(max_new_tokens=16, rule=rule, seed=4))
        for rule in ("token", "block", "coupled")
    ]
    assert texts[0] == texts[1] == texts[2]


def test_low_precision_first_difference_is_a_near_tie(embedded) -> None:
    """bf16: texts may part, but only where the two largest plain logits nearly tie."""
    from flashspec.models.catalog import load_family, load_model  # a second copy: the shared one stays float32

    family = load_family("embedded", drafters=(), layout="transformers")
    family = type(family)(
        **{**vars(family), "target": load_model("tiny").bfloat16(), "models": {"nano": load_model("nano").bfloat16()}}
    )
    request = Request(max_new_tokens=48, sampling=SamplingParams(temperature=0))
    plain, spec = (text(family, PROMPTS[0], arm, request) for arm in (Arm("plain", 0), Arm("nano", 4)))
    at = next((i for i, (a, b) in enumerate(zip(plain, spec, strict=True)) if a != b), None)
    if at is not None:
        logits = CachedModel(family.target, "tiny").read([*family.encode(PROMPTS[0]), *plain[:at]])[0, -1].float()
        best = logits.topk(2).values
        assert float(best[0] - best[1]) < 0.25


WARPS = {
    "temperature": {"temperature": 0.5},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.4},
    "min-p": {"min_p": 0.3},
    "repetition penalty": {"repetition_penalty": 1.8},
    "presence penalty": {"presence_penalty": 3.0},
    "frequency penalty": {"frequency_penalty": 2.0},
    "negative frequency penalty": {"frequency_penalty": -2.0},
    "bias": {"logit_bias": {5: 6.0, 6: -float("inf")}},
    "all": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "logit_bias": {7: 2.0},
    },
}


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("greedy", [False, True])
def test_every_warp_reaches_every_position(name, greedy) -> None:
    """Seeded text equals plain for every γ, plain differs from no warp at all, and every emitted token is possible under the warp."""
    prompt = [5, 8, 5, 8, 5]
    settings = {"temperature": 1.3} | WARPS[name] | ({"temperature": 0} if greedy else {})
    request = Request(max_new_tokens=40, sampling=SamplingParams(**settings), rule="coupled", seed=2)
    engine = decoder(cached(0, sharp=20.0), {"draft": cached(1, sharp=20.0), "same": cached(0, sharp=20.0)})
    wanted = ids(run(engine, prompt, request))
    for drafter, gamma in (("draft", 1), ("draft", 4), ("same", 8), ("lookup", 3)):
        assert ids(run(engine, prompt, request, drafter, gamma)) == wanted, (drafter, gamma)
    bare = Request(max_new_tokens=40, sampling=SamplingParams(temperature=0 if greedy else 1.3), rule="coupled", seed=2)
    truncation = name in ("temperature", "top-k", "top-p", "min-p")
    if not (greedy and truncation):  # the likeliest token survives every truncation
        assert ids(run(engine, prompt, bare)) != wanted
    for rule in ("token", "block"):
        output = ids(
            run(engine, prompt, Request(max_new_tokens=40, sampling=request.sampling, rule=rule, seed=3), "same", 4)
        )
        model = CachedModel(llama(seed=0, sharp=20.0), "again")
        for i, token in enumerate(output):
            context = [*prompt, *output[:i]]
            p = warp(adjust(model.read(context)[0], request.sampling, context, len(prompt), ()), request.sampling)[0]
            assert p[token] > 0, (rule, i)
