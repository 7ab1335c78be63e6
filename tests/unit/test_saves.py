"""The worker's stores: every job is reported once, and only slots that were given are written."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvfold.errors import StoreGone
from kvfold.store.client import EXISTS, NO_ROOM, REFUSED, Verdicts
from kvfold.vllm.messages import StoreOrder
from kvfold.vllm.saves import Saves


class Source:
    """Rank 1 of 2: writes chunks of rotation 1 alone, shares none of rotation 0."""

    rotations, rank, world = 2, 1, 2
    writer_masks = np.array([0b01, 0b10], dtype=np.uint64)

    def __init__(self):
        self.copied, self.fail_at = [], None

    def copy(self, connection, rotation, blocks, offset):
        if self.fail_at == offset:
            raise RuntimeError("broken")
        self.copied.append((connection, rotation, tuple(blocks), offset))
        return 10

    def audit_records(self, blocks):
        return b"x" * 12


class Client:
    def __init__(self, offsets, conflicts=()):
        self.offsets, self.conflicts, self.asked, self.commits = offsets, conflicts, [], []

    def ask(self, job, group, namespace, keys, askers, writers, audit=b"", timeout_s=10):
        if self.offsets is None:
            raise StoreGone("gone")
        self.asked.append((job, group, namespace, keys, askers, writers.tolist(), audit))
        return Verdicts(
            np.array(self.offsets, dtype=np.uint64), np.array(self.conflicts, dtype=np.uint32)
        )

    def commit(self, job, indices, ok):
        self.commits.append((job, indices.tolist(), ok))


def order(first_bytes, job=7, audit=False):
    keys = b"".join(bytes([b]) + bytes(31) for b in first_bytes)
    blocks = np.arange(len(first_bytes), dtype=np.int32).reshape(-1, 1) + 20
    return StoreOrder(job, b"n" * 32, keys, blocks, audit)


def run(source, client, *orders, stored=None):
    saves = Saves(source, 1.0, stored=stored)
    for one in orders:
        saves.submit(one, client, 3, lambda: None)
    reports, deadline = [], time.monotonic() + 10
    while len(reports) < len(orders):
        assert time.monotonic() < deadline
        reports += saves.take_reports()
        time.sleep(0.001)
    saves.close()
    assert saves.take_reports() == []
    return reports, saves.counters


def test_only_given_slots_of_my_own_are_written_and_committed():
    source, client = Source(), Client([0, 4096, EXISTS, NO_ROOM, 8192])
    reports, counters = run(source, client, order([0, 1, 1, 1, 3]))
    assert [(r.job, r.conflicts) for r in reports] == [(7, ())]
    assert source.copied == [(3, 1, (21,), 4096), (3, 1, (24,), 8192)]
    assert client.commits == [(7, [1, 4], True)]
    job, group, namespace, _, askers, writers, audit = client.asked[0]
    assert (job, group, namespace, askers, audit) == (7, 0, b"n" * 32, 0b11, b"")
    assert writers == [0b01, 0b10, 0b10, 0b10, 0b10]
    assert (counters.chunks_written, counters.no_room, counters.bytes) == (2, 1, 20)


def test_commits_come_in_parts_so_that_chunks_are_published_early():
    client = Client([4096 * i for i in range(20)])
    run(Source(), client, order([1] * 20))
    assert [len(c[1]) for c in client.commits] == [8, 8, 4]


def test_a_failed_copy_takes_back_what_is_not_committed():
    source, client = Source(), Client([4096 * i for i in range(20)])
    source.fail_at = 4096 * 10
    reports, _ = run(source, client, order([1] * 20))
    assert client.commits == [(7, list(range(8)), True), (7, list(range(8, 20)), False)]
    assert len(reports) == 1


@pytest.mark.parametrize("client", [None, Client(None)])
def test_without_a_store_the_job_is_reported_and_nothing_is_read(client):
    source = Source()
    reports, counters = run(source, client, order([1]), order([1], job=8))
    assert [r.job for r in reports] == [7, 8]
    assert source.copied == []
    assert counters.dropped_jobs == 2


def test_a_refused_audit_writes_nothing_and_names_the_fragments():
    source, client = Source(), Client([REFUSED, REFUSED], conflicts=[4, 9])
    reports, _ = run(source, client, order([1, 1], audit=True))
    assert client.asked[0][-1] == b"x" * 12
    assert reports[0].conflicts == (4, 9)
    assert source.copied == []
    assert client.commits == []


def test_copies_wait_for_the_step_that_computes_the_blocks():
    source, computed = Source(), threading.Event()
    saves = Saves(source, 1.0)
    saves.submit(order([1]), Client([0]), 3, computed.wait)
    time.sleep(0.05)
    assert source.copied == []
    assert saves.take_reports() == []
    computed.set()
    saves.close()
    assert len(source.copied) == 1


def test_digests_are_taken_of_every_offered_chunk():
    seen = []
    run(
        Source(),
        Client([EXISTS, 0]),
        order([0, 1]),
        stored=lambda k, b: seen.append((k[0], tuple(b))),
    )
    assert seen == [(0, (20,)), (1, (21,))]


def test_a_job_that_waited_too_long_is_dropped_unasked():
    release, source, client = threading.Event(), Source(), Client([0])
    saves = Saves(source, 0.05)
    saves.submit(order([1], job=1), client, 3, release.wait)
    saves.submit(order([1], job=2), client, 3, lambda: None)
    time.sleep(0.1)
    release.set()
    saves.close()
    assert [r.job for r in saves.take_reports()] == [1, 2]
    assert [a[0] for a in client.asked] == [1]
