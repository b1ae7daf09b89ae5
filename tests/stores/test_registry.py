"""`open_store` finds stores of other packages by their entry points."""

import sys

import pytest

from tidegate import ConfigError, Limiter
from tidegate.stores import MemoryStore, open_store


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that provides a store."""
    (tmp_path / "elsewhere.py").write_text(
        "from tidegate.stores import MemoryStore\n"
        "class Elsewhere(MemoryStore):\n"
        "    pass\n"
        "def open_it(url, clock):\n"
        "    return Elsewhere(clock=clock)\n"
    )
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tidegate.stores]\nelsewhere = elsewhere:open_it\nmemory = elsewhere:open_it\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("elsewhere", None)


def test_a_store_of_another_package_is_opened_by_its_scheme(package):
    with Limiter("2/1h", store="elsewhere://anything") as limiter:
        assert [bool(limiter.try_acquire("k")) for _ in range(3)] == [True, True, False]


def test_a_package_cannot_replace_a_built_in_store(package):
    assert type(open_store("memory://")) is MemoryStore


def test_the_error_for_an_unknown_scheme_lists_the_known_ones(package):
    with pytest.raises(ConfigError, match=r"unknown scheme nowhere://: expected .*elsewhere://.*sqlite://"):
        open_store("nowhere://")


def test_a_misspelled_scheme_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown scheme sqlit://: expected .*; did you mean 'sqlite://'\?"):
        open_store("sqlit:///limits.db")
