"""The figures of a finished run hold the run's own numbers."""

import numpy as np
import pytest
from worlds import ScriptedModel, decoder, random_logits

from flashspec.bandits.baselines import RoundRobin
from flashspec.engine import Request
from flashspec.records import Arm, Trace
from flashspec.ui import figures


@pytest.fixture
def trace() -> Trace:
    target = ScriptedModel(random_logits(12, 1), 12)
    engine = decoder(
        target, {"draft": ScriptedModel(random_logits(12, 1), 12), "other": ScriptedModel(random_logits(12, 2), 12)}
    )
    arms = [Arm("plain", 0), Arm("draft", 2), Arm("other", 3)]
    rounds = tuple(engine.rounds([1, 2, 3], Request(40, candidates=0), RoundRobin(arms)))
    return Trace("toy", "", 3, {}, {}, rounds)


def test_figures_show_the_rounds(trace) -> None:
    regret = {"tokens": [1, 2], "run": [0.0, 0.1], "rule": [0.0, 0.2], "oracle": [0.0, -0.1], "best": "draft γ=2"}
    time, depth, speed, lost = figures.of_run(trace, regret)
    played = {str(arm): [r for r in trace.rounds if r.arm == arm] for arm in {r.arm for r in trace.rounds}}
    for bar in time.data:
        part = bar.name.replace(" ", "_")
        for name, value in zip(bar.y, bar.x, strict=True):
            arm, count = name.rsplit(" (", 1)
            assert int(count[:-1]) == len(played[arm])
            assert value == pytest.approx(1000 * np.mean([getattr(r.seconds, part) for r in played[arm]]))
    lines = {line.name: line for line in depth.data}
    assert lines.keys() == {"draft γ=2", "other γ=3"}
    assert set(lines["draft γ=2"].y) == {1.0}  # the same model accepts all of its own drafts
    some = played["other γ=3"]
    assert lines["other γ=3"].y[0] == sum(r.tau > 0 for r in some) / len(some)
    assert speed.data[1].x[-1] == sum(len(r.emitted) for r in trace.rounds)
    assert speed.data[1].y[-1] == pytest.approx(speed.data[1].x[-1] / sum(r.seconds.total for r in trace.rounds))
    assert [line.name for line in lost.data] == ["always draft γ=2", "this run", "hand rule", "oracle"]


def test_without_a_replay_the_last_figure_is_empty(trace) -> None:
    assert len(figures.of_run(trace, None)[-1].data) == 0
