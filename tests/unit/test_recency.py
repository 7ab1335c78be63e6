"""Recency against an OrderedDict, with a log so short that it is swept all the time."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfold.store import recency
from kvfold.store.recency import Entries, Recency


def numbers(entries: list[int]) -> Entries:
    return np.array(entries, np.int64)


entry = st.integers(0, 29)


class RecencyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(recency, "_BATCH", 2)
        self.patch.setattr(recency, "_SLACK", 4)
        self.patch.setattr(recency, "time", SimpleNamespace(monotonic_ns=lambda: self.clock))
        self.order = Recency(30)
        self.model: OrderedDict[int, int] = OrderedDict()  # entry -> when it was touched

    def teardown(self) -> None:
        self.patch.undo()

    @rule(entries=st.lists(entry, max_size=60))
    def touch(self, entries: list[int]) -> None:
        self.clock += 1
        self.order.touch(numbers(entries))
        for e in entries:
            self.model[e] = self.clock
            self.model.move_to_end(e)

    @rule(few=st.lists(entry, min_size=1, max_size=3), times=st.integers(1, 40))
    def touch_a_few_again_and_again(self, few: list[int], times: int) -> None:
        for _ in range(times):
            self.touch(few)

    @rule(entries=st.lists(entry, max_size=10))
    def drop(self, entries: list[int]) -> None:
        self.order.drop(numbers(entries))
        for e in entries:
            self.model.pop(e, None)

    @rule(count=st.integers(0, 12))
    def pop(self, count: int) -> None:
        expected = list(self.model)[:count]
        assert self.order.pop(count).tolist() == expected
        for e in expected:
            del self.model[e]

    @rule(count=st.integers(1, 12), pinned=st.sets(entry, max_size=25))
    def pop_with_pins(self, count: int, pinned: set[int]) -> None:
        expected = [e for e in self.model if e not in pinned][:count]
        passed = list(self.model)
        if len(expected) == count:
            passed = passed[: passed.index(expected[-1]) + 1]
        popped = self.order.pop(count, lambda asked: ~np.isin(asked, list(pinned)))
        assert popped.tolist() == expected
        for e in passed:
            del self.model[e]

    @rule(more=st.integers(0, 10))
    def grow(self, more: int) -> None:
        self.order.grow(self.order.capacity + more)

    @invariant()
    def agrees(self) -> None:
        assert len(self.order) == len(self.model)
        # The log, read without changing it.
        head, tail = self.order._head, self.order._tail
        assert self.order._live_records(head, tail - head)[0].tolist() == list(self.model)
        assert tail - head <= len(self.order._ring)

    @rule()
    def oldest(self) -> None:
        expected = next(iter(self.model.values()), None)
        assert self.order.oldest_stamp() == expected


TestRecencyMachine = RecencyMachine.TestCase
TestRecencyMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_popped_order_is_the_order_of_touches() -> None:
    random = np.random.default_rng(5)
    order = Recency(50_000)
    model: OrderedDict[int, None] = OrderedDict()
    for _ in range(20):
        batch = random.integers(0, 50_000, 20_000)
        order.touch(batch)
        for e in batch.tolist():
            model[e] = None
            model.move_to_end(e)
    assert order.pop(60_000).tolist() == list(model)
    assert len(order) == 0
    assert order.pop(1).tolist() == []


def test_entries_may_repeat_and_be_absent() -> None:
    order = Recency(8)
    order.touch(numbers([3, 1, 3, 3]))
    assert len(order) == 2
    order.drop(numbers([3, 3, 5]))
    assert len(order) == 1
    assert order.pop(8).tolist() == [1]


def most_stale(order: Recency) -> int:
    return order._tail - order._head - len(order)


def test_stale_records_stay_few_when_some_entries_are_hot() -> None:
    order = Recency(100_000)
    order.touch(np.arange(100_000))
    hot = np.arange(1, 50_000)
    for _ in range(12):
        for begin in range(0, len(hot), 500):
            order.touch(hot[begin : begin + 500])
            assert most_stale(order) < 100_000 // 2 + recency._SLACK
    assert order.pop(2).tolist() == [0, 50_000]


def test_stale_records_stay_few_when_most_entries_are_dropped() -> None:
    order = Recency(100_000)
    order.touch(np.arange(100_000))
    for begin in range(1, 99_000, 500):
        order.drop(np.arange(begin, begin + 500))
        assert most_stale(order) < 100_000 // 2 + recency._SLACK
    assert order.pop(2).tolist() == [0, 99_001]
