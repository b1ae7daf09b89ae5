"""Values that know their file, line and field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import ConfigError, Limit
from tidegate._policy.config_value import ConfigValue, load, parse

YAML_TEXT = """\
name: no
count: 1_000
share: 0.5
on: yes
quoted: "5"
empty:
nested:
  list: [a, {b: 1}]
"""


def refused(call, *args):
    with pytest.raises(ConfigError) as error:
        call(*args)
    return str(error.value)


def test_the_reading_method_decides_the_type():
    fields = parse(YAML_TEXT, "f.yaml").entries()
    assert fields["name"].string() == "no"
    assert fields["name"].boolean() is False
    assert fields["count"].integer() == 1000
    assert fields["count"].string() == "1_000"
    assert fields["share"].number() == 0.5
    assert fields["on"].boolean() is True
    assert fields["quoted"].string() == "5"
    assert fields["empty"].is_null
    assert [item.is_mapping for item in fields["nested"].entries()["list"].items()] == [False, True]
    assert [item.string() for item in fields["name"].one_or_many()] == ["no"]
    assert fields["name"].choice("no", "maybe") == "no"


def test_a_value_has_its_file_line_and_field():
    b = parse(YAML_TEXT, "f.yaml").entries()["nested"].entries()["list"].items()[1].entries()["b"]
    assert (b.file, b.line, b.field) == ("f.yaml", 8, "nested.list[1].b")
    assert str(b.error("is wrong")) == "f.yaml:8: nested.list[1].b: is wrong"


@cases(
    ("field", "method", "message"),
    [
        ("name", "integer", "f.yaml:1: name: expected an integer of at least 1, not no"),
        ("count", "boolean", "f.yaml:2: count: expected true or false, not 1_000"),
        ("count", "items", "f.yaml:2: count: expected a list, not 1_000"),
        ("count", "entries", "f.yaml:2: count: expected a mapping, not 1_000"),
        ("share", "integer", "f.yaml:3: share: expected an integer of at least 1, not 0.5"),
        ("quoted", "integer", "f.yaml:5: quoted: expected an integer of at least 1, not '5'"),
        ("quoted", "number", "f.yaml:5: quoted: expected a number above 0, not '5'"),
        ("empty", "string", "f.yaml:6: empty: expected a string, not null"),
        ("nested", "string", "f.yaml:7: nested: expected a string, not a mapping"),
        ("nested", "items", "f.yaml:7: nested: expected a list, not a mapping"),
    ],
)
def test_errors_name_the_expected_type_and_the_value(field, method, message):
    assert refused(getattr(parse(YAML_TEXT, "f.yaml").entries()[field], method)) == message


def test_unknown_settings_are_rejected_with_the_closest_name():
    setting = parse("a: 1\nlimt: 2\n", "f.yaml")
    assert refused(setting.fields, "a", "limit") == "f.yaml:2: limt: unknown setting: did you mean 'limit'?"
    assert refused(setting.fields, "a", "window") == "f.yaml:2: limt: unknown setting: expected one of a, window"


@cases(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: a: duplicate key, first set on line 1"),
        (
            "a: 1\n---\nb: 2\n",
            "f.yaml:2: is not valid YAML: expected a single document in the stream, but found another document",
        ),
        (
            "a: [1\nb: 2\n",
            "f.yaml:2: is not valid YAML: expected ',' or ']', but got ':': the bracket opened on line 1 is not closed",
        ),
        (
            "a: 1\nb:2\nc: 3\n",
            (
                "f.yaml:2: is not valid YAML: could not find expected ':': "
                "write a colon and a space after the name of a setting"
            ),
        ),
        (
            "a:\n b: 1\n  c: 2\n",
            (
                "f.yaml:3: is not valid YAML: mapping values are not allowed here: "
                "check the indentation, a space after each ':', and the quotes of a value that contains one"
            ),
        ),
        (
            "cron: */5 * * * *\n",
            (
                "f.yaml:1: is not valid YAML: expected alphabetic or numeric character, but found '/': "
                "put a value that begins with * or & in quotes"
            ),
        ),
        (
            "a: 'b\nc: 1\n",
            "f.yaml:1: is not valid YAML: found unexpected end of stream: close the quotes",
        ),
        (
            "a: @b\n",
            "f.yaml:1: is not valid YAML: found character '@' that cannot start any token: put the value in quotes",
        ),
        (
            "a:\n\t- b\n",
            (
                "f.yaml:2: is not valid YAML: found character '\\t' that cannot start any token: "
                "indent with spaces, not tabs"
            ),
        ),
        (
            "a:1\nb: 2\n",
            (
                "f.yaml:2: is not valid YAML: mapping values are not allowed here: "
                "check the indentation, a space after each ':', and the quotes of a value that contains one"
            ),
        ),
        ("a: b\n\nc: \0", "f.yaml:3: is not valid YAML: the character U+0000 is not allowed"),
        ("[a]: 1\n", "f.yaml:1: keys must be strings, not lists or mappings"),
        ("? {a: 1}\n: 1\n", "f.yaml:1: keys must be strings, not lists or mappings"),
        ("a:\n  " + "[" * 1500, "f.yaml:2: is nested more than 100 levels deep"),
        ("a: &a [*a]", "f.yaml:1: an alias refers to a node that contains it"),
        ("a: *b", "f.yaml:1: is not valid YAML: found undefined alias 'b'"),
        ("- a\n", "f.yaml:1: expected a mapping, not a list"),
        ("!!python/object:os.system {a: 1}", None),
    ],
)
def test_invalid_files_are_rejected(text, message):
    error = refused(lambda: parse(text, "f.yaml").entries())
    assert message in (None, error)
    assert "f.yaml" in error


def test_tags_construct_nothing():
    setting = parse("a: !!python/object/apply:os.system [ls]\nb: !!int '5'\n", "f.yaml").entries()
    assert "unsupported tag tag:yaml.org,2002:python/object/apply:os.system: remove it" in refused(setting["a"].items)
    assert refused(setting["b"].integer).startswith("f.yaml:2: b: unsupported tag")


def test_aliases_that_expand_too_far_are_rejected_with_their_line():
    """Each line doubles the nodes of the line before; line 13 exceeds ten thousand."""
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    message = "aliases expand to more than 10000 nodes: use fewer aliases"
    assert refused(parse, "\n".join(lines), "f.yaml") == f"f.yaml:12: {message}"
    assert parse("\n".join(lines[:11])).entries()["a10"].is_list


def test_aliases_count_towards_the_depth_bound():
    lines = ["a0: &a0 x"] + [f"a{i}: &a{i} {'[' * 30}*a{i - 1}{']' * 30}" for i in range(1, 6)]
    assert parse("\n".join(lines[:4])).entries()["a3"].is_list
    assert refused(parse, "\n".join(lines), "f.yaml") == "f.yaml:5: is nested more than 100 levels deep"


def test_a_file_with_many_nodes_and_few_aliases_is_read():
    text = "limit: &limit 5\n" + "".join(f"k{i}: *limit\n" for i in range(9_999))
    assert len(parse(text).entries()) == 10_000
    text = "\n".join(f"k{i}: 5" for i in range(20_000))
    assert len(parse(text).entries()) == 20_000


def test_a_file_that_is_too_large_is_refused(tmp_path):
    path = tmp_path / "f.yaml"
    with path.open("wb") as file:
        file.truncate(16 * 2**20 + 1)
    assert refused(load, path) == f"{path}: is larger than 16777216 bytes"


def test_python_mappings_are_read():
    fields = load({"a": 1, "b": True, "c": ["x"], "d": {"e": 0.5}, "f": None, "g": "no"}).entries()
    assert fields["a"].integer() == 1
    assert fields["b"].boolean() is True
    assert fields["c"].items()[0].string() == "x"
    assert fields["d"].entries()["e"].number() == 0.5
    assert fields["f"].is_null
    assert refused(fields["g"].boolean) == "g: expected true or false, not 'no'"
    assert refused(fields["b"].integer) == "b: expected an integer of at least 1, not True"
    assert refused(fields["d"].entries()["e"].integer) == "d.e: expected an integer of at least 1, not 0.5"
    assert ConfigValue({1: 2}).entries()["1"].integer() == 2  # as in a file
    assert refused(ConfigValue({None: 2}).entries) == "keys must be strings, not None"
    assert refused(ConfigValue({True: 2}).entries) == "keys must be strings, not True"


def test_other_config_errors_get_the_location():
    setting = parse("limit: 0\nperiod: 1x\n", "f.yaml")
    fields = setting.entries()
    with pytest.raises(ConfigError) as error, setting.locate_errors(quota=fields["limit"], period=fields["period"]):
        Limit(0, "1m")
    assert str(error.value) == "f.yaml:1: limit: must be an integer from 1 to 2**53 - 1, not 0"
    with pytest.raises(ConfigError) as error, setting.locate_errors():
        Limit(1, "1m", algorithm="guess")
    assert str(error.value).startswith("f.yaml:1: algorithm: unknown algorithm 'guess'")


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "missing.yaml"
    assert refused(load, missing) == f"{missing}: cannot be read: No such file or directory"
    assert refused(load, str(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory"
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xff\n")
    assert refused(load, latin) == f"{latin}: is not valid UTF-8 at byte 3"
    assert refused(load, 5) == "config: expected a file path or a mapping, not 5"
    assert refused(load, "a\0b").startswith("config: expected a file path")


def test_a_file_is_read(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("a: 1\n", encoding="utf-8")
    assert load(path).entries()["a"].file == str(path)
    path.write_text("", encoding="utf-8")
    assert load(str(path)).is_null


def test_very_long_numbers_are_shortened_in_errors():
    setting = parse(f"a: {'9' * 5000}\n").entries()["a"]
    assert len(refused(setting.integer)) < 200
    assert len(refused(setting.number)) < 200
    assert refused(ConfigValue("x" * 500, field="a").boolean).endswith("…")


@given(st.text(st.sampled_from("ab:-[]{}#&*!|>'\"%@`,? \n\t0123456789\0"), max_size=80))
def test_any_string_is_read_or_rejected(text):
    try:
        setting = parse(text, "f.yaml")
        for entry in setting.entries().values():
            entry.integer()
    except ConfigError as error:
        assert error.file == "f.yaml"  # noqa: PT017 - either is fine
