"""The worker's loads: every load is reported once, complete only if the store held all its pins."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvfold.errors import StoreGone
from kvfold.vllm.loads import LoadReport, Loads
from kvfold.vllm.messages import LoadFailure, LoadOrder, LoadPart
from kvfold.vllm.metrics import Recorder


class Client:
    """Remembers what it was told; answers `done` when the test says so."""

    def __init__(self, store_id="s"):
        self.store_id, self.acked, self.done_for = store_id, [], []
        self.when_done = lambda: None

    def ack(self, ticket, indices):
        self.acked += [(ticket, int(i)) for i in indices]

    def done(self, ticket, callback):
        self.when_done()
        self.done_for.append((ticket, callback))

    def tickets(self):
        return [ticket for ticket, _ in self.done_for]

    def confirm(self, ticket, held=True):
        next(callback for t, callback in self.done_for if t == ticket)(held)


class Bench:
    """Loads over fake copies: slot offset 4096 * i for chunk i."""

    labels = ("0 full", "1 window", "2 draft")

    def __init__(self, deadline_s=30.0, rank=0, clock=time.monotonic):
        self.rank, self.copied, self.loaded, self.detached = rank, [], [], []
        self.client, self.recorder = Client(), Recorder()
        self.copy = lambda group, offset: None
        self.loads = Loads(
            self,
            deadline_s,
            recorder=self.recorder,
            loaded=lambda group, key, blocks: self.loaded.append((group, key[0])),
            clock=clock,
        )

    def copy_in(self, connection, group, blocks, offset):
        self.copy(group, offset)
        self.copied.append((connection, group, tuple(blocks), offset // 4096))
        return 7

    def detach(self, connection):
        self.detached.append(connection)

    def start(self, *parts, load=1, req="r", client="same", store="s", connection=1):
        order = LoadOrder(load, req, store, parts or (part(1),))
        self.loads.start(order, self.client if client == "same" else client, connection)

    def ready(self, indices, ticket=1, connection=1):
        index = np.array(indices, dtype=np.uint32)
        self.loads.ready(connection, ticket, index, index.astype(np.uint64) * 4096)

    def settle(self):
        """Wait until everything posted so far is done with, and let overdue loads expire."""
        for _ in range(2):  # what failed is reported behind what was posted before
            passed = Client("s")
            self.loads.start(LoadOrder(0, "probe", "s", (part(99, 1),)), None, 1)
            self.loads.connected(passed)
            wait(lambda passed=passed: 99 in passed.tickets())

    def reports(self) -> list[LoadReport]:
        self.settle()
        return [r for r in self.loads.take_reports() if r.req_id != "probe"]

    def failures(self) -> list[LoadFailure]:
        """Those of the one load that ended."""
        (report,) = self.reports()
        assert report.req_id == "r"
        return list(report.failures)

    def indices_of(self, group):
        return [index for _, g, _, index in self.copied if g == group]


def part(ticket, chunks=3, group=0, optional=False):
    blocks = np.arange(2 * chunks, dtype=np.int32).reshape(-1, 2) + 10
    keys = b"".join(bytes([i]) * 32 for i in range(chunks))
    return LoadPart(ticket, group, keys, blocks, optional)


def wait(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


@pytest.fixture
def bench():
    b = Bench()
    yield b
    b.loads.close()


# -- one part ----------------------------------------------------------------------------------


def test_a_load_is_complete_only_after_the_store_confirmed(bench):
    bench.start()
    bench.ready([0, 1])
    bench.ready([2])
    assert bench.reports() == []
    assert bench.client.tickets() == [1]
    assert bench.copied == [(1, 0, (10, 11), 0), (1, 0, (12, 13), 1), (1, 0, (14, 15), 2)]
    assert bench.client.acked == [(1, 0), (1, 1), (1, 2)]
    assert bench.loaded == []
    bench.client.confirm(1)
    assert bench.failures() == []
    assert bench.loaded == [(0, 0), (0, 1), (0, 2)]


def test_pins_that_were_not_held_make_it_fail(bench):
    bench.start()
    bench.ready([0, 1, 2])
    bench.settle()
    bench.client.confirm(1, held=False)
    (failure,) = bench.failures()
    assert (failure.load, failure.part, failure.index) == (1, 0, 0)
    assert "hold the pins" in failure.reason
    assert bench.loaded == []


def test_announcements_before_the_order_are_kept(bench):
    bench.ready([0, 1, 2])
    bench.settle()
    bench.start()
    bench.settle()
    assert bench.indices_of(0) == [0, 1, 2]
    assert bench.client.tickets() == [1]


def test_a_chunk_lost_before_the_order_fails_it(bench):
    bench.loads.lost(1, 1, 2, "corrupt")
    bench.start()
    assert bench.failures() == [LoadFailure(1, 0, 2, "corrupt")]


def test_announcements_of_another_connection_are_ignored(bench):
    bench.start(connection=2)
    bench.ready([0, 1, 2], connection=1)
    bench.loads.lost(1, 1, 0, "corrupt")
    bench.ready([0], connection=2)
    assert bench.reports() == []
    assert bench.copied == [(2, 0, (10, 11), 0)]


def test_a_lost_chunk_fails_at_its_index_and_nothing_is_copied_after_it(bench):
    bench.start()
    bench.ready([0, 1])
    bench.loads.lost(1, 1, 2, "corrupt")
    bench.ready([2])
    assert bench.failures() == [LoadFailure(1, 0, 2, "corrupt")]
    bench.ready([2])
    bench.settle()
    assert bench.indices_of(0) == [0, 1]
    assert bench.client.tickets() == [1]


def test_a_dead_store_fails_all_its_loads_and_nobody_is_told(bench):
    bench.start(part(1), part(2), load=1, req="a")
    bench.start(part(3), load=2, req="b")
    bench.start(part(4), load=3, req="c", connection=2)
    bench.ready([0], ticket=1)
    bench.loads.gone(1)
    reports = {r.req_id: [(f.part, f.index) for f in r.failures] for r in bench.reports()}
    assert reports == {"a": [(0, 0), (1, 0)], "b": [(0, 0)]}
    assert bench.client.done_for == []
    assert bench.detached == [1]


@pytest.mark.parametrize(("client", "store"), [(None, "s"), ("same", "another"), ("same", "")])
def test_a_ticket_of_another_store_fails_at_once(bench, client, store):
    bench.start(part(1), part(2), client=client, store=store)
    assert bench.failures() == [LoadFailure(1, 0, 0, "the store is gone")]
    assert bench.client.done_for == []


def test_a_load_without_parts_fails_at_once(bench):
    bench.loads.start(LoadOrder(4, "r", "s", ()), bench.client, 1)
    assert bench.failures() == [LoadFailure(4, 0, 0, "nothing was ordered")]


def test_a_load_that_starts_after_its_store_has_gone_fails_at_once(bench):
    bench.loads.gone(1)
    bench.start(part(1), part(2, 0), part(3))
    assert [f.index for f in bench.failures()] == [0]
    assert bench.client.tickets() == [1, 3], "the same store, over another connection"


def test_refused_tickets_are_ended_when_the_store_is_there_again(bench):
    bench.start(part(1), part(2, 0), part(3), client=None)
    other, same = Client("other"), Client("s")
    bench.loads.connected(same)
    bench.loads.connected(other)
    bench.settle()
    assert same.tickets() == [1, 3], "nobody opened a ticket for no chunks"
    assert other.done_for == []


@pytest.mark.parametrize("lose", [True, False])
def test_a_client_that_raises_does_not_swallow_the_report(bench, lose):
    def broken(ticket, callback):
        raise RuntimeError("broken")

    bench.client.done = broken
    bench.start()
    if lose:
        bench.loads.lost(1, 1, 0, "lost")
    else:
        bench.ready([0, 1, 2])
    (failure,) = bench.failures()
    assert failure.reason == "lost" if lose else "hold the pins" in failure.reason


@pytest.mark.parametrize("error", [RuntimeError("torn"), StoreGone("the store is gone")])
def test_a_copy_that_raises_fails_the_load_at_that_chunk(bench, error, caplog):
    def copy(group, offset):
        if offset == 4096:
            raise error

    bench.copy = copy
    bench.start()
    bench.ready([0, 1, 2])
    (failure,) = bench.failures()
    assert failure.index == 1
    assert str(error) in failure.reason
    assert bench.client.tickets() == [1]
    surprising = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert bool(surprising) == isinstance(error, RuntimeError)


def test_the_arena_of_an_ended_connection_is_let_go_after_its_loads():
    bench = Bench()
    bench.loads.gone(4)
    assert bench.loads.close()
    assert bench.detached == [4]


def test_no_progress_ends_at_the_deadline_at_the_first_missing_chunk():
    bench = Bench(deadline_s=0.2)
    try:
        bench.start()
        bench.ready([0])
        found = []
        wait(lambda: found.extend(bench.loads.take_reports()) or found)
        (failure,) = found[0].failures
        assert failure.index == 1
        assert "no progress" in failure.reason
        assert bench.client.tickets() == [1]
    finally:
        bench.loads.close()


def test_a_reset_fails_what_began_before_it(bench):
    bench.start(part(1, 1), part(2, 1, optional=True), load=1, req="old")
    bench.ready([0], ticket=1)
    bench.settle()
    bench.client.confirm(1)
    bench.loads.reset()
    bench.start(part(3, 1), load=2, req="new")
    bench.ready([0], ticket=3)
    bench.settle()
    bench.client.confirm(3)
    reports = {r.req_id: r.failures for r in bench.reports()}
    assert reports == {"old": (LoadFailure(1, 0, 0, "the cache was reset"),), "new": ()}
    assert bench.client.tickets() == [1, 2, 3]


# -- several parts -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_parts_complete_in_any_order_and_the_load_after_the_last(bench, order):
    bench.start(part(1, 2), part(2, 3, group=1), part(3, 1, group=2))
    chunks = {1: 2, 2: 3, 3: 1}
    for ticket in order:
        bench.ready(range(chunks[ticket]), ticket=ticket)
    bench.settle()
    assert sorted(bench.client.tickets()) == [1, 2, 3]
    for ticket in reversed(order):
        assert bench.reports() == []
        bench.client.confirm(ticket)
    assert bench.failures() == []
    assert sorted(bench.loaded) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert [len(bench.indices_of(group)) for group in range(3)] == [2, 3, 1]


def test_a_part_that_fails_late_fails_the_load(bench):
    bench.start(part(1), part(2, group=1))
    bench.ready([0, 1, 2], ticket=1)
    bench.settle()
    bench.client.confirm(1)
    bench.ready([0, 1], ticket=2)
    bench.settle()
    bench.loads.lost(1, 2, 2, "evicted")
    assert bench.failures() == [LoadFailure(1, 1, 2, "evicted")]
    assert bench.client.tickets() == [1, 2]
    assert bench.loaded == []


def test_a_failed_part_stops_the_others_before_it_is_reported(bench):
    bench.start(part(1), part(2, group=1))
    bench.ready([0], ticket=2)
    early = []
    bench.client.when_done = lambda: early.extend(bench.loads.take_reports())
    bench.loads.lost(1, 1, 0, "evicted")
    bench.ready([1, 2], ticket=2)
    assert bench.failures() == [LoadFailure(1, 0, 0, "evicted")]
    assert early == [], "reported before the store was told that the tickets are done with"
    assert bench.client.tickets() == [1, 2]
    assert bench.indices_of(1) == [0]


def test_a_failed_load_may_still_be_told_that_pins_were_held(bench):
    bench.start(part(1), part(2))
    bench.ready([0, 1, 2], ticket=1)
    bench.loads.lost(1, 2, 1, "evicted")
    bench.settle()
    bench.client.confirm(1)
    bench.client.confirm(2)
    assert bench.failures() == [LoadFailure(1, 1, 1, "evicted")]


def test_all_parts_that_are_known_to_fail_are_reported(bench):
    inside, go = threading.Event(), threading.Event()

    def copy(group, offset):
        inside.set()
        assert go.wait(10)

    bench.copy = copy
    bench.start(part(1), part(2, group=1), part(3, group=2))
    bench.ready([0], ticket=1)
    assert inside.wait(10)
    bench.loads.lost(1, 3, 1, "corrupt")
    bench.loads.lost(1, 2, 2, "evicted")
    go.set()
    assert bench.failures() == [LoadFailure(1, 1, 2, "evicted"), LoadFailure(1, 2, 1, "corrupt")]


@pytest.mark.parametrize("reset_first", [True, False])
def test_of_two_failures_of_a_part_the_earlier_chunk_counts(bench, reset_first):
    inside, go = threading.Event(), threading.Event()

    def copy(group, offset):
        inside.set()
        assert go.wait(10)

    bench.copy = copy
    bench.start()
    bench.ready([0])
    assert inside.wait(10)
    failures = [bench.loads.reset, lambda: bench.loads.lost(1, 1, 2, "evicted")]
    for fail in failures if reset_first else reversed(failures):
        fail()
    go.set()
    assert bench.failures() == [LoadFailure(1, 0, 0, "the cache was reset")]


def test_an_optional_part_may_fail(bench, caplog):
    caplog.set_level(logging.DEBUG, logger="vllm.kvfold.vllm.loads")
    bench.start(part(1, 2), part(2, 2, group=2, optional=True))
    bench.ready([0], ticket=2)
    bench.loads.lost(1, 2, 1, "evicted")
    bench.ready([1], ticket=2)
    bench.ready([0, 1], ticket=1)
    assert bench.reports() == []
    assert bench.client.tickets() == [2, 1]
    bench.client.confirm(2, held=False)
    bench.client.confirm(1)
    assert bench.failures() == []
    assert bench.indices_of(2) == [0], "nothing is copied after the failure"
    assert bench.loaded == [(0, 0), (0, 1)], "no digest of what is not all there"
    assert bench.loads.optional_failures == 1
    assert not [r for r in caplog.records if r.levelno > logging.DEBUG and "r failed" in r.message]


def test_an_optional_part_that_fails_last_ends_the_load(bench):
    bench.start(part(1, 1), part(2, 1, optional=True))
    bench.ready([0], ticket=1)
    bench.settle()
    bench.client.confirm(1)
    assert bench.reports() == []
    bench.loads.lost(1, 2, 0, "evicted")
    assert bench.failures() == []


def test_an_optional_part_must_have_held_its_pins_to_be_digested(bench):
    bench.start(part(1, 1), part(2, 1, group=2, optional=True))
    bench.ready([0], ticket=1)
    bench.ready([0], ticket=2)
    bench.settle()
    bench.client.confirm(2, held=False)
    bench.client.confirm(1)
    assert bench.failures() == []
    assert bench.loaded == [(0, 0)]


def test_a_part_without_chunks_has_no_ticket_and_is_complete(bench):
    bench.start(part(0, 0), part(2, 1, group=1))
    bench.ready([0], ticket=2)
    bench.settle()
    bench.client.confirm(2)
    assert bench.failures() == []
    assert bench.client.tickets() == [2]
    bench.start(part(0, 0), part(0, 0, group=1), load=2)
    assert bench.failures() == []
    bench.start(part(0, 0), part(3, 1), load=3)
    bench.loads.lost(1, 3, 0, "evicted")
    bench.settle()
    assert bench.client.tickets() == [2, 3]


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def timed():
    """A bench whose time stands still, with a deadline of 30 s."""
    clock = Clock()
    b = Bench(clock=clock)
    b.now = clock
    yield b
    b.loads.close()


def test_a_load_whose_other_part_goes_on_is_not_overdue(timed):
    timed.start(part(1), part(2, group=1))
    timed.ready([0], ticket=1)
    timed.settle()
    for index in range(2):
        timed.now.now_s += 20
        timed.ready([index], ticket=2)
        assert timed.reports() == []
    timed.now.now_s += 29
    assert timed.reports() == []
    timed.now.now_s += 1
    assert [(f.part, f.index) for f in timed.failures()] == [(0, 1), (1, 2)]
    assert timed.client.tickets() == [1, 2]


def test_an_overdue_part_is_not_waited_for_if_it_is_optional(timed):
    timed.start(part(1, 1), part(2, group=2, optional=True))
    timed.ready([0], ticket=1)
    timed.settle()
    timed.client.confirm(1)
    timed.now.now_s += 31
    assert timed.reports() == [], "the confirmation was progress"
    timed.now.now_s += 31
    assert timed.failures() == []
    assert timed.client.tickets() == [1, 2]


def test_an_unconfirmed_part_is_overdue_as_a_whole(timed):
    timed.start(part(1, 1), part(2, 1))
    timed.ready([0], ticket=1)
    timed.ready([0], ticket=2)
    timed.settle()
    timed.client.confirm(1)
    timed.settle()
    timed.now.now_s += 31
    assert [(f.part, f.index) for f in timed.failures()] == [(1, 0)]


def test_a_load_is_overdue_also_while_others_are_busy(timed):
    reports = []

    def copy(group, offset):
        """The next chunk is announced before this one is copied, as long as anything goes on."""
        timed.now.now_s += 1
        reports.extend(timed.loads.take_reports())
        if not reports and timed.now.now_s < 200:
            timed.ready([0], ticket=2)

    timed.copy = copy
    timed.start(part(1), req="stuck")
    timed.start(part(2), load=2, req="busy")
    timed.ready([0], ticket=2)
    wait(lambda: reports or timed.now.now_s >= 200)
    assert [(r.req_id, r.failures[0].reason) for r in reports] == [
        ("stuck", "no progress for 30 s")
    ]


def test_what_was_announced_in_time_is_not_overdue(timed):
    def copy(group, offset):
        if group == 0:  # the machine stands still
            timed.now.now_s += 40
            timed.ready([0], ticket=2)

    timed.copy = copy
    timed.start(part(1), req="slow")
    timed.start(part(2, group=1), load=2, req="waiting")
    timed.settle()
    timed.ready([0], ticket=1)
    assert timed.reports() == []
    assert timed.indices_of(1) == [0]


def test_every_load_has_its_own_deadline(timed):
    for n in range(4):
        timed.start(part(n), load=n, req=f"r{n}")
        timed.settle()
        timed.now.now_s += 8
    overdue = []
    for _ in range(8):
        overdue.append([r.req_id for r in timed.reports()])
        timed.now.now_s += 4
    assert overdue == [["r0"], [], ["r1"], [], ["r2"], [], ["r3"], []]


# -- the end -----------------------------------------------------------------------------------


def test_closing_reports_what_is_unfinished():
    bench = Bench()
    bench.start(part(1), part(2))
    bench.start(part(3, 1), part(4, 1, optional=True), load=2, req="all but the draft")
    bench.ready([0])
    bench.ready([0], ticket=3)
    bench.settle()
    bench.client.confirm(3)
    assert bench.loads.close()
    reports = {r.req_id: r.failures for r in bench.loads.take_reports()}
    reason = "the engine is shutting down"
    assert reports["r"] == (LoadFailure(1, 0, 1, reason), LoadFailure(1, 1, 0, reason))
    assert reports["all but the draft"] == ()
    assert sorted(bench.client.tickets()) == [1, 2, 3, 4]


def test_closing_waits_for_the_copy_that_runs():
    bench = Bench()
    inside, go, ended = threading.Event(), threading.Event(), []

    def copy(group, offset):
        inside.set()
        assert go.wait(10)

    bench.copy = copy
    bench.start(part(1), part(2, group=1))
    bench.ready([0], ticket=1)
    assert inside.wait(10)
    closing = threading.Thread(target=lambda: ended.append(bench.loads.close()))
    closing.start()
    closing.join(timeout=0.05)
    assert ended == []
    assert bench.loads.take_reports() == []
    assert bench.client.done_for == []
    go.set()
    closing.join(timeout=10)
    assert ended == [True]
    assert [(f.part, f.index) for f in bench.loads.take_reports()[0].failures] == [(0, 1), (1, 0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_worker_counts_its_bytes_and_one_counts_chunks(rank):
    bench = Bench(rank=rank)
    try:
        bench.start(part(1, 2), part(2, 1, group=1), part(3, 1, group=2, optional=True))
        bench.ready([0, 1], ticket=1)
        bench.ready([0], ticket=2)
        bench.loads.lost(1, 3, 0, "evicted")
        bench.settle()
        bench.client.confirm(1)
        bench.client.confirm(2)
        bench.settle()
        data = bench.recorder.take().data
        assert data["loaded_bytes"] == {"0 full": 14, "1 window": 7}
        assert data.get("loaded_chunks", {}) == ({} if rank else {"0 full": 2, "1 window": 1})
        assert sum(n for n, _ in data["load_seconds"][""].values()) == 1
    finally:
        bench.loads.close()
