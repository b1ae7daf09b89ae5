"""The four scenarios of the design document provider-gatekeeper.md."""

import pytest

from tidegate import Denied
from tidegate.outbound import Gate, OutboundRequest, Providers
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.testing import ManualClock

AT_10_23 = 1_736_936_580  # 2025-01-15 10:23:00 UTC
FMP = {"domain": "financialmodelingprep.com", "limit": 300, "period": "1m"}
URL = "https://financialmodelingprep.com/api/v3/historical-price-full/AAPL"


def call(url):
    return OutboundRequest("GET", url, {}.get, lambda: None, True, lambda _error: False)


class Sources:
    """Sources that share a provider, each asking as a worker does."""

    def __init__(self, provider, store="memory://", clock=None):
        self.clock = clock or ManualClock(AT_10_23)
        self.gate = Gate(Providers.of(provider), store, clock=self.clock, timeout=0)

    def ask(self, url=URL):
        """Tell whether a request was approved."""
        try:
            self.gate.run(
                self.gate.send_flow(call(url), lambda _provider: ProviderResponse(200, (), lambda: None, None))
            )
        except Denied:
            return False
        return True

    def used(self):
        return 300 - self.gate.peek(call(URL)).remaining - 1


def test_scenario_1_several_sources_share_one_domain():
    sources = Sources(FMP)
    for number, url in enumerate((URL, URL.replace("AAPL", "MSFT"), "https://www.financialmodelingprep.com/x"), 1):
        assert sources.ask(url)
        assert sources.used() == number
    sources.gate.close()


def test_scenario_2_approaching_the_limit():
    sources = Sources(FMP)
    for _ in range(295):
        assert sources.ask()
    sources.clock.advance(20)
    assert [sources.ask() for _ in range(10)] == [True] * 5 + [False] * 5
    sources.clock.advance(40)  # a minute after the first
    assert [sources.ask() for _ in range(5)] == [True] * 5  # those that were skipped
    sources.gate.close()


@pytest.mark.parametrize("algorithm", ["sliding_log", "fixed_window"])
def test_scenario_3_the_window_resets_when_its_period_is_over(algorithm):
    yahoo = {"domain": "finance.yahoo.com", "limit": 200, "period": "1h", "algorithm": algorithm}
    sources = Sources(yahoo)
    url = "https://finance.yahoo.com/v8"
    assert [sources.ask(url) for _ in range(201)] == [True] * 200 + [False]
    sources.clock.advance(3599.999999)
    assert not sources.ask(url)
    sources.clock.advance(0.000001)
    assert [sources.ask(url) for _ in range(201)] == [True] * 200 + [False]
    sources.gate.close()


def test_scenario_3_with_fixed_windows_the_whole_quota_is_available_at_once():
    """With `fixed_window`, what was used late is forgotten with its window; by default it counts for a period."""
    sources = {name: Sources({**FMP, "limit": 2, "algorithm": name}) for name in ("fixed_window", "sliding_log")}
    fresh = {}
    for name, each in sources.items():
        each.ask()
        each.clock.advance(59)
        each.ask()
        each.clock.advance(1)
        fresh[name] = [each.ask() for _ in range(2)]
        each.gate.close()
    assert fresh == {"fixed_window": [True, True], "sliding_log": [True, False]}


def test_scenario_4_a_crash_loses_nothing(tmp_path):
    """What the document loses, up to 10 seconds of requests, is not lost here: a new process sees every one."""
    clock = ManualClock(AT_10_23)
    before = Sources(FMP, f"sqlite:///{tmp_path}/quota.db", clock)
    for _ in range(45):
        assert before.ask()
    clock.advance(10)  # it was never closed
    after = Sources(FMP, f"sqlite:///{tmp_path}/quota.db", clock)
    assert after.used() == 45
    assert sum(after.ask() for _ in range(300)) == 255
    before.gate.close()
    after.gate.close()
