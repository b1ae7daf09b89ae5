"""A certificate for the TLS tests of the RESP port."""

import shutil
import subprocess

import pytest

from tests.servers.process import need


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """Return a folder with `cert.pem` and `key.pem` for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    openssl = need(shutil.which("openssl"), "openssl", "apt-get install openssl")
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=tidegate", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([openssl, "req", *made, *names, *files], check=True, capture_output=True)
    return folder
