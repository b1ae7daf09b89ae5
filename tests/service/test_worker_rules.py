"""All workers decide by the same policies: a worker that replaces another one gets those in effect, not the file."""

import os
import signal

import pytest

from tests.servers.process import until
from tests.service.harness import serving
from tests.service.test_service_processes import log_lines
from tests.service.test_worker_totals import only, read_metrics
from tests.service.test_workers import RULES, process_ids, store_of

ASK = {"policy": "api", "key": "k"}


def replace_worker(service):
    """Kill the first worker; return the id of its replacement."""
    started = len(process_ids(service))
    os.kill(process_ids(service)[0], signal.SIGKILL)
    until(lambda: len(process_ids(service)) > started, "a replacement", 60)
    return process_ids(service)[-1]


def read_rules(service):
    return service.get("/v1/overview").json()["rules"]


@pytest.mark.once
@pytest.mark.parametrize("text", ["policies: {api: many}\n", "", None])
def test_a_replacement_does_not_use_a_refused_file(tmp_path, text):
    config = tmp_path / "service.yaml"
    with serving(tmp_path, "reload_every: 1h\n" + store_of(tmp_path) + RULES, "--workers", "2") as service:
        if text is None:
            config.unlink()
        else:
            config.write_text(text, encoding="utf-8")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.logged("reload refused"), "the refusal")
        new = replace_worker(service)
        until(lambda: all(each["error"] for each in rules_of_all(service)), "the refusal in all workers")
        with only(service, new):
            assert read_rules(service)["refused"] == 1
            assert [service.post("acquire", ASK).json()["allowed"] for _ in range(4)] == [True] * 3 + [False]
            assert read_metrics(service)['tidegate_reloads_total{outcome="refused"}'] == 1
        assert len(log_lines(service, "reload refused")) == 1  # once for all workers
        assert service.stop() == 0


def rules_of_all(service):
    found = []
    for pid in {each["id"] for each in service.get("/v1/overview").json()["workers"]}:
        with only(service, pid):
            found.append(read_rules(service))
    return found


def test_a_replacement_uses_the_accepted_file_and_the_settings_of_the_start(tmp_path):
    config = tmp_path / "service.yaml"
    token = tmp_path / "token"
    token.write_text("decision-token-0123", encoding="utf-8")
    head = f"reload_every: 1h\ndecision_token_file: {token}\n" + store_of(tmp_path)
    headers = {"authorization": "Bearer decision-token-0123"}
    with serving(tmp_path, head + RULES, "--workers", "2") as service:
        config.write_text(head + "policies: {api: 3/1h, other: 1/1h}\n", encoding="utf-8")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.logged("new policies are in effect"), "the new policies")
        token.unlink()  # a replacement needs no file
        config.write_text("policies: {api: 1/1h}\n", encoding="utf-8")  # changed, but not read yet
        new = replace_worker(service)
        with only(service, new):
            names = {each["name"] for each in service.get("/v1/policies", headers=headers).json()["policies"]}
            assert names == {"api", "other"}
            rules = service.get("/v1/overview", headers=headers).json()["rules"]
            assert rules == {"adopted": 1, "refused": 0, "error": None, "since": None}
            assert service.get("/v1/policies").status_code == 401
        assert service.stop() == 0
