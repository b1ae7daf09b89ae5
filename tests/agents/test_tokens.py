"""Attacks on tokens: one test for each sentence of SECURITY.md about them."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest

from tidegate import ConfigError
from tidegate.agents import Run, RunDenied, RunRightError, TokenError
from tidegate.agents._tokens import RIGHTS
from tidegate.stores import open_store

SECRET, OLD = "a secret of the settings", "the one before"


@pytest.fixture
def run(memory, clock):
    return Run("r", store=memory, limits=["0.10/run unit=usd", "9/run"], ttl=3600, clock=clock)


def payload_of(token):
    text = token.split(".")[1]
    return json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def with_payload(token, payload):
    text = urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=").decode()
    return ".".join((token.split(".")[0], text, token.split(".")[2]))


def test_a_token_that_was_changed_is_refused(run, memory):
    token = run.child("c").token(rights=["charge"])
    for place in range(5):
        payload = payload_of(token)
        payload[place] = [["x"], payload[1][:1], list(RIGHTS), payload[3] + 1, "0"][place]
        with pytest.raises(TokenError, match="not valid"):
            Run.join(with_payload(token, payload), store=memory)


@pytest.mark.parametrize(
    "token", ["x", "tgr1.a", "tgr1.!.!", "tgr1..", "tgr2.a.b", "tgr1." + "a" * 5000 + ".b", "tgr1.e30.e30"]
)
def test_what_is_no_token_is_refused(memory, token):
    with pytest.raises(TokenError):
        Run.join(token, store=memory)


def test_a_token_of_another_store_is_refused(run, clock):
    other = open_store("memory://", clock=clock)
    with pytest.raises(TokenError, match="not valid for this store"):
        Run.join(run.token(), store=other)
    same_secret = Run("r", store=open_store("memory://", clock=clock), secret=SECRET, clock=clock)
    with pytest.raises(TokenError, match="for another one"):
        Run.join(same_secret.token(), store=other, secret=SECRET)


def test_a_token_of_a_rotated_secret_is_valid_until_the_secret_is_dropped(memory, clock):
    token = Run("r", store=memory, secret=OLD, clock=clock).token()
    Run.join(token, store=memory, secret=[SECRET, OLD], clock=clock).charge()
    with pytest.raises(TokenError):
        Run.join(token, store=memory, secret=SECRET, clock=clock)


@pytest.mark.parametrize("right", RIGHTS)
def test_a_token_gives_only_its_rights(run, memory, clock, right):
    joined = Run.join(run.token(rights=[right]), store=memory, clock=clock)
    calls = {"charge": joined.charge, "child": lambda: joined.child("c"), "read": joined.usage}
    calls.pop(right)()
    for other, call in calls.items():
        with pytest.raises(RunRightError, match=f"no right to {other}"):
            call()
        with pytest.raises(RunRightError, match=f"no right to {other}"):
            joined.token(rights=[other])


def test_a_token_never_extends_or_stops(run, memory, clock):
    joined = Run.join(run.token(), store=memory, clock=clock)
    for call in (joined.stop, lambda: joined.extend({"usd": 1})):
        with pytest.raises(RunRightError, match="needs the creator"):
            call()
    joined.close()
    run.charge()
    with pytest.raises(ConfigError, match="must be some of charge, child, read, not 'stop'"):
        run.token(rights=["stop"])


def test_a_token_reads_nothing_outside_its_subtree(run, memory, clock):
    run.child("other").charge({"usd": "0.01"})
    own = run.child("own")
    own.child("below").charge({"usd": "0.02"})
    found = [node.name for _, node in Run.join(own.token(), store=memory, clock=clock).usage().walk()]
    assert found == ["own", "below"]


def test_a_stolen_token_spends_at_most_what_its_node_has_left(run, memory, clock):
    child = run.child("c", limits="0.03/run unit=usd")
    thief = Run.join(child.token(), store=memory, clock=clock)
    spent, denied = 0, []
    for node in (thief, thief.child("x", limits="5/run unit=usd"), thief.child("y").child("z")):
        for _ in range(3):
            try:
                node.charge({"usd": "0.01"})
            except RunDenied as error:
                denied.append(error.node)
            else:
                spent += 1
    assert spent == 3
    assert set(denied) == {"r/c"}
    assert run.usage().used["usd_micros"] == 30_000


def test_every_call_after_the_end_of_the_token_is_denied_and_uncharged(run, memory, clock):
    joined = Run.join(run.token(ttl=10), store=memory, clock=clock)
    clock.advance(9.999_999)
    joined.charge()
    child = joined.child("c")
    clock.advance(0.000_001)
    with pytest.raises(RunDenied, match="the token has ended"):
        joined.charge()
    with pytest.raises(RunDenied, match="has ended"):
        child.charge()
    with pytest.raises(RunDenied, match="the token has ended"):
        joined.child("d")
    run.extend(ttl=7200)
    with pytest.raises(RunDenied, match="the token has ended"):
        joined.charge()
    run.charge()
    assert run.usage().used["requests"] == 2


def test_a_token_does_not_outlive_the_one_that_it_was_made_from(run, memory, clock):
    joined = Run.join(run.token(ttl=10), store=memory, clock=clock)
    again = Run.join(joined.token(ttl=600), store=memory, clock=clock)
    clock.advance(10)
    with pytest.raises(RunDenied, match="the token has ended"):
        again.charge()


def test_a_token_holds_no_secret_of_the_store(clock, tmp_path):
    url = f"sqlite:///{tmp_path}/secret-name.db"
    with Run("r", store=url, clock=clock) as run:
        assert "secret-name" not in str(payload_of(run.token()))


def test_a_process_finds_the_token_and_the_store_in_its_environment(monkeypatch, tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    with Run("r", store=url, limits="5/run") as run:
        monkeypatch.setenv("TIDEGATE_RUN", run.token())
        Run.join().charge()
        monkeypatch.setenv("TIDEGATE_STORE", url)
        monkeypatch.setattr("tidegate.agents._base_run.STORES", {})
        Run.join().charge()
        monkeypatch.delenv("TIDEGATE_STORE")
        monkeypatch.setattr("tidegate.agents._base_run.STORES", {})
        with pytest.raises(ConfigError, match="pass store=, or set TIDEGATE_STORE"):
            Run.join()
        assert run.usage().used == {"requests": 2}
    monkeypatch.delenv("TIDEGATE_RUN")
    with pytest.raises(ConfigError, match="needs a token"):
        Run.join()
