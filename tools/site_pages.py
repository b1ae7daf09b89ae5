"""Writes the pages of the site as plain Markdown files, so that any generator can build it.

    python tools/site_pages.py write FOLDER
    python tools/site_pages.py check SITE      # no page loads anything from another server

The folder has the pages of docs/, and:

- The pages of the API (`site_reference`), and the pictures of the algorithms (`site_pictures`).
- The pages in the root of the repository, such as ARCHITECTURE.md, under project/.
- A page under files/ for each file or folder of the repository that a page links to, so that no link leaves the site.
- A stylesheet.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.docs.links import CODE, LINK  # noqa: E402 - found in ROOT
from tools.site_pictures import LIMITS, draw  # noqa: E402 - found in ROOT
from tools.site_reference import api_pages  # noqa: E402 - found in ROOT

PROJECT_PAGES: Final = {name: f"project/{name.lower()}" for name in (
    "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
)}  # fmt: skip
HOME: Final = "README.md"
LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".lua": "lua", ".sql": "sql",
                    ".mjs": "js", ".conf": "nginx", ".tpl": "yaml", ".toml": "toml"}  # fmt: skip
MAX_SHOWN_BYTES: Final = 200_000  # of a file
STYLESHEET: Final = "assets/site.css"  # named in mkdocs.yml
STYLES: Final = """/* names in tables are not broken; a table that is too wide scrolls */
.md-typeset table:not([class]) td:not(:last-child) code { white-space: nowrap; }
"""
PICTURE: Final = re.compile(r"<!-- picture: (\w+) -->")
LOADED: Final = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(https?:)?//|<link[^>]*href=\"?(https?:)?//[^>]*stylesheet|@import|url\((https?:)?//"
)


def main(action: str, folder: str) -> None:
    """Write the pages, or check the site."""
    {"write": write, "check": check}[action](Path(folder))


def write(folder: Path) -> None:
    """Write all pages and pictures into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    texts = api_pages() | {STYLESHEET: STYLES}
    waiting = [(f"docs/{path.relative_to(folder)}", path.read_text(encoding="utf-8")) for path in folder.rglob("*.md")]
    for source, text in waiting:
        path = source.removeprefix("docs/")
        texts[path] = without_recipes(draw_pictures(relink(text, source, path), source))
    for name, path in PROJECT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        waiting.append((name, text))
        texts[path] = relink(text, name, path)
    seen = set()
    while waiting:
        source, text = waiting.pop()
        for target in outside_links(text, source):
            if target not in seen:
                seen.add(target)
                inside = f"{target}/index.md" if (ROOT / target).is_dir() else target
                path, described = place_of(target), describe(target)
                texts[path] = relink(described, inside, path)
                waiting.append((inside, described))
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def draw_pictures(text: str, source: str) -> str:
    """Insert the pictures that a page names."""
    for name in PICTURE.findall(text):
        if name not in LIMITS:
            raise SystemExit(f"{source}: there is no picture {name!r}: {', '.join(LIMITS)}")
    return PICTURE.sub(lambda found: draw(found[1]), text)


def without_recipes(text: str) -> str:
    """Remove what only tests need from code blocks."""
    return re.sub(r"^( *```\w+) recipe=\S+", r"\1", text, flags=re.MULTILINE)


def check(site: Path) -> None:
    """Check that no page loads anything from another server."""
    for page in site.rglob("*.html"):
        if found := LOADED.search(page.read_text(encoding="utf-8")):
            raise SystemExit(f"{page}: loads something from another server: {found[0]}")


# ---- links to files of the repository --------------------------------------------------------------------------------


def resolve(target: str, source: str) -> str | None:
    """Return the path in the repository that a link of a file leads to; None for other sites and anchors."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:|/", path):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def outside_links(text: str, source: str) -> list[str]:
    """Return the files and folders outside docs/ that a page links to, except those with a page of their own."""
    targets = [resolve(link[1], source) for link in LINK.finditer(CODE.sub("", text))]
    return [target for target in targets if target and not has_page(target)]


def has_page(target: str) -> bool:
    """Return whether a file of the repository is a page of the site anyway."""
    return target in PROJECT_PAGES or target in {HOME, "docs"} or target.startswith("docs/")


def place_of(target: str) -> str:
    """Return the path in the site of a file in the repository."""
    if target in PROJECT_PAGES:
        return PROJECT_PAGES[target]
    if target == HOME:
        return HOME
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"files/{target}/index.md" if (ROOT / target).is_dir() else f"files/{target.removesuffix('.md')}.md"


def relink(text: str, source: str, path: str) -> str:
    """Change the links of a file in the repository so that they work at its path in the site."""

    def change(link: re.Match[str]) -> str:
        target = resolve(link[1], source)
        if target is None:
            return link[0]
        _, mark, anchor = link[1].partition("#")
        place = posixpath.relpath(place_of(target), posixpath.dirname(path) or ".")
        return f"{link[0][: link.start(1) - link.start(0)]}{place}{mark}{anchor})"

    code = [found[0] for found in CODE.finditer(text)]
    marked = CODE.sub("\0", text)
    changed = LINK.sub(change, marked)
    return re.sub("\0", lambda _: code.pop(0), changed)


def describe(target: str) -> str:
    """Return the page of a file, or of a folder with links to its files."""
    path = ROOT / target
    if path.is_dir():
        command = ["git", "ls-files", target]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = [posixpath.relpath(line, target) for line in listed.stdout.splitlines()]
        shown = [name for name in names if readable(path / name)]
        readme = (path / "README.md").read_text(encoding="utf-8") if (path / "README.md").exists() else f"# {target}\n"
        return "\n".join([readme, "\n## Files\n", *(f"- [{name}]({name})" for name in shown), ""])
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    fence = "`" * 4
    return f"# {target}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"


def readable(path: Path) -> bool:
    """Return whether a file is text of a reasonable size."""
    return path.is_file() and path.stat().st_size < MAX_SHOWN_BYTES and b"\0" not in path.read_bytes()


if __name__ == "__main__":
    main(*sys.argv[1:])
