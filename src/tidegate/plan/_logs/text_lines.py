"""Reads logs whose lines follow a pattern: nginx and Apache combined, any `log_format` of either, and AWS ALB."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.plan._logs.batch import NO_DURATION, NO_STATUS, LogBatch, LogSender, LogSubject
from tidegate.plan._logs.requests import read_request
from tidegate.plan._logs.timestamps import choose_reader, read_common, read_duration, resolution_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.plan._logs.timestamps import ReadTime

COMBINED: Final = '$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent'
ALB: Final = (
    "$type $ended $elb $peer_port $target $wait $work $answer $status $target_status $received $sent "
    '"$request" "$user_agent" $cipher $protocol $group "$trace" "$domain" "$certificate" $priority $begun '
)
VARIABLES: Final = {  # of nginx: what a variable holds
    "remote_addr": "peer",
    "realip_remote_addr": "peer",
    "http_x_forwarded_for": "forwarded",
    "proxy_add_x_forwarded_for": "forwarded",
    "time_local": "time",
    "time_iso8601": "time",
    "msec": "time",
    "request": "request",
    "request_method": "method",
    "request_uri": "path",
    "uri": "path",
    "status": "status",
    "request_time": "duration",
    "peer_port": "peer",  # this and the next are of ALB
    "begun": "time",
    "ended": "ended",
}
DIRECTIVES: Final = {  # of Apache
    "h": "peer",
    "a": "peer",
    "t": "time",
    "r": "request",
    "m": "method",
    "U": "path",
    "s": "status",
    ">s": "status",
    "D": "duration_us",
    "T": "duration",
    "{X-Forwarded-For}i": "forwarded",
    "{msec}t": "time",
    "{usec}t": "time",
}
PREFERRED_TIMES: Final = ("msec", "{usec}t", "{msec}t", "time_iso8601")  # more exact than another time of the line
FIELD = re.compile(r"\$\{?(\w+)\}?|%([<>]?(?:\{[^}]*\})?[A-Za-z])")
QUOTED: Final = r'([^"\\\n]*(?:\\.[^"\\\n]*)*)'
BRACKETED: Final = r"\[([^\]\n]*)\]"  # Apache writes the brackets of %t itself
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|(.))")
NAMES: Final = ("time", "duration", "duration_us", "ended", "peer", "forwarded", "request", "method", "path", "status")


class LinePattern(NamedTuple):
    """A compiled format: the expression, the group of each field that it has, and whether its time is the start."""

    expression: re.Pattern[str]
    groups: dict[str, int]
    starts: bool


def compile_pattern(text: str) -> LinePattern:
    """Compile a `log_format` of nginx or a `LogFormat` of Apache; raises ConfigError for one without the fields."""
    text = text.replace("%%", "%").strip()
    found = [(match, match[1] or match[2]) for match in FIELD.finditer(text)]
    apache = bool(found) and all(match[2] for match, _ in found)
    roles = DIRECTIVES if apache else VARIABLES
    names = [name for _, name in found]
    best = next((name for name in PREFERRED_TIMES if name in names), None)
    groups: dict[str, int] = {}
    parts, end = [], 0
    for match, name in found:
        parts.append(re.escape(text[end : match.start()]))
        end = match.end()
        following = text[end : end + 1]
        role = roles.get(name)
        skipped = role is None or role in groups or (role == "time" and best not in (None, name))
        body = QUOTED if following == '"' else f"([^{re.escape(following or ' ')}\\n]*)"
        parts.append(BRACKETED if apache and name == "t" else body)
        if skipped:
            parts[-1] = parts[-1].replace("(", "(?:", 1)
        else:
            groups[str(role)] = len(groups)
    parts.append(re.escape(text[end:]))
    check_fields(text, groups)
    tail = "" if text.endswith("$") else r"[^\n]*"
    return LinePattern(re.compile(rf"^{''.join(parts)}{tail}$", re.MULTILINE), groups, apache or "begun" in names)


def check_fields(text: str, groups: dict[str, int]) -> None:
    """Raise ConfigError if a format lacks the time of a request, its client, or what it asked for."""
    missing = []
    if "time" not in groups:
        missing.append("its time ($msec or $time_local; %t)")
    if "peer" not in groups:
        missing.append("its client ($remote_addr; %h)")
    if "request" not in groups and "path" not in groups:
        missing.append('what it asked for ("$request"; "%r")')
    if missing:
        raise ConfigError(f"does not say of a request {' nor '.join(missing)}: {text!r}", field="--log-format")


class TextLines:
    """A parser of lines that follow a pattern."""

    def __init__(self, pattern: LinePattern, sample: str) -> None:
        """Read lines like those of a sample, which has at least one that follows the pattern."""
        self._pattern = pattern
        match = pattern.expression.search(sample)
        if match is None:
            raise ConfigError(f"no line follows the format; the first is {sample.splitlines()[0][:120]!r}")
        groups = pattern.groups
        text = match[groups["time"] + 1]
        self._read_time: ReadTime = read_common if "/" in text else choose_reader(text)
        self.resolution: int = resolution_of(text)
        self.times_are_starts: bool = pattern.starts
        self.has_durations: bool = any(name in groups for name in ("duration", "duration_us", "ended"))
        self._places = [groups.get(name, -1) for name in NAMES]

    def parse(self, block: str, file: str, line: int) -> LogBatch:  # written out: it runs for every line
        """Parse a block of lines, of which the first has this number."""
        (at_time, at_duration, at_us, at_ended, at_peer, at_forwarded, at_request, at_method, at_path, at_status) = (
            self._places
        )
        batch = LogBatch()
        read_time, starts = self._read_time, self.times_are_starts
        senders: dict[object, int] = {}
        subjects: dict[object, int] = {}
        known: dict[LogSubject, int] = {}
        add_time, add_duration, add_status = batch.times.append, batch.durations.append, batch.statuses.append
        add_sender, add_subject = batch.senders.append, batch.subjects.append
        timed = self.has_durations
        position, last_text, time = 0, None, 0
        for match in self._pattern.expression.finditer(block):
            if match.start() != position:
                self._reject_between(batch, block[position : match.start()], file, line + batch.lines)
            position = match.end() + 1
            batch.lines += 1
            values = match.groups()
            try:
                text = values[at_time]
                if text != last_text:
                    time, last_text = read_time(text), text
                duration = NO_DURATION
                if timed:
                    duration = self._duration(values, time, at_duration, at_us, at_ended)
                raw: object = values[at_request] if at_path < 0 else (values[at_method], values[at_path])
                subject = subjects.get(raw)
                if subject is None:
                    subject = subjects[raw] = self._subject(raw, known, batch)
                who: object = values[at_peer] if at_forwarded < 0 else (values[at_peer], values[at_forwarded])
                sender = senders.get(who)
                if sender is None:
                    sender = senders[who] = len(senders)
                    batch.sender_table.append(read_sender(who))
            except (ValueError, KeyError, IndexError) as error:
                batch.reject(file, line + batch.lines - 1, describe(error), match[0])
                continue
            status = values[at_status] if at_status >= 0 else ""
            add_time(time if starts or duration < 0 else time - duration)
            add_sender(sender)
            add_subject(subject)
            add_status(int(status) if len(status) == 3 and status.isdecimal() else NO_STATUS)  # noqa: PLR2004 - of HTTP
            if timed:
                add_duration(duration)
        if position < len(block):
            self._reject_between(batch, block[position:], file, line + batch.lines)
        return batch

    @staticmethod
    def _duration(values: tuple[str, ...], time: int, at_duration: int, at_us: int, at_ended: int) -> int:
        if at_duration >= 0:
            text = values[at_duration]
            return NO_DURATION if text in ("-", "") else read_duration(text, SECOND)
        if at_us >= 0:
            return int(values[at_us])
        return max(0, choose_reader(values[at_ended])(values[at_ended]) - time)

    @staticmethod
    def _subject(raw: object, known: dict[LogSubject, int], batch: LogBatch) -> int:
        """Return the place of what a line asks for: lines that differ in their query have the same."""
        subject = read_request(unescape(raw)) if isinstance(raw, str) else read_request(" ".join(map(unescape, raw)))  # type: ignore[call-overload]  # a pair of strings
        place = known.get(subject)
        if place is None:
            place = known[subject] = len(known)
            batch.subject_table.append(subject)
        return place

    @staticmethod
    def _reject_between(batch: LogBatch, text: str, file: str, line: int) -> None:
        """Count the lines between two that follow the format; empty ones are no mistake."""
        for number, each in enumerate(lines_of(text)):
            batch.lines += 1
            if each.strip():
                batch.reject(file, line + number, "does not follow the format", each)


def read_sender(who: object) -> LogSender:
    """Return who sent a request."""
    if isinstance(who, str):
        return LogSender(address_of(who))
    peer, forwarded = map(str, who)  # type: ignore[call-overload]  # a pair of strings
    return LogSender(address_of(peer), "" if forwarded == "-" else unescape(forwarded))


def address_of(text: str) -> str:
    """Return an address without its port, as ALB and Envoy write both."""
    if text.count(":") == 1 or text.startswith("["):
        return text.rpartition(":")[0].strip("[]") if not text.endswith("]") else text.strip("[]")
    return "" if text == "-" else text


def unescape(text: str) -> str:
    r"""Replace `\x22` and `\"`, which servers write for characters that would end a field."""
    if "\\" not in text:
        return text
    raw = ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else match[2], text)
    try:
        return raw.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return raw


def lines_of(text: str) -> Iterator[str]:
    """Yield the lines of a block, of which only the last may lack its end."""
    yield from text.removesuffix("\n").split("\n")


def describe(error: Exception) -> str:
    """Say what is wrong with a line."""
    return f"no month {error}" if isinstance(error, KeyError) else str(error)
