"""The hooks of mkdocs.yml: pages from outside docs/, and links between files of the checkout.

Each page is a Markdown file that GitHub shows too, and there a link names a file. On the site the link leads to that
file's page; if the file has no page, the link becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = {  # file of the checkout → page of the site
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "deployments/README.md": "DEPLOYMENTS.md",
}
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages from outside docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=posixpath.join(_root(config), source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """Let each link lead to the page of the file that it names."""
    pages = {file.src_uri for file in files}
    parts = _FENCED.split(markdown)
    parts[::2] = [site_links(part, page.file.src_uri, pages) for part in parts[::2]]
    return "".join(parts)


def site_links(text: str, page: str, pages: set[str]) -> str:
    """Rewrite the links of `page`, one of `pages` by its place on the site, from files to pages."""
    sources = {site: file for file, site in OUTSIDE.items()}
    folder = posixpath.dirname(sources.get(page, f"docs/{page}"))

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        file = posixpath.normpath(posixpath.join(folder, target))
        place = OUTSIDE.get(file, file.removeprefix("docs/"))
        if place not in pages and not file.startswith("docs/"):
            return words
        return f"[{words}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(link, text)


def _root(config: MkDocsConfig) -> str:
    return posixpath.dirname(config.config_file_path)
