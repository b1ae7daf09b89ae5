"""Prices: the file of the user, the message that each mistake must give, and the arithmetic of a call's cost."""

from datetime import date
from pathlib import Path

import pytest

from tests.cases import cases
from tidegate import ConfigError, Limit
from tidegate.errors import ResourceUnknown
from tidegate.outbound import OutboundRequest, Providers
from tidegate.outbound._providers.file import read_provider
from tidegate.outbound._providers.prices import ModelPrice, read_prices, usage_cost
from tidegate.outbound._providers.profile_file import shipped_profile
from tidegate.outbound._quota.cost import read_call

BAD_PRICES = sorted((Path(__file__).parent / "bad_prices").glob("*.yaml"))
PRICES = {
    "date": "2026-11-01",
    "models": {
        "mini": {"input": 0.15, "cached": 0.075, "output": 0.6},
        "big*": {"input": 2.5, "cached": 1.25, "cache_write": 3.125, "output": 10, "request": 0.01},
        "painter": {"kinds": {"image": 0.04}},
    },
}


def provider(*limits, **fields):
    return read_provider({"domain": "a.test", "profile": "openai", "limits": list(limits), "price": PRICES, **fields})


@cases("path", BAD_PRICES)
def test_each_bad_file_is_refused_with_line_and_message(path):
    """The first line of a file says which message its mistake must give: `# LINE: the message`."""
    line, _, message = path.read_text().splitlines()[0].removeprefix("# ").partition(": ")
    with pytest.raises(ConfigError) as error:
        read_prices(path)
    assert str(error.value) == f"{path}:{line}: {message}"


def test_the_bad_files_are_found():
    assert len(BAD_PRICES) >= 12


def test_prices_are_exact_integers():
    found = read_prices(PRICES)
    assert (found.date, found.currency, found.unit) == (date(2026, 11, 1), "usd", "usd_micros")
    assert found.find("mini") == ModelPrice(
        "usd_micros", 150_000, 75_000, 150_000, 600_000, audio=150_000, audio_output=600_000
    )
    assert found.find("big-2026").request == 10_000
    assert found.find("painter", "image").fee("image", 3) == 120_000


@pytest.mark.parametrize("amount", [0.00005, 0.000001, 0.1])
def test_a_small_float_of_a_mapping_is_read_exactly(amount):
    micros = round(amount * 10**6)
    assert read_prices({**PRICES, "default": {"request": amount}}).default.request == micros
    assert provider({"limit": amount, "period": "day", "unit": "usd"}).limits[0].quota == micros


@pytest.mark.parametrize("amount", [0.0000005, float("inf"), float("nan"), -0.00005, 1e300])
def test_other_floats_of_a_mapping_are_refused(amount):
    with pytest.raises(ConfigError, match="expected a number of at least 0 with at most six decimals"):
        read_prices({**PRICES, "default": {"request": amount}})


def test_only_a_star_is_special_in_the_name_of_a_model():
    models = {"m[1m]": {"request": 1}, "q?": {"request": 2}, "*[x]": {"request": 3}}
    found = read_prices({**PRICES, "models": models})
    assert [found.find(name).request for name in ("m[1m]", "q?", "big[x]")] == [1_000_000, 2_000_000, 3_000_000]
    for other in ("m1", "mm", "qa", "bigx", "m[1m]2"):
        with pytest.raises(ResourceUnknown, match="there is no price for the model"):
            found.find(other)


def test_a_model_without_a_price_is_an_error_or_costs_the_default():
    with pytest.raises(ResourceUnknown, match=r"there is no price for the model 'min': .* did you mean 'mini'\?"):
        read_prices(PRICES).find("min")
    with pytest.raises(ResourceUnknown, match="a request names no model"):
        read_prices(PRICES).find(None)
    chosen = read_prices({**PRICES, "default": {"input": 15, "output": 60}})
    assert chosen.find("min").output == chosen.find(None).output == 60_000_000


def test_the_cost_of_usage_in_each_format():
    big = read_prices(PRICES).find("big")
    openai, anthropic, google = map(shipped_profile, ("openai", "anthropic", "google"))
    # OpenAI's input includes what was cached; Anthropic reports it apart; Gemini reports reasoning apart.
    assert usage_cost(big, {"input": 1000, "cache_read": 400, "output": 10}, openai) == 600 * 2.5 + 400 * 1.25 + 100
    parts = {"input": 600, "cache_read": 400, "cache_write": 80, "output": 10}
    assert usage_cost(big, parts, anthropic) == 600 * 2.5 + 400 * 1.25 + 80 * 3.125 + 100
    assert usage_cost(big, {"input": 600, "output": 10, "reasoning": 30}, google) == 600 * 2.5 + 400
    assert usage_cost(big, {"input": 600, "output": 40, "reasoning": 30}, openai) == 600 * 2.5 + 400
    assert usage_cost(big, {"total": 100}, openai) == 1000  # the dearest kind of token


def test_audio_has_prices_of_its_own():
    models = {"voice": {"input": 2.5, "output": 10, "audio": 40, "audio_output": 80}}
    voice = read_prices({**PRICES, "models": models}).find("voice")
    parts = {"input": 1000, "output": 100, "audio": 300, "audio_output": 60}
    openai = shipped_profile("openai")
    assert usage_cost(voice, parts, openai) == 700 * 2.5 + 300 * 40 + 40 * 10 + 60 * 80
    assert usage_cost(voice, {"input": 1000, "output": 100}, openai) == 1000 * 2.5 + 100 * 10
    # Before the call, any part of it may be audio.
    assert voice.estimate(1000, 100) == 1000 * 40 + 100 * 80
    assert voice.output_within(48_000, 1000) == 100


def test_a_fraction_of_a_micro_is_rounded_up():
    mini = read_prices(PRICES).find("mini")
    assert usage_cost(mini, {"input": 1, "output": 0}, shipped_profile("openai")) == 1
    assert usage_cost(mini, {"input": 0, "output": 0}, shipped_profile("openai")) == 0
    assert mini.estimate(7, 0) == 2


@cases("amount", [0, 1, 9, 100, 12_345, 999_999])
@cases("tokens", [0, 1, 777])
def test_the_output_that_an_amount_pays_for_never_costs_more(amount, tokens):
    big = read_prices(PRICES).find("big")
    output = big.output_within(amount, tokens)
    if output:
        assert big.estimate(tokens, output) <= amount
    assert big.estimate(tokens, output + 1) > amount


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("25/day unit=usd", Limit(25_000_000, "day", "calendar_window", unit="usd_micros", name="usd-day")),
        ("2.50/day unit=usd", Limit(2_500_000, "day", "calendar_window", unit="usd_micros", name="usd-day")),
        ("25 usd/month", Limit(25_000_000, "month", "calendar_window", unit="usd_micros", name="usd-month")),
        ("25/1d unit=usd", Limit(25_000_000, "1d", "sliding_log", unit="usd_micros", name="usd-1d")),
        ("7/day unit=usd_micros", Limit(7, "day", "calendar_window", unit="usd_micros")),
        (
            "25/week unit=usd timezone=Europe/Berlin name=team",
            Limit(25_000_000, "week", "calendar_window", unit="usd_micros", name="team", timezone="Europe/Berlin"),
        ),
        (
            {"limit": 0.5, "period": "day", "unit": "usd", "timezone": "America/New_York", "reset_hour": 9},
            Limit(500_000, "day", "calendar_window", unit="usd_micros", name="usd-day", timezone="America/New_York",
                  reset_hour=9),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_limits_of_money(limit, expected):
    assert provider(limit).limits == (expected,)


def test_decimals_are_for_money_only():
    with pytest.raises(ConfigError, match=r"expected a whole number of requests, in '2\.5/1m'"):
        provider("2.5/1m")


def test_a_limit_in_micros_needs_a_price_or_an_estimate():
    fields = {"domain": "a.test", "limits": ["7/day calendar_window unit=usd_micros"]}
    assert read_provider({**fields, "estimate": {"usd_micros": 2}}).cost(None) == {"usd_micros": 2}
    assert read_provider({**fields, "endpoints": [{"path": "/x", "cost": {"usd_micros": 2}}]})


def test_prices_in_another_currency():
    prices = {"date": "2026-11-01", "currency": "eur", "models": {"m": {"input": 1, "output": 2}}}
    found = provider("25/day unit=eur", price=prices)
    assert found.limits[0].unit == "eur_micros"


def test_a_unit_of_three_letters_that_the_file_gives_the_cost_of_is_no_currency():
    assert provider("25/day unit=gpu", estimate={"gpu": 1}).limits[0].unit == "gpu"
    assert provider("25/day unit=gpu", endpoints=[{"path": "/x", "cost": {"gpu": 2}}]).limits[0].unit == "gpu"
    assert provider("25/day unit=images", "9/day unit=micro-batches").limits[0].unit == "images"


def test_a_file_that_does_not_exist(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("domain: a.test\nprofile: openai\nlimits: [5/1m]\nprice: none.yaml\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:4: price: cannot read .*none\.yaml: there is no such file"):
        read_provider(path)


def test_a_profile_names_kinds_of_calls_that_have_a_price_of_their_own(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "usage: {at: [usage], input: [in], output: [out]}\ncounts: {tokens: [input, output]}\n"
        "endpoints:\n  - {path: '*/search', output: no, priced: search}\n"
        "  - {path: '*/rank', output: no, priced: {page: pages}}\n"
    )
    prices = {"date": "2026-11-01", "default": {"kinds": {"search": 0.01, "page": 0.002}, "input": 0, "output": 0}}
    (provider,) = Providers.of(
        {"domain": "x.test", "profile": str(tmp_path / "mine.yaml"), "price": prices, "limits": ["1/day unit=usd"]}
    )
    costs = {}
    for path, body in (("/v1/search", b'{"q": "a"}'), ("/v1/rank", b'{"pages": 3}'), ("/v1/other", b"{}")):
        call = OutboundRequest("POST", f"https://x.test{path}", {}.get, lambda body=body: body, True, lambda _: False)
        costs[path] = read_call(provider, call).fee
    assert costs == {"/v1/search": 10_000, "/v1/rank": 6_000, "/v1/other": 0}


@pytest.mark.parametrize(
    ("price", "profile", "problem"),
    [
        ({"kinds": {"imgae": 0.04}}, "openai", "no calls of the kind 'imgae', only of image, .*did you mean 'image'"),
        ({"input": 5, "output": 10, "kinds": {"images": 0.04}}, "openai", "did you mean 'image'"),
        ({"input": 5, "output": 10, "kinds": {"image": 0.04}}, "anthropic", "'image', of none, so its price"),
    ],
)
@pytest.mark.parametrize("whose", ["models", "default"])
def test_a_kind_that_no_call_is_of_is_refused(price, profile, problem, whose):
    """Its calls would cost nothing."""
    prices = {"date": "2026-11-01", whose: {"painter": price} if whose == "models" else price}
    with pytest.raises(ConfigError, match=problem):
        provider("1/day unit=usd", profile=profile, price=prices)
