"""Schedulers that asked are told which chunks have left every tier, and nobody is held up."""

from __future__ import annotations

import errno

import pytest
from core_world import OTHER_SPACE, SLOT, SPACE, Peer, World, key

from kvfold.errors import FormatError
from kvfold.store import core_clients, core_evictions
from kvfold.store.core_evictions import MAX_BACKLOG_BYTES
from kvfold.store.disk import ReadOutcome
from kvfold.store.messages import Evicted

SOME = (bytes(32), ())


def told(peer: Peer) -> list[tuple[bytes, tuple[bytes, ...]]]:
    """What a turn's end says to a scheduler, keys in order."""
    peer.world.core.evictions.tell()
    messages = peer.got(Evicted)
    peer.inbox = [m for m in peer.inbox if m not in messages]
    return [
        (m.namespace, tuple(sorted(m.keys[i : i + 32] for i in range(0, len(m.keys), 32))))
        for m in messages
    ]


def lost(*numbers: int, space: bytes = SPACE) -> tuple[bytes, tuple[bytes, ...]]:
    return space, tuple(sorted(map(key, numbers)))


def listening(world: World, **more: object) -> tuple[Peer, Peer]:
    """A scheduler that asked, and a worker of its engine."""
    scheduler = world.connect("scheduler", evictions=True, **more)  # type: ignore[arg-type]
    return scheduler, world.connect(**more)  # type: ignore[arg-type]


def test_without_a_disk_a_chunk_is_lost_with_its_host_slot() -> None:
    world = World(slots=4)
    scheduler, worker = listening(world)
    for number in range(4):
        worker.store(number, number)
    assert told(scheduler) == []
    worker.store(10, 10, 11)
    assert told(scheduler) == [lost(0, 1)], "one message of a turn and namespace"
    assert told(scheduler) == []
    assert not worker.got(Evicted)


def test_with_a_disk_a_chunk_is_lost_only_when_both_tiers_have_given_it_up() -> None:
    world = World(slots=4, disk_slots=6)
    scheduler, worker = listening(world)
    for number in range(6):
        worker.store(number, number)
        world.run_disk()
    assert world.core.table.evicted_host == 2
    assert told(scheduler) == []
    worker.store(6, 6)
    world.run_disk()
    assert told(scheduler) == [lost(0)], "its disk slot was overwritten"


def test_a_chunk_that_left_the_disk_first_is_lost_when_it_leaves_the_host() -> None:
    world = World(slots=4, disk_slots=1)
    scheduler, worker = listening(world)
    for number in range(4):
        worker.store(number, number)
        world.run_disk()
    assert world.core.table.evicted_disk == 3
    assert told(scheduler) == []
    worker.store(4, 4)
    assert told(scheduler) == [lost(0)]


@pytest.mark.parametrize("error", [errno.EIO, ReadOutcome.CORRUPT_KEY])
def test_a_chunk_that_cannot_be_read_is_lost(error: object) -> None:
    world = World(slots=4, disk_slots=20)
    scheduler, worker = listening(world)
    for number in range(5):
        worker.store(number, number)
        world.run_disk()
    scheduler.open(1, 0)
    [order] = world.orders(1)
    world.finish(order, error)
    assert told(scheduler) == [lost(0)]


def test_a_chunk_whose_write_fails_may_have_been_told_to_others() -> None:
    world = World()
    scheduler, worker = listening(world)
    worker.ask(1, (1, 2))
    assert worker.ask(2, (1,)) == [2**64 - 1]
    worker.commit(1, 0, ok=False)
    worker.commit(1, 1)
    assert told(scheduler) == [lost(1)]


def store(worker: Peer, *numbers: int, space: bytes = SPACE) -> None:
    """One after the other: a job alone cannot have all slots."""
    for number in numbers:
        [offset] = worker.ask(number, (number,), space=space)
        worker.write(offset, number)
        worker.commit(number, 0)


def test_each_engine_is_told_of_its_own_namespaces() -> None:
    world = World(slots=4)
    mine, worker = listening(world)
    other = [world.group(namespace=OTHER_SPACE)]
    theirs, their_worker = listening(world, engine="other", groups=other)
    store(worker, 1)
    store(their_worker, 2, space=OTHER_SPACE)
    store(worker, *range(10, 14))
    world.core.evictions.tell()
    assert told(mine) == [lost(1)]
    assert told(theirs) == [lost(2, space=OTHER_SPACE)]


def test_two_engines_with_one_namespace_are_both_told() -> None:
    world = World(slots=4)
    mine, worker = listening(world)
    theirs, _ = listening(world, engine="other")
    store(worker, *range(5))
    assert told(mine) == told(theirs) == [lost(0)]


def test_epochs_are_learned_from_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(slots=4)
    scheduler, worker = listening(world)
    store(worker, 1, 2, space=OTHER_SPACE)
    store(worker, *range(10, 13))
    assert told(scheduler) == [lost(1, space=OTHER_SPACE)]
    monkeypatch.setattr(core_clients, "_NAMESPACES", 2)
    for number in range(3):
        worker.ask(100 + number, (), space=key(number))
    assert list(world.core.engines["e"].namespaces) == [key(1), key(2)]
    store(worker, 20, space=key(3))
    assert told(scheduler) == [], "that epoch is long over"


def test_only_those_who_ask_are_told_and_only_schedulers_may() -> None:
    world = World(slots=4)
    for role in ("worker", "tool"):
        with pytest.raises(FormatError):
            world.connect(role, evictions=True)
    scheduler, worker = world.connect("scheduler"), world.connect()
    store(worker, *range(5))
    assert told(scheduler) == []
    assert world.core.table.gone is None, "nothing is kept for nobody"
    scheduler.bye()
    scheduler = world.connect("scheduler", evictions=True)
    store(worker, 5)
    assert told(scheduler) == [lost(1)]
    scheduler.vanish()
    store(worker, 6)
    assert world.core.table.gone is None
    assert told(scheduler) == []


def test_a_client_that_does_not_read_is_told_that_some_were_lost_when_it_does() -> None:
    world = World(slots=4)
    scheduler, worker = listening(world)
    world.backlog_bytes = MAX_BACKLOG_BYTES
    store(worker, *range(6))
    assert told(scheduler) == []
    store(worker, 6)
    assert told(scheduler) == [], "still not"
    assert world.core.status()["untold_evictions"] == 3
    world.backlog_bytes = MAX_BACKLOG_BYTES - 1
    assert told(scheduler) == [SOME], "although nothing was lost in this turn"
    store(worker, 7)
    assert told(scheduler) == [lost(3)]
    assert world.core.status()["untold_evictions"] == 3


def test_what_comes_after_a_gap_comes_after_the_word_of_it() -> None:
    world = World(slots=4)
    scheduler, worker = listening(world)
    world.backlog_bytes = MAX_BACKLOG_BYTES
    store(worker, *range(5))
    assert told(scheduler) == []
    world.backlog_bytes = 0
    store(worker, 5)
    assert told(scheduler) == [SOME, lost(1)]


def test_many_keys_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_evictions, "MAX_KEYS", 3)
    world = World(slots=16)
    scheduler, worker = listening(world)
    store(worker, *range(24))
    messages = told(scheduler)
    assert [len(keys) for _, keys in messages] == [3, 3, 2]
    assert sorted(k for _, keys in messages for k in keys) == list(lost(*range(8))[1])


def test_a_slot_that_goes_to_another_size_loses_its_chunk() -> None:
    world = World(slots=1024)
    scheduler, worker = listening(world)
    large = [world.group(slot_bytes=64 * SLOT, namespace=OTHER_SPACE)]
    _, large_worker = listening(world, engine="large", groups=large)
    for job in range(10):
        worker.store(job, *range(100 * job, 100 * job + 100))
    assert told(scheduler) == []
    for job in range(8):
        large_worker.ask(job, (5000 + job,), space=OTHER_SPACE)
        large_worker.commit(job, 0)
    [(_, keys)] = told(scheduler)
    assert len(keys) == world.core.table.evicted_host > 0
