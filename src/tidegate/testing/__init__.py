"""For tests: a manual clock, and conformance tests for stores and buses.

```python
from tidegate.testing import ManualClock, random_vectors, verify_store

verify_store(MyStore)                     # raises AssertionError with the violated guarantee, the step and the seed
for vector in random_vectors(seed=7, n=100):
    store.apply(vector.verb, vector.asks, now=vector.now, at=vector.at)     # and compare with vector.answers
```
"""

from tidegate._runtime.clock import ManualClock
from tidegate.testing._bus_kit import OpenBus, verify_bus
from tidegate.testing._reference import ExpectedAnswer, ReferenceStore
from tidegate.testing._store_kit import OpenStore, verify_store
from tidegate.testing._vectors import Vector, random_vectors

__all__ = [
    "ExpectedAnswer",
    "ManualClock",
    "OpenBus",
    "OpenStore",
    "ReferenceStore",
    "Vector",
    "random_vectors",
    "verify_bus",
    "verify_store",
]
