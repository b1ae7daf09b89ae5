"""Addresses: loopback, link-local and private ones cannot be reached unless their host is allowed by name."""

import json
import socket

import pytest

from tests.cases import cases
from tests.egress.harness import running, serving
from tests.outbound.server import QuotaServer, as_json
from tidegate.egress._addresses import AddressCheck, ForbiddenAddressError, is_public
from tidegate.outbound import AsyncGate, Providers


@pytest.fixture(scope="module")
def upstream():
    with QuotaServer(respond=lambda request: as_json({"path": request.path})) as server:
        yield server


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "168.63.129.17", "192.0.1.1", "2606:4700:4700::1111", "2001:4860:4860::8888", "::ffff:8.8.8.8"],
)
def test_public_addresses(address):
    assert is_public(address)


@cases("address", [
        "127.0.0.1", "127.8.8.8", "0.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "not an address",
        "192.0.0.192", "192.0.0.9", "168.63.129.16", "192.88.99.1", "100.100.100.200", "198.18.0.1", "240.0.0.1",
        "::ffff:168.63.129.16", "64:ff9b::c000:c0", "2002:a83f:8110::1", "fd00:ec2::254", "fd20:ce::254",
        "64:ff9b:1::808:808", "2001:0:a9fe:a9fe:0:0:f7f7:f7f7", "2001:2::1", "100::1", "3fff::1", "3fff:fff::1",
        "5f00::1", "::169.254.169.254", "::ffff:0:a9fe:a9fe",
    ])  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


async def test_a_private_address_is_refused_unless_its_host_is_allowed(upstream):
    async with running(upstream.url, {"allow_private": []}) as gateway:
        status, _, body = await gateway.get("/up/x")
        assert (status, json.loads(body)["error"]["type"]) == (403, "address-not-allowed")
        assert gateway.gateway.gate.metrics()["sent"] == 1
        (account,) = gateway.gateway.gate.accounts
        assert (await account.limiter.usage(account.key))["1m"].used == 0  # nothing was sent: the permit is returned
    assert not upstream.requests


@pytest.mark.parametrize("first", ["8.8.8.8", None])
async def test_a_name_that_turns_private_is_refused(upstream, first):
    """DNS rebinding: the name is public when it is looked up first, and later resolves to this machine."""
    answers = [["127.0.0.1"]] * 5 if first is None else [[first], ["127.0.0.1"], ["127.0.0.1"]]

    async def lookup(host, port):
        return answers.pop(0)

    check = AddressCheck((), lookup)
    if first is not None:
        assert await check.addresses("api.example.com", 443) == [first]
    gate = AsyncGate(Providers.of({"domain": "api.example.com", "name": "up", "limits": ["10/1m"]}), reload=None)
    settings = {
        "upstreams": {"up": f"http://api.example.com:{upstream.port}"},
        "listen": "127.0.0.1:0",
        "tunnels": "allow",
    }
    async with serving(gate, settings, check) as gateway:
        status, _, body = await gateway.get("/up/x")
        assert (status, json.loads(body)["error"]["type"]) == (403, "address-not-allowed")
        status, _, body = await gateway.get(f"/to/api.example.com:{upstream.port}/x")
        assert status == 403
    assert not upstream.requests


async def test_the_address_is_checked_again_when_the_socket_is_created(upstream):
    """Whatever resolves the name, no socket is created for a private address."""

    class Careless(AddressCheck):
        async def addresses(self, host, port):
            return ["127.0.0.1"]

    gate = AsyncGate(Providers.of({"domain": "api.example.com", "name": "up", "limits": ["10/1m"]}), reload=None)
    settings = {"upstreams": {"up": f"http://api.example.com:{upstream.port}"}, "listen": "127.0.0.1:0"}
    async with serving(gate, settings, Careless(())) as gateway:
        status, _, body = await gateway.get("/up/x")
        assert (status, json.loads(body)["error"]["type"]) == (403, "address-not-allowed")
    assert not upstream.requests


async def test_a_private_address_of_an_allowed_host_stays_forbidden_for_others():
    async def lookup(host, port):
        return ["10.1.2.3"]

    check = AddressCheck(["llm.internal"], lookup)
    assert await check.addresses("LLM.internal", 80) == ["10.1.2.3"]
    check.make_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 80))).close()
    with pytest.raises(ForbiddenAddressError):
        await check.addresses("evil.example", 80)
    with pytest.raises(ForbiddenAddressError):
        check.check("10.1.2.4")
