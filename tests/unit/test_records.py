from dataclasses import replace

import msgspec
import pytest
from worlds import cached, decoder, ids, run

from flashspec.engine import Request
from flashspec.records import MAX_TRACE_BYTES, Arm, Trace, totals, trace_from_json
from flashspec.sampling import SamplingParams


@pytest.fixture(scope="module")
def trace() -> Trace:
    rounds = run(
        decoder(cached(0), {"draft": cached(1)}),
        [3, 1, 4],
        Request(max_new_tokens=25, sampling=SamplingParams(temperature=0.8)),
        "draft",
        3,
    )
    return Trace("test", "prompt", 3, {"temperature": 0.8}, {"device": "cpu"}, tuple(rounds))


def test_trace_round_trip(trace) -> None:
    assert trace_from_json(trace.to_json()) == trace
    assert trace.text == "".join(round.text for round in trace.rounds)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"[1, 2]",
        lambda data: b"\xff\xfe",
        lambda data: data.replace(b'"tau":', b'"tau":"x","y":'),
        lambda data: data.replace(b'"schema":1', b'"schema":999'),
        lambda data: b'{"schema": 1}',
        lambda data: b" " * (MAX_TRACE_BYTES + 1),
    ],
)
def test_damaged_traces_get_a_sentence(trace, damage) -> None:
    with pytest.raises(ValueError, match=r"trace\.json|update FlashSpec|shorter run"):
        trace_from_json(damage(trace.to_json()))


def test_counters_count_ids(trace) -> None:
    total = totals(trace.rounds)
    assert total.tokens == len(ids(trace.rounds)) == 25
    assert total.rounds == len(trace.rounds)
    assert total.drafted == sum(len(round.drafted) for round in trace.rounds)
    assert total.accepted == sum(d.verdict == "accepted" for round in trace.rounds for d in round.drafted)
    assert total.tokens == total.accepted + sum(round.next is not None for round in trace.rounds)
    assert total.rate == pytest.approx(25 / sum(round.seconds.total for round in trace.rounds))


def test_a_round_accepting_everything_counts_gamma_plus_one() -> None:
    rounds = run(
        decoder(cached(0), {"same": cached(0)}),
        [3, 1, 4],
        Request(max_new_tokens=25, sampling=SamplingParams(temperature=0)),
        "same",
        4,
    )
    total = totals(rounds)
    assert [len(round.emitted) for round in rounds] == [5] * 5
    assert (total.tokens, total.drafted, total.accepted, total.acceptance) == (25, 20, 20, 1.0)


def test_nothing_measured_is_none_and_not_zero() -> None:
    total = totals([])
    assert (total.rate, total.tokens_per_round, total.acceptance) == (None, None, None)


def test_records_do_not_change(trace) -> None:
    with pytest.raises(AttributeError):
        trace.rounds[0].tau = 5
    assert replace(trace.rounds[0], tau=0) != trace.rounds[0] or trace.rounds[0].tau == 0


def test_arms_have_names() -> None:
    assert (str(Arm("plain", 0)), str(Arm("nano", 3))) == ("plain", "nano γ=3")


def test_wire_form_is_plain_json(trace) -> None:
    plain = msgspec.json.decode(trace.to_json())
    assert plain["schema"] == 1
    assert {"drafted", "next", "seconds", "tau", "backend"} <= plain["rounds"][0].keys()
