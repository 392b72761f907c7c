"""The experiments of the page: sound where the engine is sound, and every planted fault shows somewhere."""

import numpy as np
import pytest

from flashspec.ui import labs

SHARP, FLAT = (8, 4, 2, 1, 1), (1, 2, 4, 4, 2)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_engine_passes(rule, gamma, temperature) -> None:
    found = labs.draw(SHARP, FLAT, gamma=gamma, rule=rule, temperature=temperature)
    assert not found.rejected
    assert found.first == pytest.approx(found.law, abs=0.03)


@pytest.mark.parametrize("fault", labs.PLANTED[1:])
def test_every_planted_fault_is_rejected_somewhere(fault) -> None:
    worlds = [(SHARP, FLAT), (FLAT, SHARP), ((1, 1, 1), (6, 3, 1)), ((3, 1, 6, 0), (1, 3, 2, 2))]
    assert any(
        labs.draw(p, q, gamma=gamma, temperature=temperature, fault=fault, samples=40_000).rejected
        for p, q in worlds
        for gamma in (2, 3)
        for temperature in (0.5, 1.0)
    )


def test_a_temperature_that_is_never_applied_hides_at_one() -> None:
    text, _ = labs.temperature_lab(0.5)
    assert "**rejects**" in text
    text, _ = labs.temperature_lab(1.0)
    assert "**does not reject**" in text


def test_power_grows_with_samples_and_false_alarms_are_rare() -> None:
    _, figure = labs.samples_lab(8)
    small, large = (np.array(bar.y) for bar in figure.data)
    assert (large > 0.9).all()
    assert (small < 0.5).all()
    _, figure = labs.samples_lab(0)
    assert max(max(bar.y) for bar in figure.data) <= 0.02


def test_the_search_shrinks_to_one_by_one() -> None:
    text, table = labs.shape_lab()
    assert "B = 1, γ = 1" in text
    assert "differs" in table


def test_the_arena_knows_when_there_is_nothing_to_learn() -> None:
    alike, _ = labs.arena((0.6, 0.6), (20, 30, 30), ["contextual", "random"])
    assert "Nothing to learn" in alike
    different, _ = labs.arena((0.2, 0.9), (20, 30, 30), ["contextual", "random"])
    assert "Best: **tiny" in different
    assert "contextual has lost least" in different


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: labs.draw((0, 0), (1, 1)), "raise a bar"),
        (lambda: labs.draw((1, 1), (1, 1, 1)), "same number"),
        (lambda: labs.draw((1, 1), (1, 1), fault="gremlins"), "no planted fault"),
        (lambda: labs.draw((1, 1), (1, 1), rule="magic"), "no rule"),
        (lambda: labs.arena((0.5, 0.5), (20, 30, 30), []), "at least one"),
        (lambda: labs.arena((1.5, 0.5), (20, 30, 30), ["random"]), "between 0 and 1"),
        (lambda: labs.samples_lab(-1), "between 0 and 50"),
    ],
)
def test_bad_settings_get_a_sentence(ask, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        ask()
