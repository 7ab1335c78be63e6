"""The leak check sees what it is there to see, and nothing of other runs."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfold.testing import leaks


@pytest.fixture
def before(tmp_runtime: Path) -> Iterator[set[str]]:
    yield leaks.traces(tmp_runtime)
    leaks.kill_all()


def new(before: set[str], runtime: Path) -> list[str]:
    return leaks.left_behind(before, runtime, grace_s=0)


def test_nothing_new_is_no_leak(before: set[str], tmp_runtime: Path) -> None:
    assert new(before, tmp_runtime) == []


def test_sees_a_process_that_left_its_parents(before: set[str], tmp_runtime: Path) -> None:
    subprocess.run(["sh", "-c", "setsid sleep 100 & sleep 0.1"], check=True)
    (line,) = new(before, tmp_runtime)
    assert line.endswith(": sleep 100")
    leaks.kill_all()
    assert leaks.left_behind(before, tmp_runtime) == []


def test_a_process_of_another_run_is_not_ours(before: set[str], tmp_runtime: Path) -> None:
    env = {**os.environ, leaks.MARK: "another"}
    command = "setsid sleep 0.5 & sleep 0.1"
    subprocess.run(["sh", "-c", command], env=env, check=True)
    assert new(before, tmp_runtime) == []


def test_sees_mapped_memory_and_open_descriptors(before: set[str], tmp_runtime: Path) -> None:
    fd = os.memfd_create("kvfold-test")
    os.ftruncate(fd, 4096)
    assert len(new(before, tmp_runtime)) == 1
    mapped = mmap.mmap(fd, 4096)
    os.close(fd)
    (line,) = new(before, tmp_runtime)
    assert line.startswith("memory memfd:kvfold-test inode ")
    mapped.close()
    assert new(before, tmp_runtime) == []


def test_sees_a_socket_file(before: set[str], tmp_runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_runtime / "store.sock"))
    assert new(before, tmp_runtime) == [f"socket {tmp_runtime}/store.sock"]
