"""What is drawn and written of a run: well-formed, in bounds, and nothing but text of what a run directory says."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.records import Evaluation
from ckpt_tasks.run.ledger.goodput import Course, follow
from ckpt_tasks.run.ledger.timeline import Moment, Timeline
from ckpt_tasks.run.report.html import GENERATOR, to_html
from ckpt_tasks.run.report.picture import draw_run
from ckpt_tasks.run.report.run_report import Report, checkpoint_rows, in_markdown, make_report, to_markdown
from ckpt_tasks.run.report.words import printable
from tests.support.ledgers import made

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = (
    '</title><script>alert(1)</script><img src=x onerror="a()">'
    " | [x](http://e.vil) ![y](z) `c` **b** &amp; \x1b[2J\n# h"
)


def run_of(*values: float, every_s: float = 60.0, name: str = "loss", evaluate: float | None = None) -> list[Moment]:
    """Return a run of one commit per value, one step and `every_s` seconds apart."""
    found = [Moment(kind="taken", n=0, epoch=1, at_s=0.0, text="it has had no owner", flow_run_id="f")]
    for n, value in enumerate(values, start=1):
        line: dict[str, Any] = {"identity": str(n), "parent": str(n - 1) if n > 1 else None}
        metrics = {} if value is None else {name: value}
        found.append(
            Moment(kind="commit", n=n, epoch=1, at_s=n * every_s, step=n, metrics=metrics, trained_s=every_s, **line)
        )
    if evaluate is not None:
        last = found[-1]
        found.append(
            Moment(
                kind="evaluation",
                n=len(found),
                epoch=1,
                at_s=last.at_s,
                step=last.step,
                text="quick",
                metrics={"heldout_loss": evaluate, "accuracy": 99.0},
            )
        )
    return found


def broken(run: list[Moment]) -> list[Moment]:
    """Let the run fail, die and be taken up again."""
    n, at_s = len(run), run[-1].at_s
    failure = Moment(kind="failure", n=n, epoch=1, at_s=at_s + 10, step=3, text=HOSTILE)
    again = Moment(kind="lost", n=n + 1, epoch=2, at_s=at_s + 500, text="its owner, process 7, is gone")
    return [*run, failure, again]


def drawn(course: Course) -> ET.Element:
    return ET.fromstring(draw_run(course, heading="lm-7"))


def report_of(moments: list[Moment], **more: Any) -> Report:
    state = State(live=(made(1, 1, metrics={"loss": 0.5}), made(2, 2, "1@1", metrics={HOSTILE: math.nan})))
    return make_report(more.pop("run_key", "lm-7"), "/runs/lm-7", Timeline(moments=tuple(moments), **more), state)


# ── the picture ──────────────────────────────────────────────────────────────────────────────────────────────


def test_all_of_a_run_is_on_one_time_line() -> None:
    """The picture has the loss, a point for the evaluation, ticks, marks for failure, death and resume, and a band."""
    svg = drawn(follow(broken(run_of(3.0, 2.0, 1.0, evaluate=1.5))))
    assert len(next(svg.iter(f"{SVG}polyline")).attrib["points"].split()) == 3
    shapes = [one.attrib.get("class", "") for one in svg.iter()]
    assert [shapes.count(css) for css in ("ckr-down", "ckr-eval")] == [1, 2]  # one of them is in the legend
    titles = [one.text or "" for one in svg.iter(f"{SVG}title")]
    assert "step 3, quick: heldout_loss 1.5" in titles
    assert any(title.startswith("lost: its owner") for title in titles)
    words = " ".join(one.text or "" for one in svg.iter(f"{SVG}text"))
    for name in (
        "loss",
        "evaluation",
        "commit",
        "failure",
        "resumed",
        "from 1970-01-01 00:00:00 UTC",
        "useful",
        "down",
    ):
        assert name in words


def test_thousands_of_commits_make_a_small_picture() -> None:
    """10,000 commits with 1,000 failures are thinned to what a screen shows, their highest and lowest values kept."""
    moments = run_of(*(5.0 if n == 5_000 else 1.0 + (n % 7) / 10 for n in range(10_000)))
    failed = [Moment(kind="failure", n=n, epoch=1, at_s=n * 600.0, text="x" * 300) for n in range(1_000)]
    ordered = sorted([*moments, *failed], key=lambda one: one.at_s)
    text = draw_run(follow(ordered), heading="long")
    assert len(text) < 100_000
    heights = [float(p.split(",")[1]) for p in re.findall(r'points="([^"]*)"', text)[0].split()]
    assert len([height for height in heights if height < 80]) == 1  # the one outlier


@example([3.0, math.nan, 1e308, -1e308, math.inf], 0.0)
@example([None], 5e-324)
@given(st.lists(st.floats() | st.none(), max_size=40), st.floats(0, 1e6))
def test_the_picture_stays_in_its_frame(values: list[float | None], every_s: float) -> None:
    """Whatever the values: a well-formed picture, and every point of the curve lies within the axes."""
    svg = drawn(follow(run_of(*values, every_s=every_s)))  # type: ignore[arg-type]
    assert not [word for one in svg.iter() for word in one.attrib.values() if re.search(r"\bnan\b|\binf\b", word)]
    for one in svg.iter(f"{SVG}polyline"):
        for place in one.attrib["points"].split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= 900
            assert 0 <= y <= 360


# ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────


class Tags(HTMLParser):
    """Collect the tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)


def test_the_html_file_runs_its_own_scripts_and_nothing_else() -> None:
    """Keys, metric names and reasons with markup in them appear as text; nothing is loaded from anywhere."""
    page = to_html(report_of(broken(run_of(3.0, 2.0, name=HOSTILE)), run_key=HOSTILE))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    policy = re.search(r'content="(default-src[^"]*)"', page)[1]  # type: ignore[index]
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert policy.rpartition("script-src ")[2] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert len(scripts) == 3
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]  # type: ignore[index]
    assert json.loads(data)["label"] == HOSTILE
    assert not set(data) & set("<>")
    for one in (*scripts, data):
        page = page.replace(one, "")
    tags = Tags()
    tags.feed(page)
    assert not tags.tags & {"img", "iframe", "object", "link", "a", "h3"}
    assert not [name for name in tags.attributes if name.startswith("on") or name in ("src", "href")]
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    assert page[:1000].count(GENERATOR) == 1
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src ")


def test_markdown_shows_foreign_text_as_it_stands() -> None:
    """No character of a foreign text begins a link, a tag, code, a cell or a line of its own."""
    page = to_markdown(report_of(broken(run_of(3.0, 2.0, name=HOSTILE)), run_key=HOSTILE))
    text = page.replace(re.search(r"!\[the run[^)]*\)", page)[0], "")  # type: ignore[index]
    assert not re.search(r"(?<!\\)<|(?<!\\)`|(?<!\\)\]\(|https?:/", text)
    assert "\x1b" not in text
    assert len([line for line in page.splitlines() if line.startswith("#")]) == 4
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4, 5}  # tables of three and of four columns


class Shown(HTMLParser):
    """The tags of a page and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.sampled_from("-+*_~`<>[]()!|#&;:/.@=\\ \n\t1axw\x1b"), max_size=12))
@example(HOSTILE)
@example("1. x")
@example("a\r\n\r\nb")
@example("<a\nhref=x>")
@example("![i](u)")
@example("[a]: u")
@example("val/loss")
def test_a_markdown_parser_shows_any_name_as_it_is(name: str) -> None:
    """A parser makes one paragraph, and one cell of a table, of a foreign name; its text is the name."""
    assert not re.search(r"www\.|(?<!\\)://|(?<!\\)@", in_markdown(name), re.IGNORECASE), "a bare address is no link"
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    expected = printable(name).strip()
    cell = Shown(parser.render(in_markdown(name)))
    assert (cell.text.rstrip("\n"), cell.tags) == (expected, ["p"] if expected else [])
    table = Shown(parser.render(f"|h|i|\n|---|---|\n| {in_markdown(name)} | z |\n"))
    assert table.tags == ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
    assert [line for line in table.text.splitlines() if line] == [*"hi", *([expected] if expected else []), "z"]


def test_checkpoints_are_rows_with_the_same_columns() -> None:
    """Metrics, evaluations by suite, size, wait and why it stays; a value that is missing leaves its cell empty."""
    live = (made(1, 1, metrics={"loss": 0.5}), made(2, 2, "1@1", metrics={"lr": math.inf}, abandoned=True))
    evaluation = Evaluation(
        manifest_digest="1@1", step=1, suite="quick", metrics={"acc": 0.9}, table="t", table_digest="", evaluated_at=""
    )
    state = State(live=live, evaluations=(evaluation,))
    first, second = checkpoint_rows(state, {"1@1": "newest"})
    assert list(first) == list(second)
    assert (first["step"], first["loss"], first["lr"], first["quick: acc"]) == ("1", "0.5", "", "0.9")
    assert (first["size"], first["waited"], first["kept because"]) == ("1 B", "500 ms", "newest")
    assert (second["lr"], second["kept because"], second[""]) == ("inf", "", "discarded branch")


def test_a_report_says_what_it_lacks() -> None:
    """Entries that were not read, and a copy's times, are said on every page."""
    report = report_of([Moment(kind="copied", n=9, epoch=1, at_s=0.0)], damaged=1, older=5)
    for page in (to_html(report), to_markdown(report)):
        assert "5 older ledger entries were left out" in page
        assert "1 ledger entry cannot be read" in page
        assert "This is a copy" in page
    empty = make_report(None, "/runs/x", Timeline(), State())
    assert "no checkpoint yet" in to_html(empty)
    assert "run of unknown key" in to_markdown(empty)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────
