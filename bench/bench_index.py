"""How fast the key index and the recency order are at a million entries.

Run it for the figures; each function returns them as a dict. The collector is left as it is. The
worst call is given as it passed on the clock, and in time of its own thread: where the two differ,
another process had the core.
"""

from __future__ import annotations

import json
import time

import numpy as np
from numpy.typing import NDArray

from kvfold.store.index import KeyIndex, Keys
from kvfold.store.recency import Recency

ENTRIES = 1_000_000
LOOKUP_BATCH = 8192
CALLS = 100_000
CHUNKS = 64

Seconds = NDArray[np.float64]


def random_keys(random: np.random.Generator, count: int) -> Keys:
    return random.integers(0, 2**64, (count, 4), np.uint64)


def filled(random: np.random.Generator) -> tuple[KeyIndex, Keys]:
    """An index of ENTRIES keys, and the keys by entry."""
    keys = random_keys(random, ENTRIES)
    index = KeyIndex(ENTRIES)
    index.insert(keys, np.arange(ENTRIES))
    return index, keys


def lookups() -> dict[str, float]:
    """Look every key up once, in random order and in batches; then as many absent ones."""
    random = np.random.default_rng(1)
    index, keys = filled(random)
    order = random.permutation(ENTRIES)
    asked = keys[order]
    absent = random_keys(random, ENTRIES)
    figures: dict[str, float] = {}
    for name, batch_keys, expected in (
        ("present", asked, order),
        ("absent", absent, np.full(ENTRIES, -1)),
    ):
        spent_s = []
        for begin in range(0, ENTRIES, LOOKUP_BATCH):
            batch = batch_keys[begin : begin + LOOKUP_BATCH]
            start = time.perf_counter()
            found = index.find(batch)
            spent_s.append(time.perf_counter() - start)
            if not np.array_equal(found, expected[begin : begin + LOOKUP_BATCH]):
                raise SystemExit("the index gave a wrong answer")
        figures[f"{name}_keys_per_s"] = ENTRIES / sum(spent_s)
        figures[f"{name}_worst_batch_ms"] = 1e3 * max(spent_s)
    return figures


def evicting_calls(calls: int = CALLS) -> dict[str, float]:
    """Make room for CHUNKS new keys and add them, in a full index; milliseconds a call."""
    random = np.random.default_rng(2)
    index, _ = filled(random)
    recency = Recency(ENTRIES)
    recency.touch(random.permutation(ENTRIES))
    spent_s = np.zeros((calls, 2))
    for call in range(calls):
        keys = random_keys(random, CHUNKS)
        start = _clocks()
        entries = recency.pop(CHUNKS)
        index.remove(entries)
        index.insert(keys, entries)
        recency.touch(entries)
        spent_s[call] = _clocks() - start
    return _summary(spent_s, CHUNKS)


def touching_calls(calls: int = 2_000) -> dict[str, float]:
    """Touch a batch of random entries of a full order, as a lookup does; milliseconds a call."""
    random = np.random.default_rng(3)
    recency = Recency(ENTRIES)
    recency.touch(random.permutation(ENTRIES))
    spent_s = np.zeros((calls, 2))
    for call in range(calls):
        entries = random.integers(0, ENTRIES, LOOKUP_BATCH)
        start = _clocks()
        recency.touch(entries)
        spent_s[call] = _clocks() - start
    return _summary(spent_s, LOOKUP_BATCH)


def _clocks() -> Seconds:
    return np.array((time.perf_counter(), time.thread_time()))


def _summary(spent_s: Seconds, keys_per_call: int) -> dict[str, float]:
    wall_s, thread_s = spent_s.T
    return {
        "median_ms": 1e3 * float(np.median(wall_s)),
        "p999_ms": 1e3 * float(np.quantile(wall_s, 0.999)),
        "worst_ms": 1e3 * float(wall_s.max()),
        "worst_thread_ms": 1e3 * float(thread_s.max()),
        "keys_per_s": len(spent_s) * keys_per_call / float(wall_s.sum()),
    }


if __name__ == "__main__":
    for measure in (lookups, evicting_calls, touching_calls):
        print(measure.__name__, json.dumps(measure(), indent=2))
