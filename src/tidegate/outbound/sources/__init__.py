"""Sources: URLs fetched on a schedule, within the quotas of providers.

source.py      a Source and its YAML file
schedule.py    when a source is due next: intervals and cron expressions
ledger.py      what survives a crash: when each source is due, its last result, requests in flight
scheduler.py   which sources may be fetched now: the first check of capacity
fetch.py       fetches one source: the second check of capacity, then the request, within a maximum size and time
download.py    follows redirects without secrets, and reads bodies up to a maximum size
failures.py    says what failed: DNS, TLS, a refused connection
delivery.py    where a body is stored
runner.py      runs scheduler and workers until stopped
control.py     how commands call a running service
configured.py  the sources that a service runs
"""

from tidegate.errors import ConfigError

try:
    import httpx  # noqa: F401 - the modules below import it
except ImportError:
    raise ConfigError("sources need httpx: pip install 'tidegate[sources]'") from None

from tidegate.outbound.sources._ledger import SourceRow
from tidegate.outbound.sources._runner import SourceRunner
from tidegate.outbound.sources._schedule import Schedule
from tidegate.outbound.sources._source import Destination, Source, read_source, read_sources

__all__ = ["Destination", "Schedule", "Source", "SourceRow", "SourceRunner", "read_source", "read_sources"]
