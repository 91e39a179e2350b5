"""report.html in a real browser: every section is there, nothing leaves the page, on a phone, on a screen, in the dark, in Chinese."""

import json
from pathlib import Path

import pytest

from common import report
from tests.common.report.test_report import HOSTILE
from tests.tools.jobs import FIGURES, TINY, run_job
from tests.tools.packages import program
from tests.tools.runs import ended, made_up

pytestmark = pytest.mark.rehearsal

SECTIONS = ["curves", "events", "time", "confusion", "classes", "worst", "surest", "mistakes", "warnings", "how"]


@pytest.fixture(scope="module")
def browser():
    """A function that opens a page as somebody would: open(path, width, dark, language)."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium")
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(program("chromedriver")))

    def open_(path, width=1440, dark=False, language="en-US"):
        tell = driver.execute_cdp_cmd
        tell(
            "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 800}
        )
        tell(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        )
        tell("Network.setUserAgentOverride", {"userAgent": "a reader", "acceptLanguage": language})
        driver.get_log("performance")
        driver.get_log("browser")
        driver.get(Path(path).as_uri())
        return driver

    yield open_
    driver.quit()


def requests(driver):
    """The addresses that the page has asked for, beside itself and the pictures that it holds."""
    told = [json.loads(row["message"])["message"] for row in driver.get_log("performance")]
    asked = [message["params"]["request"]["url"] for message in told if message["method"] == "Network.requestWillBeSent"]
    return [address for address in asked[1:] if not address.startswith("data:")]


def written(folder, page=None):
    path = folder / "report.html"
    path.write_text(page or report.of_one(report.RunFiles.read(str(folder))))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of a real job, with a restart in it."""
    folder = tmp_path_factory.mktemp("run")
    run_job("train", folder, *TINY, "--max_steps", 5, env=FIGURES)
    run_job("train", folder, *TINY, env=FIGURES)
    return folder / "out"


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_every_section_is_there_and_fits(browser, run, width, dark, tmp_path):
    driver = browser(run / "report.html", width, dark)
    found = {section.get_attribute("id"): section for section in driver.find_elements("css selector", "section")}
    assert list(found) == SECTIONS
    for name, section in found.items():
        assert len(section.text.split()) > 5 and section.size["height"] > 50, name
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width, "nothing sticks out"
    drawn = driver.find_elements("css selector", "figure svg")
    assert len(drawn) == 5 and all(figure.size["width"] > 200 and figure.size["height"] > 100 for figure in drawn)
    pictures = driver.execute_script("return [...document.images].map(image => image.complete && image.naturalWidth)")
    assert len(pictures) == 48 and set(pictures) == {64}
    colour = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    assert [row for row in driver.get_log("browser") if row["level"] in ("SEVERE", "WARNING")] == [] and requests(driver) == []


def test_each_picture_has_words_and_a_table(browser, run):
    driver = browser(run / "report.html")
    for figure in driver.find_elements("css selector", "figure:has(svg)"):
        label = figure.find_element("css selector", "[role=img]").get_attribute("aria-labelledby")
        assert driver.find_element("id", label).text.strip()
        figure.find_element("css selector", "summary").click()
        assert (
            len(figure.find_elements("css selector", "tbody tr")) >= 2
            and figure.find_element("css selector", "tbody").is_displayed()
        )
    assert all(image.get_attribute("alt") for image in driver.find_elements("css selector", "img"))


def test_in_chinese_it_is_chinese_and_a_button_changes_it(browser, run):
    driver = browser(run / "report.html", language="zh-CN")
    assert (
        "已完成，共 2/2 个 epoch" in driver.find_element("id", "outcome").text
        and "Finished" not in driver.find_element("id", "outcome").text
    )
    driver.find_element("id", "language").click()
    assert driver.find_element("id", "outcome").text.startswith("Finished after 2/2 epochs. Best accuracy")
    assert "Finished" in browser(run / "report.html", language="fr-FR").find_element("id", "outcome").text


def test_hostile_names_are_shown_and_not_run(browser, tmp_path):
    folder = made_up(
        tmp_path / "run", names=HOSTILE, event=[ended("failed", HOSTILE[0])], options={name: [name, name] for name in HOSTILE}
    )
    driver = browser(written(folder, report.of_one(report.RunFiles.read(str(folder), HOSTILE[0]))), width=360)
    assert driver.find_element("css selector", "h1").text == HOSTILE[0]
    names = [cell.text for cell in driver.find_elements("css selector", ".heat tbody th")]
    assert [name.replace("\\n", "\n") for name in names] == HOSTILE
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
    assert driver.get_log("browser") == [] and requests(driver) == []


def test_the_slider_uncovers_the_picture_before(browser, tmp_path):
    run_job("train_restore", tmp_path, "--custom_data", "true", "--epochs", 1, "--max_samples", 16, "--width", 4, env=FIGURES)
    driver = browser(tmp_path / "out" / "report.html")
    pair = driver.find_element("css selector", "#restored .pair")
    words = [image.get_attribute("alt") for image in pair.find_elements("css selector", "img")]
    assert words == ["restored 1", "blurry 1", "sharp 1"]
    assert set(driver.execute_script("return [...document.images].map(image => image.complete && image.naturalWidth)")) == {48}
    shown = "return getComputedStyle(document.querySelector('.over')).clipPath"
    before = driver.execute_script(shown)
    slider = pair.find_element("css selector", "input")
    driver.execute_script("arguments[0].value = 90; arguments[0].dispatchEvent(new Event('input'))", slider)
    assert (before, driver.execute_script(shown)) == ("inset(0px 50% 0px 0px)", "inset(0px 10% 0px 0px)")
    assert driver.get_log("browser") == [] and requests(driver) == []
