"""`metrics_token`: /metrics has a token of its own, needs no token, or needs the one for decisions."""

import subprocess

import httpx
import pytest

from tests.budget.prometheus import program, promtool
from tests.servers.process import free_port, until
from tests.service.harness import ADMIN, DECISION, ROOT, InProcessService, serving

METRICS = "metrics-token-012345"
POLICIES = {"api": "10/1h"}


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [
        ({}, {None, METRICS, DECISION, ADMIN}),
        ({"decision_token": DECISION}, {DECISION}),
        ({"metrics_token": METRICS}, {METRICS}),
        ({"decision_token": DECISION, "metrics_token": METRICS}, {METRICS, DECISION}),
        ({"decision_token": DECISION, "admin_token": ADMIN, "metrics_token": METRICS}, {METRICS, DECISION, ADMIN}),
        ({"decision_token": DECISION, "admin_token": ADMIN, "metrics_token": "none"}, {None, METRICS, DECISION, ADMIN}),
        ({"metrics_token": "none"}, {None, METRICS, DECISION, ADMIN}),
    ],
)
async def test_who_can_read_the_metrics(tokens, accepted):
    async with InProcessService(policies=POLICIES, **tokens) as service:
        for token in (None, METRICS, DECISION, ADMIN, "another-token-0123"):
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            response = await service.http.get("/metrics", headers=headers)
            allowed = token in accepted or None in accepted
            assert (token, response.status_code) == (token, 200 if allowed else 401)
            assert response.headers.get("www-authenticate") == (None if allowed else 'Bearer realm="tidegate"')


async def test_the_metrics_token_allows_nothing_else():
    tokens = {"decision_token": DECISION, "admin_token": ADMIN, "metrics_token": METRICS}
    async with InProcessService(policies=POLICIES, **tokens) as service:
        headers = {"authorization": f"Bearer {METRICS}"}
        ask = {"policy": "api", "key": "k"}
        assert (await service.http.get("/v1/overview", headers=headers)).status_code == 401
        assert (await service.http.get("/v1/policies", headers=headers)).status_code == 401
        assert (await service.post("acquire", ask, headers=headers)).status_code == 401
        assert (await service.post("reset", ask, headers=headers)).status_code == 401


@pytest.mark.parametrize("tokens", [{}, {"metrics_token": "none"}])
async def test_without_a_decision_token_other_host_names_are_refused(tokens):
    async with InProcessService(policies=POLICIES, **tokens) as service:
        response = await service.http.get("/metrics", headers={"host": "rebound.example:8080"})
        assert response.status_code == 403


# ---- the scrape configuration in docs/howto/service.md ---------------------------------------------------------------


def scrape_configuration():
    text = (ROOT / "docs/howto/service.md").read_text(encoding="utf-8")
    return text.partition("scrape_configs:")[2].partition("```")[0]


@pytest.mark.slow
@pytest.mark.parametrize("with_token", [True, False])
def test_prometheus_scrapes_as_documented(tmp_path, with_token):
    """Prometheus scrapes a service with two workers by the configuration in the docs, with a token and without."""
    token_file = tmp_path / "metrics-token"
    token_file.write_text(METRICS, encoding="utf-8")
    text = scrape_configuration()
    assert "credentials_file: /etc/prometheus/tidegate-token" in text
    text = text.replace("/etc/prometheus/tidegate-token", str(token_file))
    if not with_token:
        text = "\n".join(line for line in text.splitlines() if "authorization" not in line and "cred" not in line)
    setting = f"metrics_token_file: {token_file}\n" if with_token else "metrics_token: none\n"
    head = f"decision_token: {DECISION}\nstore: sqlite:///{tmp_path / 'limits.db'}?deadline=10s\n{setting}"
    with serving(tmp_path, head + "policies: {api: 10/1h}\n", "--workers", "2") as service:
        config = tmp_path / "prometheus.yaml"
        text = text.replace("127.0.0.1:8080", f"127.0.0.1:{service.port}")
        config.write_text(f"global: {{scrape_interval: 100ms}}\nscrape_configs:{text}", encoding="utf-8")
        promtool("check", "config", config)
        port = free_port()
        command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            query = f"http://127.0.0.1:{port}/api/v1/query?query=up"
            until(lambda: scraped(query) == ["1"], "a scrape", 60)
        finally:
            process.kill()
            process.wait(10)


def scraped(query):
    """Return the values of a query: one for each target."""
    try:
        response = httpx.get(query, trust_env=False, timeout=10)
    except httpx.HTTPError:
        return []
    results = response.json()["data"]["result"] if response.status_code == httpx.codes.OK else []  # still starting
    return [result["value"][1] for result in results]
