"""The store's metrics: Prometheus text whose figures follow what was done."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from core_world import NO_SPACE, PAYLOAD, SLOT, SPACE, World, counters
from prometheus_client.parser import text_string_to_metric_families

from kvfold.store.disk import ReadOutcome
from kvfold.store.latency import BOUNDS_S, Latency
from kvfold.store.messages import NO_ROOM
from kvfold.store.metrics import exposition
from kvfold.store.tally import tally

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
COPIES = 8 * PAYLOAD

Figures = dict[tuple[str, ...], float]


def figures(world: World) -> Figures:
    """(name less its prefix, label values in order of the labels) -> value."""
    return {
        (
            sample.name.removeprefix("kvfold_store_"),
            *dict(sorted(sample.labels.items())).values(),
        ): (sample.value)
        for family in text_string_to_metric_families(exposition(world.core.status()))
        for sample in family.samples
    }


def small_world(disk_slots: int = 6) -> World:
    return World(slots=4, disk_slots=disk_slots)


def connect(world: World):  # type: ignore[no-untyped-def]
    groups = [world.group(copies_bytes=COPIES)]
    return world.connect("scheduler", groups=groups), world.connect(groups=groups)


def test_stores_loads_and_evictions_are_counted_once() -> None:
    world = small_world()
    scheduler, worker = connect(world)
    second = world.connect(rank=1, groups=[world.group(copies_bytes=COPIES)])
    for number in range(8):
        worker.store(number, number)
        world.run_disk()
    now = figures(world)
    assert now["stored_chunks_total",] == 8
    assert now["stored_bytes_total",] == 8 * PAYLOAD
    assert now["stored_copies_bytes_total",] == 8 * COPIES
    assert now["disk_written_chunks_total",] == 8
    assert now["evicted_chunks_total", "host"] == 4
    assert now["evicted_chunks_total", "disk"] == 2
    assert now["chunks", "host"] == 4
    assert now["chunks", "disk"] == 6
    assert now["unique_chunks",] == 6
    assert now["payload_bytes", "disk"] == 6 * PAYLOAD
    space = SPACE.hex()[:16]
    assert now["namespace_bytes", space, "disk"] == 6 * PAYLOAD
    assert now["namespace_copies_bytes", space, "disk"] == 6 * COPIES
    assert now["namespace_chunks", space, "host"] == 4

    assert worker.lookup(7, 2, 0, 100, 7) == [2, 1, 0, 0, 2]
    now = figures(world)
    assert now["lookups_total",] == 1
    found = {kind: now["lookup_keys_total", kind] for kind in ("host", "disk", "absent")}
    assert found == {"host": 2, "disk": 1, "absent": 2}

    scheduler.open(1, 7, 2, readers=3)  # 2 comes from disk, for both readers together
    for index in range(2):
        world.run_disk()
        for reader in (worker, second):
            reader.ack(1, index)
    world.advance(0.2)
    assert worker.done(1)
    assert second.done(1)
    now = figures(world)
    assert now["loaded_chunks_total", "host"] == now["loaded_chunks_total", "disk"] == 1
    assert now["loaded_bytes_total", "disk"] == PAYLOAD
    assert now["disk_read_chunks_total",] == 1
    assert now["tickets_opened_total",] == 1
    assert now["ticket_seconds_count",] == 1
    assert now["ticket_seconds_sum",] == pytest.approx(0.2)
    assert now["ticket_seconds_bucket", "0.1"] == 0
    assert now["ticket_seconds_bucket", "0.25"] == 1
    assert now["disk_write_seconds_count",] == 8
    assert now["disk_read_seconds_count",] == 1
    assert now["lookup_seconds_count",] == 1


def test_two_tickets_share_one_read() -> None:
    world = small_world()
    scheduler, worker = connect(world)
    for number in range(6):
        worker.store(number, number)
        world.run_disk()
    scheduler.open(1, 0)
    scheduler.open(2, 0)
    world.run_disk()
    now = figures(world)
    assert now["loaded_chunks_total", "disk"] == 2
    assert now["disk_read_chunks_total",] == 1


def test_occupancy_of_tiers_and_sizes() -> None:
    world = World(slots=16, disk_slots=20)
    other = world.group(slot_bytes=2 * SLOT)
    worker = world.connect(groups=[world.group(), other])
    worker.store(1, 1, 2, 3)
    offsets = worker.ask(2, (10, 11), 1, group=1)
    assert max(offsets) < NO_ROOM
    worker.commit(2, 0, 1)
    worker.ask(3, (20,), 1)  # being written
    now = figures(world)
    one, two = str(SLOT), str(2 * SLOT)
    assert now["slots", one, "used", "host"] == 4
    assert now["slots", two, "used", "host"] == 2
    assert now["slots", one, "free", "host"] > 0
    assert now["occupancy_bytes", "used", "host"] == 8 * SLOT
    assert now["occupancy_bytes", "free", "host"] == 8 * SLOT
    assert now["capacity_bytes", "host"] == 16 * SLOT
    assert now["chunks", "host"] == 5
    assert now["jobs",] == 1
    assert now["disk_queue_chunks", "write"] > 0
    world.run_disk()
    now = figures(world)
    assert now["slots", one, "used", "disk"] == 3
    assert now["disk_queue_chunks", "write"] == 0


def test_failures_by_kind() -> None:
    world = small_world()
    scheduler, worker = connect(world)
    other = world.connect(rank=1)

    def failed() -> dict[str, float]:
        return {k[1]: v for k, v in figures(world).items() if k[0] == "failures_total" and v}

    assert failed() == {}
    worker.ask(1, (1,), 1)
    worker.commit(1, 0, ok=False)
    assert failed() == {"declined": 1}
    worker.ask(2, (2, 3), 1)
    world.advance(61)
    assert failed() == {"declined": 1, "abandoned": 2}
    assert figures(world)["quarantined_bytes",] == 2 * SLOT
    worker.commit(2, 0, 1)
    assert figures(world)["quarantined_bytes",] == 0
    other.ask(3, (4,), 2)
    other.vanish()
    assert failed() == {"declined": 1, "abandoned": 3}
    worker.ask(4, tuple(range(10, 20)), 1)
    expected = {"declined": 1, "abandoned": 3, "no_room": 7}
    assert failed() == expected
    worker.commit(4, 0, 1, 2, ok=False)
    expected["declined"] += 3
    other.exit()
    worker.store(5, 5)
    world.finish(world.orders(1)[0], NO_SPACE)
    expected["disk_write"] = 1
    assert failed() == expected
    assert figures(world)["disk_paused",] == 1
    world.advance(2)
    world.run_disk()
    for number in range(30, 34):
        worker.store(number, number)
        world.run_disk()
    assert worker.lookup(5) == [1]
    scheduler.open(1, 5)
    world.finish(world.orders(1)[0], ReadOutcome.CORRUPT_CHECKSUM)
    expected |= {"corrupt": 1, "ticket": 1}
    assert failed() == expected
    assert not worker.done(1)
    scheduler.open(2, 30)
    world.finish(world.orders(1)[0], 5)
    expected |= {"disk_read": 1, "ticket": 2}
    assert failed() == expected
    assert figures(world)["ticket_seconds_count",] == 0  # only of complete loads


def test_replicas_that_differ() -> None:
    world = small_world()
    one, two = connect(world)[1], world.connect(rank=1)
    one.ask(1, (1,), 3, audit=(1).to_bytes(4, "little") + bytes(8))
    two.ask(1, (1,), 3, audit=(1).to_bytes(4, "little") + b"\1" * 8)
    assert figures(world)["failures_total", "audit"] == 1


def test_a_store_without_a_disk_has_no_disk_samples() -> None:
    world = World()
    worker = world.connect()
    worker.store(1, 1)
    now = figures(world)
    assert not [key for key in now if "disk" in key[0]]
    assert now["chunks", "host"] == 1
    assert ("chunks", "disk") not in now
    assert not [key for key in now if key[0] == "namespace_copies_bytes"]  # nobody told


def test_namespaces_beyond_the_largest_are_told_together() -> None:
    world = World(slots=64)
    worker = world.connect()
    for number in range(40):
        worker.ask(number, (number,), 1, space=number.to_bytes(2, "big") * 16)
        worker.commit(number, 0)
    worker.store(100, *range(100, 103))
    told = {k[1]: v for k, v in figures(world).items() if k[0] == "namespace_chunks"}
    assert len(told) == 33
    assert told["others"] == 9
    assert told[SPACE.hex()[:16]] == 3
    assert sum(told.values()) == 43


def test_the_document_lists_every_metric_and_kind() -> None:
    world = small_world()
    connect(world)[1].store(1, 1)
    text = DOCS.read_text()
    listed = set(re.findall(r"`(kvfold_store_\w+)`", text))
    for base, rest in re.findall(r"`(kvfold_store_\w+)`, `(_\w+)`", text):
        listed.add(base.removesuffix("_chunks_total").removesuffix("_chunks") + rest)
    families = list(text_string_to_metric_families(exposition(world.core.status())))
    names = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    assert names == listed
    kinds = {s.labels["kind"] for f in families for s in f.samples if "kind" in s.labels}
    assert all(f"`{kind}`" in text for kind in kinds)


def test_buckets() -> None:
    latency = Latency()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1], BOUNDS_S[-1] + 1):
        latency.note(seconds)
    assert latency.counts[:2] == [2, 1]
    assert latency.counts[-2:] == [1, 1]
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))


def test_a_tally_beside_a_store_that_works() -> None:
    """Counting while the table changes and grows gives figures between before and after."""
    world = World(slots=20_000)
    worker = world.connect()
    stop = threading.Event()
    seen: list[int] = []
    failures: list[BaseException] = []

    def count() -> None:
        try:
            while not stop.is_set():
                seen.append(tally(world.core.table).in_host)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for job in range(150):
            numbers = tuple(range(100 * job, 100 * (job + 1)))
            space = (job % 50).to_bytes(2, "big") * 16
            worker.ask(job, numbers, 1, space=space)
            worker.commit(job, *range(100))
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert seen
    assert all(0 <= n <= 15_000 for n in seen)
    assert tally(world.core.table).in_host == 15_000


def test_a_scrape_changes_nothing() -> None:
    world = small_world()
    connect(world)[1].store(1, 1)
    assert counters(world) == counters(world)
