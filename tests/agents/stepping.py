"""Executes a flow of a run so that a test does something between two of its steps."""

from tidegate._limiter.joint import performer
from tidegate._runtime.flow import run


def interleaved(node, flow, after, something):
    """Execute a flow of a node; something else happens after the step of this number, where the first is 1."""
    perform = performer(node.clock)
    steps = []

    def perform_and_count(step):
        found = perform(step)
        steps.append(step)
        if len(steps) == after:
            something()
        return found

    return run(flow, perform_and_count)
