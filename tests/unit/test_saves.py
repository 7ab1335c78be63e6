"""The worker's stores: every job is reported once, and only slots that were given are written."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvfold.errors import StoreGone
from kvfold.store.client import EXISTS, NO_ROOM, REFUSED, Verdicts
from kvfold.vllm.messages import NO_BLOCK, StoreOrder
from kvfold.vllm.metrics import Recorder
from kvfold.vllm.saves import Saves


class Source:
    """Two ranks. Group 0: rank 1 writes chunks of rotation 1 alone. Group 1: rank 0 writes all.
    Group 2: both write every chunk."""

    world = 2
    writer_masks = tuple(np.array(masks, np.uint64) for masks in ([0b01, 0b10], [0b01], [0b11]))
    labels, copies_bytes = ("0 full", "1 state", "2 heads"), (100, 50, 40)

    def __init__(self, rank=1):
        self.rank, self.copied, self.audited, self.fail_at = rank, [], [], None

    def copy(self, connection, group, rotation, blocks, offset):
        if self.fail_at == offset:
            raise RuntimeError("broken")
        self.copied.append((connection, group, rotation, tuple(blocks), offset))
        return 10

    def audit_records(self, group, blocks):
        self.audited.append((group, blocks.tolist()))
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


def order(first_bytes, job=7, audit=False, group=0):
    keys = b"".join(bytes([b]) + bytes(31) for b in first_bytes)
    blocks = np.arange(len(first_bytes), dtype=np.int32).reshape(-1, 1) + 20
    return StoreOrder(job, group, b"n" * 32, keys, blocks, audit)


def run(source, client, *orders, offered=None):
    recorder = Recorder()
    saves = Saves(source, 1.0, recorder=recorder, offered=offered)
    for one in orders:
        saves.submit(one, client, 3, lambda: None)
    reports, deadline = [], time.monotonic() + 10
    while len(reports) < len(orders):
        assert time.monotonic() < deadline
        reports += saves.take_reports()
        time.sleep(0.001)
    saves.close()
    assert saves.take_reports() == []
    return reports, recorder.take().data


def test_only_given_slots_of_my_own_are_written_and_committed():
    source, client = Source(), Client([0, 4096, EXISTS, NO_ROOM, 8192])
    reports, figures = run(source, client, order([0, 1, 1, 1, 3]))
    assert [(r.job, r.conflicts) for r in reports] == [(7, ())]
    assert source.copied == [(3, 0, 1, (21,), 4096), (3, 0, 1, (24,), 8192)]
    assert client.commits == [(7, [1, 4], True)]
    job, group, namespace, _, askers, writers, audit = client.asked[0]
    assert (job, group, namespace, askers, audit) == (7, 0, b"n" * 32, 0b11, b"")
    assert writers == [0b01, 0b10, 0b10, 0b10, 0b10]
    assert figures["stored_bytes"] == {"0 full": 20}
    assert figures["stored_chunks"] == {"0 full": 2}
    assert figures["stored_as_tp_copies_bytes"] == {"0 full": 200}
    assert "store_jobs_dropped" not in figures


@pytest.mark.parametrize(("rank", "copied"), [(0, [0, 4096]), (1, [])])
def test_a_rank_that_owns_nothing_of_a_group_asks_and_reports(rank, copied):
    source, client = Source(rank), Client([0, 4096])
    reports, figures = run(source, client, order([5, 6], group=1, audit=True))
    assert [asked[1] for asked in client.asked] == [1]
    assert client.asked[0][5] == [0b01, 0b01]
    assert source.audited == [(1, [[20], [21]])]
    assert [offset for *_, offset in source.copied] == copied
    assert client.commits == ([(7, [0, 1], True)] if copied else [])
    assert [(r.job, r.stored) for r in reports] == [(7, b"\1\1")]
    assert figures.get("stored_chunks", {}) == ({"1 state": 2} if copied else {})


@pytest.mark.parametrize("rank", [0, 1])
def test_chunks_that_several_write_are_counted_once(rank):
    _, figures = run(Source(rank), Client([0, NO_ROOM]), order([0, 0], group=2))
    assert figures["stored_bytes"] == {"2 heads": 10}
    assert figures.get("stored_chunks", {}) == ({} if rank else {"2 heads": 1})
    assert figures.get("chunks_no_room", {}) == ({} if rank else {"": 1})


def test_what_is_stored_is_told_per_chunk():
    client = Client([EXISTS, NO_ROOM, 0, 4096, REFUSED])
    reports, _ = run(Source(), client, order([0, 0, 0, 1, 1]))
    assert [r.stored for r in reports] == [bytes([1, 0, 1, 1, 0])], "others write the third"


def test_commits_come_in_parts_so_that_chunks_are_published_early():
    client = Client([4096 * i for i in range(20)])
    run(Source(), client, order([1] * 20))
    assert [len(c[1]) for c in client.commits] == [8, 8, 4]


def test_a_failed_copy_takes_back_what_is_not_committed():
    source, client = Source(), Client([4096 * i for i in range(20)])
    source.fail_at = 4096 * 10
    reports, figures = run(source, client, order([1] * 20))
    assert client.commits == [(7, list(range(8)), True), (7, list(range(8, 20)), False)]
    assert [(r.job, r.stored) for r in reports] == [(7, bytes(20))]
    assert figures["store_jobs_dropped"] == {"": 1}


@pytest.mark.parametrize("client", [None, Client(None)])
def test_without_a_store_the_job_is_reported_and_nothing_is_read(client):
    source = Source()
    reports, figures = run(source, client, order([1]), order([1, 1], job=8))
    assert [(r.job, r.stored) for r in reports] == [(7, bytes(1)), (8, bytes(2))]
    assert source.copied == []
    assert figures["store_jobs_dropped"] == {"": 2}
    assert sum(n for n, _ in figures["store_seconds"][""].values()) == 2


def test_a_refused_audit_writes_nothing_and_names_the_fragments_of_the_group():
    source, client = Source(), Client([REFUSED, REFUSED], conflicts=[4, 9])
    reports, _ = run(source, client, order([1, 1], audit=True, group=2))
    assert client.asked[0][-1] == b"x" * 12
    assert reports[0].conflicts == ((2, 4), (2, 9))
    assert reports[0].stored == bytes(2)
    assert source.copied == []
    assert client.commits == []


def test_a_chunk_without_all_its_blocks_is_never_read():
    one = order([1, 1], audit=True)
    one.blocks[1, 0] = NO_BLOCK
    source, client, seen = Source(), Client([0, 4096]), []
    reports, _ = run(source, client, one, offered=lambda *chunk: seen.append(chunk))
    assert [(r.job, r.stored) for r in reports] == [(7, bytes(2))]
    assert (source.copied, source.audited, client.asked, seen) == ([], [], [], [])


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
        order([0, 1], group=1),
        offered=lambda group, key, blocks: seen.append((group, key[0], tuple(blocks))),
    )
    assert seen == [(1, 0, (20,)), (1, 1, (21,))]


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


def test_closing_drops_what_is_queued_behind_a_copy_that_runs(monkeypatch):
    monkeypatch.setattr("kvfold.vllm.saves.FINISH_S", 0.05)
    release, source, client = threading.Event(), Source(), Client([0])
    saves = Saves(source, 60.0)
    saves.submit(order([1], job=1), client, 3, release.wait)
    saves.submit(order([1], job=2), client, 3, lambda: None)
    ended = []
    closing = threading.Thread(target=lambda: ended.append(saves.close()))
    closing.start()
    deadline = time.monotonic() + 10
    while not saves._stopped:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert (saves.take_reports(), ended) == ([], [])
    release.set()
    closing.join(timeout=10)
    assert ended == [True]
    assert [(r.job, r.stored) for r in saves.take_reports()] == [(1, b"\1"), (2, b"\0")]
