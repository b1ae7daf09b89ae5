"""After the first argument, the options of public functions and methods are keywords."""

import importlib
import inspect
from dataclasses import is_dataclass

MODULES = ("tidegate.budget", "tidegate.budget.alerts", "tidegate.spending", "tidegate.swarm")
DOCUMENT_NAMES = {"announce_reduced": {"reason"}}  # positional in the document "agent swarm"


def public_functions():
    for name in MODULES:
        module = importlib.import_module(name)
        for label in module.__all__:
            value = getattr(module, label)
            if inspect.isfunction(value):
                yield label, value
            elif inspect.isclass(value) and not is_dataclass(value) and not issubclass(value, tuple):
                for method, function in inspect.getmembers(value, inspect.isfunction):
                    if method == "__init__" or not method.startswith("_"):
                        yield f"{label}.{method}", function


def positional_options(function):
    """Return the names of the parameters after the first one that have a default and may be given by position."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")]
    return {
        each.name
        for each in parameters[1:]
        if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is not each.empty
    }


def test_options_are_keywords():
    found = {
        label: names
        for label, function in public_functions()
        if (names := positional_options(function) - DOCUMENT_NAMES.get(label.rpartition(".")[2], set()))
    }
    assert found == {}


def test_a_positional_option_is_found():
    def acquire(key, cost=1, *, timeout=None):
        return key, cost, timeout

    assert positional_options(acquire) == {"cost"}
