"""Parsing URLs of Redis stores; error messages never contain the password."""

from __future__ import annotations

import pytest

from tests.cases import cases
from tidegate import ConfigError
from tidegate.stores import open_store
from tidegate.stores._redis import RedisStore
from tidegate.stores._redis.address import read_url


@cases(
    ("url", "kind", "hosts", "tls"),
    [
        ("redis://", "server", (("127.0.0.1", 6379),), False),
        ("redis://cache", "server", (("cache", 6379),), False),
        ("redis://cache:7000/2", "server", (("cache", 7000),), False),
        ("rediss://[::1]:7000", "server", (("::1", 7000),), True),
        ("valkey://[::1]", "server", (("::1", 6379),), False),
        ("valkeys://cache", "server", (("cache", 6379),), True),
        ("redis+cluster://a,b:7001", "cluster", (("a", 6379), ("b", 7001)), False),
        ("rediss+cluster://a", "cluster", (("a", 6379),), True),
        ("redis+sentinel://a,b:1/mymaster/3", "sentinel", (("a", 26379), ("b", 1)), False),
    ],
)
def test_hosts_and_tls(url: str, kind: str, hosts: tuple[tuple[str, int], ...], tls: bool) -> None:
    address = read_url(url)
    assert (address.kind, address.hosts, address.tls) == (kind, hosts, tls)
    opened = open_store(url)
    assert isinstance(opened, RedisStore)
    opened.close()


def test_options_of_the_query() -> None:
    address = read_url("redis://us%40er:p%3Ass@h/4?timeout=0.2&connect_timeout=1&prefix=x&hash_tag=policy&batch=9")
    assert (address.username, address.password, address.db) == ("us@er", "p:ss", 4)
    assert (address.timeout, address.connect_timeout, address.prefix) == (0.2, 1.0, "x")
    assert (address.hash_tag, address.batch) == ("policy", 9)
    assert read_url("redis+sentinel://h/name").service == "name"
    assert read_url("rediss://h?ssl_ca_certs=ca.pem").driver == {"ssl_ca_certs": "ca.pem"}


@cases(
    ("url", "message"),
    [
        ("redis://user:hush@host:port", "a port is a number"),
        ("redis://user:hush@host/one", "db must be an integer of at least 0, not 'one'"),
        ("redis://user:hush@host/1/2", "the path must be a database number"),
        ("redis://user:hush@host?timout=1", "unknown option 'timout': did you mean 'timeout'"),
        ("redis://user:hush@host?timeout=soon", "timeout must be a number"),
        ("redis://user:hush@host?hash_tag=user", "hash_tag must be key, policy or all, not 'user'"),
        ("redis://user:hush@host?prefix={x}", "prefix must be a non-empty string without braces, not '{x}'"),
        ("redis://user:hush@a,b", r"redis\+cluster://"),
        ("redis+cluster://user:hush@a/1", "a cluster has only database 0"),
        ("redis+sentinel://user:hush@a", "the service name is missing"),
        ("redis://user:hush@[::1", "malformed URL"),
    ],
)
def test_invalid_urls_raise_an_error_without_the_password(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(url)
    assert "hush" not in str(caught.value)
