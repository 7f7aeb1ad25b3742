"""The page in a real browser, by clicking and by keys alone. Skipped where Debian's Chromium and
its driver are not installed.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from .conftest import ANSWER, PROBLEM
from .test_socket import Served

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-dev-shm-usage"
    " --disable-background-networking --disable-component-update --disable-sync"
)
IMAGES = Path(__file__).parents[2] / "docs" / "images"
pytestmark = [
    pytest.mark.skipif(None in (BROWSER, DRIVER), reason="needs chromium and chromium-driver"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = Chrome(options, Service(DRIVER))
    made.set_script_timeout(120)
    yield made
    made.quit()


class Page:
    """The page as somebody sees it."""

    def __init__(self, browser: Chrome, url: str, width: int = 1280, height: int = 900) -> None:
        self.browser = browser
        # A headless window has a least width; a phone's is narrower.
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(url)
        self.until(lambda: self.all("#model option"))
        self.until(lambda: self.all("#iteration-specs option"))

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.browser, 120, 0.05).until(lambda _: condition())

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def write(self, selector: str, text: str) -> None:
        self.one(selector).clear()
        self.one(selector).send_keys(text)

    def run(self, runs: int = 1) -> None:
        self.one("#run").click()
        self.until(lambda: len(self.all(".run[data-done]")) == runs)
        self.until(lambda: self.one("#run").is_enabled())

    def canvas(self, run: int = 0) -> list[str]:
        """Text of the cells; a dot is a masked one."""
        script = "return [...document.querySelectorAll('.canvas')[arguments[0]].children]"
        return list(self.browser.execute_script(f"{script}.map(c => c.textContent)", run))

    def set(self, run: int = 0) -> int:
        return sum(text != "·" for text in self.canvas(run))

    def fits(self) -> bool:
        """Whether nothing is wider than the window."""
        script = "return document.documentElement.scrollWidth <= window.innerWidth"
        return bool(self.browser.execute_script(script))


@pytest.fixture
def page(browser: Chrome, served: Served) -> Iterator[Page]:
    browser.get_log("browser")
    yield Page(browser, served.url)
    # Nothing was refused by the page's policy, nothing failed, nothing came from elsewhere.
    said = [line for line in browser.get_log("browser") if line["level"] != "DEBUG"]
    assert [line for line in said if "400" not in line["message"]] == []
    script = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert all(name.startswith(served.url) for name in browser.execute_script(script))


def test_a_run_and_its_steps(page: Page) -> None:
    page.write("#prompt", PROBLEM)
    page.run()
    assert page.one(".text").get_attribute("textContent") == ANSWER
    assert "".join(page.canvas()[:18]).replace("↵", "\n") == ANSWER
    last = int(page.one(".steps input").get_attribute("max") or 0)
    assert last > 3
    counts = [page.set()]
    for step in range(last - 1, -1, -1):
        page.one("[data-go=back]").click()
        counts.append(page.set())
        assert page.one(".cost").text.startswith(f"forward {step} of {last} ")
    assert counts[-1] == 0 and counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)  # every forward sets something
    page.one("[data-go=on]").click()
    assert page.set() == counts[-2] == len(page.all(".canvas .cell.fresh"))
    page.one("[data-go=first]").click()
    page.one("[data-go=play]").click()
    page.until(lambda: page.set() == counts[0])


def test_confidence_is_colour_and_a_figure(page: Page) -> None:
    page.write("#prompt", PROBLEM)
    page.run()
    cell = page.all(".canvas .cell.set")[2]
    script = "return arguments[0].style.getPropertyValue('--confidence')"
    sure = float(page.browser.execute_script(script, cell))
    assert 0 < sure <= 1
    cell.click()
    assert f"confidence {sure:.3f}, set in forward" in page.one(".about").text
    colours = {c.value_of_css_property("background-color") for c in page.all(".canvas .cell.set")}
    assert len(colours) > 3


def test_two_strategies_side_by_side(page: Page) -> None:
    page.write("#prompt", PROBLEM)
    page.one("#compare").click()
    page.all(".choice [data-kind=decoder]")[1].send_keys("fixed")
    page.run(2)
    first, second = (int(e.get_attribute("max") or 0) for e in page.all(".steps input"))
    assert second > 2 * first
    assert all(" tokens a forward · " in e.text for e in page.all(".cost"))
    left, right = (e.rect for e in page.all(".run"))
    assert left["y"] == right["y"] and left["x"] < right["x"]
    assert page.all(".run h2")[1].text.startswith("fixed · ")


def test_holes(page: Page) -> None:
    page.one("[value=fill]").click()
    page.write("#prompt", PROBLEM)
    page.write("#text", "Add 7: 12+7=[BLANK:2].")
    page.run()
    assert page.one(".text").get_attribute("textContent") == "Add 7: 12+7=19."
    (hole,) = page.all(".holes li")
    assert hole.text.startswith('hole 1: "19", confidence 0.')
    page.one("[data-go=first]").click()
    assert "".join(page.canvas()) == "Add 7: 12+7=··."
    assert len(page.all(".canvas .cell.fixed")) == len(page.canvas()) - 2


def test_by_keys_alone(page: Page) -> None:
    """From the top of the page, without a mouse: a prompt, a run, a step back, a position."""
    keys = page.browser.switch_to

    def focused() -> str:
        return str(page.browser.execute_script("return document.activeElement.id"))

    page.one("body").send_keys(Keys.TAB)
    for _ in range(40):
        if focused() == "prompt":
            break
        keys.active_element.send_keys(Keys.TAB)
    assert focused() == "prompt"
    keys.active_element.send_keys(Keys.CONTROL, "a")
    keys.active_element.send_keys(Keys.NULL, PROBLEM)
    keys.active_element.send_keys(Keys.CONTROL, Keys.ENTER)
    page.until(lambda: page.all(".run[data-done]"))
    for _ in range(40):
        if keys.active_element.get_attribute("class") == "canvas":
            break
        keys.active_element.send_keys(Keys.TAB)
    keys.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.one(".about").text.startswith("Position 1: ")
    for _ in range(3):
        keys.active_element.send_keys(Keys.TAB)
    assert keys.active_element.get_attribute("type") == "range"
    last = int(keys.active_element.get_attribute("value") or 0)
    keys.active_element.send_keys(Keys.ARROW_LEFT)
    assert page.one(".cost").text.startswith(f"forward {last - 1} of {last} ")


def test_what_the_server_refuses_is_said(page: Page) -> None:
    page.one(".choice [data-kind=decoder]").send_keys("treshold")
    page.one("#run").click()
    page.until(lambda: "Did you mean 'threshold'?" in page.one("#error").text)
    page.one(".choice [data-kind=decoder]").clear()
    page.run()
    assert page.one("#error").text == ""


def test_stop(page: Page, served: Served) -> None:
    page.write("#max_tokens", "450")
    page.one(".choice [data-kind=decoder]").send_keys("fixed:ranking=sequential")
    page.one(".choice [data-kind=cache]").send_keys("none")
    page.one("#run").click()
    page.until(lambda: page.all(".canvas .cell.fresh"))
    page.one("#stop").click()
    page.until(lambda: page.one("#run").is_enabled())
    assert page.one("#error").text == ""


@pytest.mark.parametrize("mode", ["answer", "fill"])
def test_a_phones_width(browser: Chrome, served: Served, mode: str) -> None:
    page = Page(browser, served.url, 390, 800)
    assert page.fits()
    page.one(f"[value={mode}]").click()
    page.one("#compare").click()
    page.run(2)
    assert page.fits()
    upper, lower = (e.rect for e in page.all(".run"))
    assert upper["x"] == lower["x"] and upper["y"] + upper["height"] <= lower["y"]


def dark(browser: Chrome, wanted: bool) -> None:
    """Sets what the reader prefers."""
    value = "dark" if wanted else "light"
    feature = {"features": [{"name": "prefers-color-scheme", "value": value}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2) of rgb(...)."""
    parts = [int(part) / 255 for part in re.findall(r"[0-9]+", colour)[:3]]
    line = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * line[0] + 0.7152 * line[1] + 0.0722 * line[2]


def test_text_can_be_read_in_light_and_in_dark(page: Page) -> None:
    """Contrast of 4.5 and more (WCAG 2, level AA)."""
    grounds = []
    for wanted in (False, True):
        dark(page.browser, wanted)
        grounds.append(luminance(page.one("body").value_of_css_property("background-color")))
        for selector, behind in (
            ("h1", "body"),
            ("header p", "body"),
            ("#settings label", "body"),
            ("#prompt", "#prompt"),
            ("#run", "#run"),
        ):
            pair = [
                luminance(page.one(selector).value_of_css_property("color")),
                luminance(page.one(behind).value_of_css_property("background-color")),
            ]
            assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5, (selector, wanted)
    dark(page.browser, False)
    assert grounds[0] > 0.8 and grounds[1] < 0.05


@pytest.mark.slow
def test_pictures_for_the_documentation(browser: Chrome, served: Served) -> None:
    """Writes docs/images; look at them before they are committed."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, width, height in (("desktop", 1280, 800), ("phone", 390, 844)):
        page = Page(browser, served.url, width, height)
        browser.save_screenshot(str(IMAGES / f"page-{name}-before.png"))
        page.one("#compare").click()
        page.all(".choice [data-kind=decoder]")[1].send_keys("fixed", Keys.TAB)
        page.one("#run").click()
        page.until(lambda: page.set(1) > 8)  # noqa: B023 (called at once)
        if name == "phone":
            page.browser.execute_script("document.querySelector('.legend').scrollIntoView()")
        browser.save_screenshot(str(IMAGES / f"page-{name}-during.png"))
        page.until(lambda: len(page.all(".run[data-done]")) == 2)  # noqa: B023
        for button in page.all("[data-go=back]"):
            button.click()
            button.click()
        browser.save_screenshot(str(IMAGES / f"page-{name}-after.png"))
        if name == "desktop":
            browser.execute_script("window.scrollTo(0, 0)")
            browser.save_screenshot(str(IMAGES / f"page-{name}-after.png"))
            dark(browser, True)
            browser.save_screenshot(str(IMAGES / "page-desktop-dark.png"))
            dark(browser, False)
    page = Page(browser, served.url, 1280, 800)
    page.one("[value=fill]").click()
    page.run()
    browser.save_screenshot(str(IMAGES / "page-desktop-holes.png"))
