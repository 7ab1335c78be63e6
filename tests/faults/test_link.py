"""The connector's link to real stores that are killed."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from store_peers import GROUP, eventually, settings

from kvfold.store.client import StoreClient
from kvfold.testing import leaks
from kvfold.vllm.link import Peer, StoreLink


def arenas() -> set[str]:
    return {line for line in leaks.traces() if line.startswith("memory") and "this process" in line}


@pytest.mark.usefixtures("no_leaks")
def test_a_killed_store_s_memory_is_unmapped_whoever_still_knows_its_client(tmp_path: Path) -> None:
    """Its clients are in reference cycles and in the locals of threads that wait."""
    known: list[StoreClient] = []
    peer = Peer("worker", "engine", 0, 1, "plan", [GROUP])
    link = StoreLink(
        settings(tmp_path, disk_path=None), peer, on_client=lambda client, _: known.append(client)
    )
    gc.collect()
    others = arenas()
    gc.disable()
    try:
        link.start()
        for number in range(2):
            assert len(arenas() - others) == 1
            os.kill(known[-1].store_pid, signal.SIGKILL)
            eventually(lambda seen=number: len(known) == seen + 2)
        eventually(lambda: len(arenas() - others) == 1)
        assert link.current is not None
    finally:
        gc.enable()
        link.close()
        known[-1].close()
    eventually(lambda: not arenas() - others)
    StoreClient.connect_tool(settings(tmp_path, disk_path=None).runtime_path()).stop(False)
