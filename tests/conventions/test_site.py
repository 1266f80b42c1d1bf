"""The documentation site: it builds without a warning, and shows what GitHub shows."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import markdown
import pytest
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tools.pages.site import OUTSIDE, site_links
from tools.sources import ROOT, files

PAGES = [*files("docs", suffix=".md"), *(ROOT / source for source in OUTSIDE)]
_SHOWN = re.compile(r"<(h[1-6]|li|ol|ul|table|tr|td|th|pre|blockquote|img|a)\b(?! class=\"headerlink\"| id=\"__code)")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`mkdocs build --strict` passes: each page is in the navigation, each link and anchor leads to a page."""
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    assert "bit for bit" in (tmp_path / "index.html").read_text(encoding="utf-8")
    for page in OUTSIDE.values():
        assert (tmp_path / page).with_suffix(".html").exists()


def test_links_become_those_of_the_site() -> None:
    """A link to a file with a page leads to the page, with its anchor; a link to another file becomes plain text."""
    pages = {"index.md", "DEPLOYMENTS.md", "STORES.md", "internals/decisions/README.md"}
    home = "[s](docs/STORES.md#try-it) [d](deployments/README.md) [c](ckpt_tasks/errors.py)"
    assert site_links(home, "index.md", pages) == "[s](STORES.md#try-it) [d](DEPLOYMENTS.md) c"
    decision = "[r](../../../README.md) [here](#top) [out](https://example.org/a.md)"
    assert (
        site_links(decision, "internals/decisions/README.md", pages)
        == "[r](../../index.md) [here](#top) [out](https://example.org/a.md)"
    )


def test_github_and_the_site_show_the_same() -> None:
    """Both read the same headings, lists, tables, blocks, links and pictures from a page's Markdown."""
    config, github = load_config(str(ROOT / "mkdocs.yml")), MarkdownIt("commonmark").enable("table")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        site = markdown.markdown(text, extensions=config.markdown_extensions, extension_configs=config.mdx_configs)
        assert Counter(_SHOWN.findall(site)) == Counter(_SHOWN.findall(github.render(text))), page
