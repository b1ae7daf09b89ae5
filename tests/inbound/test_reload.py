"""config.yaml changes under a running application."""

import os

import pytest


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    written = []

    def write(text):
        path.write_text(text, encoding="utf-8")
        written.append(text)
        os.utime(path, ns=(len(written), len(written)))  # two writes within a tick of the file system's clock differ
        return path

    write.path = path
    return write


def limits(number, name="read"):
    return f"rate_limiting:\n  categories:\n    {name}:\n      limit: {number}\n"


def test_a_changed_file_is_in_force_within_a_second(door, config):
    api = door(config(limits(3)))
    assert api.ask()["x-ratelimit-limit"] == "3"
    config(limits(9))
    assert api.ask()["x-ratelimit-limit"] == "3"
    api.clock.advance(1)
    api.ask()
    assert api.ask()["x-ratelimit-limit"] == "9"


def test_a_change_refills_nothing(door, config):
    api = door(config(limits(10)))
    api.many(6)
    config(limits(8))
    api.clock.advance(1)
    api.ask()
    reply = api.ask()
    assert (reply["x-ratelimit-limit"], reply["x-ratelimit-remaining"]) == ("8", "0")
    assert api.ask().status == 429


def test_a_bad_file_is_refused_with_its_place_and_the_old_one_stays(door, config, caplog):
    path = config(limits(3))
    api = door(path)
    api.ask()
    config(limits("many"))
    api.clock.advance(1)
    assert [api.ask()["x-ratelimit-limit"] for _ in range(2)] == ["3", "3"]
    expected = f"{path}:4: rate_limiting.categories.read.limit: expected an integer from 1, not many"
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message for record in errors] == [f"refused, the former rules stay in force: {expected}"]
    api.clock.advance(5)
    api.ask()
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1  # said once
    config(limits(4))
    api.clock.advance(1)
    api.ask()
    assert api.ask(peer="198.51.100.1")["x-ratelimit-limit"] == "4"


def test_a_file_that_is_gone_changes_nothing(door, config, caplog):
    path = config(limits(3))
    api = door(path)
    api.ask()
    path.unlink()
    api.clock.advance(1)
    assert [api.ask().status for _ in range(2)] == [200, 200]
    assert "cannot be read" in caplog.text
    config(limits(5))
    api.clock.advance(1)
    api.ask()
    assert api.ask(peer="198.51.100.1")["x-ratelimit-limit"] == "5"


def test_categories_come_and_go(door, config):
    api = door(config(limits(3)))
    api.ask("/login")
    config("rate_limiting:\n  categories:\n    login: {limit: 2, endpoints: [/login]}\n  max_entries: 7\n")
    api.clock.advance(1)
    api.ask("/login")
    assert [api.ask("/login")["x-ratelimit-limit"] for _ in range(2)] == ["2", "2"]
    assert api.guard.store.metrics()["max_entries"] == 7
    config("rate_limiting: {enabled: false}\n")
    api.clock.advance(1)
    api.ask("/login")
    assert "x-ratelimit-limit" not in api.ask("/login").headers
    config(limits(3))
    api.clock.advance(1)
    api.ask("/login")
    assert api.ask("/login")["x-ratelimit-limit"] == "3"  # switched on again


def test_exempt_clients_are_looked_at_again(door, config):
    api = door(config("rate_limiting: {categories: {read: {limit: 1}}}\n"))
    assert api.many(2) == [200, 429]
    config("rate_limiting: {exempt_clients: [203.0.113.9], categories: {read: {limit: 1}}}\n")
    api.clock.advance(1)
    api.ask()
    assert api.many(3) == [200] * 3


def test_a_category_that_the_program_counts_on_cannot_go(door, config, caplog):
    api = door(
        config("rate_limiting: {categories: {login: {limit: 2, endpoints: [/login]}}}\n"),
        count={"login": lambda *_: True},
    )
    api.ask("/login")
    config("rate_limiting: {}\n")
    api.clock.advance(1)
    api.ask("/login")
    assert api.ask("/login")["x-ratelimit-limit"] == "2"
    assert "there is no category 'login'" in caplog.text
