from itertools import pairwise

import pytest
import torch
from worlds import ByteTokenizer, ScriptedModel, cached, decoder, ids, llama, random_logits, run, says

from flashspec.bandits import Fixed
from flashspec.bandits.baselines import RoundRobin
from flashspec.engine import Request
from flashspec.records import Arm, totals
from flashspec.sampling import SamplingParams, warp
from flashspec.target import CachedModel

GREEDY = SamplingParams(temperature=0)
PROMPT = [3, 1, 4, 1, 5]
BYTES = 257


def scripted(text: str, prompt: str = "?", draft: str | None = None, eos: tuple[int, ...] = ()):
    """A target that writes `text`, and a drafter that writes `draft` (the same unless said otherwise)."""
    target = ScriptedModel(says([*text.encode(), 256], BYTES, len(prompt)), BYTES)
    drafted = ScriptedModel(says([*(draft or text).encode(), 256], BYTES, len(prompt)), BYTES)
    return decoder(target, {"draft": drafted}, eos), list(prompt.encode())


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_caches_hold_the_committed_text_after_every_round(rule, gamma) -> None:
    target, draft = cached(0), cached(1)
    engine = decoder(target, {"draft": draft})
    committed = list(PROMPT)
    for round in engine.rounds(PROMPT, Request(max_new_tokens=60, rule=rule, seed=gamma), Fixed(Arm("draft", gamma))):
        drafted = [d.id for d in round.drafted]
        assert (
            draft.tokens == (committed + drafted)[: len(draft.tokens)]
        )  # catches up before, keeps its own draft after
        committed += round.emitted
        assert target.tokens == committed[:-1]
        assert target._cache.get_seq_length() == len(committed) - 1
        assert draft._cache.get_seq_length() == len(draft.tokens)
    assert len(committed) == len(PROMPT) + 60


def test_one_target_forward_a_round() -> None:
    target = cached(0)
    calls = []
    target.model.register_forward_hook(lambda *_: calls.append(1))
    rounds = run(decoder(target, {"draft": cached(1)}), PROMPT, Request(max_new_tokens=30), "draft", 3)
    assert len(calls) == len(rounds) + 1  # and one for the prompt


@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_drafter_equal_to_target_is_always_accepted(temperature, rule) -> None:
    """Also the guard against a draft cache that is cut one token too short: acceptance would decay."""
    engine = decoder(cached(0), {"same": cached(0)})
    rounds = run(
        engine,
        PROMPT,
        Request(max_new_tokens=500, sampling=SamplingParams(temperature=temperature), rule=rule, seed=1),
        "same",
        5,
    )
    total = totals(rounds)
    assert total.tokens == 500
    assert total.accepted >= 0.99 * total.drafted if temperature == 1.0 else total.accepted == total.drafted


def test_idle_drafter_catches_up_and_is_charged() -> None:
    engine = decoder(cached(0), {"one": cached(1), "two": cached(2)})
    policy = RoundRobin([Arm("one", 3), Arm("one", 3), Arm("two", 3)])
    rounds = list(engine.rounds(PROMPT, Request(max_new_tokens=40), policy))
    twos = [round for round in rounds if round.arm.drafter == "two" and round.gamma]
    assert all(round.caught_up > 2 and round.seconds.catch_up > 0 for round in twos[1:])
    steady = [b for a, b in pairwise(rounds) if a.arm == b.arm and b.gamma]
    assert steady
    assert all(round.caught_up <= 2 and round.seconds.catch_up == 0 for round in steady)


def test_prefix_is_kept_between_turns() -> None:
    target = cached(0)
    engine = decoder(target)
    output = ids(run(engine, PROMPT, Request(max_new_tokens=10)))
    read = []
    target.model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    run(engine, [*PROMPT, *output, 9, 9], Request(max_new_tokens=1))
    assert sum(read) <= 4  # the last output token and the two new ones, not the whole conversation


def test_seeds_and_interleaving() -> None:
    def start(engine, seed):
        return engine.rounds(PROMPT, Request(max_new_tokens=30, rule="block", seed=seed), Fixed(Arm("draft", 3)))

    def fresh():
        return decoder(cached(0), {"draft": cached(1)})

    alone = {seed: ids(list(start(fresh(), seed))) for seed in (1, 2)}
    assert alone[1] == ids(list(start(fresh(), 1)))
    assert alone[1] != alone[2]
    shared = fresh()  # even on one decoder, whose caches both runs use in turn
    runs = {seed: start(shared, seed) for seed in (1, 2)}
    mixed = {1: [], 2: []}
    while runs:
        for seed in list(runs):
            round = next(runs[seed], None)
            if round is None:
                del runs[seed]
            else:
                mixed[seed] += round.emitted
    assert mixed == alone


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_eos_anywhere_in_the_block(at, gamma) -> None:
    text = "abcdef"
    eos = ord(text[at])
    engine, prompt = scripted(text, eos=(eos,))
    rounds = run(engine, prompt, Request(max_new_tokens=50, sampling=GREEDY), "draft", gamma)
    assert ids(rounds) == [ord(c) for c in text[: at + 1]]
    assert "".join(round.text for round in rounds) == text[:at]
    assert rounds[-1].stop == "eos"
    assert totals(rounds).tokens == at + 1


def test_eos_inside_a_lookup_draft_ends_the_text() -> None:
    """The lookup proposes a text with EOS in its middle and the target agrees with all of it."""
    prompt = "xyz.abc xyz"
    target = ScriptedModel(says([*b".abc xyz."], BYTES, len(prompt)), BYTES)
    rounds = run(
        decoder(target, eos=(ord("b"),)),
        list(prompt.encode()),
        Request(max_new_tokens=20, sampling=GREEDY),
        "lookup",
        8,
    )
    assert ids(rounds) == list(b".ab")


@pytest.mark.parametrize("gamma", range(11))
def test_stop_strings_across_tokens_and_blocks(gamma) -> None:
    text = "Hello world STOP here"
    engine, prompt = scripted(text)
    request = Request(max_new_tokens=50, sampling=GREEDY, stop=("STOP", "never"))
    rounds = run(engine, prompt, request, "draft" if gamma else "plain", gamma)
    assert "".join(round.text for round in rounds) == "Hello world "
    assert rounds[-1].stop == "stop string"
    assert bytes(ids(rounds)) == b"Hello world STOP"


def test_a_beginning_of_a_stop_string_is_released_when_it_is_none() -> None:
    engine, prompt = scripted("a STO b STOPP")
    rounds = run(engine, prompt, Request(max_new_tokens=9, sampling=GREEDY, stop=("STOP",)), "draft", 3)
    assert "".join(round.text for round in rounds) == "a STO b S"


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_lengths_are_exact(limit, gamma) -> None:
    engine = decoder(cached(0), {"same": cached(0)})
    rounds = run(engine, PROMPT, Request(max_new_tokens=limit), "same" if gamma else "plain", gamma)
    assert len(ids(rounds)) == limit
    assert rounds[-1].stop == "length"
    # the end of the context: 16 positions, 15 - n of the prompt
    small = decoder(cached(0, context=16), {"same": cached(0, context=16)})
    for length, wanted in ((15, 1), (12, 4)):
        rounds = run(small, [1] * length, Request(max_new_tokens=100), "same", gamma)
        assert (len(ids(rounds)), rounds[-1].stop) == (wanted, "context")
    for length in (16, 40):
        with pytest.raises(ValueError, match="shorten the prompt"):
            run(small, [1] * length, Request())
    with pytest.raises(ValueError, match="prompt is empty"):
        run(small, [], Request())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_raise_a_sentence(bad) -> None:
    def breaks_at(length):
        logits = random_logits(9, 1)
        return lambda context: logits(context) if len(context) < length else torch.full((9,), bad)

    good = ScriptedModel(random_logits(9, 1), 9)
    broken = decoder(ScriptedModel(breaks_at(12), 9), {"draft": good})
    seen = []
    with pytest.raises(ValueError, match="scripted gave logits that are not finite"):
        seen.extend(broken.rounds([1, 2], Request(max_new_tokens=30), Fixed(Arm("draft", 2))))  # type: ignore[func-returns-value]
    broken = decoder(good, {"draft": ScriptedModel(breaks_at(12), 9)})
    rounds = []
    with pytest.raises(ValueError, match="drafter draft gave logits that are not finite"):
        rounds.extend(broken.rounds([1, 2], Request(max_new_tokens=30), Fixed(Arm("draft", 2))))
    assert len(ids(rounds)) >= 7


def test_closing_the_generator_leaves_everything_reusable() -> None:
    request = Request(max_new_tokens=40, rule="block", seed=3)
    wanted = ids(run(decoder(cached(0), {"draft": cached(1)}), PROMPT, request, "draft"))
    engine = decoder(cached(0), {"draft": cached(1)})
    for stop_after in range(5):
        generator = engine.rounds(PROMPT, Request(max_new_tokens=40, seed=9), Fixed(Arm("draft", 4)))
        for _ in range(stop_after):
            next(generator)
        generator.close()
        assert ids(run(engine, PROMPT, request, "draft")) == wanted


def test_an_error_inside_a_forward_leaves_everything_reusable() -> None:
    request = Request(max_new_tokens=20, seed=3)
    target = cached(0)
    engine = decoder(target, {"draft": cached(1)})
    wanted = ids(run(engine, PROMPT, request, "draft"))
    calls = iter(range(1000))

    def fail(*_):
        if next(calls) == 3:
            raise MemoryError

    hook = target.model.model.layers[1].register_forward_pre_hook(fail)  # layer 0 has already read the chunk
    with pytest.raises(MemoryError):
        run(engine, PROMPT, Request(max_new_tokens=20, seed=4), "draft")
    hook.remove()
    assert ids(run(engine, PROMPT, request, "draft")) == wanted


def test_recorded_probabilities_equal_plain() -> None:
    """p of every emitted token is what a forward without any cache gives."""
    params = SamplingParams(temperature=0.8, top_p=0.95)
    rounds = run(
        decoder(cached(0), {"draft": cached(1)}), PROMPT, Request(max_new_tokens=40, sampling=params), "draft", 3
    )
    model, context = llama(seed=0), list(PROMPT)
    for round in rounds:
        recorded = [d.p for d in round.drafted[: round.tau]] + ([round.next.p] if round.next else [])
        for token, p in zip(round.emitted, recorded, strict=True):
            plain = warp(model(torch.tensor([context]), use_cache=False).logits[0, -1:], params)[0, token]
            assert abs(torch.log(plain) - torch.log(torch.tensor(p))) < 1e-4
            context.append(token)


def test_candidates_hold_the_token_and_nothing_impossible() -> None:
    for round in run(decoder(cached(0), {"draft": cached(1)}), PROMPT, Request(max_new_tokens=40), "draft", 3):
        for token in (*round.drafted, *([round.next] if round.next else [])):
            assert 1 <= len(token.candidates) <= 6
            assert token.id in [c.id for c in token.candidates]
            assert all(c.p > 0 or (c.q or 0) > 0 for c in token.candidates)
        if round.next and round.next.kind == "replacement":
            residual = {c.id: c.residual for c in round.next.candidates}
            assert residual[round.next.id] > 0
            assert all(r == 0 or c.p > c.q for c, r in zip(round.next.candidates, residual.values(), strict=True))


def test_round_names_the_backend() -> None:
    assert {round.backend for round in run(decoder(cached(0)), PROMPT, Request(max_new_tokens=3))} == {"torch"}


def test_second_run_still_drafts() -> None:
    engine = decoder(cached(0), {"draft": cached(1)})
    for seed in (0, 1):
        assert totals(run(engine, PROMPT, Request(max_new_tokens=20, seed=seed), "draft")).drafted > 10


def test_flat_logits_reach_every_token() -> None:
    """A verifier that takes the argmax would write one token only."""
    flat = ScriptedModel(lambda context: torch.zeros(8), 8)
    for rule in ("token", "block", "coupled"):
        rounds = run(decoder(flat, {"draft": flat}), [1], Request(max_new_tokens=200, rule=rule), "draft", 3)
        assert set(ids(rounds)) == set(range(8))


@pytest.mark.parametrize("bad", [{"max_new_tokens": 0}, {"rule": "magic"}, {"stop_below": 2.0}, {"stop": ("",)}])
def test_bad_requests_get_a_sentence(bad) -> None:
    with pytest.raises(ValueError, match=r"ask|choose|remove"):
        Request(**bad)


def test_early_stop_ends_blocks_after_the_unsure_token() -> None:
    engine = decoder(cached(0), {"draft": cached(1, sharp=20.0)})
    rounds = run(engine, PROMPT, Request(max_new_tokens=60, stop_below=0.6), "draft", 6)
    rounds = [round for round in rounds if round.gamma]
    lengths = [len(round.drafted) for round in rounds]
    assert min(lengths) >= 1
    assert any(length < round.gamma for length, round in zip(lengths, rounds, strict=True))
    for round in rounds:
        assert all(d.q >= 0.6 for d in round.drafted[:-1])


def test_streamed_text_equals_the_decoded_ids(embedded) -> None:
    rounds = list(
        embedded.decoder().rounds(
            embedded.encode("Say hello in Chinese, with an emoji."),
            Request(max_new_tokens=60, seed=5),
            Fixed(Arm("nano", 4)),
        )
    )
    assert "".join(round.text for round in rounds) == embedded.tokenizer.decode(ids(rounds), skip_special_tokens=True)


def test_byte_tokens_of_one_character_are_released_together() -> None:
    engine, prompt = scripted("né 😀!")
    rounds = run(engine, prompt, Request(max_new_tokens=9, sampling=GREEDY), "draft", 2)
    assert "".join(round.text for round in rounds) == "né 😀!"
    assert all("\ufffd" not in round.text for round in rounds)
    assert ByteTokenizer().decode(ids(rounds)) == "né 😀!"


def test_end_of_text_in_the_middle_of_a_character() -> None:
    target = ScriptedModel(says([*"a😀".encode()[:3], 256], BYTES, 1), BYTES)
    rounds = run(decoder(target, eos=(256,)), [63], Request(max_new_tokens=9, sampling=GREEDY))
    assert "".join(round.text for round in rounds) == "a\ufffd"


def test_model_is_left_as_it_was_by_a_run() -> None:
    model = llama(seed=0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    settings = model.config.to_dict()
    run(
        decoder(CachedModel(model, "m"), {"draft": CachedModel(model, "d")}),
        PROMPT,
        Request(max_new_tokens=20),
        "draft",
    )
    assert model.config.to_dict() == settings
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
