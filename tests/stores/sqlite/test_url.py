"""URLs of SQLite stores."""

from pathlib import Path

import pytest

from tests.cases import cases
from tidegate import Limiter
from tidegate.errors import ConfigError
from tidegate.stores import open_store
from tidegate.stores._sqlite import SQLiteStore


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///limits.db", "limits.db"),
        ("sqlite:///data/my%20limits.db", "data/my limits.db"),
        ("sqlite:////var/lib/limits.db", "/var/lib/limits.db"),
        ("sqlite:///a%3Fb%23c.db?synchronous=full&busy_timeout=250ms", "a?b#c.db"),
    ],
)
def test_the_path_of_a_url(url, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store(url)
    assert isinstance(store, SQLiteStore)
    assert store.path == tmp_path / Path(path)
    store.close()


def test_percent_encoded_characters_are_decoded(tmp_path):
    with Limiter("1/1h", store=f"sqlite:///{tmp_path}/a%3Fb%23c%25d.db") as limiter:
        assert limiter.try_acquire("k")
        assert not limiter.try_acquire("k")
    assert (tmp_path / "a?b#c%d.db").exists()


@cases(
    ("url", "message"),
    [
        ("sqlite://", "sqlite:///relative.db"),
        ("sqlite:///", "sqlite:///relative.db"),
        ("sqlite://limits.db", "sqlite:///relative.db"),
        ("sqlite:///folder/", "sqlite:///relative.db"),
        ("sqlite:///limits#1.db", "sqlite:///relative.db"),
        ("sqlite:///:memory:", "use memory://"),
        ("sqlite:///limits.db?mode=ro", "unknown option 'mode': expected one of synchronous, busy_timeout"),
        ("sqlite:///limits.db?synchronous=off", "must be 'normal', 'full' or 'extra'"),
        ("sqlite:///limits.db?busy_timeout=5", "5s or 5ms"),
        ("sqlite:///limits.db?busy_timeout=soon", "busy_timeout: .*unknown unit of time"),
    ],
)
def test_invalid_urls_are_refused(url, message):
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_a_charge_is_kept_after_closing(tmp_path):
    url = f"sqlite:///{tmp_path}/limits.db?synchronous=full"
    with Limiter("2/1h", store=url) as limiter:
        assert limiter.try_acquire("k", 2)
    with Limiter("2/1h", store=url) as limiter:
        assert not limiter.try_acquire("k")
