import time

import pytest

from flashspec.engine import SpeculativeDecoder

pytestmark = pytest.mark.browser

STATE = "(() => { let e = document.querySelector('#live .fs-strip'); while (e && !e.flashspec) e = e.parentElement; return e.flashspec; })()"
DONE = "document.querySelector('.fs-status').textContent.includes(' s.')"


def set_value(page, selector: str, value: str) -> None:
    box = page.locator(f"{selector} textarea, {selector} input").first
    box.fill(value)
    box.press("Tab")


def set_number(page, selector: str, value) -> None:
    box = page.locator(f"{selector} input[type=number]").first
    box.fill(str(value))
    box.press("Tab")


def open_more(page) -> None:
    if not page.locator("#seed input").is_visible():
        page.click("#more button")
        page.wait_for_selector("#seed input", state="visible")


def shown_text(page) -> str:
    """What the reader sees with rejected drafts hidden."""
    return page.evaluate(
        "[...document.querySelectorAll('#live .fs-strip .fs-token:not(.rejected):not(.discarded):not(.later)')].map((e) => e.textContent).join('')"
    )


def generate(page, timeout: int = 90_000) -> None:
    """Press Generate and wait until the run is done, its regret included."""
    page.click("#generate")
    page.wait_for_function(f"{STATE}.id !== 'recording' && {DONE} && {STATE}.regret", timeout=timeout)


def use(page, selector: str, choice: str) -> None:
    """Choose an entry of a dropdown."""
    page.click(f"{selector} input")
    page.get_by_role("option", name=choice, exact=True).click()


def slow_down(monkeypatch) -> None:
    """Rounds of at least 20 ms, or the text is there at once."""
    settle = SpeculativeDecoder._settle
    monkeypatch.setattr(SpeculativeDecoder, "_settle", lambda *given: (time.sleep(0.02), settle(*given)))


def test_generate_streams_coloured_tokens(page, monkeypatch) -> None:
    slow_down(monkeypatch)
    updates = "window.__seen = []; new MutationObserver(() => window.__seen.push(document.querySelectorAll('#live .fs-strip .fs-token').length)).observe(document.querySelector('#live .fs-strip'), { childList: true });"
    use(page, "#drafter", "always lookup-else-nano")
    page.evaluate(updates)
    generate(page)
    counts = page.evaluate("window.__seen")
    assert len(counts) > 4  # it streams
    state = page.evaluate(
        f"(({{tokens, lost, figures}}) => ({{lost, figures, n: tokens.length, verdicts: tokens.map((t) => t.verdict)}}))({STATE})"
    )
    assert state["lost"] == 0
    assert state["n"] == page.locator(".fs-strip .fs-token").count()
    emitted = [v for v in state["verdicts"] if v in ("accepted", "replacement", "bonus")]
    assert len(emitted) == state["figures"]["tokens"] > 20
    for verdict in ("accepted", "rejected", "replacement"):
        assert page.locator(f"#live .fs-strip .fs-token.{verdict}").count() == state["verdicts"].count(verdict) > 0
    bonus, own = (page.locator(f"#live .fs-strip .fs-token.{kind}").count() for kind in ("bonus", "own"))
    assert bonus > 0
    assert bonus + own == state["verdicts"].count("bonus")
    style = "getComputedStyle(document.querySelector('.fs-strip .fs-token.{}')).{}"
    assert "line-through" in page.evaluate(style.format("rejected", "textDecorationLine"))
    borders = {
        page.evaluate(style.format(v, "borderBottomStyle")) for v in ("accepted", "rejected", "replacement", "bonus")
    }
    assert borders == {"solid", "dashed", "double", "dotted"}
    figures = state["figures"]
    rate = figures["tokens"] / figures["seconds"]
    assert float(page.inner_text("[data-figure=rate]")) == pytest.approx(rate, abs=0.051)  # a half may round either way
    assert page.inner_text("[data-figure=pass]") == f"{figures['tokens'] / figures['rounds']:.2f}"
    assert page.inner_text("[data-figure=accepted]") == f"{round(100 * figures['accepted'] / figures['drafted'])} %"


def test_shown_text_is_the_engines_text(page) -> None:
    from flashspec.ui import live
    from flashspec.ui.page import EXAMPLES

    set_number(page, "#temperature", 0)
    generate(page)
    controls = live.Controls(EXAMPLES[0], "embedded", "lookup-else-nano", 3, "block", 0, 1.0, 128, 0, "torch")
    assert shown_text(page) == live.generate(controls).text  # greedy: whoever drafted


def test_rejected_drafts_can_be_hidden(page) -> None:
    generate(page)
    rejected = page.locator(".fs-strip .fs-token.rejected").first
    assert rejected.is_visible()
    page.uncheck("[data-show=rejected]")
    assert not rejected.is_visible()


def test_tokens_explain_themselves_by_mouse_and_keyboard(page) -> None:
    generate(page)
    page.locator(".fs-strip .fs-token.rejected").first.hover()
    assert "accepted with probability" in page.inner_text(".fs-detail")
    page.focus(".fs-strip")
    page.keyboard.press("Home")
    first = page.inner_text(".fs-detail")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".fs-detail") != first
    page.keyboard.press("End")
    assert page.locator(".fs-strip .fs-token.selected").count() == 1
    assert page.get_attribute(".fs-strip", "aria-activedescendant") == page.locator(".fs-token.selected").get_attribute(
        "id"
    )


def test_stop_and_generate_again(page, monkeypatch) -> None:
    slow_down(monkeypatch)
    open_more(page)
    set_number(page, "#tokens", 512)
    page.click("#generate")
    page.wait_for_function(f"{STATE}.id !== 'recording' && {STATE}.rounds.length > 2")
    page.click("#stop")
    page.wait_for_function("document.querySelector('.fs-status').textContent.startsWith('Stopped')")
    page.wait_for_timeout(1500)
    kept = page.locator(".fs-strip .fs-token").count()
    page.wait_for_timeout(1000)
    assert page.locator(".fs-strip .fs-token").count() == kept > 0
    monkeypatch.undo()
    run = page.evaluate(f"{STATE}.id")
    set_number(page, "#tokens", 20)
    page.click("#generate")
    page.wait_for_function(DONE, timeout=60_000)
    assert page.evaluate(f"{STATE}.id") != run
    assert page.evaluate(f"{STATE}.figures.tokens") == 20


def test_the_empty_output_says_what_is_waited_for(page) -> None:
    shown = "getComputedStyle(document.querySelector('#live .fs-strip'), '::before').content"
    empty = {
        "run": "slow",
        "rounds": [],
        "totals": {"tokens": 0, "rounds": 0, "drafted": 0, "accepted": 0, "seconds": 0},
    }
    receive = f"(message) => {STATE}.receive(message)"
    page.evaluate(receive, {**empty, "seq": 0, "note": "Loading …"})
    assert page.evaluate(shown) == '"Loading …"'
    assert page.text_content(".fs-status") == "Loading …"
    page.evaluate(receive, {**empty, "seq": 1, "done": True, "error": "It is broken."})
    assert page.evaluate(shown) == '""'
    assert page.text_content(".fs-status") == "It is broken."


def test_markup_is_shown_as_text(page) -> None:
    """A stand-in for the engine writes markup; the page shows it."""
    from flashspec.records import Arm, Drafted, NextToken, Round, Seconds
    from flashspec.ui import wire

    evil = "<img src=x onerror='window.__evil = 1'><b>bold</b>"
    drafted = Drafted(1, evil, evil, "accepted", 0.5, 0.5, 1.0, 0.2)
    round = Round(
        0, 5, Arm(evil, 1), 1, "token", "torch", (drafted,), NextToken(2, evil, evil, "bonus", 0.5), 1, 1, Seconds()
    )
    message = {
        "run": "evil",
        "seq": 0,
        "rounds": [wire.pack(round)],
        "totals": {"tokens": 2, "rounds": 1, "drafted": 1, "accepted": 1, "seconds": 1},
    }
    page.evaluate(f"(message) => {STATE}.receive(message)", message)
    page.wait_for_function(f"{STATE}.drawn === 2")
    page.locator(".fs-strip .fs-token").first.hover()
    assert page.locator(".fs-strip .fs-token").first.inner_text() == evil
    assert "<b>bold</b>" in page.inner_text(".fs-detail")
    assert page.locator(".fs-strip img, .fs-strip b, .fs-detail img").count() == 0
    assert page.evaluate("window.__evil") is None


def test_a_lost_message_is_counted_and_a_repeated_one_ignored(page) -> None:
    message = {
        "run": "gaps",
        "rounds": [],
        "totals": {"tokens": 0, "rounds": 0, "drafted": 0, "accepted": 0, "seconds": 0},
    }
    for seq in (0, 1, 1, 4):
        page.evaluate(f"(message) => {STATE}.receive(message)", {**message, "seq": seq})
    assert page.evaluate(f"{STATE}.lost") == 2


def test_bad_input_gets_a_sentence(page) -> None:
    generate(page)
    set_value(page, "#prompt", "   ")
    page.click("#generate")
    page.wait_for_selector(".fs-status.error")
    assert "prompt is empty" in page.inner_text(".fs-status")
    set_value(page, "#prompt", "Now a good one.")
    generate(page)
    assert page.locator(".fs-status.error").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_layout_fits_and_stays(browser, address, theme, width) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto(f"{address}?__theme={theme}")
    tab.wait_for_selector(".fs-strip .fs-token")
    tab.wait_for_timeout(1500)
    shift = "window.__shift = 0; new PerformanceObserver((l) => { for (const e of l.getEntries()) window.__shift += e.value; }).observe({ type: 'layout-shift', buffered: false });"
    tab.evaluate(shift)
    generate(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("window.__shift") < 0.01
    for view in ("Race", "Labs", "How it works"):
        tab.get_by_role("tab", name=view).click()
        tab.wait_for_timeout(300)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, view
    tab.get_by_role("tab", name="Labs").click()
    for lab in ("samples", "temperature", "here", "kernel", "shape", "arena"):
        tab.locator(f"#lab-{lab} button.label-wrap").click()
        tab.wait_for_timeout(300)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, lab
    tab.get_by_role("tab", name="Live").click()
    contrast = """(() => {
      const channel = (c) => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
      const light = (rgb) => { const [r, g, b] = rgb.match(/[\\d.]+/g).map(Number).map(channel); return .2126 * r + .7152 * g + .0722 * b; };
      const ink = light(getComputedStyle(document.querySelector('.fs-token.accepted')).color);
      const paper = light(getComputedStyle(document.querySelector('.fs-card')).backgroundColor);
      return (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
    })()"""
    assert tab.evaluate(contrast) > 7
    tab.close()


def test_cold_load_is_light_and_asks_no_other_host(browser, address) -> None:
    from urllib.parse import urlparse

    context = browser.new_context()
    tab = context.new_page()
    session = context.new_cdp_session(tab)
    session.send("Network.enable")
    sizes, hosts = [], set()
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    tab.on("request", lambda request: hosts.add(urlparse(request.url).hostname))
    tab.goto(address)
    tab.wait_for_selector(".fs-strip")
    tab.wait_for_timeout(1500)
    assert hosts - {None} == {"127.0.0.1"}
    assert sum(sizes) < 400_000
    context.close()
