"""The verbs of the table have functions and methods everywhere, and the clients have the names of Limiter."""

import inspect

import pytest

from tests.cases import cases
from tests.service.harness import serving
from tidegate import AsyncLimiter, ConfigError, Denied, Limiter
from tidegate._limiter.limiter import Usage
from tidegate.service._api.verbs import VERBS
from tidegate.service._decisions.reservation_ids import AlreadySettledError, UnknownReservationError
from tidegate.service._http.verbs import Verbs
from tidegate.service.client import AsyncClient, Client

# Verbs of Limiter that need a policy in addition. The others are about the limiter itself, or called by reservations.
LIMITER_VERBS = ("try_acquire", "acquire", "peek", "reserve", "refund", "release", "reset", "usage")
OTHER_METHODS = (
    *("update", "limited", "close", "make_reservation", "reject_calls"),
    *("check_open", "current_time", "observe", "policy_of"),  # called by joint reservations
    *("charge_now", "hold_now"),  # called by the gate of outgoing requests
)
INTERNAL_VERBS = ("lease",)  # the clients use it in try_acquire
CLIENTS = (Client, AsyncClient)


def parameters(function):
    return {name: each.default for name, each in inspect.signature(function).parameters.items()}


@cases("limiter", [Limiter, AsyncLimiter])
@cases("client", CLIENTS)
@cases("verb", LIMITER_VERBS)
def test_the_clients_have_the_verbs_of_limiter_with_the_same_parameters_in_the_same_order(client, limiter, verb):
    expected = parameters(getattr(limiter, verb))
    expected.pop("decision", None)  # of `release`: the service does not know past decisions
    found = parameters(getattr(client, verb))
    assert list(found) == ["self", "policy", *list(expected)[1:]]
    assert {name: found[name] for name in expected} == expected


def test_every_public_verb_of_limiter_is_checked():
    names = {name for name in dir(Limiter) if not name.startswith("_") and inspect.isfunction(getattr(Limiter, name))}
    assert names - set(OTHER_METHODS) == set(LIMITER_VERBS)


@cases("verb", VERBS.values())
def test_every_verb_has_a_function_and_methods_of_the_clients(verb):
    request = ["request"] if verb.request else []
    assert list(parameters(getattr(Verbs, verb.name))) == [
        "self",
        *request,
        *(["call"] if verb.idempotent else []),
        *(["origin"] if verb.audited else []),
    ]
    assert verb.waits == ("timeout" in verb.fields)
    for client in CLIENTS if verb.name not in INTERNAL_VERBS else ():
        assert callable(getattr(client, verb.name))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    policies = "policies: {api: 2/1h fixed_window, slots: 1/1h concurrency}\nmax_wait: 50ms\n"
    with serving(tmp_path_factory.mktemp("service"), policies) as running:
        yield running


def test_acquire_raises_denied_and_try_acquire_returns_a_decision(service):
    with Client(service.url) as client:
        assert client.try_acquire("api", "a").remaining == 1
        assert client.acquire("api", "a", 1, 5, 0.0).remaining == 0
        denied = client.try_acquire("api", "a")
        assert (bool(denied), denied.violated, denied.limits[0].allowed, denied.limits[0].quota) == (
            False, ("1h",), False, 2,
        )  # fmt: skip
        with pytest.raises(Denied, match=r"'a' got no permit within 0.01 s: 1h would allow it in 3\d+") as error:
            client.acquire("api", "a", timeout=0.01)
        assert error.value.decision.violated == ("1h",)
        with pytest.raises(Denied, match=r"within 30\.0 s"):  # the default; the service bounds it by max_wait
            client.acquire("api", "a")
        with pytest.raises(Denied, match="'a': the cost exceeds what 1h can ever allow"):
            client.acquire("api", "a", 3)
        client.refund("api", "a")
        assert client.usage("api", "a")["1h"]._replace(reset_after=0.0) == Usage(2, 1, 1, 0.0, "requests")
        assert client.acquire("api", "a")


def test_reservations_settle_themselves(service):
    with Client(service.url) as client:
        with client.reserve("api", "r", 2) as reservation:
            reservation.commit(1)
        assert client.usage("api", "r")["1h"].used == 1
        with pytest.raises(AlreadySettledError):
            client.cancel(reservation.id)
        with pytest.raises(ZeroDivisionError), client.reserve("api", "r"):
            raise ZeroDivisionError
        assert client.usage("api", "r")["1h"].used == 1
        with client.reserve("api", "r") as reservation:
            assert reservation.decision.remaining == 0
        assert client.usage("api", "r")["1h"].used == 2
        with pytest.raises(Denied, match=r"'r' got no permit within 0\.0 s"):
            client.reserve("api", "r")
        with pytest.raises(UnknownReservationError):
            client.commit("unknown")
        with pytest.raises(ConfigError, match="ttl"):
            client.reserve("api", "r", ttl=0)


async def test_the_client_for_tasks_has_the_same_verbs(service):
    async with AsyncClient(service.url) as client:
        assert (await client.try_acquire("api", "t")).remaining == 1
        async with client.reserve("api", "t") as reservation:
            assert reservation.decision.remaining == 0
        with pytest.raises(Denied, match=r"'t' got no permit within 0\.01 s"):
            await client.acquire("api", "t", timeout=0.01)
        await client.refund("api", "t")
        reservation = await client.reserve("api", "t", 1, 60.0, 0.0, 0.0)
        await reservation.cancel()
        assert (await client.usage("api", "t"))["1h"].used == 1
        with pytest.raises(ZeroDivisionError):
            async with client.reserve("api", "t"):
                raise ZeroDivisionError
        assert (await client.acquire("api", "t")).remaining == 0
        await client.acquire("slots", "t")
        await client.release("slots", "t")
        assert await client.acquire("slots", "t")
