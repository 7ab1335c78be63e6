"""The ticket table of docs/protocol.md, row by row."""

from __future__ import annotations

import pytest
from core_world import OTHER_SPACE, PAYLOAD, Peer, World, content, key

from kvfold.errors import FormatError
from kvfold.store.disk import ReadOutcome


def engine(world: World, ranks: int = 1, name: str = "e") -> tuple[Peer, list[Peer]]:
    scheduler = world.connect("scheduler", name)
    return scheduler, [world.connect("worker", name, rank) for rank in range(ranks)]


def filled(world: World, worker: Peer, count: int, job: int = 1000) -> None:
    """Have chunks 0..count-1 on disk, all that fit in host too."""
    for number in range(count):
        worker.store(job + number, number)
        world.run_disk()


def copy_all(worker: Peer, ticket: int, numbers: list[int]) -> None:
    """Read and acknowledge what is announced, until nothing more comes."""
    seen = worker.copied[ticket]
    while True:
        new = {i: o for i, o in worker.ready(ticket).items() if i not in seen}
        if not new:
            return
        for i, offset in new.items():
            assert worker.read(offset) == content(key(numbers[i]))
        seen.update(new)
        worker.ack(ticket, *new)
        worker.world.run_disk()


def test_a_ticket_of_warm_chunks_is_announced_in_order_and_held() -> None:
    world = World()
    scheduler, (worker,) = engine(world)
    worker.store(1, 1, 2, 3)
    scheduler.open(5, 3, 1, 2)
    ready = worker.ready(5)
    assert list(ready) == [0, 1, 2]
    assert worker.read(ready[0]) == content(key(3))
    assert int(world.core.table.pins.sum()) == 3
    worker.ack(5, 0, 1, 2)
    assert not world.core.table.pins.any()
    assert worker.done(5) is True
    world.check()
    assert world.core.tickets.open == 0


def test_done_before_the_last_acknowledgement_is_not_held() -> None:
    world = World()
    scheduler, (worker,) = engine(world)
    worker.store(1, 1, 2)
    scheduler.open(5, 1, 2)
    worker.ack(5, 1)
    assert worker.done(5) is False
    world.check()
    assert not world.core.table.pins.any()


def test_a_ticket_without_chunks_is_held_at_once() -> None:
    world = World()
    scheduler, (worker,) = engine(world)
    scheduler.open(5)
    assert worker.done(5) is True


def test_chunks_on_disk_are_read_once_for_all_readers() -> None:
    world = World(slots=8, disk_slots=20)
    scheduler, workers = engine(world, 2)
    filled(world, workers[0], 16)
    assert workers[0].lookup(0, 1) == [1, 1]
    before = world.core.disk.loaded_chunks
    scheduler.open(5, 0, 1, readers=3)
    assert workers[0].ready(5) == {}
    world.run_disk()
    for worker in workers:
        copy_all(worker, 5, [0, 1])
    assert world.core.disk.loaded_chunks == before + 2
    assert [worker.done(5) for worker in workers] == [True, True]
    world.check()


def test_announcements_keep_the_order_when_reads_do_not() -> None:
    world = World(slots=8, disk_slots=20)
    scheduler, (worker,) = engine(world)
    filled(world, worker, 12)
    scheduler.open(5, 0, 1)
    orders = world.orders(2)
    world.finish(orders[1])
    assert worker.ready(5) == {}
    world.finish(orders[0])
    assert list(worker.ready(5)) == [0, 1]


def test_a_prefix_larger_than_the_arena_streams_through_its_window() -> None:
    world = World(slots=4, disk_slots=40)
    scheduler, workers = engine(world, 2)
    filled(world, workers[0], 20)
    numbers = list(range(20))
    scheduler.open(5, *numbers, readers=3)
    for _ in range(40):
        world.run_disk()
        for worker in workers:
            copy_all(worker, 5, numbers)
        world.check()
    assert [worker.done(5) for worker in workers] == [True, True]


def test_two_large_tickets_do_not_wait_for_each_other() -> None:
    world = World(slots=3, disk_slots=60)
    (s1, (w1,)), (s2, (w2,)) = engine(world, 1, "e1"), engine(world, 1, "e2")
    filled(world, w1, 20)
    numbers = list(range(20))
    s1.open(1, *numbers)
    s2.open(1, *reversed(numbers))
    assert world.core.tickets.queued == 1
    for _ in range(60):
        world.run_disk()
        copy_all(w1, 1, numbers)
        copy_all(w2, 1, numbers[::-1])
        if w1.ready(1) and len(w1.ready(1)) == 20 and world.core.tickets.open == 2:
            assert w1.done(1) is True
        world.check()
    assert w2.done(1) is True
    assert world.core.tickets.open == 0


def test_tickets_are_admitted_in_order_of_opening() -> None:
    world = World(slots=16)
    scheduler, (worker,) = engine(world)
    worker.store(1, *range(14))
    for ticket in range(1, 4):  # windows of 6 of at most 12
        scheduler.open(ticket, *range(12))
    scheduler.open(4, 0)
    assert [bool(worker.ready(t)) for t in (1, 2, 3, 4)] == [True, True, False, False]
    assert len(worker.ready(1)) == 6
    worker.done(1)
    assert [bool(worker.ready(t)) for t in (3, 4)] == [True, False]
    worker.done(2)
    assert worker.ready(4)
    world.check()


def test_while_a_ticket_waits_jobs_leave_it_room() -> None:
    world = World(slots=16)
    scheduler, (worker,) = engine(world)
    worker.store(1, *range(14))
    held = worker.ask(2, tuple(range(100, 110)), 1)
    assert sum(o < 2**63 for o in held) == 10
    scheduler.open(1, *range(4, 14))
    assert world.core.tickets.queued == 1  # a window of 6 beside 10 slots of jobs: more than 14
    assert worker.ask(3, (200,), 1)[0] > 2**63
    worker.commit(2, 0, 1)
    assert world.core.tickets.queued == 0
    world.check()


def test_a_chunk_that_is_nowhere_fails_the_ticket_there() -> None:
    world = World()
    scheduler, workers = engine(world, 2)
    workers[0].store(1, 1, 2)
    scheduler.open(5, 1, 9, 2, readers=3)
    for worker in workers:
        failed = worker.failed(5)
        assert failed is not None
        assert failed.index == 1
        assert list(worker.ready(5)) == [0]
    assert int(world.core.table.pins.sum()) == 1  # chunk 0 until both have let go
    workers[0].ack(5, 0)
    assert workers[0].done(5) is False
    assert int(world.core.table.pins.sum()) == 1
    assert workers[1].done(5) is False
    assert not world.core.table.pins.any()
    assert workers[0].lookup(1, 2) == [2, 2]
    world.check()


def test_a_chunk_being_written_is_not_there_yet() -> None:
    world = World()
    scheduler, (worker,) = engine(world)
    worker.ask(1, (1,), 1)
    scheduler.open(5, 1)
    assert worker.failed(5) is not None


def test_a_chunk_of_another_namespace_or_length_is_not_this_one() -> None:
    world = World()
    scheduler, (worker,) = engine(world)
    worker.store(1, 1)
    scheduler.open(5, 1, space=OTHER_SPACE)
    assert worker.failed(5) is not None
    other = world.connect("scheduler", "e2", groups=[world.group(payload_bytes=PAYLOAD - 1)])
    reader = world.connect("worker", "e2")
    other.open(5, 1)
    assert reader.failed(5) is not None


@pytest.mark.parametrize("damage", [ReadOutcome.CORRUPT_CHECKSUM, 5])
def test_a_chunk_that_cannot_be_read_fails_the_ticket_and_is_gone(damage: object) -> None:
    world = World(slots=4, disk_slots=20)
    scheduler, (worker,) = engine(world)
    filled(world, worker, 8)
    scheduler.open(5, 0, 1)
    world.finish(world.orders(1)[0], damage)
    failed = worker.failed(5)
    assert failed is not None
    assert failed.index == 0
    worker.done(5)
    world.run_disk()
    assert worker.lookup(0)[0] == 0
    assert worker.lookup(1)[0] != 0  # a good neighbour stays
    disk = world.core.status()["disk"]
    assert (disk["corrupt_chunks"], disk["failed_reads"]) in {(1, 0), (0, 1)}
    world.check()


def test_one_damaged_chunk_fails_every_ticket_that_needs_it() -> None:
    world = World(slots=12, disk_slots=40)
    (s1, (w1,)), (s2, (w2,)) = engine(world, 1, "e1"), engine(world, 1, "e2")
    filled(world, w1, 20)
    s1.open(1, 0)
    s2.open(1, 1, 0)
    orders = world.orders(1) + world.orders(1)
    assert [o.key for o in orders] == [key(0), key(1)]  # 0 is read once
    world.finish(orders[0], ReadOutcome.CORRUPT_KEY)
    world.finish(orders[1])
    assert w1.failed(1) is not None
    failed = w2.failed(1)
    assert failed is not None
    assert failed.index == 1
    world.check()


def test_a_key_twice_in_a_ticket() -> None:
    world = World(slots=8, disk_slots=30)
    scheduler, (worker,) = engine(world)
    filled(world, worker, 16)
    numbers = [0, 1, 0, 0]
    scheduler.open(5, *numbers)
    for _ in range(4):
        world.run_disk()
        world.check()
        copy_all(worker, 5, numbers)
    assert worker.done(5) is True
    scheduler.open(6, *numbers)
    for order in world.orders(4):
        world.finish(order, ReadOutcome.CORRUPT_CHECKSUM)
        world.check()
    worker.done(6)
    world.check()


def test_a_reader_that_is_not_connected_fails_the_ticket() -> None:
    world = World()
    scheduler, (worker,) = engine(world)
    worker.store(1, 1)
    scheduler.open(5, 1, readers=3)
    failed = worker.failed(5)
    assert failed is not None
    assert failed.index == 0
    assert worker.done(5) is False
    assert world.core.tickets.open == 0


@pytest.mark.parametrize("how", ["bye", "exit"])
def test_a_reader_that_leaves_fails_the_ticket_for_the_others(how: str) -> None:
    world = World()
    scheduler, workers = engine(world, 2)
    workers[0].store(1, 1, 2)
    scheduler.open(5, 1, 2, readers=3)
    getattr(workers[1], how)()
    assert workers[0].failed(5) is not None
    workers[0].ack(5, 0, 1)
    assert not world.core.table.pins.any()
    assert workers[0].done(5) is False
    world.check()


def test_a_vanished_reader_keeps_its_pins_until_its_process_has_exited() -> None:
    world = World(slots=4)
    scheduler, workers = engine(world, 2)
    workers[0].store(1, 1)
    scheduler.open(5, 1, readers=3)
    offset = workers[1].ready(5)[0]
    workers[1].vanish()
    assert workers[0].done(5) is False
    for job in range(2, 12):
        workers[0].store(job, job)
        assert workers[1].read(offset) == content(key(1))
    world.check()
    assert workers[0].lookup(1) == [2]
    workers[1].exit()
    assert not world.core.table.pins.any()
    world.check()


def test_a_reader_that_gives_up_ends_it_for_all() -> None:
    world = World()
    scheduler, workers = engine(world, 2)
    workers[0].store(1, 1, 2)
    scheduler.open(5, 1, 2, readers=3)
    assert workers[0].done(5) is False
    assert workers[1].failed(5) is not None
    assert workers[1].done(5) is False
    assert world.core.tickets.open == 0
    world.check()


def test_done_is_held_for_who_has_all_even_if_another_fails_later() -> None:
    world = World()
    scheduler, workers = engine(world, 2)
    workers[0].store(1, 1)
    scheduler.open(5, 1, readers=3)
    workers[0].ack(5, 0)
    assert workers[0].done(5) is True
    workers[1].vanish()
    workers[1].exit()
    assert world.core.tickets.open == 0
    world.check()


def test_done_of_an_unknown_ticket_is_not_held_and_is_remembered() -> None:
    world = World()
    scheduler, workers = engine(world, 2)
    workers[0].store(1, 1)
    assert workers[1].done(5) is False
    scheduler.open(5, 1, readers=3)
    assert workers[0].ready(5) == {}
    failed = workers[0].failed(5)
    assert failed is not None
    assert failed.index == 0
    assert workers[0].done(5) is False
    scheduler.open(6, 1, readers=3)  # another ticket is not concerned
    assert workers[0].ready(6)


def test_the_scheduler_leaves_and_its_tickets_fail() -> None:
    world = World(slots=4, disk_slots=20)
    scheduler, (worker,) = engine(world)
    filled(world, worker, 8)
    scheduler.open(5, 0, 1)
    scheduler.vanish()
    assert worker.failed(5) is not None
    world.run_disk()
    assert worker.done(5) is False
    world.check()
    assert not world.core.table.pins.any()


def test_a_ticket_that_the_store_cannot_serve_fails_in_time() -> None:
    world = World(slots=2, disk_slots=10)
    scheduler, (worker,) = engine(world)
    filled(world, worker, 4)
    stuck = worker.ask(77, (50,), 1)
    assert stuck[0] < 2**63
    scheduler.open(5, 0)
    assert world.core.tickets.queued == 1
    world.advance(20)
    assert worker.failed(5) is None
    world.advance(11)
    assert worker.failed(5) is not None
    assert worker.done(5) is False
    world.check()


def test_a_slow_reader_is_not_the_stores_fault() -> None:
    world = World(slots=4)
    scheduler, (worker,) = engine(world)
    worker.store(1, 1, 2)
    scheduler.open(5, 1, 2)
    world.advance(10_000)
    assert worker.failed(5) is None
    worker.ack(5, 0)
    worker.ack(5, 1)
    assert worker.done(5) is True


def test_malformed_tickets() -> None:
    world = World()
    scheduler, (worker,) = engine(world)
    worker.store(1, 1)
    scheduler.open(5, 1)
    with pytest.raises(FormatError):
        scheduler.open(5, 1)
    with pytest.raises(FormatError):
        scheduler.open(6, 1, readers=0)
    with pytest.raises(FormatError):
        worker.ack(5, 1)
    with pytest.raises(FormatError):
        worker.open(7, 1)
    with pytest.raises(FormatError):
        scheduler.ack(5, 0)
    worker.ack(99, 0)  # unknown: it may have been closed already
    world.check()


def test_a_stopping_store_opens_no_tickets() -> None:
    world = World()
    scheduler, (worker,) = engine(world)
    worker.store(1, 1)
    world.core.stop(True, lambda _: None)
    scheduler.open(5, 1)
    assert worker.failed(5) is not None


def test_pinned_chunks_are_never_evicted() -> None:
    world = World(slots=8)
    scheduler, (worker,) = engine(world)
    worker.store(1, 1, 2, 3)
    scheduler.open(5, 1, 2, 3)
    offsets = worker.ready(5)
    for job in range(10, 40):
        worker.store(job, job)
    for i, number in enumerate((1, 2, 3)):
        assert worker.read(offsets[i]) == content(key(number))
    world.check()


def test_a_window_shrinks_with_what_is_left_and_lets_the_next_ticket_in() -> None:
    world = World(slots=16)
    scheduler, (worker,) = engine(world)
    worker.store(1, *range(14))
    scheduler.open(1, *range(6))
    scheduler.open(2, *range(6))
    scheduler.open(3, *range(6))
    assert worker.ready(3) == {}
    worker.ack(1, 0, 1, 2)
    worker.ack(2, 0, 1, 2)
    assert len(worker.ready(3)) == 6  # nobody is done, but two times three slots are enough
    world.check()


def test_a_ticket_that_finds_no_slot_goes_on_when_one_is_free() -> None:
    world = World(slots=4, disk_slots=30)
    scheduler, (worker, other) = engine(world, 2)
    filled(world, worker, 8)
    stuck = other.ask(77, (50, 51), 2)  # two slots that wait for the exit of their writer
    assert max(stuck) < 2**63
    other.vanish()
    world.connect(rank=1).ask(78, (52, 53), 2)  # and two that are written
    scheduler.open(5, 0)
    assert world.core.tickets.queued == 0
    world.run_disk()
    assert worker.ready(5) == {}
    other.exit()
    world.run_disk()
    assert worker.read(worker.ready(5)[0]) == content(key(0))
    world.check()
