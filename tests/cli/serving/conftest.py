"""Runs on a page, and a browser that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serve import make_root
from tests.support.browser import Page, browser
from tests.support.serving import served


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs of 120 commits, 1,200 steps each."""
    place = tmp_path_factory.mktemp("serve")
    make_root(place, runs=5, commits=120)
    return place


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with served(root) as address:
        yield address


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(window: Page) -> Iterator[Page]:
    """A page without an error, before and after."""
    window.errors.clear()
    yield window
    assert window.errors == []
