"""A real browser for tests: Debian's Chromium, driven by Playwright. Nothing is downloaded.

Where there is no Chromium the tests are skipped; where one must be there (CI, ATTNLAB_REQUIRE_BROWSER) they fail.
"""

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
           "--disable-component-update", "--disable-sync"]  # fmt: skip


def found():
    """Where the browser is."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


@pytest.fixture(scope="session")
def chromium():
    path = found()
    if path is None:
        if os.environ.get("ATTNLAB_REQUIRE_BROWSER") or os.environ.get("CI"):
            pytest.fail("no Chromium, and here one must be there: make browser")
        pytest.skip("no Chromium: make browser installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


class Opened:
    """A page that was opened, what it said and what it asked for."""

    def __init__(self, page):
        self.page, self.said, self.asked, self.dialogs = page, [], [], []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))

    def __getattr__(self, name):
        return getattr(self.page, name)

    def go(self, path):
        self.page.goto(path.as_uri())
        return self

    def ready(self):
        """Wait until what was last chosen is drawn."""
        self.page.wait_for_function(
            "() => { const h = document.querySelector('.viewer'); return h.dataset.ready === String(h.viewer.turn) }"
        )
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self

    def at(self, query, key, panel=0):
        """The point of a cell of the matrix."""
        self.ready()
        self.page.locator(".over").nth(panel).scroll_into_view_if_needed()
        return self.page.evaluate(
            """([i, j, n]) => {
                const { plot } = document.querySelector('.viewer').viewer.panels[n];
                const box = plot.over.getBoundingClientRect();
                return [box.left + plot.x(j + 0.5), box.top + plot.y(i + 0.5)];
            }""",
            [query, key, panel],
        )

    def point(self, query, key, panel=0):
        self.page.mouse.move(*self.at(query, key, panel))
        return self.ready()

    def click(self, query, key, panel=0):
        self.page.mouse.click(*self.at(query, key, panel))
        return self.ready()

    def value(self, measure="weight", table=".readout > .values"):
        """A number of the readout, as it is shown."""
        return self.number(f"{table} tr[data-measure='{measure}'] .value")

    def number(self, selector):
        """The number that is the text of the first such element."""
        text = self.page.locator(selector).first.inner_text()
        return float(text.replace("−", "-").replace("%", "").strip())

    def pixel(self, query, key, panel=0):
        """The colour of a cell, as it is painted."""
        return self.page.evaluate(
            """([i, j, n]) => {
                const { plot } = document.querySelector('.viewer').viewer.panels[n];
                const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
                context.drawImage(plot.bitmap, -j, -i);
                return [...context.getImageData(0, 0, 1, 1).data];
            }""",
            [query, key, panel],
        )

    def caption(self, panel=0):
        return self.page.locator(".panel figcaption").nth(panel).inner_text()


@pytest.fixture
def opened(chromium):
    """A function that opens a page, and at the end makes sure that all was quiet: no error, no request, no dialog."""
    pages = []

    def open_(path=None, **options):
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
        context.set_default_timeout(10_000)
        page = Opened(context.new_page())
        pages.append((context, page, path))
        return page.go(path) if path else page

    yield open_
    for context, page, path in pages:
        said, asked, dialogs = page.said, page.asked, page.dialogs
        context.close()
        assert said == []
        assert dialogs == []
        assert asked == ([path.as_uri()] if path else [])
