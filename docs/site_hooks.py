"""Hooks of mkdocs: README.md becomes the first page, and what pages link to outside of docs/ comes
along, so that no link leaves the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")
HOME = {"README.md": "index.md"}  # files whose place on the site is another
BESIDE = "files"


def on_files(files: Any, config: Any) -> Any:
    """Adds the first page, and all that pages link to outside of docs/."""
    files.append(File.generated(config, "index.md", content=_moved("README.md", "index.md")))
    wanted = [_outside(f"docs/{page.src_uri}", page.content_string) for page in _pages(files)]
    wanted.append(_outside("README.md", (ROOT / "README.md").read_text(encoding="utf-8")))
    for path in sorted(set().union(*wanted)):
        text = None
        if path.endswith(".md"):
            text = _moved(path, f"{BESIDE}/{path}")
        place = f"{BESIDE}/{path}"
        if text is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Leads links to where the files are on the site."""
    uri = page.file.src_uri
    if uri == "index.md" or uri.startswith(f"{BESIDE}/"):
        return markdown  # it was made so
    return _led(markdown, f"docs/{uri}", uri)


def _pages(files: Any) -> list[Any]:
    return [f for f in files if f.src_uri.endswith(".md") and f.generated_by is None]


def _outside(page: str, text: str) -> set[str]:
    """Files of the project outside of docs/ that a page links to, by their paths."""
    found = {_target(page, link) for _, link, _ in LINK.findall(text)}
    return {
        path
        for path in found
        if path not in HOME and not path.startswith(("docs/", "..")) and (ROOT / path).is_file()
    }


def _moved(path: str, uri: str) -> str:
    """The text of a file of the project, for a page at ``uri``."""
    return _led((ROOT / path).read_text(encoding="utf-8"), path, uri)


def _led(text: str, page: str, uri: str) -> str:
    def led(match: re.Match[str]) -> str:
        path = _target(page, match.group(2))
        if not (ROOT / path).exists():
            return match.group(0)
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        else:
            place = HOME.get(path, f"{BESIDE}/{path}")
        if not (ROOT / path).is_file() or (page.startswith("benchmarks/") and uri != "index.md"):
            return match.group(0)
        return f"{match.group(1)}{posixpath.relpath(place, posixpath.dirname(uri))}{match.group(3)}"

    return LINK.sub(led, text)


def _target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
