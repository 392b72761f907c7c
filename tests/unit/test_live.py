import json
import threading
from dataclasses import replace

import pytest

from flashspec.records import Arm
from flashspec.ui import live
from flashspec.ui.live import Controls, messages, prepare

BASE = Controls("Name three fruits.", "embedded", "nano", 3, "block", 0.7, 1.0, 24, 0, "torch")


def output(stream) -> str:
    """The text that a browser would assemble."""
    text = ""
    for message in map(json.loads, stream):
        for round in message["rounds"]:
            text += "".join(d[1] for d in round["drafted"]) + (round["next"][1] if round["next"] else "")
    return text


def test_messages_are_numbered_and_complete() -> None:
    received = [json.loads(message) for message in messages(BASE)]
    assert [message["seq"] for message in received] == list(range(len(received)))
    assert len({message["run"] for message in received}) == 1
    rounds = [round for message in received for round in message["rounds"]]
    assert [round["i"] for round in rounds] == list(range(len(rounds)))
    assert received[1]["head"]["prompt"] == BASE.prompt
    assert received[-2]["done"]
    assert received[-1]["regret"]["fixed"].keys() >= {"plain", "nano γ=3"}
    assert all("error" not in message for message in received)
    assert received[-1]["totals"]["tokens"] == 24


def test_the_first_message_says_what_is_waited_for(monkeypatch) -> None:
    def note(controls: Controls) -> str:
        return json.loads(next(messages(controls)))["note"]

    with monkeypatch.context() as fresh:
        fresh.setattr(live, "_families", {})
        assert note(BASE).startswith("Loading")
    live.family("embedded")
    assert note(BASE).startswith("Reading")
    bandit = replace(BASE, drafter=live.BANDIT)
    with monkeypatch.context() as fresh:
        fresh.setattr(live, "_tables", {})
        assert note(bandit).startswith("Timing")
    live.costs(bandit)
    assert note(bandit).startswith("Reading")


@pytest.fixture
def slow_loading(monkeypatch):
    """Loading that waits for the event it is given, and what it was asked for."""
    asked, go = [], threading.Event()

    def load(name: str):
        asked.append(name)
        assert go.wait(20)
        if name == "broken":
            raise ValueError("It is broken.")
        return f"the models of {name}"

    monkeypatch.setattr(live, "_families", {})
    monkeypatch.setattr(live, "load_family", load)
    yield asked, go
    go.set()


def test_models_load_behind_the_page_and_only_once(slow_loading) -> None:
    asked, go = slow_loading
    live.load_behind("embedded")  # returns while they load
    visitors, got = [], []
    for _ in range(2):
        visitors.append(threading.Thread(target=lambda: got.append(live.family("embedded"))))
        visitors[-1].start()
    assert not got
    go.set()
    for visitor in visitors:
        visitor.join(20)
    assert got == ["the models of embedded"] * 2
    assert asked == ["embedded"]


def test_on_zerogpu_models_load_before_the_page(slow_loading, monkeypatch) -> None:
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    slow_loading[1].set()
    live.load_behind("embedded")
    assert "embedded" in live._families


def test_a_family_that_breaks_while_loading_is_told_by_the_run(slow_loading, monkeypatch, capfd) -> None:
    slow_loading[1].set()
    monkeypatch.setattr(live, "check_family", lambda name: None)
    live.load_behind("broken")
    received = [json.loads(message) for message in messages(replace(BASE, family="broken"))]
    assert received[-1]["error"] == "It is broken."
    assert "Traceback" not in capfd.readouterr().err


def test_a_family_that_is_not_here_is_told_at_once(monkeypatch) -> None:
    with pytest.raises(ValueError, match="no family 'nonsense'"):
        live.load_behind("nonsense")
    monkeypatch.setattr("flashspec.models.catalog._local", lambda name: None)
    with pytest.raises(ValueError, match="flashspec pull"):
        live.load_behind("smollm2-135m")


def test_messages_are_batched() -> None:
    """Twelve a second at most: with a clock that stands still there are three: the empty one, the head, and all rounds at once."""
    assert len(list(messages(BASE, clock=lambda: 0.0, analysed=False))) == 3


def test_messages_stay_small() -> None:
    received = list(messages(BASE))
    assert sum(map(len, received)) / 24 < 900  # bytes a token, with p, q and residual of the likeliest entries


def test_every_control_reaches_the_engine(monkeypatch) -> None:
    seen = {}

    class Spy:
        def rounds(self, prompt, request, policy):
            seen.update(prompt=prompt, request=request, arms=policy.arms)
            return iter(())

    loaded = live.family("embedded")
    monkeypatch.setattr(type(loaded), "decoder", lambda self, verifier: seen.update(verifier=verifier) or Spy())
    prepare(Controls("Hello", "embedded", "lookup", 5, "coupled", 0.3, 0.8, 17, 99, "triton", "ucb1", 40)).rounds()
    assert seen["prompt"] == loaded.encode("Hello")
    assert seen["arms"] == (Arm("lookup", 5),)
    assert seen["verifier"] == "triton"
    request = seen["request"]
    assert (request.rule, request.max_new_tokens, request.seed) == ("coupled", 17, 99)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.3, 0.8, 40)


def test_the_bandit_chooses_where_it_is_asked_to() -> None:
    run = prepare(replace(BASE, drafter="bandit", policy="rate-ucb"))
    assert type(run.policy).__name__ == "RateUCB"
    assert run.policy.arms == live.family("embedded").arms()
    assert run.label == "rate-ucb"


def test_costs_of_a_run_do_not_change_the_next() -> None:
    """Sessions never mix: a policy refreshes its own copy of the cost table."""
    controls = replace(BASE, drafter="bandit")
    before = live.costs(controls).seconds.copy()
    list(messages(replace(controls, max_new_tokens=16), analysed=False))
    assert (live.costs(controls).seconds == before).all()


def test_a_race_runs_plain_first_and_both_alone() -> None:
    received = [json.loads(message) for message in live.race(replace(BASE, rule="coupled"), "plain")]
    lanes = [message["lane"] for message in received]
    assert lanes == sorted(lanes)  # one after the other
    assert {"a", "b"} == set(lanes)
    heads = [message["head"]["settings"]["arm"] for message in received if "head" in message]
    assert heads == ["plain", "nano γ=3"]
    texts = [output(json.dumps(m) for m in received if m["lane"] == lane) for lane in "ab"]
    assert texts[0] == texts[1] != ""
    bad = [json.loads(message) for message in live.race(replace(BASE, prompt=""), "plain")]
    assert {message["lane"] for message in bad} == {"a"}


def test_regret_of_a_run_is_priced_like_its_comparators() -> None:
    """Plain decoding has no luck in its rounds, so its regret is exactly that of the fixed arm "plain"."""
    last = json.loads(list(messages(replace(BASE, drafter="plain", gamma=0, max_new_tokens=48)))[-1])
    found = last["regret"]
    assert found["run"][-1] == pytest.approx(found["fixed"]["plain"] - found["best_seconds"], abs=2e-3)
    assert found["oracle"][-1] <= 1e-4
    assert found["tokens"][-1] == last["totals"]["tokens"]
    assert min(found["fixed"].values()) == pytest.approx(found["best_seconds"], abs=1e-3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "x" * 5000}, "shorten it"),
        ({"temperature": -1}, "temperature is -1"),
        ({"drafter": "oracle"}, "no drafter"),
        ({"family": "giant"}, "no family"),
        ({"rule": "magic"}, "no rule"),
        ({"gamma": -1}, "draft length is negative"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": 10**6}, "at most"),
        ({"seed": None}, "Seed is empty"),
        ({"policy": "magic"}, "no policy"),
        ({"top_k": -3}, "top_k is -3"),
    ],
)
def test_bad_controls_become_a_message(change, sentence) -> None:
    last = json.loads(list(messages(replace(BASE, **change)))[-1])
    assert last["done"]
    assert sentence in last["error"]


def test_an_error_keeps_what_was_written(monkeypatch) -> None:
    def breaks(run, begin=live.Run.rounds):
        for count, round in enumerate(begin(run)):
            if count == 4:
                raise ValueError("The weights broke; reload them.")
            yield round

    monkeypatch.setattr(live.Run, "rounds", breaks)
    received = [json.loads(message) for message in messages(BASE)]
    assert received[-1]["error"] == "The weights broke; reload them."
    assert sum(len(message["rounds"]) for message in received) == 4


def test_the_wall_clock_ends_a_run() -> None:
    ticks = iter(range(0, 10**6, 50))
    received = [json.loads(message) for message in messages(BASE, clock=lambda: float(next(ticks)))]
    assert "limit of this page" in received[-1]["error"]


def test_closing_ends_the_run(monkeypatch) -> None:
    closed = threading.Event()

    def watched(run, begin=live.Run.rounds):
        try:
            yield from begin(run)
        finally:
            closed.set()

    monkeypatch.setattr(live.Run, "rounds", watched)
    stream = messages(replace(BASE, max_new_tokens=500), clock=iter(range(10**6)).__next__)
    for _ in range(4):
        next(stream)
    stream.close()
    assert closed.is_set()


def test_two_sessions_equal_each_alone() -> None:
    one, two = replace(BASE, seed=1), replace(BASE, seed=2, drafter="lookup-else-nano", prompt="Write a poem.")
    alone = [output(messages(controls)) for controls in (one, two)]
    streams = [messages(one, clock=iter(range(10**6)).__next__), messages(two, clock=iter(range(10**6)).__next__)]
    mixed: list[list[str]] = [[], []]
    running = {0, 1}
    while running:
        for k in list(running):
            message = next(streams[k], None)
            if message is None:
                running.remove(k)
            else:
                mixed[k].append(message)
    assert [output(m) for m in mixed] == alone
