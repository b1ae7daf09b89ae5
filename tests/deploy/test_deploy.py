"""The files in deploy/ are checked by the tools of their fields; nothing is started: there is no container engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers.process import need
from tidegate.service._api.problems import KINDS
from tidegate.service._config.settings import OPTIONS, load_settings
from tidegate.service._http.metrics import METRICS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCS = ROOT / "docs" / "howto" / "deploy.md"
CHART = DEPLOY / "helm" / "tidegate"
TOKEN = "0123456789abcdef-{}"  # noqa: S105 - of a test
DISABLED = "autoscaling.enabled=false,serviceMonitor.enabled=false,networkPolicy.enabled=false"


def tool(name: str) -> str:
    """Return a program of this environment or of the system."""
    local = Path(sys.executable).with_name(name)
    found = str(local) if local.exists() else shutil.which(name)
    return need(found, name, "make venv, or apt-get install systemd prometheus")


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def render(*options: str) -> str:
    return run(tool("helm"), "template", "tidegate", CHART, "--namespace", "tidegate", *options)


def objects(*options: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(render(*options)) if each}


def write_tokens(folder: Path, text: str) -> str:
    """Return the file of a service whose secrets are in a folder that exists."""
    for name in re.findall(r"_token_file: (?:\S*/)?(\S+)", text):
        (folder / name).write_text(TOKEN.format(name), encoding="utf-8")
    return re.sub(r"(_token_file:) (?:\S*/)?(\S+)", rf"\1 {folder}/\2", text)


def image() -> tuple[dict[str, str], list[str]]:
    """Return the variables of the image that are settings, and its command."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    return dict(re.findall(r"\b(TIDEGATE_\w+)=(\S+)", text)), json.loads(command)


def load_service(folder: Path, text: str):
    (folder / "service.yaml").write_text(write_tokens(folder, text), encoding="utf-8")
    return load_settings(folder / "service.yaml", environment={"REDIS_PASSWORD": "secret"})


def test_hadolint_accepts_the_dockerfile():
    run(tool("hadolint"), DEPLOY / "Dockerfile")


def test_the_image_has_what_it_copies_and_runs_as_an_ordinary_user():
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"
    }
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied <= allowed
    assert all((ROOT / name).exists() for name in allowed)
    assert "\nUSER 10001:10001\n" in text
    names = {f"TIDEGATE_{option.name.upper()}" for option in OPTIONS} | {"TIDEGATE_CONFIG"}
    assert set(re.findall(r"TIDEGATE_\w+", text)) <= names


def test_the_documented_container_starts():
    (line,) = re.findall(r"^docker run .* tidegate (start .*)$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    variables, _ = image()
    command = [sys.executable, "-m", "tidegate", *shlex.split(line), "--listen", "127.0.0.1:0", "--json"]
    environment = {**os.environ, **variables, "TIDEGATE_DRAIN_FOR": "0s"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert json.loads(process.stdout.readline())["http"].startswith("http://127.0.0.1:")
        finally:
            process.terminate()


def test_every_deployment_names_the_file_that_it_mounts():
    _, command = image()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["tidegate"]
    (container,) = objects()["Deployment"]["spec"]["template"]["spec"]["containers"]
    for arguments in (command, compose["command"], container["args"]):
        assert arguments[:2] == ["start", "/etc/tidegate/service.yaml"]
    assert any(":/etc/tidegate/service.yaml" in volume for volume in compose["volumes"])
    assert any(mount["mountPath"] == "/etc/tidegate" for mount in container["volumeMounts"])


def test_the_service_of_compose_starts_with_its_settings(tmp_path):
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), volume
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
    text = (DEPLOY / "docker" / "service.yaml").read_text(encoding="utf-8")
    settings = load_service(tmp_path, text)
    assert settings.store == "redis://:secret@redis:6379/0"
    assert settings.metrics_token == TOKEN.format("metrics_token")


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("replicas=0", "replicas"),
        ("replica=3", "replica"),
        ("config.store=memory://", "config.store"),
        ("service.httpPort=99999", "service.httpPort"),
        ("autoscaling.cpuPercent=high", "autoscaling.cpuPercent"),
    ],
)
def test_helm_refuses_values_that_cannot_work(setting, part):
    with pytest.raises(AssertionError) as failed:
        render("--set", setting)
    assert part in str(failed.value)


def test_the_folder_of_alert_rules_passes_promtool():
    run(tool("promtool"), "check", "rules", *sorted((DEPLOY / "prometheus" / "rules").iterdir()))


def test_helm_accepts_the_chart():
    assert "1 chart(s) linted, 0 chart(s) failed" in run(tool("helm"), "lint", "--strict", CHART)


@pytest.mark.parametrize("options", [(), ("--set", DISABLED)])
def test_kubernetes_accepts_the_objects_of_the_chart(tmp_path, options):
    (tmp_path / "objects.yaml").write_text(render(*options), encoding="utf-8")
    # ServiceMonitor is a type of the Prometheus operator, which Kubernetes itself does not know.
    standard = [each for each in yaml.safe_load_all(render(*options)) if each and each["kind"] != "ServiceMonitor"]
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(standard), encoding="utf-8")
    for version in ("1.28", "1.32"):
        run(tool("kubernetes-validate"), "--strict", "-k", version, tmp_path / "objects.yaml")


def test_the_manifests_are_those_of_the_chart():
    manifests = DEPLOY / "kubernetes" / "tidegate.yaml"
    assert manifests.read_text(encoding="utf-8") == render(), "run: make manifests"


def test_the_settings_of_the_chart_are_valid(tmp_path):
    config = objects()["ConfigMap"]["data"]["service.yaml"]
    settings = load_service(tmp_path, config)
    assert not settings.listen.loopback
    assert settings.drain_for == 5


def test_probes_metrics_and_labels_of_the_chart():
    found = objects()
    pod = found["Deployment"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    (metric,) = [each["pods"] for each in found["HorizontalPodAutoscaler"]["spec"]["metrics"] if each["type"] == "Pods"]
    assert metric["metric"]["name"] in METRICS
    for kind in ("Deployment", "PodDisruptionBudget", "ServiceMonitor"):
        assert found[kind]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert "HorizontalPodAutoscaler" not in objects("--set", DISABLED)


def test_systemd_accepts_the_unit(tmp_path):
    text = (DEPLOY / "systemd" / "tidegate.service").read_text(encoding="utf-8")
    program = re.search(r"^ExecStart=(\S+) start", text, re.MULTILINE)
    assert program
    unit = tmp_path / "tidegate.service"
    unit.write_text(text.replace(program[1], sys.executable), encoding="utf-8")
    assert not run(tool("systemd-analyze"), "verify", "--man=no", unit).strip()


def test_prometheus_accepts_the_configuration_and_the_rules(tmp_path):
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    token = tmp_path / "token"
    token.write_text("token", encoding="utf-8")
    config = (folder / "prometheus.yml").read_text(encoding="utf-8")
    (folder / "prometheus.yml").write_text(config.replace("/run/secrets/metrics_token", str(token)), encoding="utf-8")
    run(tool("promtool"), "check", "config", folder / "prometheus.yml")
    for rules in sorted(folder.glob("rules/*.rules.yml")):
        assert "SUCCESS" in run(tool("promtool"), "check", "rules", rules)


def test_dashboards_rules_and_runbook_are_up_to_date():
    """Also checks that every metric in them is one that tidegate exports."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "tools" / "make_monitoring.py"), "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_name_problems_that_the_service_reports():
    text = (DEPLOY / "monitoring.yaml").read_text(encoding="utf-8")
    named = [kind for kinds in re.findall(r'kind=~"([^"]+)"', text) for kind in kinds.split("|")]
    assert named
    assert set(named) <= set(KINDS)


def test_every_exported_metric_of_the_service_is_on_a_dashboard():
    shown = (DEPLOY / "monitoring.yaml").read_text(encoding="utf-8")
    assert [name for name in METRICS if name not in shown] == []
