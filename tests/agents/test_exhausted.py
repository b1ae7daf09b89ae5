"""What a node does when it has nothing left: credits pay in the same step, a function or webhook may extend it."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.agents.test_one_step import CountingStore
from tidegate import ConfigError
from tidegate.agents import AskWebhook, AsyncCredits, AsyncRun, Credits, Exhausted, Run, RunDenied
from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.spending._webhook import sign


def test_credits_pay_what_the_quota_has_not_in_one_call_of_the_store(request, store):
    cluster = request.node.callspec.params["store"] == "cluster"  # credits are in another slot than the run
    counting = CountingStore(store)
    prepaid = Credits("team-red", store=counting)
    prepaid.add("0.05")
    run = Run("r", store=counting, limits=["0.02/run unit=usd", "9/run"], on_exhausted=prepaid)
    child = run.child("c", limits=["9/run"])
    names = []
    for _ in range(4):
        before = counting.calls
        with child.reserve({"usd": "0.015"}) as call:
            assert counting.calls == before + 1 or cluster
            names.append(call.alternative)
            call.commit({"usd": "0.01"})
    assert names == ["0", "team-red", "team-red", "team-red"]
    assert prepaid.balance() == ("usd_micros", 50_000, 30_000, 20_000)
    assert [node.used["usd_micros"] for _, node in run.usage().walk()] == [10_000, 10_000]
    assert run.usage().used["requests"] == 4, "what credits do not pay is charged to the run"
    child.charge({"usd": "0.02"})
    with pytest.raises(RunDenied) as caught:
        child.charge({"usd": "0.015"})
    assert (caught.value.node, caught.value.limit) == ("r", "usd_micros-run")
    assert caught.value.left["r"]["usd_micros-run"] == 10_000
    assert caught.value.left["team-red"]["usd_micros-run"] == 0, "what is left where"
    prepaid.add(1)
    child.charge({"usd": "0.7"})
    call = child.reserve({"usd": "0.3"})
    call.cancel()
    assert prepaid.balance().remaining == 300_000


def test_credits_outlive_runs_and_are_found_by_name_in_other_processes(store):
    with Run(
        "one", store=store, limits="1/run unit=tokens", on_exhausted=Credits("c", store=store, unit="tokens")
    ) as run:
        Credits("c", store=store, unit="tokens").add(10)
        elsewhere = Run.join(run.token(), store=store)
        elsewhere.charge({"tokens": 1})
        assert elsewhere.reserve({"tokens": 4}).alternative == "c"
    with Run(
        "two", store=store, limits="1/run unit=tokens", on_exhausted=Credits("c", store=store, unit="tokens")
    ) as run:
        assert run.reserve({"tokens": 6}).alternative == "c"
        with pytest.raises(RunDenied):
            run.charge({"tokens": 2})
    with pytest.raises(ConfigError, match="are in tokens, not in usd_micros"):
        Credits("c", store=store).balance()


def test_a_waterfall_charges_the_first_alternative_with_room_and_names_it(store):
    prepaid = Credits("prepaid", store=store)
    prepaid.add("0.03")
    run = Run("r", store=store, limits=["0.05/run unit=usd", "2/run unit=small"])
    found = []
    for _ in range(5):
        call = run.reserve_first(
            {
                "large model": {"usd": "0.03"},
                "large model, prepaid": prepaid.pays({"usd": "0.03"}),
                "small model": {"usd": "0.005", "small": 1},
            }
        )
        found.append((call.chosen, call.alternative))
        call.commit()
        if len(found) == 4:
            break
    assert found == [(0, "large model"), (1, "large model, prepaid"), (2, "small model"), (2, "small model")]
    with pytest.raises(RunDenied) as caught:
        run.reserve_first([{"usd": "0.03"}, prepaid.pays({"usd": "0.03"})])
    assert caught.value.left == {"r": {"usd_micros-run": 10_000, "small-run": 0}, "prepaid": {"usd_micros-run": 0}}
    assert caught.value.unit == "usd_micros"
    assert caught.value.needed == 30_000


def test_credits_are_never_overspent_by_threads(store):
    prepaid = Credits("shared", store=store, unit="tokens")
    prepaid.add(50)
    run = Run("r", store=store, limits="20/run unit=tokens", on_exhausted=prepaid)
    admitted = []

    def spend():
        while True:
            try:
                call = run.reserve({"tokens": 7})
            except RunDenied:
                return
            call.commit({"tokens": 5})
            admitted.append(call.alternative)

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.usage().used["tokens"] == 5 * admitted.count("0") <= 20
    assert prepaid.balance().used == 5 * admitted.count("shared") <= 50
    assert len(admitted) >= 11


def test_a_function_may_extend_its_own_node(store):
    asked = []

    def ask(exhausted):
        asked.append(exhausted)
        return {"usd": "0.10"} if len(asked) < 3 else None

    run = Run("r", store=store, limits=["0.25/run unit=usd"])
    child = run.child("c", limits=["0.10/run unit=usd"], on_exhausted=ask)
    child.charge({"usd": "0.10"})
    child.child("d").charge({"usd": "0.10"})
    assert asked == [Exhausted(child.id, "r/c", "usd_micros-run", "usd_micros", 100_000, 0, 100_000)]
    with pytest.raises(RunDenied) as caught:
        child.charge({"usd": "0.10"})
    assert caught.value.node == "r", "the right of its parent bounds what it can spend"
    assert len(asked) == 2
    child.charge({"usd": "0.05"})
    with pytest.raises(RunDenied):
        child.charge({"usd": "0.06"})
    assert run.usage().used["usd_micros"] == 250_000


def test_two_denials_at_the_same_time_extend_once(memory):
    both = threading.Barrier(2)

    def ask(_):
        both.wait(10)
        return {"requests": 2}

    run = Run("r", store=memory, limits="1/run", on_exhausted=ask)
    run.charge()
    threads = [threading.Thread(target=run.charge) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.usage().limits["requests-run"].quota == 3


async def test_a_coroutine_function_is_awaited(memory):
    async def ask(_):
        await asyncio.sleep(0)
        return {"requests": 1}

    prepaid = AsyncCredits("c", store=memory, unit="tokens")
    await prepaid.add(5)
    async with AsyncRun("r", store=memory, limits=["1/run", "1/run unit=tokens"], on_exhausted=[prepaid, ask]) as run:
        for tokens in (1, 5):
            await run.charge({"tokens": tokens})
        assert (await prepaid.balance()).remaining == 0
        assert (await run.usage()).limits["requests-run"].quota == 2
    with Run("r", store=memory, limits="1/run", on_exhausted=ask) as run:
        run.charge()
        with pytest.raises(ConfigError, match="pass a plain function"):
            run.charge()


@contextmanager
def webhook(answer, status=200):
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((json.loads(body), dict(self.headers), body))
            text = answer.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", seen
    finally:
        server.shutdown()
        server.server_close()


async def test_a_webhook_may_extend_and_is_signed(memory):
    with webhook('{"extend": {"requests": 2}}') as (url, seen):
        ask = AskWebhook(url, secret="s" * 32)
        with Run("r", store=memory, limits="1/run", on_exhausted=ask) as run:
            for _ in range(3):
                run.charge()
        question, headers, body = seen[0]
        assert {key: question[key] for key in ("node", "limit", "needed", "remaining", "quota")} == {
            "node": "r",
            "limit": "requests-run",
            "needed": 1,
            "remaining": 0,
            "quota": 1,
        }
        assert headers["X-Tidegate-Signature"] == sign(b"s" * 32, headers["X-Tidegate-Timestamp"], body)
        async with AsyncRun("r", store=memory, limits="1/run", on_exhausted=url) as other:
            await other.charge()
            await other.charge()
        assert len(seen) == 2


@pytest.mark.parametrize(
    ("answer", "status"), [("{}", 200), ("no", 200), ('{"extend": {"requests": 2}}', 500), ("[]", 200)]
)
def test_a_webhook_without_an_answer_denies(memory, answer, status):
    with webhook(answer, status) as (url, _), Run("r", store=memory, limits="1/run", on_exhausted=url) as run:
        run.charge()
        with pytest.raises(RunDenied):
            run.charge()
    with Run("r", store=memory, limits="1/run", on_exhausted=url) as run:
        run.charge()
        with pytest.raises(RunDenied):
            run.charge()


def test_a_loop_is_stopped(store):
    run = Run("r", store=store, limits="99/run", max_repeats=3)
    child = run.child("c")
    for _ in range(3):
        child.reserve(request="search tides").commit()
        child.reserve().commit()
    with pytest.raises(RunDenied, match="the same request was made 3 times") as caught:
        run.reserve(request="search tides")
    assert (caught.value.node, caught.value.limit) == ("r", "repeats")
    child.reserve(request=b"search gates").cancel()
    assert run.usage().used["requests"] == 6, "a denied call is charged nowhere"
    assert len(Run("other", store=store, max_repeats=1).usage().limits) == 0


def test_a_client_that_repeats_a_request_is_stopped(memory, tmp_path):
    (tmp_path / "p.yaml").write_text("domain: api.example\nlimits: [100/1h]\n")
    providers = Providers.load(files=[tmp_path / "p.yaml"])
    sent = []
    transport = httpx.MockTransport(lambda request: sent.append(request) or httpx.Response(200))
    client = httpx.Client(transport=RateLimitTransport(providers, store="memory://", transport=transport))
    with Run("r", store=memory, limits="99/run", max_repeats=2), client:
        for body in ("a", "b", "a", "b"):
            client.post("https://api.example/x", content=body)
        with pytest.raises(RunDenied, match="the same request"):
            client.post("https://api.example/x", content="a")
        client.post("https://api.example/x", content="c")
    assert len(sent) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_exhausted": "ask"}, "the URL of a webhook"),
        ({"on_exhausted": 3}, "must be 'stop'"),
        ({"on_exhausted": [print, print]}, "one function"),
        ({"max_repeats": 0}, "an integer of 1"),
    ],
)
def test_wrong_options(memory, options, message):
    with pytest.raises(ConfigError, match=message):
        Run("r", store=memory, limits="1/run", **options)


def test_credits_of_another_store_are_refused(memory):
    with pytest.raises(ConfigError, match="same Store"):
        Run("r", store=memory, on_exhausted=Credits("c", store="memory://"))
    with pytest.raises(ConfigError, match="above 0"):
        Credits("c", store=memory).add(0)
    with pytest.raises(ConfigError, match="without '/'"):
        Credits("a/b", store=memory)
