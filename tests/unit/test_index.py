"""KeyIndex against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfold.store.index import KeyIndex, Keys


def rows(names: list[tuple[int, int, int, int]]) -> Keys:
    return np.array(names, np.uint64).reshape(-1, 4)


# Few values per word, so that homes, upper halves and whole words collide all the time.
word = st.sampled_from([0, 1, 2, 7, 2**32, 2**32 + 1, 2**63, 2**64 - 1])
name = st.tuples(word, st.integers(0, 1), st.integers(0, 1), st.sampled_from([0, 2**64 - 1]))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = KeyIndex(4)
        self.model: dict[tuple[int, int, int, int], int] = {}
        self.free = list(range(4))

    @rule(names=st.lists(name, unique=True, max_size=12))
    def insert(self, names: list[tuple[int, int, int, int]]) -> None:
        names = [n for n in names if n not in self.model]
        if len(names) > len(self.free):
            old = self.index.capacity
            new = 2 * (old + len(names))
            self.index.grow(new)
            self.free += range(old, new)
        entries = [self.free.pop() for _ in names]
        self.index.insert(rows(names), np.array(entries, np.int64))
        self.model.update(zip(names, entries, strict=True))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        live = sorted(self.model)
        names = data.draw(st.lists(st.sampled_from(live), unique=True)) if live else []
        entries = [self.model.pop(n) for n in names]
        self.index.remove(np.array(entries, np.int64))
        self.free += entries

    @rule(names=st.lists(name, max_size=12))
    def find(self, names: list[tuple[int, int, int, int]]) -> None:
        found = self.index.find(rows(names))
        assert found.tolist() == [self.model.get(n, -1) for n in names]

    @invariant()
    def everything_is_there(self) -> None:
        assert len(self.index) == len(self.model)
        names = list(self.model)
        assert self.index.find(rows(names)).tolist() == list(self.model.values())
        for key, entry in self.model.items():
            assert tuple(self.index.keys[entry].tolist()) == key


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(st.integers(0, 2**32), st.integers(1, 3000))
@settings(max_examples=15, deadline=None)
def test_random_keys_at_full_capacity(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    keys = random.integers(0, 2**64, (count, 4), np.uint64)
    index = KeyIndex(count)
    entries = random.permutation(count)
    index.insert(keys, entries)
    assert (index.find(keys) == entries).all()

    gone = random.permutation(count)[: count // 2]
    index.remove(entries[gone])
    expected = entries.copy()
    expected[gone] = -1
    assert (index.find(keys) == expected).all()
    # The cells of what was removed are free again: the table holds exactly the live entries.
    assert len(index) == count - len(gone) == np.count_nonzero(index._table)


def test_a_key_differs_in_any_one_bit() -> None:
    index = KeyIndex(8)
    key = rows([(5, 6, 7, 8)])
    index.insert(key, np.array([3]))
    for bit in range(256):
        other = key.copy()
        other[0, bit // 64] ^= np.uint64(1 << (bit % 64))
        assert index.find(other).tolist() == [-1], f"bit {bit}"


@pytest.mark.parametrize("removed", range(16))
def test_a_cluster_wraps_around_the_end_of_the_table(removed: int) -> None:
    index = KeyIndex(4)  # eight cells; all four keys start at the last one
    keys = rows([(7, n, 0, 0) for n in range(4)])
    index.insert(keys, np.arange(4))
    gone = [n for n in range(4) if removed >> n & 1]
    index.remove(np.array(gone, np.int64))
    assert index.find(keys).tolist() == [-1 if n in gone else n for n in range(4)]


def test_empty_batches() -> None:
    index = KeyIndex(0)
    none = rows([])
    index.insert(none, np.zeros(0, np.int64))
    index.remove(np.zeros(0, np.int64))
    assert index.find(none).tolist() == []
    assert index.find(rows([(0, 0, 0, 0)])).tolist() == [-1]


def test_misuse_is_caught() -> None:
    index = KeyIndex(4)
    index.insert(rows([(1, 0, 0, 0)]), np.array([2]))
    with pytest.raises(AssertionError):
        index.remove(np.array([3]))
    with pytest.raises(AssertionError):
        index.insert(rows([(2, 0, 0, 0)]), np.array([4]))
