"""Write-through, its bound, its failures, draining, and what a scan finds."""

from __future__ import annotations

import numpy as np
from core_world import NO_SPACE, OTHER_SPACE, SLOT, World, content, key

from kvfold.store.core_disk import Drained
from kvfold.store.disk import ReadOutcome


def disk_figures(world: World) -> dict[str, object]:
    figures = world.core.status()["disk"]
    assert isinstance(figures, dict)
    return figures


def test_a_published_chunk_is_written_and_survives_its_eviction() -> None:
    world = World(slots=4, disk_slots=50)
    worker = world.connect()
    for number in range(12):
        worker.store(number, number)
        world.run_disk()
        world.check()
    assert worker.lookup(0, 11) == [1, 2]
    assert disk_figures(world)["stored_chunks"] == 12
    world.check_bytes()


def test_eviction_from_host_writes_nothing() -> None:
    world = World(slots=8, disk_slots=50)
    worker = world.connect()
    for number in range(20):
        worker.store(number, number)
    assert disk_figures(world)["stored_chunks"] == 0
    world.run_disk()
    figures = disk_figures(world)
    assert figures["skipped_chunks"] + figures["stored_chunks"] == 20  # type: ignore[operator]
    assert figures["stored_chunks"] == 8
    world.check()


def test_queued_chunks_are_pinned_a_quarter_at_most_and_the_others_follow() -> None:
    world = World(slots=16, disk_slots=50)
    worker = world.connect()
    worker.store(1, *range(10))
    assert disk_figures(world)["queued_writes"] == 4
    world.check()
    world.run_disk()
    assert disk_figures(world)["stored_chunks"] == 10
    assert disk_figures(world)["skipped_chunks"] == 0
    world.check()


def test_reads_for_tickets_go_before_writes() -> None:
    world = World(slots=8, disk_slots=50)
    scheduler, worker = world.connect("scheduler"), world.connect()
    for number in range(16):
        worker.store(number, number)
        world.run_disk()
    worker.store(100, 100)
    scheduler.open(1, 0)
    orders = world.orders(8)
    assert [order.is_read for order in orders] == [True]
    assert [order.is_read for order in world.orders(8)] == [False]


def test_a_task_holds_so_many_chunks_and_bytes() -> None:
    world = World(slots=16, disk_slots=50)
    worker = world.connect()
    worker.store(1, *range(4))
    assert len(world.core.disk.take(8, 2 * 64)) == 2
    assert len(world.core.disk.take(8, 1)) == 1  # never none, however large the chunk
    assert len(world.core.disk.take(8, 1000)) == 1


def test_the_disk_overwrites_what_was_used_least_recently() -> None:
    world = World(slots=8, disk_slots=6)
    worker = world.connect()
    for number in range(6):
        worker.store(number, number)
        world.run_disk()
    worker.lookup(0)
    for number in range(6, 10):
        worker.store(number, number)
        world.run_disk()
        world.check()
    on_disk = {held[0] for held in world.disk.held.values() if held}  # type: ignore[union-attr]
    assert on_disk == {key(n) for n in (0, 5, 6, 7, 8, 9)}
    assert disk_figures(world)["evicted_chunks"] == 4
    world.check_bytes()


def test_a_full_disk_pauses_and_heals_by_itself() -> None:
    world = World(slots=16, disk_slots=50)
    worker = world.connect()
    worker.store(1, 1, 2, 3)
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        (order,) = world.orders(1)
        world.finish(order, NO_SPACE)
        world.check()
        assert disk_figures(world)["paused"]
        assert not world.orders(8)
        world.advance(pause_s - 0.5)
        assert not world.orders(8)
        world.advance(1)
    assert worker.lookup(1, 2, 3) == [2, 2, 2]
    assert disk_figures(world)["failed_writes"] == 8
    world.run_disk()
    figures = disk_figures(world)
    assert (figures["stored_chunks"], figures["paused"]) == (3, False)
    world.check()
    world.check_bytes()


def test_a_success_ends_the_episode() -> None:
    world = World(slots=16, disk_slots=50)
    worker = world.connect()
    worker.store(1, 1)
    world.finish(world.orders(1)[0], NO_SPACE)
    world.advance(1.5)
    world.run_disk()
    worker.store(2, 2)
    world.finish(world.orders(1)[0], NO_SPACE)
    world.advance(1.5)  # the first pause again, not the second
    assert world.orders(1)


def test_several_failures_at_once_are_one_pause() -> None:
    world = World(slots=16, disk_slots=50)
    worker = world.connect()
    worker.store(1, 1, 2, 3, 4)
    for order in world.orders(4):
        world.finish(order, NO_SPACE)
    world.advance(1.5)
    assert world.orders(1)


def test_a_chunk_may_be_evicted_while_the_disk_refuses_writes() -> None:
    world = World(slots=4, disk_slots=50)
    worker = world.connect()
    worker.store(1, 1)
    world.finish(world.orders(1)[0], NO_SPACE)
    for number in range(10, 20):
        worker.store(number, number)
        world.check()
    assert worker.lookup(1) == [0]
    world.advance(5)
    world.run_disk()
    world.check()
    assert disk_figures(world)["skipped_chunks"] > 0  # type: ignore[operator]


def test_a_group_may_stay_off_the_disk() -> None:
    world = World(slots=8, disk_slots=50)
    worker = world.connect(groups=[world.group(durable=False)])
    worker.store(1, 1)
    assert not world.orders(1)
    drained: list[Drained] = []
    world.core.flush(drained.append)
    assert drained == [Drained(0, 0)]


def test_flush_writes_all_and_reports_when_done() -> None:
    world = World(slots=16, disk_slots=50)
    worker = world.connect()
    worker.store(1, *range(12))
    drained: list[Drained] = []
    world.core.flush(drained.append)
    assert drained == []
    world.run_disk()
    assert drained == [Drained(12, 0)]
    world.core.flush(drained.append)
    assert drained[1] == Drained(0, 0)


def test_flush_of_a_disk_that_refuses_reports_what_is_left() -> None:
    world = World(slots=16, disk_slots=50)
    worker = world.connect()
    worker.store(1, *range(6))
    drained: list[Drained] = []
    world.core.flush(drained.append)
    world.finish(world.orders(1)[0])
    world.finish(world.orders(1)[0], NO_SPACE)
    world.orders(8)
    assert drained == [Drained(1, 5)]
    world.core.flush(drained.append)  # tries at once, whatever the pause
    world.run_disk()
    assert drained[1] == Drained(5, 0)
    world.check()


def test_flush_without_a_disk() -> None:
    world = World()
    worker = world.connect()
    worker.store(1, 1, 2)
    drained: list[Drained] = []
    world.core.flush(drained.append)
    assert drained == [Drained(0, 2)]


def test_stop_drains_first() -> None:
    world = World(slots=16, disk_slots=50)
    worker = world.connect()
    worker.store(1, 1)
    drained: list[Drained] = []
    world.core.stop(True, drained.append)
    assert not world.stopped
    world.run_disk()
    assert world.stopped
    assert drained == [Drained(1, 0)]


def test_found_chunks_are_served_and_evicted_oldest_first() -> None:
    world = World(slots=8, disk_slots=5)
    assert world.disk is not None
    found = [world.disk.put(n, sequence=n) for n in (3, 1, 2)]
    world.core.found(found[:2])
    world.core.found(found[2:])
    world.core.scan_finished()
    scheduler, worker = world.connect("scheduler"), world.connect()
    assert worker.lookup(1, 2, 3, 4) == [1, 1, 1, 0]
    scheduler.open(1, 2)
    world.run_disk()
    assert worker.read(worker.ready(1)[0]) == content(key(2))
    worker.ack(1, 0)
    world.core.scan_finished()
    for number in range(10, 13):
        worker.store(number, number)
        world.run_disk()
    assert worker.lookup(1) == [0]
    world.check()
    assert world.orders(1) == []
    worker.store(50, 50)
    assert world.orders(1)[0].sequence > 3


def test_nothing_is_overwritten_and_nothing_given_up_before_the_scan_has_ended() -> None:
    world = World(slots=8, disk_slots=3, scanned=False)
    assert world.disk is not None
    found = [world.disk.put(n, sequence=n) for n in (3, 1, 2)]
    worker = world.connect()
    worker.store(1, 50)
    world.run_disk()
    world.core.found(found[:1])  # the latest
    worker.store(2, 51)
    world.run_disk()
    assert disk_figures(world)["skipped_chunks"] == disk_figures(world)["evicted_chunks"] == 0
    drained: list[Drained] = []
    world.core.flush(drained.append)
    world.run_disk()
    assert not drained
    world.core.found(found[1:])
    world.core.scan_finished()
    world.run_disk()
    world.check()
    assert drained == [Drained(2, 0)]
    assert worker.lookup(1, 2, 3, 50, 51) == [0, 0, 1, 2, 2]


def test_of_two_slots_with_one_key_the_later_stays() -> None:
    world = World(slots=8, disk_slots=20)
    assert world.disk is not None
    old, new = world.disk.put(1, sequence=5), world.disk.put(1, sequence=9)
    other_new, other_old = world.disk.put(2, sequence=9), world.disk.put(2, sequence=5)
    world.core.found([new, other_old])
    world.core.found([old])
    world.core.found([other_new])
    world.check()
    assert set(world.disk.held) == {new.slot, other_new.slot}
    both = [world.disk.put(3, sequence=s) for s in (4, 8, 6)]
    world.core.found(both)
    world.check()
    assert both[1].slot in world.disk.held


def test_a_chunk_stored_before_the_scan_came_to_it() -> None:
    world = World(slots=8, disk_slots=20)
    assert world.disk is not None
    worker = world.connect(groups=[world.group(durable=False)])
    worker.store(1, 1)
    busy = world.connect(engine="e2")
    busy.store(1, 2)
    adopted, refused = world.disk.put(1), world.disk.put(2)
    world.core.found([adopted, refused, world.disk.put(3, space=OTHER_SPACE)])
    assert adopted.slot in world.disk.held
    assert refused.slot not in world.disk.held  # its own write is on the way
    world.run_disk()
    world.check()
    scheduler = world.connect("scheduler")
    scheduler.open(1, 3)  # the key is known, but of another namespace
    assert worker.failed(1) is not None


def test_found_chunks_of_a_size_that_nobody_has_asked_for() -> None:
    world = World(slots=8, disk_slots=20)
    assert world.disk is not None
    item = world.disk.put(1)._replace(slot_bytes=2 * SLOT)
    world.disk.class_of[item.slot] = 2 * SLOT
    world.core.found([item])
    worker = world.connect()
    assert worker.lookup(1) == [1]
    scheduler = world.connect("scheduler")
    scheduler.open(1, 1)
    assert worker.failed(1) is not None  # another slot size is not this chunk
    world.core.status()


def test_slots_move_from_one_class_to_another() -> None:
    world = World(slots=16, disk_slots=8)
    small = world.connect()
    for number in range(16):
        small.store(number, number)
        world.run_disk()
    large = world.connect(engine="e2", groups=[world.group(slot_bytes=2 * SLOT)])
    for job in range(100, 140):
        large.store(job, job)
        world.run_disk()
        world.check()
    assert large.lookup(139) == [2]
    status = world.core.status()["classes"]
    assert status[1]["host_chunks"] > 1  # type: ignore[index]
    assert status[1]["disk_chunks"] > 1  # type: ignore[index]
    world.check_bytes()


def test_a_read_that_nobody_waits_for_any_more() -> None:
    world = World(slots=4, disk_slots=20)
    scheduler, worker = world.connect("scheduler"), world.connect()
    for number in range(8):
        worker.store(number, number)
        world.run_disk()
    scheduler.open(1, 0)
    (order,) = world.orders(1)
    worker.done(1)
    world.check([order])
    world.finish(order, ReadOutcome.CORRUPT_HEADER)
    world.check()
    assert worker.lookup(0) == [0]
    assert not np.any(world.core.table.pins)


def test_a_disk_slot_that_is_being_read_is_not_overwritten() -> None:
    world = World(slots=8, disk_slots=3)
    scheduler, worker = world.connect("scheduler"), world.connect()
    filler = world.connect(engine="e2", groups=[world.group(durable=False)])
    for number in range(3):
        worker.store(number, number)
        world.run_disk()
    for number in range(10, 20):
        filler.store(number, number)
    assert worker.lookup(0, 1, 2) == [1, 1, 1]
    scheduler.open(1, 0)
    (read,) = world.orders(1)
    for number in range(20, 26):
        worker.store(number, number)
        for order in world.orders(1):
            world.finish(order)
        world.check([read])
    world.finish(read)
    assert worker.read(worker.ready(1)[0]) == content(key(0))
    assert world.core.disk.corrupt == 0
