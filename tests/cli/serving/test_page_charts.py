"""What the page of `ckpt serve` draws and lists, by the user's choice; what it says where nothing is drawn."""

from __future__ import annotations

import csv
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ckpt_tasks import Checkpointer
from tests.support.browser import Page
from tests.support.cli_runs import config, some_state
from tests.support.gang import Gang
from tests.support.histories import LOST, Told, trained
from tests.support.interpreters import python
from tests.support.serving import ROWS, drawn_of, served
from tests.support.waiting import until

# uPlot keeps its scales to itself: remember each chart that it makes, and draw all of them again.
PLOTS = """(() => {
  const made = uPlot;
  window.plots = [];
  const make = function (...given) { plots.push(new made(...given)); return plots[plots.length - 1]; };
  window.uPlot = Object.assign(make, made);
  document.getElementById('log').dispatchEvent(new Event('change'));
})()"""
TITLES = "[...document.querySelectorAll('.chart h3')].map(title => title.textContent)"
NOTES = "document.getElementById('none').innerText"


def write(root: Path, name: str, metrics: Mapping[int, Mapping[str, float]], **params: float) -> None:
    """Make a run in this process: the metrics of its steps, all of them committed."""
    with Checkpointer(config(root / name)) as ckpt:
        ckpt.acquire()
        ckpt.record_program("m:P", params)
        for step, values in metrics.items():
            ckpt.save(step, some_state(step), metrics=values)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Seven runs of two rates; `long-…` has the most steps, `scored` one value of an accuracy, `bare` no metric."""
    place = tmp_path_factory.mktemp("sweep")
    for n, lr in enumerate((0.003, 0.01, 0.01, 0.003)):
        write(place, f"run-{n}", {step: {"loss": 1 / step, "lr": lr} for step in (1, 2)}, lr=lr, width=8)
    write(place, "long-" + 6 * "name-", {step: {"loss": 2 / step} for step in (1, 2, 50, 100)}, lr=0.1, width=8)
    write(place, "scored", {20_000: {"accuracy": 0.9}}, lr=0.1, width=8)
    write(place, "bare", {1: {}}, lr=0.1, width=8)
    with Checkpointer(config(place / "unsaved")) as ckpt:
        ckpt.acquire()
    with served(place) as address:
        yield address


def test_the_newest_runs_are_drawn_without_a_click(page: Page, sweep: str) -> None:
    """Without a choice the five newest runs are chosen; a choice, also of none, is kept in the address."""
    page.go(sweep)
    page.until(f"{TITLES}.includes('loss')")
    chosen = "[...document.querySelectorAll('#table tr.chosen .name')].map(one => one.textContent)"
    assert page.value(chosen) == ["bare", "long-" + 6 * "name-", "run-2", "run-3", "scored"]
    page.value("document.getElementById('clear').click()")
    assert page.value("location.hash") == "#run="
    page.value("document.querySelector('[aria-label=\"choose run-1\"]').click()")
    assert page.value("location.hash") == "#run=run-1"
    page.go(f"{sweep}#run=")
    page.until(f"{ROWS}.length === 8")
    assert page.value(chosen) == []


def test_columns_are_chosen_and_ordered_in_the_address(page: Page, sweep: str) -> None:
    """A box shows a column, a button moves it to the left, and a reload keeps both; names take one line each."""
    heads = "[...document.querySelectorAll('#table thead button')].map(one => one.dataset.sort)"
    page.go(f"{sweep}#run=&column=step")
    page.until(f"{ROWS}.length === 8")
    assert page.value(heads) == ["name", "step"]
    page.value("document.getElementById('columns').open = true")
    page.until("document.querySelector('[data-column=\"param lr\"]') !== null")
    page.value("document.querySelector('[data-column=\"param lr\"]').click()")
    page.value("document.querySelector('[data-column=\"move param lr\"]').click()")
    assert page.value(heads) == ["name", "param lr", "step"]
    page.go(sweep + page.value("location.hash"))
    page.until(f"{heads}.join() === 'name,param lr,step'")
    heights = "[...document.querySelectorAll('#table .name button')].map(one => one.getClientRects().length)"
    assert set(page.value(heights)) == {1}
    tallest = "Math.max(...[...document.querySelectorAll('#table tbody tr')].map(one => one.offsetHeight))"
    assert page.value(tallest) < 45


def test_runs_are_grouped_by_a_parameter(page: Page, sweep: str) -> None:
    """Each value is a heading, by size; runs of one value have one colour; a click on the heading chooses them."""
    page.go(f"{sweep}#run=run-0&run=run-1&run=run-2")
    page.until(drawn_of("run-0", "run-1", "run-2"))
    offered = "[...document.getElementById('group').options].map(one => one.value)"
    assert page.value(offered) == ["", "lr", "width"]
    page.value(
        "(box => { box.value = 'lr'; box.dispatchEvent(new Event('change')); })(document.getElementById('group'))"
    )
    rows = "[...document.querySelectorAll('#table .group button, #table .name')].map(one => one.textContent)"
    assert page.value(rows)[:6] == ["lr = 0.003 (2)", "run-0", "run-3", "lr = 0.01 (2)", "run-1", "run-2"]
    assert "group=lr" in page.value("location.hash")
    legend = "[...document.querySelectorAll('#legend li')].map(one => one.textContent)"
    assert page.value(legend) == ["lr = 0.003: run-0", "lr = 0.01: run-1, run-2"]
    page.value(PLOTS)
    strokes = page.value("plots[0].series.slice(1).map(one => one.stroke())")
    assert strokes[1] == strokes[2] != strokes[0]
    page.value("document.querySelector('#table .group button').click()")
    assert page.value("location.hash").endswith("run=run-0&run=run-3")


def test_a_filter_leaves_the_metrics_that_match(page: Page, sweep: str) -> None:
    """Words that the name of a metric must have, in the address; if none has them, the page says so."""
    page.go(f"{sweep}#run=run-0&metric=lr")
    page.until(f"{TITLES}.join() === 'lr'")
    box = "document.getElementById('metric')"
    page.value(f"(box => {{ box.value = 'none'; box.dispatchEvent(new Event('input')); }})({box})")
    assert page.value(NOTES) == "No metric matches the filter."
    assert page.value(TITLES) == []
    assert "metric=none" in page.value("location.hash")


def test_the_tooltip_leaves_out_a_run_without_a_value_there(page: Page, sweep: str) -> None:
    """At step 100 only the long run has a value; at step 1 all of them have one."""
    name = "long-" + 6 * "name-"
    page.go(f"{sweep}#run=run-0&run={name}&metric=loss")
    page.until(drawn_of("run-0", name))
    page.value("document.querySelector('.chart-canvas').focus()")
    tip = "[...document.querySelectorAll('.chart-tip li')].map(one => one.innerText)"
    page.key("End")
    assert page.until(f"{tip}.length && {tip}") == [f"0.02 {name}"]
    page.key("Home")
    assert page.value(tip) == ["1 run-0", f"2 {name}"]


def test_one_value_is_said_and_not_drawn(page: Page, sweep: str) -> None:
    """Where each run has at most one value of a metric, the values stand in the place of the chart."""
    page.go(f"{sweep}#run=scored")
    note = "document.querySelector('.chart-note')"
    page.until(f"{note}?.textContent === 'scored: 0.9 at step 20000.'")
    assert page.value(f"[{note}.hidden, document.querySelector('.chart-canvas').hidden]") == [False, True]


def test_equal_curves_can_be_told_apart(page: Page, sweep: str) -> None:
    """Of runs that begin with the same values each is drawn in dashes over the one before; the page names them."""
    page.go(f"{sweep}#run=run-0&run=run-1&run=run-2&metric=loss")
    page.until(drawn_of("run-0", "run-1", "run-2"))
    keys = "[...document.querySelectorAll('.chart-keys li')].map(one => one.textContent)"
    assert page.value(keys) == ["equal, at least at first: run-0, run-1, run-2"]
    page.value(PLOTS)
    assert page.value("plots[0].series.slice(1).map(one => one.dash)") == [[], [12, 12], [8, 16]]


def test_no_line_is_drawn_while_no_process_lived(page: Page, tmp_path: Path) -> None:
    """By time, the minutes after a death are a gap, also where another run has values in these minutes."""
    killed, through = Told(tmp_path / "killed"), Told(tmp_path / "through")
    killed.metrics = through.metrics = {"loss": 0.5}
    trained(killed.taken(), 3, every_s=10, steps=1)
    trained(killed.after(100).taken(LOST), 3, every_s=10, steps=1).released()
    trained(through.taken(), 16, every_s=10, steps=1).released()
    with served(tmp_path) as address:
        page.go(f"{address}#by=time&run=killed&run=through")
        page.until(drawn_of("killed", "through"))
        page.value(PLOTS)
        of_killed = page.value("plots[0].data[0].map((x, n) => [x, plots[0].data[1][n] === null])")
        gap = [empty for x, empty in of_killed if 30 < x < 139]
        assert len(gap) > 9
        assert all(gap), of_killed
        assert not any(empty for x, empty in of_killed if x in (9.5, 19.5, 29.5, 139.5, 149.5, 159.5))


def test_a_resume_is_marked_with_the_steps_that_were_trained_again(page: Page, tmp_path: Path) -> None:
    """The mark of a resume after a kill names the steps after the commit that the killed process had trained."""
    memory = tmp_path / "memory"
    memory.mkdir()
    for last in (17, 30):
        child = python("-c", KILLED, str(tmp_path / "runs/killed"), str(memory), str(last))
        assert child.returncode == (-signal.SIGKILL if last == 17 else 0), child.stderr
    with served(tmp_path / "runs") as address:
        page.go(f"{address}#run=killed")
        page.until(drawn_of("killed"))
        assert "shaded: trained again" in page.value("document.querySelector('.chart-keys').innerText")
        place = page.box(".u-over")
        page.value(PLOTS)
        at = page.value("plots[0].valToPos(10, 'x')")
        page.mouse("mouseMoved", place["x"] + at, place["y"] + 40)
        tip = page.until(
            "document.querySelector('.chart-tip').innerText.includes('resumed') && "
            "document.querySelector('.chart-tip').innerText"
        )
        assert "steps 11 to 17 were trained again" in tip
        page.value(
            "(box => { box.value = 'time'; box.dispatchEvent(new Event('change')); })(document.getElementById('by'))"
        )
        page.until("document.querySelector('.chart-keys').innerText.includes('dashed')")


KILLED = """
import os, signal, sys
import torch
from ckpt_tasks import CheckpointConfig, Checkpointer
run, memory, last = sys.argv[1:]
state = {"weights": torch.zeros(4)}
with Checkpointer(CheckpointConfig(checkpoint_dir=run, memory_dir=memory, step_interval=10)) as ckpt:
    for step in range(ckpt.restore(state) + 1, 31):
        ckpt.step(step, state, metrics={"loss": 1 / step})
        if step == 10:
            ckpt.wait()
        if step == int(last) != 30:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_chart_is_saved_as_csv_and_png(page: Page, sweep: str, url: str, tmp_path: Path) -> None:
    """The CSV has each value of the drawn runs, also of a curve that is thinned on the page; the PNG is a picture."""
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.go(f"{sweep}#run=run-0&run=run-1&metric=loss")
    page.until(drawn_of("run-0", "run-1"))
    page.value("[...document.querySelectorAll('.chart-files button')].forEach(one => one.click())")
    until(lambda: {file.name for file in tmp_path.iterdir()} == {"loss.csv", "loss.png"})
    rows = [*csv.reader((tmp_path / "loss.csv").read_text().splitlines())]
    assert rows[0] == ["run", "step", "seconds", "value", "part"]
    assert [(row[0], row[1], row[3], row[4]) for row in rows[1:]] == [
        (run, step, value, "kept") for run in ("run-0", "run-1") for step, value in (("1", "1"), ("2", "0.5"))
    ]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    page.go(f"{url}#run=run-000&metric=grad_norm")
    page.until(drawn_of("run-000"))
    page.value("document.querySelector('.chart-files button').click()")
    until((tmp_path / "grad_norm.csv").exists)
    until(lambda: len((tmp_path / "grad_norm.csv").read_text().splitlines()) == 1 + 1200)


def test_what_is_not_there_is_said(page: Page, sweep: str, tmp_path: Path) -> None:
    """A run without a checkpoint, one without metrics, a directory without runs, and one that does not exist."""
    page.go(f"{sweep}#run=unsaved&run=bare")
    page.until(f"{NOTES}.split('\\n').join() === 'unsaved has no checkpoint yet.,bare has no metrics.'")
    [row] = page.value(
        "[...document.querySelectorAll('#table tr')].map(one => one.innerText).filter(text => text.includes('unsaved'))"
    )
    assert "no checkpoint" in row
    said = "document.getElementById('empty').innerText"
    with served(tmp_path / "runs") as address:
        page.go(address)
        page.until(f"{said}.startsWith('There is no directory {tmp_path / 'runs'} yet.')")
        (tmp_path / "runs").mkdir()
        page.until(f"{said}.startsWith('There is no run in {tmp_path / 'runs'} yet.')")
        assert page.value(NOTES) == ""


def save_together(rank: int, size: int, run: str) -> None:
    with Checkpointer(config(Path(run))) as ckpt:
        ckpt.save(10, some_state(10), metrics={"loss": 0.5})


def test_a_run_of_ranks_says_how_many(page: Page, tmp_path: Path) -> None:
    """The legend and the numbers of a run name the ranks that saved its newest checkpoint."""
    with Gang(2, save_together, str(tmp_path / "runs/pair")) as gang:
        gang.results()
    with served(tmp_path / "runs") as address:
        page.go(address)
        page.until("document.querySelector('#legend li')?.innerText === 'pair (2 ranks)'")
