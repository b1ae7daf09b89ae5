"""How many seeds a simulation tries."""

from hypothesis import settings


def is_quick() -> bool:
    """Return whether this is `make test`, which tries few random examples; the rest is for `make test-all`."""
    return settings.get_current_profile_name() not in {"main", "deep"}


def seeds(count: int) -> range:
    """Return the seeds of a simulation, a fifth of them in `make test`; the test has the mark `seeds`."""
    return range(count // 5 if is_quick() else count)
