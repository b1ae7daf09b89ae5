"""Writes what lists files: docs/README.md from the navigation, and the tree of ARCHITECTURE.md from the packages.

    python tools/make_index.py        # part of `make reference`; a test compares

A page is described by its first sentence, a package by the first line of its docstring.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "src" / "tidegate"
INTRODUCTION: Final = """\
# Documentation

tidegate limits the requests that you receive, and keeps the requests that you send within the quotas of the APIs that
you call. Find out [which part you need](concepts/which-part.md), [install it](howto/install.md), then follow the
tutorial that matches your work. A test runs every Python block on these pages, and another one works through each
tutorial.

This page is generated from the navigation and the pages (`make reference`).
"""
LINK: Final = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
SENTENCE: Final = re.compile(r"(.+?[.!?:])(?:\s(?=[A-Z`]|tidegate)|$)", re.DOTALL)
TREE: Final = re.compile(r"(<!-- tree: `make reference` -->\n```text\n).*?(```\n<!-- end of the tree -->\n)", re.DOTALL)


def index_page() -> str:
    """Return docs/README.md."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    sections = yaml.safe_load(text[text.index("\nnav:\n") :])["nav"]
    lines = [INTRODUCTION]
    for entry in sections:
        ((title, content),) = entry.items()
        if isinstance(content, list) and title != "Project":
            lines += [f"## {title}", ""]
            lines += [*table(content), ""]
    lines += [
        "## Project", "", "[Architecture](../ARCHITECTURE.md), [contributing](../CONTRIBUTING.md),",
        "[security](../SECURITY.md), [changes](../CHANGELOG.md).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def table(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of pages; the pages of a group have its name in front."""
    yield from ("| page | |", "|---|---|")
    for group, title, path in pages_of(entries):
        shown = f"{group}: " if group else ""
        yield f"| {shown}[{title}]({path}) | {first_sentence(path)} |"


def pages_of(entries: list[dict[str, Any]], group: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield group, title and path of each page in docs; the pages of the API are part of the site only."""
    for entry in entries:
        ((title, content),) = entry.items()
        if isinstance(content, list):
            yield from pages_of(content, title)
        elif not content.startswith("reference/api/"):
            yield group, title, content


def first_sentence(path: str) -> str:
    """Return the first sentence of a page as text without links."""
    paragraphs = (ROOT / "docs" / path).read_text(encoding="utf-8").split("\n\n")
    text = next(each for each in paragraphs[1:] if not each.startswith(("#", "<", "!", "|", "```")))
    found = SENTENCE.match(LINK.sub(r"\1", " ".join(text.split())))
    return found[1].rstrip(":") if found else text


def tree() -> str:
    """Return the packages and public modules, each with the first line of its docstring."""
    return "".join(f"{'    ' * depth}{name:<{26 - 4 * depth}}{line}\n" for depth, name, line in entries_of(PACKAGE, 0))


def entries_of(folder: Path, depth: int) -> Iterator[tuple[int, str, str]]:
    """Yield depth, name and first line of each package below a folder, and of the public modules in it."""
    for path in in_order(folder.iterdir()):
        source = path / "__init__.py" if path.is_dir() else path
        line = (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        yield depth, f"{path.name}/" if path.is_dir() else path.name, line
        if path.is_dir() and depth == 0:
            yield from entries_of(path, depth + 1)


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Return the packages and public modules: what is public first."""
    shown = [path for path in paths if (path / "__init__.py").exists() or re.fullmatch(r"[a-z]\w*\.py", path.name)]
    return sorted(shown, key=lambda path: (path.name.startswith("_"), path.name))


def architecture() -> str:
    """Return ARCHITECTURE.md with the tree of the packages as they are."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return TREE.sub(lambda match: f"{match[1]}{tree()}{match[2]}", text)


def written() -> dict[Path, str]:
    """Return the files that list files, with their text."""
    return {ROOT / "docs" / "README.md": index_page(), ROOT / "ARCHITECTURE.md": architecture()}


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
