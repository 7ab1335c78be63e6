"""Hello and its refusals, lookups, and who may say what."""

from __future__ import annotations

import json

import pytest
from core_world import SLOT, World, keys

from kvfold.errors import FormatError, StoreRefused
from kvfold.store.messages import VERSION, Bye, Hello, Lookup, OpenTicket, Report, Status, Stop


def refused(world: World, **changes: object) -> str:
    with pytest.raises(StoreRefused) as error:
        world.connect(**changes)  # type: ignore[arg-type]
    assert str(error.value)
    return error.value.code


def test_a_client_of_another_version_is_refused() -> None:
    assert refused(World(), version=VERSION + 1) == "version"


def test_clients_of_one_engine_agree_on_the_plan() -> None:
    world = World()
    first = world.connect()
    assert refused(world, rank=1, fingerprint="other") == "fingerprint"
    world.connect(engine="another engine", fingerprint="other")
    first.bye()
    world.connect(rank=1, fingerprint="other")  # nobody is left of the first plan


def test_a_rank_is_taken_only_by_a_connected_client() -> None:
    world = World()
    first = world.connect(rank=1)
    assert refused(world, rank=1) == "rank"
    world.connect("scheduler", rank=1)
    first.vanish()
    world.connect(rank=1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"slot_bytes": 4097}, "slot_bytes"),
        ({"payload_bytes": SLOT + 1}, "slot_bytes"),
        ({"slot_bytes": 16 * SLOT}, "host_too_small"),
    ],
)
def test_groups_that_do_not_fit(changes: dict[str, int], code: str) -> None:
    world = World(slots=16)
    assert refused(world, groups=[world.group(**changes)]) == code


def test_a_stopping_store_refuses_clients() -> None:
    world = World()
    world.core.stop(False, lambda _: None)
    assert refused(world) == "stopping"


def test_lookups_of_all_states() -> None:
    world = World(slots=4, disk_slots=20)
    scheduler, worker = world.connect("scheduler"), world.connect()
    for number in range(8):
        worker.store(number, number)
        world.run_disk()
    worker.ask(100, (100,), 1)
    scheduler.open(1, 0)
    world.orders(1)  # 0 is being read
    assert worker.lookup(7, 0, 1, 100, 50) == [2, 1, 1, 0, 0]
    assert worker.lookup() == []


def test_lookups_touch() -> None:
    world = World(slots=4)
    worker = world.connect()
    for number in range(4):
        worker.store(number, number)
    worker.lookup(0)
    worker.store(10, 10)
    assert worker.lookup(0, 1) == [2, 0]


def test_roles() -> None:
    world = World()
    tool = world.connect("tool", groups=[])
    tool.send(Status(3))
    report = tool.take(Report)
    assert report.rid == 3
    assert json.loads(report.json)["clients"][0]["role"] == "tool"
    worker = world.connect()
    with pytest.raises(FormatError):
        tool.store(1, 1)
    with pytest.raises(FormatError):
        worker.send(OpenTicket(1, 0, bytes(32), b"", 1))
    with pytest.raises(FormatError):
        worker.send(Lookup(1, bytes(33)))
    with pytest.raises(FormatError):
        worker.send(Bye())  # the server's business, as Hello is
    with pytest.raises(FormatError):
        worker.send(Hello(1, "worker", "e", 0, 1, "", []))
    assert worker.lookup(1) == [0]


def test_tools_do_not_keep_an_engine() -> None:
    world = World()
    world.connect("tool", engine="e", fingerprint="x", groups=[])
    world.connect("tool", engine="e", groups=[])
    world.connect()
    assert list(world.core.engines) == ["e"]


def test_stop_answers_and_stops() -> None:
    world = World()
    tool = world.connect("tool", groups=[])
    tool.send(Stop(4, True))
    assert tool.take(Report).rid == 4
    assert world.stopped


def test_counters_only_rise() -> None:
    world = World(slots=4, disk_slots=6)
    worker = world.connect()
    before: dict[str, int] = {}
    for number in range(20):
        worker.store(number, number)
        world.run_disk()
        status = world.core.status()
        flat = {f"{t}.{k}": v for t in ("host", "disk") for k, v in status[t].items()}  # type: ignore[attr-defined]
        now = {k: v for k, v in flat.items() if k.endswith(("stored_chunks", "evicted_chunks"))}
        assert all(now[k] >= v for k, v in before.items())
        before = now
    assert before["host.stored_chunks"] == 20
    assert before["host.evicted_chunks"] == 16
    assert before["disk.evicted_chunks"] == 14


def test_a_client_that_is_gone_is_gone_once() -> None:
    world = World()
    worker = world.connect()
    worker.ask(1, (1,), 1)
    worker.vanish()
    worker.vanish()
    assert len(world.core.quarantine) == 1
    worker.exit()
    worker.exit()
    world.check_empty()


def test_many_chunks_grow_the_table() -> None:
    world = World(slots=6000, disk_slots=9000)
    worker = world.connect()
    for job in range(4):
        worker.ask(job, tuple(range(5000 * job, 5000 * (job + 1))), 1)
        worker.commit(job, *range(5000))
        world.run_disk()
        world.check()
    assert world.core.table.capacity >= 9000
    assert worker.lookup(0, 19_999)[1] == 2
    assert keys(1) != keys(2)
