"""Real stores and clients, each a process, some of them killed."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from store_peers import GROUP, PAYLOAD, SPACE, Child, Peer, content, eventually, join, settings

from kvfold.errors import ConfigError, StoreError, StoreGone, StoreRefused
from kvfold.store import connection
from kvfold.store.client import REFUSED, Group, StoreClient
from kvfold.store.connection import Connection
from kvfold.store.launch import connect_socket, running_stores
from kvfold.store.settings import StoreSettings

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def folder(tmp_runtime: Path) -> Path:
    return tmp_runtime


@pytest.fixture
def told(folder: Path) -> Iterator[StoreSettings]:
    """Settings; whatever store runs with them at the end is ended."""
    yield settings(folder)
    for found in running_stores(runtime_dir=str(folder / "run")):
        StoreClient.connect_tool(found).stop(drain=False)


def status(peer: Peer) -> dict[str, object]:
    return peer.client.status()


def await_written(peer: Peer) -> None:
    eventually(lambda: status(peer)["disk"]["queued_writes"] == 0)  # type: ignore[index]


def await_scan(peer: Peer) -> None:
    eventually(lambda: not status(peer)["scanning"])


def await_gone(peer: Peer) -> None:
    eventually(lambda: peer.gone == 1)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_store_load_restart_and_load_again(told: StoreSettings) -> None:
    numbers = list(range(60))
    for run in range(2):
        worker, scheduler = Peer(told), Peer(told, "scheduler")
        if run == 0:
            for job in range(6):
                assert len(worker.store(job, numbers[10 * job : 10 * job + 10])) == 10
                await_written(worker)
        else:
            await_scan(worker)
            assert worker.tiers(numbers) == [1] * 60
        scheduler.client.open_ticket(1, 0, SPACE, join(numbers), 1)
        assert worker.load(1, numbers) is True
        assert scheduler.client.stop(drain=True)["host_only_chunks"] == 0
        await_gone(worker)
        worker.client.close()
        scheduler.client.close()
        assert worker.gone == 1


def test_a_writer_is_killed_in_the_middle_of_a_store(told: StoreSettings) -> None:
    worker, child = Peer(told), Child(told)
    numbers = [1, 2, 3]
    masks = np.full(3, 3, np.uint64)
    offsets = child.tell("ask", job=1, numbers=numbers, mask=3)
    child.tell("write", numbers=numbers[:1], offsets=offsets[:1])
    child.tell("commit", job=1, indices=[0])
    mine = worker.client.ask(1, 0, SPACE, join(numbers), 3, masks)
    assert mine.offsets.tolist() == offsets
    for i in (0, 1, 2):
        worker.write(offsets[i], numbers[i])
    child.kill()
    eventually(lambda: len(status(worker)["clients"]) == 1)  # type: ignore[arg-type]
    worker.client.commit(1, np.arange(3, dtype=np.uint32), True)
    assert worker.tiers(numbers) == [2, 0, 0]  # both had written 1
    assert status(worker)["quarantined_slots"] == 0
    assert worker.store(2, numbers) == [2, 3]
    worker.client.close()


def test_a_reader_is_killed_in_the_middle_of_a_load(told: StoreSettings) -> None:
    worker, child, scheduler = Peer(told), Child(told), Peer(told, "scheduler")
    numbers = [1, 2, 3, 4]
    worker.store(1, numbers)
    scheduler.client.open_ticket(7, 0, SPACE, join(numbers), 3)
    assert len(child.tell("ready")) == 4
    child.kill()
    ticket, _, reason = worker.failed.get(timeout=10)
    assert ticket == 7
    assert "reader 1" in reason
    assert worker.done(7) is False
    eventually(lambda: status(worker)["host"]["pinned_chunks"] == 0)  # type: ignore[index]
    assert status(worker)["departed_holders"] == 0
    scheduler.client.open_ticket(8, 0, SPACE, join(numbers), 1)
    while not worker.ready.empty():
        worker.ready.get()
    scheduler.client.open_ticket(9, 0, SPACE, join(numbers), 2)  # its reader is gone
    worker.client.close()
    scheduler.client.close()


def test_a_lost_connection_keeps_its_slots_until_the_process_ends(told: StoreSettings) -> None:
    worker, child = Peer(told), Child(told)
    offsets = child.tell("ask", job=1, numbers=[1, 2], mask=2)
    child.tell("drop")
    eventually(lambda: status(worker)["quarantined_slots"] == 2)
    for job in range(2, 20):  # the store is full and more; those two slots stay out of it
        numbers = list(range(100 * job, 100 * job + 8))
        masks = np.ones(8, np.uint64)
        given = worker.client.ask(job, 0, SPACE, join(numbers), 1, masks).offsets
        assert not set(given.tolist()) & set(offsets)
        indices = np.flatnonzero(given < REFUSED).astype(np.uint32)
        for i in indices:
            worker.write(int(given[i]), numbers[i])
        worker.client.commit(job, indices, True)
    assert status(worker)["quarantined_slots"] == 2
    child.kill()
    eventually(lambda: status(worker)["quarantined_slots"] == 0)
    worker.client.close()


def test_the_store_is_killed_and_its_disk_serves_the_next(told: StoreSettings) -> None:
    child = Child(told)  # starts the store, and is killed with it
    worker, scheduler = Peer(told), Peer(told, "scheduler")
    numbers = list(range(40))
    for job in range(4):
        worker.store(job, numbers[10 * job : 10 * job + 10])
    first_id = worker.client.store_id
    os.kill(worker.client.store_pid, signal.SIGKILL)
    await_gone(worker)
    await_gone(scheduler)
    with pytest.raises(StoreGone):
        worker.tiers([1])
    held: list[bool] = []
    worker.client.done(3, held.append)
    assert held == [False]
    worker.client.ack(3, np.zeros(1, np.uint32))
    worker.client.commit(3, np.zeros(1, np.uint32), True)
    with pytest.raises(StoreGone):
        scheduler.client.open_ticket(1, 0, SPACE, join(numbers), 1)
    worker.client.close()
    scheduler.client.close()
    child.kill()
    worker, scheduler = Peer(told), Peer(told, "scheduler")
    assert worker.client.store_id != first_id
    await_scan(worker)
    there = [n for n, tier in zip(numbers, worker.tiers(numbers), strict=True) if tier]
    scheduler.client.open_ticket(1, 0, SPACE, join(there), 1)
    # A slot that was being written is found by its header, and refused by its checksum.
    for _ in there:
        if not worker.failed.empty():
            break
        _, index, offset = worker.ready.get(timeout=10)
        assert bytes(worker.client.arena[offset : offset + len(content(1))]) == content(  # type: ignore[index]
            there[index]
        )
        worker.client.ack(1, np.array([index], np.uint32))
    worker.client.close()
    scheduler.client.close()


def loaded(scheduler: Peer, worker: Peer, numbers: list[int], ticket: int) -> int:
    """Load what is there, each chunk by a ticket of its own; return how many arrived."""
    there = [n for n, tier in zip(numbers, worker.tiers(numbers), strict=True) if tier]
    for offset, number in enumerate(there):
        scheduler.client.open_ticket(ticket + offset, 0, SPACE, join([number]), 1)
    arrived = torn = 0
    while arrived + torn < len(there):
        if not worker.failed.empty():  # torn: found by its header, refused by its sum
            worker.done(worker.failed.get()[0])
            torn += 1
            continue
        try:
            of, _, where = worker.ready.get(timeout=0.1)
        except queue.Empty:
            continue
        assert worker.client.arena is not None
        seen = bytes(worker.client.arena[where : where + PAYLOAD])
        assert seen == content(there[of - ticket]), "wrong bytes"
        worker.client.ack(of, np.zeros(1, np.uint32))
        assert worker.done(of)
        arrived += 1
    return arrived


@pytest.mark.parametrize("victim", ["store", "writer"])
def test_kills_at_random_times_in_the_middle_of_stores(told: StoreSettings, victim: str) -> None:
    random = Random(victim)
    numbers = list(range(200))
    arrived = 0
    for _ in range(6):
        child = Child(told)
        child.tell("churn", numbers=numbers)
        time.sleep(random.uniform(0.05, 0.3))
        os.kill(child.store_pid if victim == "store" else child.process.pid, signal.SIGKILL)
        child.kill()
        worker, scheduler = Peer(told), Peer(told, "scheduler")
        await_scan(worker)
        eventually(lambda: status_is_quiet(worker))  # noqa: B023
        arrived += loaded(scheduler, worker, numbers, 1)
        worker.client.close()
        scheduler.client.close()
    assert arrived > 50


def status_is_quiet(peer: Peer) -> bool:
    now = status(peer)
    return not now["quarantined_slots"] and not now["jobs_open"] and not now["departed_holders"]


def test_the_store_is_no_child_of_its_starter_and_outlives_it(told: StoreSettings) -> None:
    child = Child(told)
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.communicate()
    worker = Peer(told)
    assert worker.client.store_pid == child.store_pid
    parent = Path(f"/proc/{child.store_pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) != child.process.pid
    worker.client.close()


def test_a_shared_store_lingers_and_a_private_one_does_not(folder: Path) -> None:
    shared = Peer(settings(folder, linger_s=0.5))
    private = Peer(settings(folder, disk_path=None, private=True))
    pids = shared.client.store_pid, private.client.store_pid
    assert pids[0] != pids[1]
    private.client.close()
    eventually(lambda: gone(pids[1]))
    assert not gone(pids[0])
    shared.client.close()
    eventually(lambda: gone(pids[0]))


def test_a_private_store_is_its_engines_own(folder: Path) -> None:
    told = settings(folder, disk_path=None, private=True)
    one, two = Peer(told, engine="one"), Peer(told, engine="two")
    assert one.client.store_id != two.client.store_id
    one.client.close()
    two.client.close()


def test_many_starters_and_one_store(told: StoreSettings) -> None:
    found: list[Peer] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(Peer(told, engine=f"engine {n}")))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({peer.client.store_id for peer in found}) == 1
    for peer in found:
        peer.client.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"disk_bytes": 1 << 55}, "quota"),
        ({"host_bytes": 1 << 45}, "available"),
        ({"disk_path": "/proc/nothing"}, "/proc/nothing"),
    ],
)
def test_a_store_that_cannot_start_says_why(
    folder: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(StoreError, match=words):
        Peer(settings(folder, **changes))


def test_a_disk_belongs_to_one_store(told: StoreSettings, folder: Path) -> None:
    worker = Peer(told)
    with pytest.raises(StoreError, match=str(worker.client.store_pid)):
        Peer(settings(folder, host_bytes=8 << 20))
    worker.client.close()


def test_unusable_settings_are_named(folder: Path) -> None:
    for field, value in [("host_bytes", 0), ("disk_threads", 0), ("store_name", "a/b")]:
        with pytest.raises(ConfigError, match=field):
            Peer(settings(folder, **{field: value}))
    (folder / "open").mkdir(mode=0o755)
    told = settings(folder, runtime_dir=str(folder))
    path = told.runtime_path()
    path.mkdir(mode=0o755)
    path.chmod(0o777)
    with pytest.raises(StoreError, match="0777"):
        Peer(told)


def test_refusals_carry_their_code(told: StoreSettings) -> None:
    worker = Peer(told)
    with pytest.raises(StoreRefused) as taken:
        Peer(told)
    assert taken.value.code == "rank"
    with pytest.raises(StoreRefused) as small:
        Peer(told, engine="other", groups=[Group(4 << 20, 1, SPACE, "{}")])
    assert small.value.code == "host_too_small"
    assert worker.tiers([1]) == [0]
    worker.client.close()


def test_a_client_that_comes_while_a_store_ends_gets_the_next_one(told: StoreSettings) -> None:
    for how in (signal.SIGKILL, signal.SIGTERM):
        worker = Peer(told)
        first = worker.client.store_id
        os.kill(worker.client.store_pid, how)
        others = [Peer(told, engine=f"engine {n}") for n in range(3)]
        assert len({other.client.store_id for other in others} - {first}) == 1
        for peer in (worker, *others):
            peer.client.close()


def test_who_talks_nonsense_is_cut_off_alone(told: StoreSettings) -> None:
    worker = Peer(told)
    for nonsense in (
        struct.pack("<I", 1 << 30),
        struct.pack("<I", 5) + b"\xc1" * 5,
        struct.pack("<I", 3) + b"\x91\xa1x",
        struct.pack("<I", 8) + b"\x92\xa6Status\x01"[:8],
    ):
        sock = connect_socket(told.runtime_path(), 5)
        sock.sendall(nonsense)
        assert sock.recv(100) == b""
        sock.close()
    half = connect_socket(told.runtime_path(), 5)
    half.sendall(struct.pack("<I", 100) + b"half a frame")
    assert worker.tiers([1]) == [0]
    eventually(lambda: status(worker)["malformed_messages"] >= 3)  # type: ignore[operator]
    half.close()
    worker.client.close()


def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_BACKLOG_BYTES", 1 << 20)
    mine, theirs = socket.socketpair()
    held = Connection(mine, 1, os.getpid())
    frame = bytearray(b"x" * (300 << 10))
    while not held.broken:
        assert held.backlog_bytes <= 1 << 20
        held.send(frame)
    assert held.backlog_bytes > 1 << 20
    held.close()
    theirs.close()


def test_what_does_not_fit_the_socket_arrives_later_and_in_order() -> None:
    mine, theirs = socket.socketpair()
    held = Connection(mine, 1, os.getpid())
    sent = b"".join(bytes([n]) * 100_000 for n in range(20))
    for n in range(20):
        held.send(bytearray(sent[100_000 * n : 100_000 * (n + 1)]))
    got = b""
    while len(got) < len(sent):
        got += theirs.recv(1 << 16)
        held.flush()
    assert got == sent
    assert held.backlog_bytes == 0
    held.close()
    theirs.close()


def test_a_large_lookup_is_cut_into_messages(told: StoreSettings) -> None:
    worker = Peer(told)
    worker.store(1, [5])
    tiers = worker.client.lookup(os.urandom(32 * 70_000) + join([5]), 20)
    assert len(tiers) == 70_001
    assert tiers[-1] == 2
    worker.client.close()


def test_a_late_answer_to_an_ask_is_declined(told: StoreSettings) -> None:
    worker, other = Peer(told), Child(told)
    audit = struct.pack("<IQ", 0, 1)
    masks = np.full(1, 1, np.uint64)
    with pytest.raises(StoreGone):  # the other asker does not ask
        worker.client.ask(1, 0, SPACE, join([1]), 3, masks, audit, timeout_s=0.05)
    other.kill()  # now the answer comes, to nobody
    eventually(lambda: status(worker)["jobs_open"] == 1)
    eventually(lambda: status(worker)["host"]["used_slots"] == 0)  # type: ignore[index]
    assert worker.store(2, [1]) == [1]
    worker.client.close()


def test_a_stopped_store_says_so_to_signals_and_leaves_nothing(told: StoreSettings) -> None:
    worker = Peer(told)
    worker.store(1, [1, 2, 3])
    pid = worker.client.store_pid
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: gone(pid))
    worker.client.close()
    assert not (told.runtime_path() / "store.sock").exists()
    worker = Peer(told)
    await_scan(worker)
    assert worker.tiers([1, 2, 3]) == [1, 1, 1]
    worker.client.close()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from kvfold.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_command_line(folder: Path) -> None:
    told = settings(folder, linger_s=float("inf"))
    where = ["--runtime-dir", str(told.runtime_dir)]
    assert command("--version").stdout.startswith("kvfold ")
    assert command("store", "status", *where).returncode == 3
    assert command("store", "run", "--host", "lots").returncode == 2
    disk = ["--disk-path", str(told.disk_path), "--disk", "64MiB"]
    run = ["store", "run", "--host", "4MiB", *disk, *where]
    code = "import sys; from kvfold.cli import main; sys.exit(main())"
    store = subprocess.Popen(
        [sys.executable, "-c", code, *run], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert store.stdout is not None
    assert str(told.runtime_path()) in store.stdout.readline().decode()
    worker = Peer(told)  # finds the store that runs already
    assert worker.client.store_pid == store.pid
    worker.store(1, [1, 2])
    second = command(*run)
    assert second.returncode == 1
    assert str(store.pid) in second.stderr
    report = json.loads(command("store", "flush", "--json", *where).stdout)
    assert report["host_only_chunks"] == 0
    shown = command("store", "status", *where)
    assert "engine" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100
    figures = json.loads(command("store", "status", "--json", *where).stdout)
    assert figures["disk"]["chunks"] == 2
    worker.client.close()
    assert command("store", "stop", *where).returncode == 0
    assert store.wait(20) == 0
    store.stdout.close()
    assert GROUP.namespace == SPACE
