"""Real stores tell schedulers what they have lost, and are held up by none that does not read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_peers import GROUP, SLOT, SPACE, Peer, eventually, key, settings

from kvfold.store.client import Group, StoreClient
from kvfold.store.core_evictions import MAX_BACKLOG_BYTES, SOME
from kvfold.store.launch import connect_socket, running_stores
from kvfold.store.messages import VERSION, Evicted, Frames, Hello, encode, store_decoder
from kvfold.vllm import link as links
from kvfold.vllm.evictions import Evictions, listening_link

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def folder(tmp_runtime: Path) -> Iterator[Path]:
    """A folder; whatever stores run below it at the end are ended."""
    yield tmp_runtime
    for found in running_stores(runtime_dir=str(tmp_runtime / "run")):
        StoreClient.connect_tool(found).stop(drain=False)


def test_schedulers_that_ask_hear_what_the_store_has_lost_and_that_it_is_gone(folder: Path) -> None:
    small = settings(folder, host_bytes=16 * SLOT, disk_path=None)
    evictions, heard = Evictions(), set[bytes]()
    peer = links.Peer("scheduler", "engine", 0, 2, "plan", [GROUP])
    link = listening_link(small, peer, evictions)
    link.start()
    try:
        assert evictions.take() == (True, {})
        worker = Peer(small)
        for number in range(40):
            worker.store(number, [number])
        absent = {key(n) for n, tier in enumerate(worker.tiers(range(40))) if tier == 0}
        assert len(absent) == 24

        def all_heard() -> bool:
            everything, keys = evictions.take()
            assert not everything
            assert keys.keys() <= {SPACE}
            heard.update(bytes(v[i : i + 32]) for v in keys.values() for i in range(0, len(v), 32))
            return heard >= absent

        eventually(all_heard)
        assert heard == absent
        os.kill(worker.client.store_pid, signal.SIGKILL)
        eventually(lambda: evictions.take()[0])
        worker.client.close()
    finally:
        link.close()


def test_a_scheduler_that_does_not_read_holds_nobody_up_and_hears_that_it_missed_some(
    folder: Path,
) -> None:
    group = Group(4096, 100, SPACE, "{}")
    told = settings(folder, host_bytes=64 << 20, disk_path=None)
    worker = Peer(told, groups=[group])
    sock = connect_socket(told.runtime_path(), 10.0)
    try:
        sock.sendall(encode(Hello(VERSION, "scheduler", "engine", 0, 2, "plan", [group], True)))
        chunks, job = 8192, 0
        masks, every = np.ones(chunks, np.uint64), np.arange(chunks, dtype=np.uint32)
        while not (status := worker.client.status())["untold_evictions"]:
            assert job * chunks * 32 < 2 * MAX_BACKLOG_BYTES, "everything was told"
            keys = np.random.default_rng(job).bytes(32 * chunks)
            worker.client.ask(job, 0, SPACE, keys, 1, masks)
            worker.client.commit(job, every, True)
            job += 1
        frames, messages = Frames(store_decoder), list[Evicted]()
        sock.settimeout(20)
        while not (messages and messages[-1].keys == b""):
            frames.feed(sock.recv(1 << 20))
            messages += [m for m in frames if isinstance(m, Evicted)]
        heard = sum(len(m.keys) // 32 for m in messages)
        assert heard * 32 >= MAX_BACKLOG_BYTES
        assert heard == status["host"]["evicted_chunks"] - status["untold_evictions"]
        assert messages[-1].namespace == SOME
    finally:
        sock.close()
        worker.client.close()
