"""The real page in a real browser. Skipped, with the reason, where no Chromium is found."""

import shutil

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
]


@pytest.fixture(scope="session")
def address():
    from flashspec.ui.page import build, launch

    demo = build()
    _, url, _ = launch(demo, "127.0.0.1", prevent_thread_lock=True, quiet=True)
    yield url
    demo.close()


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, address):
    """The page, loaded; a console error or an exception in the browser fails the test."""
    tab = browser.new_page(viewport={"width": 1440, "height": 1000})
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(address)
    tab.wait_for_selector("#generate")
    tab.wait_for_function("document.querySelector('#live')?.flashspec || document.querySelector('.fs-strip')")
    yield tab
    tab.close()
    assert problems == []
