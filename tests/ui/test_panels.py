"""Charts, inspector, replay, files, race and labs, by mouse and by keyboard."""

import json

import pytest
from ui.test_page import STATE, generate, set_number, shown_text, use

from flashspec.records import totals, trace_from_json

pytestmark = pytest.mark.browser


def test_a_recording_plays_before_the_first_click(page) -> None:
    assert page.evaluate(f"{STATE}.id") == "recording"
    page.wait_for_function(f"{STATE}.cursor === null || {STATE}.cursor > 3")
    assert "A recording from" in page.inner_text("#live .fs-status")
    page.wait_for_function(f"{STATE}.cursor === null", timeout=30_000)
    assert page.locator("#live .later").count() == 0
    assert page.locator("[data-chart=regret] path").count() == 3
    assert "Headroom" in page.inner_text(".fs-headroom")


def test_bandit_panels_show_every_round_and_the_exact_regret(page) -> None:
    generate(page)
    page.wait_for_function("document.querySelectorAll('[data-chart=regret] path').length === 3")
    state = page.evaluate(
        f"(({{rounds, regret, head, sums}}) => ({{rounds: rounds.length, regret, arms: head.arms, sums: sums.at(-1)}}))({STATE})"
    )
    assert page.locator("[data-chart=arms] circle.dot").count() == state["rounds"]
    assert page.locator("[data-chart=arms] circle.mean").count() == len(state["arms"])
    regret = state["regret"]
    assert state["regret"]["verdict"] in page.inner_text(".fs-note")
    assert regret["best"] in page.text_content("[data-chart=regret]")
    assert regret["fixed"][regret["best"]] == min(regret["fixed"].values())
    assert regret["oracle"][-1] <= 1e-4  # nothing beats who knows the text
    plain = regret["fixed"]["plain"] / (regret["best_seconds"] + regret["run"][-1])
    assert page.inner_text("[data-figure=plain]") == f"{plain:.2f}"
    rows = page.locator("[data-table=arms] tbody tr")
    assert sum(int(rows.nth(k).locator("td").first.inner_text()) for k in range(rows.count())) == state["rounds"]


def test_the_inspector_shows_what_was_drawn(page) -> None:
    use(page, "#drafter", "always nano")
    use(page, "#rule", "token")
    generate(page)
    page.locator("#live .fs-strip .fs-token.rejected").first.click()
    index = page.evaluate(f"{STATE}.selected")
    token = page.evaluate(
        f"(({{p, q, threshold, uniform, candidates}}) => ({{p, q, threshold, uniform, candidates}}))({STATE}.tokens[{index}])"
    )
    said = page.inner_text(".fs-detail")
    assert f"q = {token['q']:.3f}" in said or token["q"] < 5e-4
    assert token["threshold"] == pytest.approx(token["p"] / token["q"], rel=2e-3, abs=2e-4)
    assert token["uniform"] > token["threshold"]
    assert page.locator(".fs-gauge").count() == 1
    assert page.locator(".fs-top tbody tr").count() == len(token["candidates"])
    assert page.locator(".fs-top tr.chosen").count() == 1
    page.locator("#live .fs-strip .fs-token.replacement").first.click()
    assert "residual" in page.inner_text(".fs-top thead")
    candidates = page.evaluate(f"{STATE}.tokens[{STATE}.selected].candidates")
    for _, _, p, q, residual in candidates:
        assert (residual > 0) == (p > q) or abs(p - q) < 2e-4  # max(p − q, 0), normalised
    assert "Round " in page.inner_text(".fs-words")


def test_replay_by_round_by_stage_and_by_rejection(page) -> None:
    use(page, "#drafter", "always nano")
    set_number(page, "#temperature", 1)
    generate(page)
    whole = shown_text(page)
    page.click("[data-do=first]")
    assert shown_text(page) == ""
    page.click("[data-do=step]")
    assert "draft" in page.inner_text(".fs-stage")
    drafted = page.evaluate(f"{STATE}.rounds[0].drafted.length")
    assert page.locator("#live .fs-strip .pending:not(.later)").count() == drafted
    page.click("[data-do=step]")
    page.click("[data-do=step]")
    assert "compare" in page.inner_text(".fs-stage")
    assert page.locator("#live .fs-strip .pending:not(.later)").count() == 0
    page.click("[data-do=step]")
    assert page.evaluate(f"{STATE}.cursor") == 1
    assert page.inner_text("[data-figure=rounds]") == "1"
    page.click("[data-do=rejection]")
    assert page.locator("#live .fs-strip .selected.rejected").count() == 1
    page.locator("[data-do=scrub]").fill("5")
    assert page.evaluate(f"{STATE}.cursor") == 5
    page.select_option("[data-do=speed]", "4")
    page.click("[data-do=play]")
    page.wait_for_function(f"{STATE}.cursor === null && !{STATE}.timer", timeout=30_000)
    assert shown_text(page) == whole


def test_all_of_the_live_view_by_keyboard(page) -> None:
    generate(page)
    page.focus("#live .fs-strip")
    page.keyboard.press("r")
    first = page.evaluate(f"{STATE}.selected")
    assert page.evaluate(f"{STATE}.tokens[{first}].verdict") == "rejected"
    page.keyboard.press("r")
    assert page.evaluate(f"{STATE}.selected") > first
    page.keyboard.press(" ")
    page.wait_for_function(f"{STATE}.timer")
    page.keyboard.press(" ")
    page.wait_for_function(f"!{STATE}.timer")
    for _ in range(3):  # Tab walks on to the transport
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.fs-transport') !== null")


def test_the_tour_by_keyboard(page) -> None:
    page.focus("[data-tour=start]")
    page.keyboard.press("Enter")
    seen = []
    for _ in range(6):
        seen.append(page.inner_text(".fs-tour p"))
        assert page.locator(".fs-lit").count() == 1
        page.keyboard.press("Enter")  # Next has the focus
    assert len(set(seen)) == 6
    assert page.locator(".fs-tour").is_hidden()
    page.click("[data-tour=start]")
    page.keyboard.press("Escape")
    assert page.locator(".fs-tour").is_hidden()
    assert page.locator(".fs-lit").count() == 0


def test_rounds_view(page) -> None:
    generate(page)
    page.check("[data-show=rounds]")
    assert page.locator(".fs-round").count() == page.evaluate(f"{STATE}.rounds.length")
    widths = page.evaluate(
        "[...document.querySelector('.fs-times').children].map((bar) => parseFloat(bar.style.width))"
    )
    assert sum(widths) == pytest.approx(100, abs=0.5)
    page.locator(".fs-round .fs-token").nth(3).click()
    assert page.evaluate(f"{STATE}.selected") == 3


def test_a_saved_trace_opens_here_and_in_python(page, tmp_path) -> None:
    generate(page)
    whole, figures = shown_text(page), page.evaluate(f"{STATE}.figures")
    with page.expect_download() as download:
        page.click("[data-file=save]")
    saved = tmp_path / "trace.json"
    download.value.save_as(saved)
    trace = trace_from_json(saved.read_bytes())
    assert trace.text == whole
    assert totals(trace.rounds).tokens == figures["tokens"]
    assert totals(trace.rounds).accepted == figures["accepted"]
    assert trace.rounds[3].estimates is not None
    page.reload()
    page.wait_for_selector("#live .fs-strip .fs-token")
    page.set_input_files(".fs-files input", saved)
    page.wait_for_function(f"{STATE}.id === 'file'")
    assert shown_text(page) == whole
    assert page.locator("[data-chart=arms] circle.dot").count() == figures["rounds"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("not json", "not a FlashSpec trace"),
        ("[]", "not a FlashSpec trace"),
        ('{"rounds": [], "schema": 99}', "schema version 99"),
        ('{"rounds": [], "schema": 1}', "holds no round"),
        ('{"rounds": [{"arm": ["nano", 2]}], "schema": 1}', "not a FlashSpec trace"),
        (
            '{"rounds": [{"index": 0, "tau": 0, "arm": ["x", 1], "seconds": {}, "drafted": [{"verdict": "<b>"}]}], "schema": 1}',
            "not a FlashSpec trace",
        ),
    ],
)
def test_bad_files_get_a_sentence_and_nothing_is_lost(page, tmp_path, content, sentence) -> None:
    before = page.evaluate(f"{STATE}.tokens.length")
    file = tmp_path / "bad.json"
    file.write_text(content)
    page.set_input_files(".fs-files input", file)
    page.wait_for_selector("#live .fs-status.error")
    assert sentence in page.inner_text("#live .fs-status")
    assert page.evaluate(f"{STATE}.tokens.length") == before > 0


def test_exports(page) -> None:
    generate(page)
    found = {}
    for name in ("csv", "svg", "png"):
        with page.expect_download() as download:
            page.click(f"[data-file={name}]")
        found[name] = download.value.path().read_bytes()
    rows = found["csv"].decode().splitlines()
    assert rows[0].startswith("round,arm,id,token,verdict,p,q")
    assert len(rows) >= page.evaluate(f"{STATE}.tokens.length")
    assert found["svg"].startswith(b"<svg")
    assert b"var(" not in found["svg"]  # colours are written in
    assert found["png"].startswith(b"\x89PNG")


def test_a_link_carries_the_settings(browser, address) -> None:
    tab = browser.new_page()
    tab.goto(
        f"{address}?prompt=Name+a+bird%3Cb%3E&drafter=nano&gamma=5&temperature=0.4&rule=token&tokens=16&seed=9&top_k=7&policy=nonsense"
    )
    tab.wait_for_selector("#prompt textarea")
    tab.wait_for_function("document.querySelector('#prompt textarea').value.startsWith('Name a bird')")
    assert tab.input_value("#prompt textarea") == "Name a bird<b>"
    assert tab.input_value("#drafter input") == "always nano"
    assert tab.input_value("#temperature input[type=number]") == "0.4"
    generate(tab)
    settings = tab.evaluate(f"{STATE}.head.settings")
    assert (settings["arm"], settings["rule"], settings["max_new_tokens"], settings["seed"]) == (
        "nano γ=5",
        "token",
        16,
        9,
    )
    assert settings["sampling"]["top_k"] == 7
    tab.close()


def test_the_race_measures_both_and_tells_the_loser(page) -> None:
    use(page, "#drafter", "always nano")
    use(page, "#rule", "coupled")
    set_number(page, "#temperature", 0.8)
    page.get_by_role("tab", name="Race").click()
    page.click("#start-race")
    page.wait_for_function("document.querySelector('.fs-result').textContent.includes('tokens/s')", timeout=90_000)
    said = page.inner_text(".fs-result")
    assert "Both texts are identical" in said
    lanes = page.evaluate(
        """(() => {
          let e = document.querySelector('.fs-result');
          while (!e.flashspec) e = e.parentElement;
          return ['a', 'b'].map((k) => { const s = e.flashspec.lanes[k].sums.at(-1); return s.tokens / s.seconds; });
        })()"""
    )
    assert f"{lanes[1]:.1f} against {lanes[0]:.1f}" in said
    assert ("times as fast" in said) == (lanes[1] >= lanes[0])
    assert page.locator("[data-lane=a] h2").inner_text().lower().startswith("plain")


LABS = [
    ("exactness", "Passed"),
    ("samples", "10,000 in"),
    ("temperature", "invisible"),
    ("kernel", "slower at"),
    ("shape", "B = 1, γ = 1"),
    ("arena", "Best: tiny"),
]


def open_lab(page, name: str) -> None:
    page.get_by_role("tab", name="Labs").click()
    if not page.locator(f"#lab-{name} .fs-question").first.is_visible():
        page.locator(f"#lab-{name} button.label-wrap").click()


@pytest.mark.parametrize(("name", "answer"), LABS)
def test_labs_answer_the_prediction(page, name, answer) -> None:
    open_lab(page, name)
    page.locator(f"#guess-{name} label").first.click()
    page.click(f"#run-{name}")
    page.wait_for_function(
        f"document.querySelector('#answer-{name}').textContent.includes('You predicted')", timeout=90_000
    )
    assert answer in page.inner_text(f"#answer-{name}")
    page.wait_for_selector(f"#plot-{name} .js-plotly-plot, #plot-{name} table", timeout=30_000)


def test_exactness_lab_obeys_bars_and_faults(page) -> None:
    """Dragged bars reach the engine, and a planted fault is rejected."""
    open_lab(page, "exactness")
    use(page, "#fault", "replacement from p, not the residual")
    page.click("#run-exactness")
    page.wait_for_function(
        "document.querySelector('#answer-exactness').textContent.includes('Rejected')", timeout=60_000
    )
    for k in range(4):  # q like p: every draft is accepted, and no fault can show
        for which in "pq":
            page.locator(f".fs-sliders input[data-which={which}][data-token='{k}']").fill(str(k + 1))
    page.click("#run-exactness")
    page.wait_for_function(
        "document.querySelector('#answer-exactness').textContent.includes('100% of the drafted')", timeout=60_000
    )
    assert "Passed" in page.inner_text("#answer-exactness")


def test_what_runs_here_names_the_missing(page) -> None:
    open_lab(page, "here")
    shown = page.inner_text("#capabilities")
    assert "PyTorch" in shown
    assert "family embedded" in shown


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["Live", "Race", "Labs", "How it works"])
def test_axe_finds_no_serious_fault(browser, address, theme, view) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    tab.goto(f"{address}?__theme={theme}")
    tab.wait_for_selector("#live .fs-strip .fs-token")
    tab.get_by_role("tab", name=view).click()
    tab.wait_for_timeout(500)
    found = Axe().run(tab).response["violations"]
    serious = [
        (v["id"], [node["html"][:160] for node in v["nodes"]][:3])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert serious == []
    tab.close()


def test_no_delta_is_dropped_at_a_hundred_tokens_a_second(page) -> None:
    """A recorded run is fed at 100 tokens a second; every token is drawn within two tenths of a second."""
    from flashspec.models.catalog import assets

    recorded = json.loads((assets() / "page" / "recording.json").read_text(encoding="utf-8"))["recording"]
    result = page.evaluate(
        f"""async (recorded) => {{
          const live = {STATE};
          let last = 0;
          for (const message of recorded) {{
            live.receive({{ ...message, run: "fed" }});
            await new Promise((go) => setTimeout(go, 10 * Math.max(1, message.totals.tokens - last)));
            last = message.totals.tokens;
          }}
          await new Promise((go) => setTimeout(go, 200));
          return {{ lost: live.lost, drawn: live.drawn, tokens: live.tokens.length, emitted: live.sums.at(-1).tokens }};
        }}""",
        recorded,
    )
    assert result["lost"] == 0
    assert result["drawn"] == result["tokens"] > 0
    assert result["emitted"] == recorded[-1]["totals"]["tokens"]


def test_the_last_run_is_taken_apart(page) -> None:
    page.click("#analysis button.label-wrap")
    page.click("#draw-analysis")
    page.wait_for_function("document.querySelector('#analysis').innerText.includes('no finished run yet')")
    generate(page)
    page.wait_for_function("document.querySelectorAll('[data-chart=regret] path').length === 3")
    page.wait_for_timeout(300)  # what is kept of the run follows its last message
    page.click("#draw-analysis")
    page.wait_for_function(
        "document.querySelectorAll('#analysis .js-plotly-plot .xaxislayer-above').length === 4", timeout=30_000
    )
    rounds = page.evaluate(f"{STATE}.rounds.length")
    assert f"{rounds} rounds" in page.inner_text("#analysis")
    played = page.evaluate(f"new Set({STATE}.rounds.map((round) => String(round.arm))).size")
    assert page.locator("#analysis .js-plotly-plot").first.locator(".annotation").count() == played
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(600)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
