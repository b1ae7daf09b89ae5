"""URLs are shown and rejected without their secrets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import ConfigError, Limiter
from tidegate._policy.config_value import parse
from tidegate._runtime.urls import redact, redact_text, server_url, split_url
from tidegate.budget import TaskBudget
from tidegate.budget._settings.model import BudgetSettings
from tidegate.bus import open_bus
from tidegate.outbound.sources import read_source
from tidegate.service._config.settings import load_settings
from tidegate.stores import open_store
from tidegate.stores._outage import open_guarded
from tidegate.stores._postgres.store import read_target
from tidegate.stores._redis.address import read_url
from tidegate.swarm import SwarmLimiter

SERVERS = ("redis", "rediss", "valkey", "redis+cluster", "redis+sentinel", "postgresql", "postgres")
BUSES = ("redis", "rediss", "valkey", "nats", "tls")
MALFORMED = (
    "{scheme}://user:hunter2@[::1",
    "{scheme}://user:hunter2@[zz]/0",
    "{scheme}://user:hunter2@host:99999/0",
    "{scheme}://user:hunter2@host:0/0",
    "{scheme}://user:hunter2@host:-1/0",
    "{scheme}://user:hunter2@host:6379:6379/0",
    "{scheme}://user:hunter2@::1:6379/0",
    "{scheme}://user:hun/ter2@host/0",
    "{scheme}://user:hun?ter2@host/0",
    "{scheme}://user:hun#ter2@host/0",
    "{scheme}://user:12/hunter2@host/0",
    "{scheme}://user:12?hunter2=1@host/0",
    "{scheme}://user:hunter2",
    "{scheme}://:hunter2",
    "{scheme}://user:hunter2@ho\u2100st/0",
)


@cases(
    ("url", "shown"),
    [
        ("https://me:pw@a.test:81/x/y?key=secret#part", "https://…@a.test:81/x/y?…"),
        ("https://a.test/@name/feed", "https://a.test/@name/feed"),
        ("https://a.test#secret", "https://a.test#…"),
        ("https://a.test?key=secret@b", "https://a.test?…"),
        ("https://me:p/w@a.test/x", "https://…@a.test/x"),
        ("redis://me:pw@host:6379/0", "redis://…@host:6379/0"),
        ("redis://me:p@w@host", "redis://…@host"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:secret", "redis://:…"),
        ("nats://a:b@one,nats://c:d@two", "nats://…@two"),
        ("redis+cluster://a:1,[::1]:2", "redis+cluster://a:1,[::1]:2"),
        ("postgresql://host/db?password=secret", "postgresql://host/db?…"),
        ("sqlite:///a@b.db", "sqlite:///a@b.db"),
        ("sqlite://user:pw@/a.db", "sqlite://…@/a.db"),
        ("me:pw@host", "…@host"),
        ("memory://", "memory://"),
        ("", ""),
        (None, "None"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url, shown):
    assert redact(url) == shown


@given(
    st.sampled_from((*SERVERS, *BUSES, "https")),
    st.text(st.sampled_from("xyz:/?#@[]% ."), max_size=12).map(lambda text: f"hunter2{text}hunter2"),
)
def test_no_part_of_a_password_is_shown(scheme, password):
    assert "hunter2" not in redact(f"{scheme}://user:{password}@host:1/path")


def test_urls_within_a_message_are_redacted():
    redacted = redact_text("cannot reach 'redis://a:hunter2@host:1/0' or https://b:hunter2@c/?k=hunter2: refused")
    assert redacted == "cannot reach 'redis://…@host:1/0' or https://…@c/?… refused"


@cases("wrong", MALFORMED)
@cases(
    ("open_it", "scheme"),
    [
        *((open_store, scheme) for scheme in SERVERS),
        *((open_guarded, scheme) for scheme in ("redis", "redis+cluster", "postgresql", "sqlite", "memory", "x")),
        *((open_bus, scheme) for scheme in BUSES),
        (lambda url: Limiter("1/1m", store=url), "redis"),
        (lambda url: TaskBudget(per_day=1, store=url), "postgresql"),
        (lambda url: SwarmLimiter(bus=url, agent_id="a"), "nats"),
    ],
)
def test_a_malformed_url_is_a_config_error_that_repeats_no_password(open_it, scheme, wrong):
    with pytest.raises(ConfigError) as error:
        open_it(wrong.format(scheme=scheme))
    assert "hunter2" not in str(error.value)
    assert "ter2" not in str(error.value)


@cases(
    "url",
    [
        "sqlite://user:hunter2@host/limits.db",
        "sqlite://user:hunter2@/limits.db",
        "sqlite://user:hunter2@host:99999/limits.db",
        "memory://user:hunter2@host",
        "user:hunter2@host:6379",
        "//user:hunter2@host:6379",
        "hunter2",
    ],
)
@cases("open_it", [open_store, open_guarded, open_bus])
def test_a_url_without_a_server_is_rejected_without_its_password(open_it, url):
    with pytest.raises(ConfigError) as error:
        open_it(url)
    assert "hunter2" not in str(error.value).replace("not 'hunter2'", "")


ODD = ("", "x", "-1", "9" * 5000, "1e999", "nan", "inf", "\u0663", "1_0", "%00", "%ff", "\ud800", "1\x00", "1s" * 3000)
OPTIONS = {
    "memory://": ("max_entries", "overflow", "deadline"),
    "sqlite:///odd.db": ("synchronous", "busy_timeout", "deadline", "local_for", "heartbeat", "odd"),
    "redis://host": ("timeout", "connect_timeout", "db", "batch", "prefix", "hash_tag", "client_name", "deadline"),
    "redis+sentinel://host/name": ("timeout", "db", "sentinel_password"),
    "postgresql://host/db": ("schema", "timeout", "connect_timeout", "pool_size", "unlogged", "sslmode", "port"),
}


@pytest.mark.parametrize("base", OPTIONS)
def test_an_option_of_a_url_is_taken_or_a_config_error(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in OPTIONS[base]:
        for value in ODD:
            try:
                open_guarded(f"{base}?{name}={value}").close()
            except ConfigError as error:
                assert str(error)  # noqa: PT017 - either is fine
    for path in ODD:
        try:
            open_guarded(f"{base.partition('?')[0]}/{path}").close()
        except ConfigError as error:
            assert str(error)  # noqa: PT017 - either is fine


def test_a_url_in_a_settings_error_is_redacted():
    setting = parse("a: https://user:hunter2@host/?token=hunter2", "f.yaml").entries()["a"]
    with pytest.raises(ConfigError, match=r"f\.yaml:1: a: expected an integer of at least 1, not 'https://…@host/\?…'"):
        setting.integer()


def test_no_repr_shows_a_password():
    url = "https://user:hunter2@host/?token=hunter2"
    source = read_source({"name": "a", "url": url, "interval": "1h", "to": {"webhook": url}})
    storage = {"store": "redis://user:hunter2@host", "webhook": url, "secret": "hunter2"}
    budget = BudgetSettings(per_day=1, **storage)
    service = load_settings({"store": "redis://user:hunter2@host", "bus": "nats://user:hunter2@host"})
    target = read_target("postgresql://user:hunter2@host/db")
    address = read_url("redis://user:hunter2@host")
    for shown in (source, source.destination, budget, service, target, address):
        assert "hunter2" not in f"{shown!r} {shown}"


def test_well_formed_urls_are_split():
    assert split_url("postgresql://h1:1,[::1]:2/db", "store").netloc == "h1:1,[::1]:2"
    assert server_url("redis://user:p%40ss@[fe80::1%25eth0]:6379/0?a=b", "store").query == "a=b"
    assert split_url("sqlite:////tmp/a@b:c.db", "store").path == "//tmp/a@b:c.db"
