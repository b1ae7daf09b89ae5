"""Sources: what is fetched on a schedule, within the quotas of providers.

source.py      a Source and its YAML file
timetable.py   when a source is due next: intervals and cron expressions
ledger.py      what is kept over a crash: when each source is due, what came of it, what was under way
scheduler.py   which sources may be fetched now: the first check of the document
worker.py      fetching one: the second check, within a size and a time
download.py    redirects without secrets, bodies within a size
delivery.py    where a body goes
service.py     all of it running, until it is told to stop
control.py     how commands talk to a running service
"""

from tidegate.outbound.sources.runner import SourceRunner
from tidegate.outbound.sources.source import Source, read_source, read_sources

__all__ = ["Source", "SourceRunner", "read_source", "read_sources"]
