"""A store of another package is found by its entry point."""

import sys

import pytest

from tidegate import ConfigError, Limiter
from tidegate.stores import MemoryStore, open_store


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a store of its own."""
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


def test_a_package_cannot_take_the_place_of_our_own(package):
    assert type(open_store("memory://")) is MemoryStore


def test_an_unknown_scheme_names_the_known_ones(package):
    with pytest.raises(ConfigError, match=r"no store for nowhere://: known are .*elsewhere://.*sqlite://"):
        open_store("nowhere://")
