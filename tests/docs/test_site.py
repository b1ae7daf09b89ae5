"""The site: its navigation has every page, its reference has everything that the code has. `make site` builds it."""

import itertools
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.cases import cases
from tests.docs.blocks import blocks_of
from tests.docs.links import FENCE, anchor_of
from tests.docs.test_pages import PAGES
from tests.project.public_surface import public_modules
from tidegate._cli import COMMANDS, EXIT_BAD_INPUT, EXIT_DENIED, EXIT_INTERRUPTED, EXIT_OK, EXIT_UNAVAILABLE
from tidegate.service._config.settings import OPTIONS
from tools import make_index, site_log_lines, site_pictures, site_reference
from tools.make_monitoring import known_metrics

ROOT = Path(__file__).parents[2]
PROJECT = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


@cache
def reference():
    return site_reference.write_pages()


def nav_pages(entry):
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in nav_pages(part)]


def test_the_navigation_has_every_page_once():
    nav = yaml.safe_load(
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    )  # the rest has tags
    written = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")]
    project = [f"project/{page.lower()}" for page in PROJECT]
    assert sorted(nav_pages(nav)) == sorted([*written, *site_reference.api_pages(), *project])


# ---- reference -------------------------------------------------------------------------------------------------------


@cases("path", [*site_reference.PAGES])
def test_the_generated_pages_are_what_the_code_says(path):
    assert (ROOT / "docs" / path).read_text(encoding="utf-8") == reference()[path], "run: make reference"


def test_the_index_and_the_tree_list_what_there_is():
    stale = {path.name for path, text in make_index.written().items() if path.read_text(encoding="utf-8") != text}
    assert stale == set(), "run: make reference"


def first_cells(path):
    """What the rows of a page have in their first cell, as code."""
    return set(re.findall(r"^\| `([^`]+)` \|", reference()[path], re.MULTILINE))


def test_the_reference_has_every_setting():
    """The files whose settings have no list of help texts get their meaning from the guides, which must have it."""
    found = first_cells("reference/settings.md")
    assert {option.name for option in OPTIONS} <= found
    for part in (*site_reference.file_tables(), *site_reference.store_tables()):
        assert set(part.names) <= found
    assert "see above" not in reference()["reference/settings.md"]


def test_a_setting_that_no_guide_describes_is_an_error():
    with pytest.raises(SystemExit, match=r"^reference/egress\.md: no table describes the setting 'made_up'"):
        site_reference.meaning_of("made_up", [("reference/egress.md", "field of the egress")])


def test_the_reference_has_every_metric_with_its_labels():
    assert first_cells("reference/metrics.md") == known_metrics()


def test_the_page_of_the_command_line_has_every_command_and_exit_code():
    """tools/make_cli_page.py writes it from the parser."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert [line for line in COMMANDS if f"### tidegate {line}\n" not in page] == []
    codes = (EXIT_OK, EXIT_DENIED, EXIT_BAD_INPUT, EXIT_UNAVAILABLE, EXIT_INTERRUPTED)
    assert [int(number) for number in re.findall(r"^\| (\d+) \| ", page, re.MULTILINE)] == list(codes)


def test_the_reference_has_the_message_of_every_log_call():
    """A call whose message cannot be found in the code would be missing silently."""
    assert site_log_lines.silent_calls() == []
    lines = {(line.logger, line.level, line.message) for line in site_log_lines.log_lines()}
    lost = "store unavailable: …; until it is available again, …; probing it in the background"
    assert ("tidegate.stores", "ERROR", lost) in lines


def test_the_reference_has_every_public_name():
    listed = set(re.findall(r"^::: (\S+)$", "\n".join(site_reference.api_pages().values()), re.MULTILINE))
    assert listed == {f"{module}.{each}" for module, names in public_modules().items() for each in names}


# ---- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", site_pictures.LIMITS)
def test_the_page_of_algorithms_says_what_its_picture_shows(algorithm):
    page = (ROOT / "docs" / "concepts" / "algorithms.md").read_text(encoding="utf-8")
    assert f"<!-- picture: {algorithm} -->" in page
    calls, _ = site_pictures.simulate(site_pictures.LIMITS[algorithm])
    admitted = sum(call.allowed for call in calls)
    (row,) = re.findall(rf"^\| \[`{algorithm}`\]\(#[a-z-]+\) \| (\d+)[^|]* \| (\d*)", page, re.MULTILINE)
    most = str(site_pictures.most_in_a_window(calls)) if row[1] else ""
    assert row == (str(admitted), most)
    assert f"{admitted} of {len(calls)} calls admitted" in site_pictures.draw(algorithm)


# ---- the same text on GitHub and in the site -------------------------------------------------------------------------


@cases("page", PAGES)
def test_a_list_begins_after_an_empty_line(page):
    """GitHub shows a list without it, the site does not."""
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    starts = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"(- |1\. )", line) and before.strip() and not re.match(r"(- |\d+\. | )", before)
    ]
    assert starts == []


@cases("page", PAGES)
def test_blocks_are_not_in_lists(page):
    """A block in a list needs another indentation on GitHub than in the site."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [block.line for block in blocks_of(page) if lines[block.line - 2].startswith(" ")] == []


def test_anchors_are_those_of_github():
    assert anchor_of("Limits, and `s`: a/b (c)") == "limits-and-s-ab-c"
