"""A provider's key is kept in memory only: this test searches for it in every output."""

import copy
import io
import json
import logging
import pickle
import pprint
import traceback
from dataclasses import asdict

import pytest

from tests.outbound.clients import KINDS, fetch
from tests.outbound.server import Answer, QuotaServer
from tidegate import Denied
from tidegate.errors import RateLimitError
from tidegate.outbound import Gate, Providers
from tidegate.outbound._providers.secret import Secret, fingerprint

KEY = "hunter2-is-my-key"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "fmp.yaml"
    path.write_text(f"domain: 127.0.0.1\nlimit: 3\nperiod: 1h\napi_key: {KEY}\nper: [credential]\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("place", ["key: {header: Authorization, prefix: Bearer}\n", "key: {query: apikey}\n"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_key_appears_only_in_the_request(kind, place, file, tmp_path, caplog):
    """In no database, log (all libraries' at their loudest), error, traceback or answer."""
    file.write_text(file.read_text() + place)
    caplog.set_level(logging.DEBUG)
    known = Providers.load(files=[file])
    store = f"sqlite:///{tmp_path}/quota.db"
    seen = io.StringIO()
    with QuotaServer(respond=lambda _request: Answer(200, (("X-RateLimit-Remaining", "2"),))) as server:
        for _ in range(3):
            for found in fetch(kind, known, [server.url], store=store, timeout=0):
                seen.write(f"{found!r} {found.text} {found.url}")
        try:
            fetch(kind, known, [server.url], store=store, timeout=0)
        except Denied:
            seen.write(traceback.format_exc())
        assert all(KEY in f"{each.path} {each.headers}" for each in server.requests)
    try:
        fetch(kind, known, [server.url], store="memory://", timeout=0)  # nobody listens any more
    except Exception as error:  # noqa: BLE001 - whatever the library raises
        seen.write(f"{error!r} {error} {traceback.format_exc()} {vars(error)}")
    assert KEY not in seen.getvalue() + caplog.text
    for path in tmp_path.iterdir():
        if path != file:
            assert KEY.encode() not in path.read_bytes(), path
    assert "Denied" in seen.getvalue()


def test_no_representation_of_a_provider_shows_its_key(file):
    provider = next(iter(Providers.load(files=[file])))
    gate = Gate(Providers.load(files=[file]))
    shown = [repr(provider), str(provider), f"{provider}", pprint.pformat(provider), repr(provider.api_key),
             str(asdict(provider)), repr(provider.api_key.__class__.__dict__), repr(gate.metrics()),
             repr(vars(gate)), repr(gate.providers), json.dumps(gate.metrics()), repr(copy.deepcopy(provider.api_key)),
             str({slot: getattr(provider, slot) for slot in provider.__slots__})]  # fmt: skip
    assert all(KEY not in text for text in shown)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(RateLimitError, match="cannot be pickled"):
            pickle.dumps(provider, protocol)
    gate.close()


def test_a_secret_compares_and_hashes_without_revealing_itself():
    one, same, other = Secret("abc"), Secret("abc"), Secret("abd")
    assert one == same
    assert one != other
    assert one != "abc"
    assert len({one, same, other}) == 2
    assert one.fingerprint == fingerprint("abc") != other.fingerprint
    assert one.reveal() == "abc"
    assert not hasattr(one, "__dict__")


def test_credentials_are_distinguished_by_a_fingerprint(file, tmp_path):
    known = Providers.load(files=[file])
    with QuotaServer() as server:
        for name in ("ann-credential", "bob-credential"):
            fetch("httpx", known, [server.url], headers={"Authorization": name}, store=f"sqlite:///{tmp_path}/q.db")
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path != file)
    assert b"ann-credential" not in stored
    assert fingerprint("ann-credential").encode() in stored
    assert fingerprint("bob-credential").encode() in stored
