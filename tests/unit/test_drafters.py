import hashlib

import pytest
import torch
from scipy import stats
from worlds import ByteTokenizer, ScriptedModel, cached, decoder, ids, llama, random_logits, run

from flashspec.bandits import Fixed
from flashspec.drafters import LookupDrafter, LookupElseDrafter, ModelDrafter, early_exit
from flashspec.engine import Request, SpeculativeDecoder
from flashspec.records import Arm, totals
from flashspec.sampling import SamplingParams
from flashspec.target import CachedModel

GREEDY = SamplingParams(temperature=0)
PROMPT = [3, 1, 4, 1, 5]


def test_lookup_takes_the_longest_and_latest_match() -> None:
    lookup = LookupDrafter(longest=3, shortest=2)
    lookup.catch_up([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3])
    assert (lookup.match_length, lookup.next([]), lookup.next([7])) == (3, 7, 9)
    lookup.catch_up([1, 2, 3, 7, 9, 2, 3, 8, 5, 2, 3])
    assert (lookup.match_length, lookup.next([])) == (2, 8)
    lookup.catch_up([1, 2, 3, 4])
    assert (lookup.match_length, lookup.next([])) == (0, None)


def test_lookup_goes_on_with_a_period() -> None:
    lookup = LookupDrafter()
    lookup.catch_up([5, 6, 5, 6])
    drafted = []
    for _ in range(5):
        drafted.append(lookup.next(drafted))
    assert drafted == [5, 6, 5, 6, 5]


def test_lookup_index_grows_with_the_text_and_starts_again() -> None:
    text = [int(x) for x in torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(0))]
    growing = LookupDrafter()
    for end in range(1, len(text)):
        growing.catch_up(text[:end])
        fresh = LookupDrafter()
        fresh.catch_up(text[:end])
        assert growing.next([]) == fresh.next([])
    growing.catch_up([9, 9, 9])
    assert growing.next([]) == 9


@pytest.mark.parametrize(("longest", "shortest"), [(0, 0), (2, 3)])
def test_lookup_refuses_impossible_lengths(longest, shortest) -> None:
    with pytest.raises(ValueError, match="Lookup needs"):
        LookupDrafter(longest, shortest)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafted_ids_follow_the_returned_q(rule) -> None:
    """The first drafted id of 3000 runs against the q recorded with it; lookup and greedy drafts say one-hot."""
    target, draft = ScriptedModel(random_logits(6, 1), 6), ScriptedModel(random_logits(6, 2), 6)
    engine = decoder(target, {"draft": draft})
    counts, law = [0] * 6, {}
    for seed in range(3000):
        first = next(
            engine.rounds([1], Request(max_new_tokens=3, rule=rule, seed=seed, candidates=0), Fixed(Arm("draft", 2)))
        ).drafted[0]
        counts[first.id] += 1
        law[first.id] = first.q
    assert abs(sum(law.values()) - 1) < 1e-5
    assert stats.chisquare([counts[v] for v in law], [3000 * q for q in law.values()]).pvalue > 1e-4
    for drafter, sampling, prompt in (("lookup", SamplingParams(), [1, 2, 3, 1, 2]), ("draft", GREEDY, [1])):
        rounds = run(engine, prompt, Request(max_new_tokens=20, sampling=sampling), drafter, 3)
        assert {d.q for round in rounds for d in round.drafted} == {1.0}


@pytest.mark.parametrize(("target_size", "draft_size"), [(104, 97), (97, 104)])
def test_padded_vocabularies_of_different_size(target_size, draft_size) -> None:
    """Both directions run, equal plain decoding, and never propose what the target does not have."""
    target, draft = llama(target_size, seed=0), llama(draft_size, seed=1)
    for temperature in (0.0, 1.0):
        request = Request(max_new_tokens=60, sampling=SamplingParams(temperature=temperature), rule="coupled", seed=1)
        engine = decoder(CachedModel(target, "target"), {"draft": CachedModel(draft, "draft")})
        rounds = run(engine, PROMPT, request, "draft", 4)
        assert ids(rounds) == ids(run(engine, PROMPT, request))
        assert all(d.id < target_size for round in rounds for d in round.drafted)
        assert totals(rounds).drafted > 0


def test_id_beyond_the_drafters_vocabulary_means_no_proposal() -> None:
    drafter = ModelDrafter(cached(1, vocabulary=50), 97)
    assert drafter.catch_up([1, 60, 2]) == 0
    assert drafter.next([]) is None
    engine = decoder(cached(0), {"draft": cached(1, vocabulary=50)})
    assert len(ids(run(engine, [1, 96, 2], Request(max_new_tokens=10), "draft"))) == 10


def test_draft_context_shorter_than_target() -> None:
    target = cached(0, context=128)
    engine = decoder(target, {"draft": cached(1, context=64)})
    request = Request(max_new_tokens=200, sampling=GREEDY)
    rounds = run(engine, PROMPT, request, "draft", 4)
    assert ids(rounds) == ids(run(engine, PROMPT, request))
    assert all(not round.drafted for round in rounds if round.position > 64)
    assert any(round.drafted for round in rounds if round.position < 50)


def fingerprint(model) -> str:
    digest = hashlib.sha256(
        repr((model.config.to_dict(), [n for n, _ in model.named_modules()], list(vars(model)))).encode()
    )
    for name, weight in model.state_dict().items():
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest()


def test_shared_model_is_left_as_it_was() -> None:
    model = llama(layers=4)
    before = fingerprint(model)
    engine = decoder(CachedModel(model, "target"), {"exit": CachedModel(early_exit(model, 2), "exit")})
    run(engine, PROMPT, Request(max_new_tokens=20), "exit")
    generator = engine.rounds(PROMPT, Request(), Fixed(Arm("exit", 4)))
    next(generator)
    generator.close()
    hook = model.model.layers[3].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        run(engine, PROMPT, Request(max_new_tokens=20), "exit")
    hook.remove()
    assert fingerprint(model) == before


def test_early_exit_is_the_first_layers_and_shares_their_weights() -> None:
    model = llama(layers=4)
    view = early_exit(model, 2)
    assert view.model.layers[0] is model.model.layers[0]
    assert len(model.model.layers) == 4
    hidden = model.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[2]
    wanted = model.lm_head(model.model.norm(hidden))
    assert torch.allclose(view(torch.tensor([PROMPT])).logits, wanted, atol=1e-5)


@pytest.mark.parametrize("layers", [0, 4, 9])
def test_early_exit_depth_is_checked(layers) -> None:
    with pytest.raises(ValueError, match="choose 1 to 3"):
        early_exit(llama(layers=4), layers)


def test_lookup_else_uses_the_model_only_without_a_match() -> None:
    model = cached(1)
    target = cached(0)
    drafters = {"both": LookupElseDrafter(LookupDrafter(), ModelDrafter(model, target.vocabulary))}
    engine = SpeculativeDecoder(target, drafters, ByteTokenizer(), ())
    list(engine.rounds([7, 8, 9, 7, 8], Request(max_new_tokens=2), Fixed(Arm("both", 1))))
    assert model.tokens == []
    list(engine.rounds([7, 8, 9, 1, 2], Request(max_new_tokens=2), Fixed(Arm("both", 1))))
    assert model.tokens[:5] == [7, 8, 9, 1, 2]
