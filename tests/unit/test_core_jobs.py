"""The job table of docs/protocol.md, row by row, and the quarantine."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from core_world import OTHER_SPACE, SPACE, Peer, World, indices, key, keys, words

from kvfold.errors import FormatError
from kvfold.store.messages import EXISTS, NO_FRAGMENT, NO_ROOM, REFUSED, Ask, Commit, Verdicts


@pytest.fixture
def world() -> World:
    return World(slots=16)


def pair(world: World) -> tuple[Peer, Peer]:
    return world.connect(rank=0), world.connect(rank=1)


def audit(*records: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<IQ", *record) for record in records)


def test_a_chunk_is_published_by_its_last_writer_and_not_before(world: World) -> None:
    a, b = pair(world)
    given = a.ask(1, (1, 2), 3)
    assert given == b.ask(1, (1, 2), 3)
    assert len(set(given)) == 2
    a.commit(1, 0, 1)
    assert a.lookup(1, 2) == [0, 0]
    b.commit(1, 1)
    assert a.lookup(1, 2) == [0, 2]
    b.commit(1, 0)
    assert a.lookup(1, 2) == [2, 2]
    world.check()
    assert not a.world.core.engines["e"].jobs


def test_only_writers_in_the_mask_must_commit(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1, 2), 3, masks=(1, 2))
    b.ask(1, (1, 2), 3, masks=(1, 2))
    b.commit(1, 0)  # not its key: of no effect
    assert a.lookup(1, 2) == [0, 0]
    a.commit(1, 0)
    assert a.lookup(1, 2) == [2, 0]


def test_what_somebody_has_or_is_writing_exists(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1,), 1)
    assert b.ask(2, (1, 2), 2)[0] == EXISTS
    a.commit(1, 0)
    assert a.ask(3, (1,), 1) == [EXISTS]


def test_a_key_without_writers_gets_no_slot(world: World) -> None:
    a = world.connect()
    assert a.ask(1, (1, 2), 1, masks=(0, 1))[0] == NO_ROOM


def test_a_key_twice_in_one_job_gets_one_slot(world: World) -> None:
    a = world.connect()
    given = a.ask(1, (1, 2, 1), 1)
    assert given[2] == EXISTS
    assert given[0] < 2**40
    a.commit(1, 0, 1, 2)
    assert a.lookup(1, 2) == [2, 2]
    world.check()


def test_a_writer_that_is_not_connected_means_no_room(world: World) -> None:
    a = world.connect(rank=0)
    assert a.ask(1, (1, 2), 3, masks=(3, 1)) != [NO_ROOM, NO_ROOM]
    assert a.ask(2, (3,), 3) == [NO_ROOM]


def test_never_more_slots_than_the_reserve_allows(world: World) -> None:
    a = world.connect()
    given = a.ask(1, tuple(range(20)), 1)
    assert sum(offset == NO_ROOM for offset in given) == 20 - 14  # 16 less an eighth
    world.check()


def test_room_is_made_by_eviction_of_the_least_recently_used(world: World) -> None:
    a = world.connect()
    a.store(1, *range(10))
    a.store(2, *range(10, 16))
    a.lookup(0)
    a.store(3, 50, 51)
    assert a.lookup(*range(4)) == [2, 0, 0, 2]
    assert world.core.table.evicted_host == 2
    world.check_bytes()


def test_a_failed_writer_aborts_and_the_slot_waits_for_the_other(world: World) -> None:
    a, b = pair(world)
    first = a.ask(1, (1,), 3)
    b.ask(1, (1,), 3)
    a.commit(1, 0, ok=False)
    assert len(world.core.quarantine) == 1
    b.commit(1, 0)  # says ok, too late: not published, but its slot is free now
    assert a.lookup(1) == [0]
    assert len(world.core.quarantine) == 0
    assert a.ask(2, (1,), 1) == first
    world.check()


def test_an_aborted_slot_is_never_given_away_while_a_writer_may_write() -> None:
    world = World(slots=3)
    a, b = pair(world)
    slot = a.ask(1, (1,), 3)[0]
    b.ask(1, (1,), 3)
    a.commit(1, 0, ok=False)
    for job in range(2, 20):
        given = a.ask(job, (job,), 1)[0]
        assert given != slot
        if given < REFUSED:
            a.write(given, job)
            a.commit(job, 0)
    b.commit(1, 0, ok=False)
    world.check()


def test_who_asks_after_the_abort_gets_no_room_and_holds_nothing(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1, 2), 3)
    a.commit(1, 0, ok=False)
    assert len(world.core.quarantine) == 0  # b was never told
    late = b.ask(1, (1, 2), 3)
    assert late[0] == NO_ROOM
    assert late[1] < REFUSED


def test_a_silent_writer_is_overdue(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1,), 3)
    b.ask(1, (1,), 3)
    a.commit(1, 0)
    world.advance(59)
    assert a.ask(2, (1,), 1) == [EXISTS]
    world.advance(2)
    assert len(world.core.quarantine) == 1  # b lives and may still write
    assert a.ask(3, (1,), 1)[0] < REFUSED  # but the key may be stored anew
    b.commit(1, 0)
    assert len(world.core.quarantine) == 0
    world.check()


@pytest.mark.parametrize("told", [True, False])
def test_a_writer_says_bye(world: World, told: bool) -> None:
    a, b = pair(world)
    a.ask(1, (1,), 3)
    if told:
        b.ask(1, (1,), 3)
    b.bye()
    assert a.ask(2, (1,), 1)[0] < REFUSED
    assert len(world.core.quarantine) == 1  # a may write
    a.commit(1, 0)
    assert len(world.core.quarantine) == 0
    world.check()


def test_a_writer_vanishes_and_its_slots_wait_for_its_exit(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1, 2), 3)
    b.ask(1, (1, 2), 3)
    b.commit(1, 1)
    b.vanish()
    assert len(world.core.quarantine) == 1  # 2 needs only a now
    a.commit(1, 0, 1)
    assert a.lookup(1, 2) == [0, 2]
    assert len(world.core.quarantine) == 1
    world.check()
    again = world.connect(rank=1)  # the same rank, a new connection: holds nothing
    again.commit(1, 0)
    again.bye()
    assert len(world.core.quarantine) == 1
    b.exit()
    assert len(world.core.quarantine) == 0
    world.check()


def test_a_rank_that_asks_again_gets_no_slot_twice(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1,), 3)
    b.vanish()
    again = world.connect(rank=1)
    assert again.ask(1, (1,), 3) == [NO_ROOM]
    assert again.ask(1, (1,), 3) == [NO_ROOM]


def test_the_last_client_takes_the_engine_along(world: World) -> None:
    a = world.connect()
    a.ask(1, (1, 2), 1)
    a.vanish()
    assert not world.core.engines
    assert len(world.core.quarantine) == 2
    a.exit()
    world.check_empty()


def test_all_askers_get_the_same_answer_whatever_happened_between(world: World) -> None:
    a, b = pair(world)
    mine = a.ask(1, (1, 2), 3, masks=(1, 1))
    a.write(mine[0], 1)
    a.commit(1, 0)
    assert b.ask(1, (1, 2), 3, masks=(1, 1)) == mine


def test_ranks_that_ask_for_different_things_are_malformed(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1,), 3)
    with pytest.raises(FormatError):
        b.ask(1, (2,), 3)
    with pytest.raises(FormatError):
        b.ask(1, (1,), 3, masks=(1,))
    with pytest.raises(FormatError):
        b.ask(1, (1,), 3, space=OTHER_SPACE)
    with pytest.raises(FormatError):
        b.ask(2, (1,), 1)  # not among the askers
    with pytest.raises(FormatError):
        b.ask(2, (1,), 2, masks=(3,))  # a writer that does not ask
    with pytest.raises(FormatError):
        b.ask(2, (1,), 2, group=1)
    with pytest.raises(FormatError):
        b.send(Ask(1, 2, 0, SPACE, keys(1), 2, words(2, 2), b""))
    b.ask(1, (1,), 3)
    with pytest.raises(FormatError):
        b.send(Commit(1, indices(1), True))
    world.check()


def test_an_audited_job_is_answered_when_all_have_asked(world: World) -> None:
    a, b = pair(world)
    assert a.ask(1, (1,), 3, audit=audit((0, 5), (1, 6))) == []
    given = b.ask(1, (1,), 3, audit=audit((1, 6)))
    assert given[0] < REFUSED
    assert np.frombuffer(a.take(Verdicts).offsets, "<u8").tolist() == given


def test_an_audit_that_differs_refuses_the_whole_job(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1, 2), 3, audit=audit((0, 5), (1, 6), (NO_FRAGMENT, 1)))
    b.send(Ask(9, 1, 0, SPACE, keys(1, 2), 3, words(3, 3), audit((0, 5), (1, 7), (NO_FRAGMENT, 2))))
    for peer in (a, b):
        verdict = peer.take(Verdicts)
        assert np.frombuffer(verdict.offsets, "<u8").tolist() == [REFUSED, REFUSED]
        assert np.frombuffer(verdict.conflicts, "<u4").tolist() == [1]
    assert world.core.status()["audit_conflicts"] == 1
    assert a.lookup(1, 2) == [0, 0]
    world.check()


def test_an_audit_waits_neither_for_the_gone_nor_for_ever(world: World) -> None:
    a, b = pair(world)
    assert a.ask(1, (1, 2), 3, masks=(1, 3), audit=audit((0, 5))) == []
    b.vanish()
    given = np.frombuffer(a.take(Verdicts).offsets, "<u8").tolist()
    assert given[0] < REFUSED
    assert given[1] == NO_ROOM
    again = world.connect(rank=1)
    assert again.ask(2, (3,), 3, audit=audit((0, 5))) == []
    world.advance(61)
    assert np.frombuffer(again.take(Verdicts).offsets, "<u8").tolist()[0] < REFUSED
    world.check()


def test_an_audit_that_comes_after_the_decision_is_malformed(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1,), 3)
    with pytest.raises(FormatError):
        b.ask(1, (1,), 3, audit=audit((0, 5)))


def test_an_audit_whose_askers_all_leave_stores_nothing(world: World) -> None:
    a, b = pair(world)
    a.ask(1, (1,), 3, audit=audit((0, 5)))
    a.vanish()
    b.vanish()
    a.exit()
    b.exit()
    world.check_empty()


def test_a_stopping_store_gives_no_slots(world: World) -> None:
    a = world.connect()
    world.core.stop(True, lambda _: None)
    assert a.ask(1, (1,), 1) == [NO_ROOM]


def test_commits_of_unknown_jobs_are_ignored(world: World) -> None:
    a = world.connect()
    a.commit(77, 0)
    assert a.lookup(1) == [0]
    assert key(1) != key(2)
