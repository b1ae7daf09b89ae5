"""The egress file is read again when it changes: all new settings take effect, or none."""

import json
import logging
import os
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.egress.harness import OTHER_TOKEN, TOKEN
from tests.outbound.server import QuotaServer, as_json
from tidegate.egress import load_egress
from tidegate.egress._gateway import EgressGateway
from tidegate.egress._reload import EgressFile, EgressRules
from tidegate.egress._run import listen
from tidegate.egress._server import EgressServer
from tidegate.outbound import AsyncGate, Providers
from tidegate.testing import ManualClock

PROVIDER = {"domain": "127.0.0.1", "name": "up", "limits": ["1000/1m"]}


@pytest.fixture(scope="module")
def upstream():
    with QuotaServer(respond=lambda request: as_json({"path": request.path})) as server:
        yield server


class Watched:
    """A gateway whose file is checked when a test asks for it."""

    def __init__(self, path, url, gateway, file, client, address):
        self._path, self._url = path, url
        self.gateway, self.file = gateway, file
        self._client, self._address = client, address

    def write(self, **fields):
        """Replace the file; its time is another one, however coarse the clock of the file system is."""
        settings = {"upstreams": {"up": self._url}, "allow_private": ["127.0.0.1"], "listen": "127.0.0.1:0"}
        before = self._path.stat().st_mtime_ns
        self._path.write_text(json.dumps({**settings, **fields}))
        os.utime(self._path, ns=(before + 1000, before + 1000))
        return self.file.check()

    async def status(self, token=None, **headers):
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        async with self._client.get(f"{self._address}/up/x", headers=headers) as response:
            await response.read()
            return response.status


@asynccontextmanager
async def watched(upstream, tmp_path, **fields):
    path = tmp_path / "egress.yaml"
    settings = {"upstreams": {"up": upstream.url}, "allow_private": ["127.0.0.1"], "listen": "127.0.0.1:0"}
    path.write_text(json.dumps({**settings, **fields}))
    clock = ManualClock(start=1_728_000_000)
    gate = AsyncGate(Providers.of(PROVIDER), clock=clock)
    read = load_egress(path)
    with listen(read) as listener:
        async with (
            EgressGateway(gate, read) as gateway,
            EgressServer(gateway, listener),
            aiohttp.ClientSession() as client,
        ):
            file = EgressFile(EgressRules(read), gate.providers, clock, gateway.use)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield Watched(path, upstream.url, gateway, file, client, address)
    await gate.close()


async def test_a_new_caller_may_call_and_a_removed_one_may_not(upstream, tmp_path):
    async with watched(upstream, tmp_path, callers={"a": {"token": TOKEN}}) as gateway:
        assert [await gateway.status(each) for each in (TOKEN, OTHER_TOKEN)] == [200, 401]
        assert gateway.file.check() is False  # nothing has changed
        assert gateway.write(callers={"b": {"token": OTHER_TOKEN}}) is True
        assert [await gateway.status(each) for each in (TOKEN, OTHER_TOKEN)] == [401, 200]
        assert gateway.gateway.rules.reloads == {"adopted": 1, "refused": 0}


async def test_changed_limits_of_a_caller_keep_what_it_has_used(upstream, tmp_path):
    now = {"X-Tidegate-Timeout": "0"}
    async with watched(upstream, tmp_path, callers={"a": {"token": TOKEN, "limits": ["3/1h"]}}) as gateway:
        assert [await gateway.status(TOKEN, **now) for _ in range(2)] == [200, 200]
        gateway.write(callers={"a": {"token": TOKEN, "limits": ["4/1h"]}})
        assert [await gateway.status(TOKEN, **now) for _ in range(3)] == [200, 200, 429]
        gateway.write(callers={"a": {"token": TOKEN}})
        assert await gateway.status(TOKEN, **now) == 200


async def test_an_invalid_file_changes_nothing_and_is_reported_with_line_and_field(upstream, tmp_path, caplog):
    async with watched(upstream, tmp_path, callers={"a": {"token": TOKEN}}) as gateway:
        with caplog.at_level(logging.INFO):
            assert gateway.write(callers={"a": {"token": TOKEN, "providers": ["upp"]}}) is False
        message = "egress.yaml:1: callers.a: there is no provider 'upp': did you mean 'up'?"
        assert message in caplog.text
        described = gateway.gateway.describe()["rules"]
        assert described["error"].endswith(message)
        assert (described["refused"], described["since"]) == (1, 1_728_000_000_000)
        assert await gateway.status(TOKEN) == 200
        families = {name: samples for name, *_, samples in gateway.gateway.families()}
        assert families["tidegate_egress_reloads_total"] == [
            ("tidegate_egress_reloads_total", {"outcome": "adopted"}, 0),
            ("tidegate_egress_reloads_total", {"outcome": "refused"}, 1),
        ]
        assert gateway.file.check() is False  # it is read once
        assert gateway.gateway.describe()["rules"]["refused"] == 1
        gateway.write(callers={"a": {"token": TOKEN}})  # corrected: as before
        assert gateway.gateway.describe()["rules"] == {"adopted": 0, "refused": 1, "error": None, "since": None}


async def test_a_private_host_that_is_no_longer_allowed_is_not_reached_over_an_open_connection(upstream, tmp_path):
    async with watched(upstream, tmp_path) as gateway:
        assert await gateway.status() == 200
        gateway.write(allow_private=[])
        assert await gateway.status() == 403
        gateway.write()
        assert await gateway.status() == 200


async def test_other_upstreams_and_timeouts_take_effect(upstream, tmp_path):
    with QuotaServer(respond=lambda _request: as_json({"other": True})) as other:
        async with watched(upstream, tmp_path) as gateway:
            gateway.write(upstreams={"up": other.url}, first_byte_timeout="5s", timeout="7s")
            assert await gateway.status() == 200
            assert len(other.requests) == 1
            assert (gateway.gateway.settings.timeout, gateway.gateway.settings.first_byte_timeout) == (7.0, 5.0)


async def test_settings_of_the_start_need_a_restart_and_say_so(upstream, tmp_path, caplog):
    async with watched(upstream, tmp_path) as gateway:
        assert gateway.write(store="sqlite:///other.db", timeout="9s") is True
        assert "need a restart of the gateway: store" in caplog.text
        assert (gateway.gateway.settings.store, gateway.gateway.settings.timeout) == ("memory://", 9.0)


async def test_a_changed_token_file_is_read(upstream, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with watched(upstream, tmp_path, callers={"a": {"token_file": str(token)}}) as gateway:
        assert await gateway.status(TOKEN) == 200
        token.write_text(OTHER_TOKEN + "-longer")
        assert gateway.file.check() is True
        assert [await gateway.status(each) for each in (TOKEN, OTHER_TOKEN + "-longer")] == [401, 200]


async def test_an_open_address_keeps_needing_callers(upstream, tmp_path):
    path = tmp_path / "egress.yaml"
    path.write_text(json.dumps({"listen": "0.0.0.0:1", "callers": {"a": {"token": TOKEN}}}))
    changes = []
    file = EgressFile(EgressRules(load_egress(path)), Providers.of(PROVIDER), ManualClock(), changes.append)
    path.write_text("listen: 127.0.0.1:1\n")  # the address changes at a restart only
    assert file.check() is False
    assert "reachable from other machines" in changes[-1].refused
    assert changes[-1].settings.callers


async def test_a_requested_reload_reads_a_file_that_looks_unchanged(upstream, tmp_path):
    async with watched(upstream, tmp_path, timeout="5s") as gateway:
        path = tmp_path / "egress.yaml"
        before = path.stat().st_mtime_ns
        path.write_text(path.read_text().replace("5s", "6s"))
        os.utime(path, ns=(before, before))
        assert gateway.file.check() is False
        gateway.file.request_reload()
        assert gateway.file.check() is True
        assert gateway.gateway.settings.timeout == 6.0
