"""Tables: one layout, drawn by rich or as plain text; they fit a terminal, and are complete in a pipe."""

import re

import pytest

from tidegate._cli.output import Output
from tidegate._cli.tables import TableColumn, TextTable, columns, draw_plain, draw_rich, draw_table, fit, join_within

TABLE = TextTable(
    (
        TableColumn("policy", shrinks=True),
        TableColumn("", optional=True),
        TableColumn("admitted", right=True),
        TableColumn("last minute", right=True, optional=True),
    ),
    [
        ("a-policy-with-quite-a-long-name", (("███", "green"), ("░░", "dim")), "1,234", "▁▂▃"),
        ("料金", (("█", "red"), ("░░░░", "dim")), "7", ""),
    ],
    ["", "red"],
)


def terminal(monkeypatch, columns, **variables):
    """Return the output of a terminal."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "", **variables}.items():
        monkeypatch.setenv(name, value)
    return Output()


def without_codes(lines):
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]


def test_a_pipe_gets_everything_and_no_codes():
    assert draw_table(TABLE, Output()) == [
        "policy                                  admitted  last minute",
        "a-policy-with-quite-a-long-name  ███░░     1,234          ▁▂▃",
        "料金                             █░░░░         7",
    ]


@pytest.mark.parametrize("width", [120, 80, 50, 40, 25])
def test_rich_and_plain_text_show_the_same(monkeypatch, width):
    table, widths = fit(TABLE, width)
    plain, rich = draw_plain(table, widths), without_codes(draw_rich(table, widths))
    assert rich[0] == plain[0]
    assert set(rich[1]) == {"─"}
    assert rich[2:] == plain[1:]
    assert sum(widths) + 2 * (len(widths) - 1) <= width
    assert len(draw_rich(table, widths)) == len(table.rows) + 2  # no header and no row is wrapped


def test_columns_are_dropped_and_names_shortened_to_fit(monkeypatch):
    output = terminal(monkeypatch, 25, NO_COLOR="1")
    assert draw_table(TABLE, output) == [
        "policy           admitted",
        "a-policy-with-…     1,234",
        "料金                    7",
    ]


def test_a_terminal_with_rich_has_colours(monkeypatch):
    lines = draw_table(TABLE, terminal(monkeypatch, 80))
    assert lines[0].startswith("\x1b[1m")
    assert "\x1b[32m███" in lines[2]
    assert "\x1b[31m" in lines[3]


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_switched_off(monkeypatch, variables):
    assert "\x1b" not in "".join(draw_table(TABLE, terminal(monkeypatch, 80, **variables)))


def test_text_of_others_is_no_markup(monkeypatch):
    table = TextTable(columns("key", "count"), [("[red]x[/red] :smile:", "1")])
    assert "[red]x[/red] :smile:" in draw_table(table, terminal(monkeypatch, 80))[2]


def test_an_empty_table_says_so():
    table = TextTable(columns("key", "count"), [], empty="no key is blocked")
    assert draw_table(table, Output()) == ["key  count", "no key is blocked"]


def test_items_are_joined_to_lines_that_fit():
    assert join_within(["one", "two", "three", "four"], 12) == ["one, two,", "three, four"]
    assert join_within(["one"], 2) == ["one"]
    assert join_within([], 10) == []
