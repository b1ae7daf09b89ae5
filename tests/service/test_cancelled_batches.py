"""A batch that is cancelled, also a second time while it ends, leaves no charge."""

import asyncio
from itertools import product

from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.stores._memory.store import MemoryStore

ASKS = [(Subject("api", "one"), 1), (Subject("api", "two"), 2)]


class SlowStore(MemoryStore):
    """A store whose first key is answered some iterations of the loop before the second, like a shared one."""

    instant = False

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        decisions = self.apply(verb, asks, now, at, writes)
        try:
            for _ in range(1 if asks[0][1] == "one" else 6):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if verb == "acquire":  # as every store does
                self.apply("adjust", [(policy, key, tuple(-cost for cost in costs)) for policy, key, costs in asks])
            raise
        return decisions


async def charged(cancel_after, again_after):
    """Cancel a batch after some iterations of the loop, and once more; return what is charged, and its result."""
    store = SlowStore()
    settings = load_settings({"policies": {"api": {"limits": "100/1h fixed_window", "on_store_error": "deny"}}})
    decider = Decider(settings.policies, store)
    task = asyncio.ensure_future(decider.batch(ASKS))
    for turns in (cancel_after, again_after):
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    usage = [(await decider.usage(subject))["1h"].used for subject, _ in ASKS]
    for _ in range(30):
        if usage == [0, 0]:
            break
        await asyncio.sleep(0)
        usage = [(await decider.usage(subject))["1h"].used for subject, _ in ASKS]
    await decider.close()
    return usage, result


async def test_a_batch_that_is_cancelled_twice_leaves_no_charge():
    kept = {}
    for turns in product(range(14), range(9)):
        usage, result = await charged(*turns)
        if usage != ([1, 2] if isinstance(result, list) else [0, 0]):
            kept[turns] = usage
    assert kept == {}
