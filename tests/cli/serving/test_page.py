"""The page of `ckpt serve` in a real browser: search, choose, hover, zoom, scale, and what happens while runs train."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks import Checkpointer
from tests.support.browser import Page
from tests.support.cli_runs import config, some_state
from tests.support.histories import Told, trained
from tests.support.serving import ROWS, served

EVIL = "<img src=x onerror=alert(1)>"


def drawn(*names: str) -> str:
    """An expression: the chart of the loss has the last values of these runs."""
    words = " && ".join(f"label.includes('{name} ends at')" for name in names)
    return f"(label => label.startsWith('loss') && {words})(document.querySelector('.chart-canvas').ariaLabel)"


def search(page: Page, words: str) -> None:
    box = "document.getElementById('search')"
    page.value(f"(box => {{ box.value = {words!r}; box.dispatchEvent(new Event('input')); }})({box})")


def test_search_filters_and_a_heading_sorts(page: Page, url: str) -> None:
    """A word of the name, or a parameter's value, leaves the runs that have it; a click on a heading sorts by it."""
    page.go(url)
    page.until(f"{ROWS}.length === 5")
    search(page, "lr=0.01")
    assert page.value(ROWS) == ["run-000", "run-004"]
    search(page, "gpu-1 ended")
    assert page.value(ROWS) == ["run-001"]
    search(page, "nowhere")
    assert page.value("document.getElementById('empty').textContent") == "No run matches the search."
    search(page, "")
    page.value("document.querySelector('[data-sort=\"metric loss\"]').click()")
    rows = page.value(ROWS)
    assert rows.index("run-003") == 4  # its rate is the lowest
    page.value("document.querySelector('[data-sort=\"metric loss\"]').click()")
    assert page.value(ROWS)[0] == "run-003"
    assert page.value("document.querySelector('[aria-sort]').ariaSort") == "descending"


def test_two_chosen_runs_are_over_each_other_with_their_differences(page: Page, url: str) -> None:
    """A click on each box: both curves in one chart, the spike of each kept, and the parameters that differ first."""
    page.go(f"{url}#run=")
    page.until(f"{ROWS}.length === 5")
    for name in ("run-000", "run-001"):
        page.value(f"document.querySelector('[aria-label=\"choose {name}\"]').click()")
    page.until(drawn("run-000", "run-001"))
    assert page.value("document.querySelectorAll('#legend li').length") == 2
    compared = page.until("[...document.querySelectorAll('#compare tr.differs th')].map(one => one.textContent)")
    assert compared == ["lr", "seed"]
    assert "run=run-000&run=run-001" in page.value("location.hash")


def test_a_drag_zooms_and_reads_the_steps_in_between(page: Page, url: str) -> None:
    """A tenth of the axis is shown with every step in it, for all charts; a double click shows all of it again."""
    page.go(f"{url}#run=run-000")
    page.until(drawn("run-000"))
    place = page.box(".u-over")
    page.drag(place["x"] + place["width"] * 0.5, place["y"] + 50, place["x"] + place["width"] * 0.6)
    low, high = map(float, page.until("(/range=([^&]*)/.exec(decodeURIComponent(location.hash)) || [])[1]").split("~"))
    assert 550 < low < 650 < high < 780
    page.until("!document.getElementById('whole').disabled")
    page.value("document.getElementById('whole').click()")
    page.until("!location.hash.includes('range')")


def test_a_commit_is_seen_without_a_reload(page: Page, tmp_path: Path) -> None:
    """The page is open while a run commits, another one begins, and one goes away: rows and curve follow."""
    told = trained(Told(tmp_path / "one").taken(), 3, every_s=1, steps=10)
    gone = trained(Told(tmp_path / "two").taken(), 1, every_s=1, steps=10)
    with served(tmp_path) as address:
        page.go(f"{address}#run=one")
        page.until(f"{ROWS}.join() === 'one,two'")
        page.until("document.querySelector('#abouts')?.innerText.includes('step 30')")
        trained(told, 1, every_s=1, steps=10)
        page.until("document.querySelector('#table tbody tr').innerText.includes('40')")
        page.until("document.querySelector('#abouts').innerText.includes('step 40')")
        Told(tmp_path / "three").taken()
        (tmp_path / "two").rename(tmp_path / ".two")
        page.until(f"{ROWS}.join() === 'one,three'")
        assert gone.entries


def test_a_server_that_does_not_answer_is_said(page: Page, url: str) -> None:
    """Without an answer the page says so and tries again; with one it goes on."""
    page.go(url)
    page.until(f"{ROWS}.length === 5")
    lost = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **lost)
    page.until("document.getElementById('status').textContent.includes('does not answer')")
    page.call("Network.emulateNetworkConditions", offline=False, **lost)
    page.until("document.getElementById('status').textContent === '5 runs, 0 running'")
    page.errors.clear()  # The browser's own words about it.


def test_a_hostile_text_stays_a_text(page: Page, tmp_path: Path) -> None:
    """A run's name, a reason, and parameters with markup in them are shown as they are, and nothing of them runs."""
    told = Told(tmp_path / EVIL, EVIL).taken(EVIL)
    trained(told, 2, every_s=1, steps=10)
    with served(tmp_path) as address:
        page.go(f"{address}")
        page.until(f"{ROWS}.length === 1")
        page.value("document.querySelector('.name button').click()")
        page.until(f"document.querySelector('#abouts').innerText.includes({EVIL!r})")
        assert page.value("document.querySelectorAll('img').length") == 0


@pytest.mark.parametrize("metric", ["constructor", "__proto__", "toString"])
def test_a_metric_may_have_the_name_of_a_member_of_every_object(page: Page, tmp_path: Path, metric: str) -> None:
    """Its chart has the values of the run that has it, beside a run that has none, and other metrics are there."""
    for run, metrics in {"run": {metric: 0.5, "loss": 0.25}, "other": {"loss": 0.125}}.items():
        with Checkpointer(config(tmp_path / run)) as ckpt:
            for step in (1, 2):
                ckpt.save(step, some_state(step), metrics=metrics)
    with served(tmp_path) as address:
        page.go(f"{address}#run=run&run=other")
        labels = "[...document.querySelectorAll('.chart-canvas')].map(one => one.ariaLabel)"
        for name, run, value in ((metric, "run", "0.5"), ("loss", "run", "0.25"), ("loss", "other", "0.125")):
            page.until(f"{labels}.some(label => label.startsWith({name!r}) && label.includes('{run} ends at {value}'))")
        assert (
            page.value("[...document.querySelectorAll('#table tbody tr')].map(row => row.innerText).join()").count(
                "native code"
            )
            == 0
        )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen(page: Page, url: str, width: int, dark: bool) -> None:
    """Nothing makes the page wider than the screen, and each control is large enough for a finger."""
    page.go(f"{url}#run=run-000&run=run-001", width=width, height=800, dark=dark)
    page.until(drawn("run-000", "run-001"))
    page.until("document.querySelectorAll('#compare table').length")
    assert page.value("document.documentElement.scrollWidth") <= width
    back = page.value("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") != dark
