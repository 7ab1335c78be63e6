"""What the scheduler's side and workers tell each other, through vLLM's own aggregation."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvfold.vllm.messages import (
    Handshake,
    LoadFailure,
    LoadOrder,
    LoadPart,
    StepOrders,
    StepResults,
    StoreOrder,
)


def failure(load, part=0, index=0):
    return LoadFailure(load, part, index, "lost")


def test_results_of_all_workers_add_up():
    one = StepResults(
        {1: 1, 2: 1},
        {"a": [failure(1)]},
        [(1, 2), (0, 5)],
        {1: bytes([1, 1, 0]), 3: b"\1"},
        ["a"],
    )
    two = StepResults(
        {2: 1, 4: 2},
        {"a": [failure(1, 2, 3)], "b": [failure(9)]},
        [(0, 5), (0, 1)],
        {1: bytes([0, 1, 1]), 2: b"\1"},
        ["b"],
    )
    both = one.aggregate(two)
    assert both is one
    assert both.jobs == {1: 1, 2: 2, 4: 2}
    assert both.failures == {"a": [failure(1), failure(1, 2, 3)], "b": [failure(9)]}
    assert both.conflicts == [(0, 1), (0, 5), (1, 2)]
    assert both.stored == {1: bytes([0, 1, 0]), 2: b"\1", 3: b"\1"}, "only what all of them did"
    assert both.without_draft == ["a", "b"]
    assert two.jobs == {2: 1, 4: 2}


def test_nothing_added_to_nothing_is_nothing():
    assert StepResults().aggregate(StepResults()) == StepResults()


def test_orders_travel_as_they_are():
    blocks = np.array([[1, -1], [3, 4]], dtype=np.int32)
    part = LoadPart(7, 1, b"k" * 64, blocks, optional=True)
    orders = StepOrders(
        [LoadOrder(5, "a", "s", (part,))], [StoreOrder(8, 0, b"n" * 32, b"k" * 64, blocks, True)],
        0.001, True,
    )  # fmt: skip
    sent = pickle.loads(pickle.dumps(orders))
    (load,), (store,) = sent.loads, sent.stores
    assert (load.load, load.req_id, load.store) == (5, "a", "s")
    assert (load.parts[0].ticket, load.parts[0].group, load.parts[0].optional) == (7, 1, True)
    assert (store.job, store.group, store.namespace, store.audit) == (8, 0, b"n" * 32, True)
    for found in (load.parts[0], store):
        assert found.keys == b"k" * 64
        assert found.blocks.dtype == np.int32
        assert found.blocks.tolist() == blocks.tolist()
    assert (sent.pause_s, sent.reset) == (0.001, True)
    assert pickle.loads(pickle.dumps(Handshake("{}", "f"))) == Handshake("{}", "f")


def test_a_long_prompt_s_orders_are_small():
    blocks = np.zeros((8192, 1), dtype=np.int32)
    order = StoreOrder(1, 0, b"n" * 32, bytes(8192 * 32), blocks, False)
    assert len(pickle.dumps(StepOrders(stores=[order]))) < 8192 * (32 + 4) + 2000
