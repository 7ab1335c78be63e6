"""The worker's loads: every load is reported once, complete only if the store held its pins."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvfold.vllm.loads import LoadReport, Loads
from kvfold.vllm.messages import LoadOrder


class Client:
    """Remembers what it was told; answers `done` when the test says so."""

    def __init__(self, store_id="s"):
        self.store_id, self.acked, self.done_for = store_id, [], []

    def ack(self, ticket, indices):
        self.acked += [(ticket, int(i)) for i in indices]

    def done(self, ticket, callback):
        self.done_for.append((ticket, callback))


class Bench:
    def __init__(self, deadline_s=30.0):
        self.copied, self.loaded, self.client = [], [], Client()
        self.loads = Loads(
            self.copy, deadline_s, loaded=lambda key, blocks: self.loaded.append(key)
        )

    def copy(self, connection, blocks, offset):
        self.copied.append((connection, tuple(blocks), offset))
        return 1

    def start(self, ticket=1, chunks=3, req="r", client="same", store="s", connection=1):
        blocks = np.arange(chunks, dtype=np.int32).reshape(-1, 1) + 10
        order = LoadOrder(
            ticket, req, store, b"".join(bytes([i]) * 32 for i in range(chunks)), blocks
        )
        self.loads.start(order, self.client if client == "same" else client, connection)

    def ready(self, indices, ticket=1, connection=1):
        index = np.array(indices, dtype=np.uint32)
        self.loads.ready(connection, ticket, index, index.astype(np.uint64) * 4096)

    def wait(self, condition):
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.001)

    def reports(self, count=1) -> list[LoadReport]:
        found: list[LoadReport] = []

        def enough():
            found.extend(self.loads.take_reports())
            return len(found) >= count

        self.wait(enough)
        return found


@pytest.fixture
def bench():
    b = Bench()
    yield b
    b.loads.close()


def test_a_load_is_complete_only_after_the_store_confirmed(bench):
    bench.start()
    bench.ready([0, 1])
    bench.ready([2])
    bench.wait(lambda: bench.client.done_for)
    assert bench.loads.take_reports() == []
    assert bench.copied == [(1, (10,), 0), (1, (11,), 4096), (1, (12,), 8192)]
    assert bench.client.acked == [(1, 0), (1, 1), (1, 2)]
    bench.client.done_for[0][1](True)
    assert [(r.req_id, r.failure) for r in bench.reports()] == [("r", None)]
    assert bench.loaded == [bytes([i]) * 32 for i in range(3)]


def test_pins_that_were_not_held_make_it_fail(bench):
    bench.start()
    bench.ready([0, 1, 2])
    bench.wait(lambda: bench.client.done_for)
    bench.client.done_for[0][1](False)
    report = bench.reports()[0]
    assert report.failure is not None
    assert report.failure.index == 0
    assert bench.loaded == []


def test_announcements_before_the_order_are_kept(bench):
    bench.ready([0, 1, 2])
    bench.start()
    bench.wait(lambda: bench.client.done_for)
    assert len(bench.copied) == 3


def test_announcements_of_another_connection_are_ignored(bench):
    bench.start(connection=2)
    bench.ready([0, 1, 2], connection=1)
    bench.ready([0], connection=2)
    bench.wait(lambda: bench.copied)
    assert bench.copied == [(2, (10,), 0)]


def test_a_lost_chunk_fails_at_its_index_and_says_done(bench):
    bench.start()
    bench.ready([0, 1])
    bench.loads.lost(1, 1, 2, "corrupt")
    report = bench.reports()[0]
    assert (report.req_id, report.failure.index, report.failure.reason) == ("r", 2, "corrupt")
    assert [t for t, _ in bench.client.done_for] == [1]
    bench.ready([2])  # too late: nothing may be copied any more
    bench.start(ticket=2, chunks=1)
    bench.ready([0], ticket=2)
    bench.wait(lambda: len(bench.client.done_for) == 2)
    assert [c[2] for c in bench.copied] == [0, 4096, 0]


def test_a_dead_store_fails_all_its_loads(bench):
    bench.start(ticket=1, req="a")
    bench.start(ticket=2, req="b")
    bench.start(ticket=3, req="c", connection=2)
    bench.loads.gone(1)
    assert sorted(r.req_id for r in bench.reports(2)) == ["a", "b"]
    assert bench.client.done_for == []


@pytest.mark.parametrize(("client", "store"), [(None, "s"), ("same", "another"), ("same", "")])
def test_a_ticket_of_another_store_fails_at_once(bench, client, store):
    bench.start(client=client, store=store)
    assert bench.reports()[0].failure.index == 0


def test_a_load_that_starts_after_its_store_has_gone_fails_at_once(bench):
    bench.loads.gone(1)
    bench.start(connection=1)
    assert bench.reports()[0].failure.index == 0


def test_a_refused_ticket_is_ended_when_the_store_is_there_again(bench):
    bench.start(client=None)
    bench.reports()
    other, same = Client("other"), Client("s")
    bench.loads.connected(same)
    bench.loads.connected(other)
    bench.wait(lambda: same.done_for)
    assert [t for t, _ in same.done_for] == [1]
    assert other.done_for == []


def test_a_client_that_raises_does_not_swallow_the_report(bench):
    def broken(ticket, callback):
        raise RuntimeError("broken")

    bench.client.done = broken
    bench.start()
    bench.loads.lost(1, 1, 0, "lost")
    assert bench.reports()[0].failure.reason == "lost"


def test_the_arena_of_an_ended_connection_is_let_go_after_its_loads():
    seen = []
    loads = Loads(lambda *_: 1, 30.0, detach=seen.append)
    loads.gone(4)
    loads.close()
    assert seen == [4]


def test_no_progress_ends_at_the_deadline_at_the_first_missing_chunk():
    bench = Bench(deadline_s=0.2)
    try:
        bench.start()
        bench.ready([0])
        report = bench.reports()[0]
        assert report.failure.index == 1
        assert "no progress" in report.failure.reason
    finally:
        bench.loads.close()


def test_a_reset_fails_what_began_before_it(bench):
    bench.start(ticket=1, req="old")
    bench.loads.reset()
    bench.start(ticket=2, req="new", chunks=1)
    bench.ready([0], ticket=2)
    bench.wait(lambda: any(t == 2 for t, _ in bench.client.done_for))
    next(c for t, c in bench.client.done_for if t == 2)(True)
    reports = {r.req_id: r.failure for r in bench.reports(2)}
    assert reports["old"].index == 0
    assert reports["new"] is None


def test_closing_reports_what_is_unfinished():
    bench = Bench()
    bench.start()
    bench.loads.close()
    assert [r.failure.reason for r in bench.loads.take_reports()] == ["the engine is shutting down"]
