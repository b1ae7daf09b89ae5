"""httpx and httpx2 have the same interface and separate classes: a client of the other one gets a clear error."""

from contextlib import closing

import pytest

from tests.outbound.clients import HTTPX_LIBRARIES
from tidegate import ConfigError
from tidegate.outbound import Providers


@pytest.mark.parametrize(("own", "other"), [("httpx", "httpx2"), ("httpx2", "httpx")])
def test_a_client_of_the_other_library_is_told_which_import_is_right(own, other):
    adapter, library = HTTPX_LIBRARIES[own][1], HTTPX_LIBRARIES[other][0]
    providers = Providers.of({"domain": "a.test", "limit": 5, "period": "1m"})
    with closing(adapter.RateLimitTransport(providers)) as transport:
        client = library.Client(transport=transport)
        with pytest.raises(ConfigError, match=f"from tidegate.outbound.{other}$"):
            client.get("https://a.test/")


@pytest.mark.parametrize(("own", "other"), [("httpx", "httpx2"), ("httpx2", "httpx")])
async def test_an_async_client_of_the_other_library_is_told_which_import_is_right(own, other):
    adapter, library = HTTPX_LIBRARIES[own][1], HTTPX_LIBRARIES[other][0]
    transport = adapter.AsyncRateLimitTransport(Providers.of({"domain": "a.test", "limit": 5, "period": "1m"}))
    async with library.AsyncClient(transport=transport) as client:
        with pytest.raises(ConfigError, match=f"from tidegate.outbound.{other}$"):
            await client.get("https://a.test/")
