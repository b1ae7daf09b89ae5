"""Starts the server that all recipes of a test use."""

import pytest

from tests.recipes import network
from tests.recipes.model_server import ModelServer


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    return network.make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def model_server(certificate, tmp_path, monkeypatch):
    """Start a server for the test, in an empty folder; its limits are an attribute."""
    monkeypatch.chdir(tmp_path)
    with ModelServer(limit=1000, period=60.0, tls=network.server_context(*certificate)) as server:
        for name, value in network.environment(certificate[0], server.port).items():
            monkeypatch.setenv(name, value)
        redirected = network.RedirectedSocket()
        redirected.install()
        yield server
        redirected.restore()
