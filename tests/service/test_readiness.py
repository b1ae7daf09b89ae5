"""/readyz tells apart a service that cannot decide from one that decides without its store."""

import json
import signal

import pytest

from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import DECISION, InProcessService, serving
from tidegate.service._config.settings import load_settings
from tidegate.service._http.readiness import outcomes_without_store

HEADERS = {"authorization": f"Bearer {DECISION}"}
POLICIES = {
    "closed": {"limits": "100/1h"},
    "free": {"limits": "100/1h", "on_store_error": "allow"},
    "shared": {"limits": "100/1h", "on_store_error": "local"},
    "trial": {"limits": "100/1h", "mode": "shadow"},
}


def lose(valkey, how):
    if how == "killed":
        valkey.kill()
    else:
        valkey.signal(signal.SIGSTOP)


def restore(valkey, how):
    if how == "killed":
        valkey.start()
    else:
        valkey.signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("how", "names", "readiness", "status", "state"),
    [
        ("killed", ("closed",), "policies", 503, "cannot_decide"),
        ("frozen", ("closed", "free", "trial"), "policies", 503, "denying_some_policies"),
        ("killed", ("free", "shared", "trial"), "policies", 200, "deciding_without_store"),
        ("frozen", ("free", "shared"), "store", 503, "deciding_without_store"),
        ("killed", ("closed",), "process", 200, "deciding_without_store"),
    ],
)
def test_a_lost_store(tmp_path, how, names, readiness, status, state):
    with ValkeyServer() as valkey:
        chosen = {name: POLICIES[name] for name in names}
        text = f"store: {valkey.url}?deadline=200ms\nreadiness: {readiness}\npolicies: {json.dumps(chosen)}\n"
        with serving(tmp_path, text) as service:
            until(lambda: service.get("/readyz").json() == {"ok": True, "state": "ready"}, "the store")
            lose(valkey, how)
            until(lambda: service.get("/readyz").json()["state"] != "ready", "the outage")
            response = service.get("/readyz")
            assert (response.status_code, response.json()["state"]) == (status, state)
            outcomes = outcomes_without_store(load_settings({"policies": chosen}).policies)
            assert response.json()["names"] == outcomes
            assert response.json()["policies"] == {name: len(found) for name, found in outcomes.items()}
            for name in names:  # the body says what the service does
                answer = service.post("acquire", {"policy": name, "key": "k"})
                denied = answer.status_code == 503 and answer.json()["type"].endswith("store-unavailable")
                assert denied == (name in outcomes["deny"])
            restore(valkey, how)
            until(lambda: service.get("/readyz").json() == {"ok": True, "state": "ready"}, "the return of the store")


def test_policies_by_their_decision_without_the_store():
    settings = load_settings(
        {
            "policies": {
                **POLICIES,
                "off": {"limits": "1/1h", "rollout": 0},
                "part": {"limits": "1/1h", "rollout": "1%"},
            },
            "domains": [
                {
                    "domain": "edge",
                    "descriptors": [
                        {"key": "a", "limits": "1/1h"},
                        {"key": "b", "limits": "1/1h", "shadow_mode": True},
                        {"key": "c", "limits": "1/1h", "on_store_error": "local"},
                    ],
                }
            ],
        }
    )
    assert outcomes_without_store(settings.policies) == {
        "deny": ["closed", "part", "edge/a"],
        "allow": ["free", "trial", "off", "edge/b"],
        "local": ["shared", "edge/c"],
    }


async def test_names_of_policies_need_the_token(tmp_path):
    """Without a token, the body has only numbers: /readyz itself needs no token."""
    with ValkeyServer() as valkey:
        text = f"store: {valkey.url}?deadline=200ms\ndecision_token: {DECISION}\npolicies: {json.dumps(POLICIES)}\n"
        with serving(tmp_path, text) as service:
            valkey.kill()
            until(lambda: service.get("/readyz").status_code == 503, "the outage")
            body = service.get("/readyz").json()
            assert body["policies"] == {"deny": 1, "allow": 2, "local": 1}
            assert "names" not in body
            assert not any(name in json.dumps(body) for name in ("closed", "free", "shared", "trial"))
            assert service.get("/readyz", headers=HEADERS).json()["names"]["deny"] == ["closed"]


async def test_a_service_that_drains_is_not_ready_but_decides():
    async with InProcessService(policies=POLICIES) as service:
        service.app.draining = True
        response = await service.http.get("/readyz")
        assert (response.status_code, response.json()["state"]) == (503, "stopping")
        assert (await service.post("acquire", {"policy": "closed", "key": "k"})).json()["allowed"]
