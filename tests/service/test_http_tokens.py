"""Tokens and host names over HTTP."""

from tests.cases import cases
from tests.service.harness import ADMIN, DECISION, InProcessService
from tests.service.http_harness import POLICIES, K


@cases(
    ("tokens", "sent", "decides", "administers"),
    [
        ({}, None, 200, 200),
        ({"decision_token": DECISION}, None, 401, 403),
        ({"decision_token": DECISION}, "wrong", 401, 403),
        ({"decision_token": DECISION}, DECISION, 200, 403),
        ({"decision_token": DECISION, "admin_token": ADMIN}, DECISION, 200, 403),
        ({"decision_token": DECISION, "admin_token": ADMIN}, ADMIN, 200, 200),
        ({"decision_token": DECISION, "admin_token": ADMIN}, None, 401, 401),
        ({"admin_token": ADMIN}, None, 200, 401),
        ({"admin_token": ADMIN}, ADMIN, 200, 200),
    ],
)
@cases("field", ["authorization", "x-tidegate-token"])
async def test_tokens(tokens, sent, decides, administers, field):
    value = f"Bearer {sent}" if field == "authorization" else sent
    headers = {} if sent is None else {field: value}
    async with InProcessService(policies=POLICIES, **tokens) as service:
        assert (await service.post("acquire", K, headers=headers)).status_code == decides
        assert (await service.http.get("/v1/check?policy=api&key=k", headers=headers)).status_code == decides
        assert (await service.http.get("/metrics", headers=headers)).status_code == decides
        assert (await service.post("reset", K, headers=headers)).status_code == administers
        assert (await service.http.get("/healthz")).status_code == 200


# The paths that docs/reference/service.md lists for the decision token. A new path has to be added here and there.
WITHOUT_TOKEN = {"/healthz", "/readyz", "/openapi.json"}
WITH_DECISION = {
    *("/v1/acquire", "/v1/peek", "/v1/reserve", "/v1/lease", "/v1/commit", "/v1/cancel", "/v1/release", "/v1/batch"),
    *("/v1/usage", "/v1/check", "/v1/policies", "/v1/overview", "/v1/history", "/v1/key", "/metrics"),
}
RUNS = {f"/v1/runs/{name}" for name in ("create", "child", "charge", "read", "report", "extend", "stop", "close")}
WITH_ADMIN = {"/v1/refund", "/v1/reset", "/v1/block", "/v1/unblock", "/v1/blocks", "/v1/audit", "/v1/runs"}


async def test_a_decision_token_allows_only_the_listed_paths():
    async with InProcessService(policies=POLICIES, decision_token=DECISION, admin_token=ADMIN) as service:
        described = (await service.http.get("/openapi.json")).json()["paths"]
        assert set(described) == WITHOUT_TOKEN | WITH_DECISION | RUNS | WITH_ADMIN
        for path, methods in described.items():
            method = "POST" if "post" in methods and path != "/v1/check" else "GET"
            statuses = []
            for token in ("", DECISION, ADMIN):
                headers = {"x-tidegate-token": token} if token else {}
                sent = {"json": {}} if method == "POST" else {}
                statuses.append((await service.http.request(method, path, headers=headers, **sent)).status_code)
            refused = [status if status in (401, 403) else None for status in statuses]
            expected = [None] * 3 if path in WITHOUT_TOKEN else [401, 403 if path in WITH_ADMIN else None, None]
            assert (path, refused) == (path, expected)


@cases(("host", "status"), [
     ("127.0.0.1:8080", 200), ("localhost", 200), ("[::1]:80", 200), ("[::1]", 200), ("127.0.0.2:80", 200),
     ("evil.example", 403), ("127.0.0.1.evil.example:8080", 403), ("", 403)])  # fmt: skip
@cases("tokens", [{}, {"admin_token": ADMIN}])
async def test_a_foreign_host_name_is_refused(tokens, host, status):
    async with InProcessService(policies=POLICIES, **tokens) as service:
        assert (await service.post("peek", K, headers={"host": host})).status_code == status
