"""Metrics in Prometheus's text format, without a client library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[str, Mapping[str, str], float]  # name, labels, value
MetricKind = Literal["gauge", "counter", "histogram"]


class MetricFamily(NamedTuple):
    """A metric with its samples."""

    name: str
    kind: MetricKind
    help: str
    samples: Sequence[Sample]


def write_families(families: Iterable[MetricFamily]) -> bytes:
    """Write families of metrics."""
    lines: list[str] = []
    for name, kind, help_text, samples in families:
        lines += (f"# HELP {name} {help_text}", f"# TYPE {name} {kind}")
        lines += (_line(*sample) for sample in samples)
    # A label may contain what others have sent, such as the name of a model that is not valid Unicode.
    return ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace")


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inner}}} {value}" if inner else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
