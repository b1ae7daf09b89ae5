"""Limits of money: what a call reserves, what it costs in the end, and that strict calls never pass the ceiling."""

from contextlib import closing

import httpx
import pytest

from tests.outbound.streamed_model import StreamedModel, usage
from tidegate import ConfigError, Denied, Limiter, ResourceUnknown
from tidegate.outbound import Gate, Providers, UnboundedCost, request_options
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.spending import Spending
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

URL = "https://api.test/v1/chat/completions"
# A token of input costs one micro, a cached one a tenth, a token of output five micros.
PRICES = {
    "date": "2026-11-01",
    "models": {
        "m": {"input": 1, "cached": 0.1, "output": 5},
        "search": {"input": 1, "output": 5, "request": 0.0005},
        "painter": {"kinds": {"image": 0.04}},
    },
}
START = 1_767_225_600  # 2026-01-01 00:00 UTC


@pytest.fixture
def store():
    return MemoryStore(clock=ManualClock(START))


class Client(httpx.Client):
    """A client of a provider whose answers report the given usage; notes what is reserved in flight."""

    def __init__(self, store, reply, limits=("1000/1m", "0.01/day unit=usd name=money"), timeout=0, **fields):
        self.store, self.in_flight = store, []
        settings = {"domain": "api.test", "profile": "openai", "limits": list(limits), "price": PRICES, **fields}
        self.known = Providers.of(settings)

        def handle(request):
            self.in_flight.append(self.spent())
            return reply(request) if callable(reply) else httpx.Response(200, json={"usage": reply})

        transport = RateLimitTransport(
            self.known, store, httpx.MockTransport(handle), timeout=timeout, tokenizer=lambda _text: 100
        )
        self.gate = transport.gate
        super().__init__(transport=transport)

    def spent(self):
        (provider,) = self.known
        with Limiter(provider.policy, store=self.store) as limiter:
            return limiter.usage("api.test")["money"].used

    def ask(self, model="m", url=URL, **body):
        self.post(url, json={"model": model, "max_tokens": 200, "messages": [], **body}).raise_for_status()
        return self.in_flight[-1], self.spent()


def test_the_most_that_a_call_can_cost_is_reserved_and_its_cost_settled(store):
    with Client(store, usage(100, 30)) as client:
        assert client.ask() == (1100, 250)  # 100 + 5 * 200; 100 + 5 * 30


def test_cached_input_is_cheaper(store):
    with Client(store, usage(100, 30, cached=90)) as client:
        assert client.ask()[1] == 10 + 9 + 150


def test_audio_that_a_response_reports_has_its_own_price(store):
    voice = {"input": 1, "output": 5, "audio": 20, "audio_output": 40}
    details = {"prompt_tokens_details": {"audio_tokens": 80}, "completion_tokens_details": {"audio_tokens": 10}}
    price = {"date": "2026-11-01", "models": {"voice": voice}}
    reply = {**usage(100, 30), **details}
    with Client(store, reply, ["1/day unit=usd name=money"], price=price) as client:
        assert client.ask("voice") == (100 * 20 + 200 * 40, 20 * 1 + 80 * 20 + 20 * 5 + 10 * 40)


def test_the_fee_of_a_request_and_the_price_of_an_image(store):
    with Client(store, usage(100, 30), ["1/day unit=usd name=money"]) as client:
        assert client.ask("search") == (1600, 750)
    with Client(store, {}, ["1/day unit=usd name=money"]) as client:
        url = "https://api.test/v1/images/generations"
        assert client.ask("painter", url, n=3) == (750 + 120_000, 750 + 120_000)


def test_several_answers_cost_as_many_times(store):
    with Client(store, usage(100, 60)) as client:
        assert client.ask(n=2) == (2100, 400)


@pytest.mark.parametrize("status", [400, 500])
def test_a_failed_call_costs_nothing(store, status):
    with Client(store, lambda _request: httpx.Response(status)) as client:
        client.post(URL, json={"model": "m", "max_tokens": 200})
        assert (client.in_flight, client.spent()) == ([0 + 1100], 0)


def test_a_response_without_usage_keeps_what_is_reserved(store):
    with Client(store, lambda _request: httpx.Response(200, json={})) as client:
        assert client.ask() == (1100, 1100)


@pytest.mark.parametrize("ends", [b"data: [DONE]\n\n", b""])
def test_a_lenient_stream_without_usage_costs_at_least_what_has_arrived(store, ends):
    """The provider reports no usage, or it ends the stream early."""
    event = b'data: {"choices": [{"delta": {"content": "abcabc"}}]}\n\n'  # two tokens
    reply = lambda _request: httpx.Response(200, content=event * 500 + ends)  # noqa: E731 - short
    with Client(store, reply, ["1/day unit=usd name=money"]) as client:
        assert client.ask(stream=True, max_tokens=None) == (100 + 5 * 1000, 100 + 5 * 1000)
        assert client.ask(stream=True, max_tokens=4000)[1] == 5100 + 100 + 5 * 4000
    longer = lambda _request: httpx.Response(200, content=event * 5000 + ends)  # noqa: E731 - short
    with Client(store, longer, ["1/day unit=usd name=money"]) as client:
        before = client.spent()
        assert client.ask(stream=True, max_tokens=None)[1] - before == 100 + 5 * 10_000
        assert client.ask(stream=True, max_tokens=4000)[1] - before == 2 * 100 + 5 * 14_000  # no more than its bound


@pytest.mark.parametrize("limits", [["1000/1m"], ["100_000/1m unit=tokens"], ["1/day unit=usd"]])
def test_the_ledger_has_what_is_reserved_for_a_stream_without_usage_whatever_is_limited(tmp_path, limits):
    event = b'data: {"choices": [{"delta": {"content": "abcabc"}}]}\n\n'
    settings = {"domain": "api.test", "profile": "openai", "limits": limits, "price": PRICES}
    spending = Spending(tmp_path / "spending.db")
    answer = httpx.MockTransport(lambda _request: httpx.Response(200, content=event * 3))
    transport = RateLimitTransport(
        Providers.of(settings), transport=answer, tokenizer=lambda _text: 100, spending=spending
    )
    with httpx.Client(transport=transport) as client, closing(spending):
        client.post(URL, json={"model": "m", "max_tokens": 200, "stream": True})
        assert spending.counts["spent_micros"] == 100 + 5 * 200


@pytest.mark.parametrize(
    ("reported", "cost"),
    [
        ({"prompt_tokens": 10, "total_tokens": 110}, 10 + 5 * 100),
        ({"prompt_tokens": 10, "completion_tokens": None, "total_tokens": 110}, 10 + 5 * 100),
        ({"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 120}, 10 + 5 * 110),
        ({"prompt_tokens": 10}, 1100),  # the reservation stays
        ({"total_tokens": 100}, 5 * 100),
    ],
)
def test_usage_that_is_not_complete_is_never_counted_too_low(store, reported, cost):
    with Client(store, reported) as client:
        assert client.ask() == (1100, cost)


def test_a_failed_attempt_costs_nothing_if_the_call_is_repeated(store):
    answers = iter([503, 503, 200])

    def reply(_request):
        status = next(answers)
        return httpx.Response(status, json={"usage": usage(100, 30)} if status == 200 else {})

    with Client(store, reply, timeout=60, retries={"max": 3}) as client:
        client.put(URL, json={"model": "m", "max_tokens": 200})
        assert (client.in_flight, client.spent()) == ([1100, 1100, 1100], 250)


def test_a_cost_in_a_unit_that_is_not_the_currency_is_refused(store):
    with Client(store, {}) as client:
        for unit in ("usd", "eur", "usd_micro", "eur_micros"):
            with request_options(cost={unit: 4}), pytest.raises(ConfigError, match="money are in 'usd_micros'"):
                client.ask()
        with request_options(cost={"pages": 4}):
            client.ask()


def test_the_cost_of_a_strict_call_can_be_given_if_only_a_ceiling_counts_money(store):
    limits = ["1000/1m", "100_000/1m unit=tokens"]
    known = Providers.of(
        {"domain": "a.test", "profile": "openai", "limits": limits, "price": PRICES, "spend": ["1/day unit=usd"]}
    )
    transport = RateLimitTransport(known, store, httpx.MockTransport(lambda _r: httpx.Response(200, json={})))
    with httpx.Client(transport=transport) as client, request_options(cost={"usd_micros": 4000}, strict=True):
        client.post("https://a.test/v1/chat/completions", json={"model": "m", "max_tokens": 10})
        assert transport.gate.ceilings[0].usage("all")["usd-day"].used == 4000


def test_a_model_without_a_price_is_refused_before_anything_is_sent(store):
    with Client(store, usage(1, 1)) as client:
        with pytest.raises(ResourceUnknown, match="there is no price for the model 'other'"):
            client.ask("other")
        with request_options(model="m"):
            assert client.ask("other")[0] == 1100
        assert len(client.in_flight) == 1
    with Client(store, usage(100, 1), price={**PRICES, "default": {"input": 2, "output": 3}}) as client:
        before = client.spent()
        assert client.ask("other")[1] - before == 203


def test_a_price_per_image_says_nothing_about_other_calls(store):
    unknown = r"the price of the model 'painter' is per image only, so .* is unknown: add input and output, or request"
    with Client(store, usage(100, 30)) as client:
        with pytest.raises(ResourceUnknown, match=unknown):
            client.ask("painter")
        assert (client.in_flight, client.spent()) == ([], 0)
    with Client(store, usage(100, 30), price={**PRICES, "default": {"input": 2, "output": 3}}) as client:
        assert client.ask("painter")[1] == 290  # the default price fits
    only_images = pytest.raises(ResourceUnknown, match="the default price is per image only")
    with Client(store, {}, price={**PRICES, "default": {"kinds": {"image": 1}}}) as client, only_images:
        client.ask("other")


def test_what_is_free_has_a_price_of_0(store):
    models = {"free": {"input": 0, "output": 0}, "unpriced": {"request": 0}, "drawing": {"kinds": {"image": 0}}}
    with Client(store, usage(100, 30), price={**PRICES, "models": models}) as client:
        assert (client.ask("free"), client.ask("unpriced")) == ((0, 0), (0, 0))
        assert client.ask("drawing", "https://api.test/v1/images/generations") == (0, 0)


def test_images_may_be_paid_by_token(store):
    with Client(store, usage(100, 30)) as client:
        assert client.ask(url="https://api.test/v1/images/generations")[1] == 250


def test_requests_that_no_model_answers_are_free(store):
    with Client(store, {}) as client:
        client.get("https://api.test/v1/models")
        client.get("https://api.test/v1/responses/7")
        client.post("https://api.test/v1/files", content=b"data")
        assert client.spent() == 0


def test_the_ceiling_counts_in_its_time_zone(store):
    limits = ["0.0015/day unit=usd name=money timezone=America/New_York"]
    with Client(store, usage(100, 200), limits) as client:
        assert client.ask()[1] == 1100
        with pytest.raises(Denied) as denied:
            client.ask()
        assert denied.value.decision.retry_after == 5 * 3600.0  # midnight in New York
        store.clock.advance(5 * 3600)
        assert client.ask()[1] == 1100


def test_what_a_lenient_call_overran_is_debt(store):
    limits = ["0.001/day unit=usd name=money"]
    with Client(store, usage(100, 900), limits, output_reserve="maximum") as client:
        client.ask(max_tokens=100)  # the provider exceeds what it was asked for
        assert client.spent() == 4600
        assert client.gate.metrics()["overrun_micros"] == 4000
        with pytest.raises(Denied):
            client.ask()
        store.clock.advance(86_400)
        assert client.spent() == 0


@pytest.mark.parametrize("profile", ["azure", "openai"])
def test_the_money_of_a_provider_that_counts_the_bound_is_that_of_its_usage(store, profile):
    limits = ["0.01/day unit=usd name=money", "10_000/1m unit=tokens name=tpm"]
    with Client(store, usage(100, 30), limits, profile=profile) as client:
        assert client.ask() == (1100, 250)
        with Limiter(next(iter(client.known)).policy, store=store) as limiter:
            assert limiter.usage("api.test")["tpm"].used == (300 if profile == "azure" else 130)


def test_calls_without_a_body_must_say_what_they_cost(store):
    known = Providers.of({"domain": "api.test", "profile": "openai", "limits": ["1/day unit=usd"], "price": PRICES})
    gate = Gate(known, store)
    with pytest.raises(ConfigError, match=r"cost: needs the money that the request may cost, such as {'usd_micros': "):
        gate.acquire("api.test")
    with gate.acquire("api.test", {"usd_micros": 700}) as charge:
        charge.commit({"usd_micros": 650})
    assert gate.accounts[0].limiter.usage("api.test")["usd-day"].used == 650
    gate.close()


def test_changed_prices_are_read_again(tmp_path, store):
    prices = tmp_path / "prices.yaml"
    prices.write_text("date: 2026-01-01\nmodels: {m: {input: 1, output: 1}}\n")
    (tmp_path / "api.yaml").write_text(
        "domain: api.test\nprofile: openai\nlimits: [1/day unit=usd]\nprice: prices.yaml\n"
    )
    known = Providers.load(files=[tmp_path / "api.yaml"])
    prices.write_text("date: 2026-02-01\nmodels: {m: {input: 1, output: 22}}\n")
    assert known.reload() == ("api.test",)
    assert known.match("https://api.test").prices.find("m").output == 22_000_000
    prices.write_text("models: {}\n")
    assert known.reload() == ()
    assert "needs the date" in known.problems[0]
    assert known.match("https://api.test").prices.find("m").output == 22_000_000


# ---- strict calls ----------------------------------------------------------------------------------------------------


def test_a_streamed_strict_call_reserves_the_whole_output_and_is_settled(store):
    model = StreamedModel(3000)
    with Client(store, model, ["1/day unit=usd name=money"], strict=True) as client:
        assert client.ask(stream=True, max_tokens=64_000) == (100 + 5 * 64_000, 100 + 5 * 3000)
        for _ in range(10):
            client.ask(stream=True, max_tokens=64_000)
        spent = client.spent()
        reserved = client.ask(stream=True, max_tokens=200_000)[0] - spent  # no room: what most outputs needed
        assert 100 + 5 * 3000 <= reserved <= 100 + 5 * 6000


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_call_never_passes_the_ceiling(store, stream):
    """The provider ends the output, streamed or not, at what the ceiling pays for."""
    model = StreamedModel(5000)
    with Client(store, model, ["0.011/day unit=usd name=money"], strict=True) as client:
        assert client.ask(stream=stream, max_tokens=64_000) == (11_000, 11_000)
        assert not stream or 100 + 5 * model.sent == 11_000
        with pytest.raises(Denied):
            client.ask(stream=stream)


def test_a_strict_call_without_a_tokenizer_pays_for_a_token_per_byte(store):
    """No text has more tokens than bytes, whatever was learned from other texts."""
    known = Providers.of(
        {"domain": "api.test", "profile": "openai", "limits": ["10/day unit=usd name=money"], "price": PRICES}
    )
    reserved, content = [], {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x" * 5000}]}

    def handle(_request):
        reserved.append(transport.gate.accounts[0].limiter.usage("api.test")["money"].used)
        return httpx.Response(200, json={"usage": usage(5, 1)})

    transport = RateLimitTransport(known, store, httpx.MockTransport(handle), timeout=0)
    with httpx.Client(transport=transport) as client:
        for strict in (False, True):
            for _ in range(10):
                before = transport.gate.accounts[0].limiter.usage("api.test")["money"].used if reserved else 0
                with request_options(strict=strict):
                    length = len(client.post(URL, json=content).request.content)
                reserved[-1] -= before
            assert reserved[-1] == length + 5 if strict else reserved[-1] < 100


def test_a_strict_call_that_cannot_pay_for_its_input_is_refused(store):
    with Client(store, usage(1, 1), ["0.00005/day unit=usd name=money"], strict=True) as client:
        with pytest.raises(Denied) as denied:
            client.ask()
        assert denied.value.decision.retry_after is None
        assert not client.in_flight


def test_a_strict_call_whose_output_nothing_bounds_is_not_sent_unless_its_cost_is_given(store):
    """The body is not in memory, so its maximum can be neither read nor lowered."""
    with Client(store, usage(100, 1900), strict=True) as client, request_options(model="m"):
        with pytest.raises(UnboundedCost, match="the body cannot be read") as refused:
            client.post(URL, content=iter([b'{"model": "m"}']))
        assert (refused.value.field, refused.value.decision.retry_after) == ("body", None)
        assert (client.in_flight, client.spent()) == ([], 0)
        with request_options(cost={"usd_micros": 9_600}):
            assert client.post(URL, content=iter([b'{"model": "m"}'])).status_code == 200
        assert client.in_flight == [9_600]


def test_the_cost_of_a_batch_can_be_given(store):
    """tidegate does not see the usage of a batch: the program says what it may cost."""
    url = "https://api.test/v1/batches"
    with Client(store, usage(0, 0), spend=["0.006/day unit=usd"]) as client:
        assert client.ask(url=url) == (0, 0)
        with request_options(cost={"usd_micros": 4000}):
            assert client.ask(url=url) == (4000, 4000)
            assert client.gate.ceilings[0].usage("all")["usd-day"].used == 4000
            with pytest.raises(Denied, match="usd-day"):
                client.ask(url=url)


def test_midnight_does_not_move_the_money_of_a_call_into_the_next_day(store):
    """A call counts in the day in which it was reserved, so the next day's ceiling holds, too."""

    def reply(_request):
        store.clock.advance(60)
        return httpx.Response(200, json={"usage": usage(100, 200)})

    with Client(store, reply, ["1000/1m", "0.0011/day unit=usd name=money"], strict=True) as client:
        store.clock.advance(86_400 - 30)
        assert client.ask() == (1100, 0)
        assert client.ask() == (1100, 1100)
