"""What a test run has left behind: processes, memory, socket files, shared memory.

Processes are known by a mark in their environment, which children inherit, so other runs on the
same machine are not mistaken for this one. What vLLM itself leaves when killed (psm_*, sem.*,
vllm_dist_*) is not looked at.
"""

from __future__ import annotations

import os
import signal
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "KVFOLD_TEST_RUN"


def mark_run() -> str:
    """Mark this process's environment, once, and return the mark."""
    return os.environ.setdefault(MARK, uuid.uuid4().hex)


def traces(runtime: Path | None = None) -> set[str]:
    """Return what exists now, one line each: take it before and after a test and compare.

    Lists the run's processes (not this one), `kvfold` memfds that they or this process map or hold
    open, socket files below `runtime`, and entries of /dev/shm named after kvfold.
    """
    found = {f"shared memory {path}" for path in Path("/dev/shm").glob("*kvfold*")}
    for pid, command in processes().items():
        found.add(f"process {pid}: {command}")
        found |= {f"memory {name} of process {pid}" for name in _memory(pid)}
    found |= {f"memory {name} of this process" for name in _memory(os.getpid())}
    if runtime is not None:
        found |= {f"socket {path}" for path in runtime.rglob("*") if _is_socket(path)}
    return found


def left_behind(before: set[str], runtime: Path | None = None, grace_s: float = 10) -> list[str]:
    """Return the traces that were not there `before`, once processes had `grace_s` to end."""
    deadline = time.monotonic() + grace_s
    while True:
        left = sorted(traces(runtime) - before)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def processes() -> dict[int, str]:
    """Return the run's living processes but this one: pid -> command line."""
    run = f"{MARK}={mark_run()}".encode()
    own = os.getpid()
    found: dict[int, str] = {}
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with suppress(OSError):
            folder = Path(f"/proc/{pid}")
            # Fields after the command, which may hold spaces and brackets itself.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (folder / "cmdline").read_bytes().split(b"\0")
            command = b" ".join(words).decode(errors="replace").strip()
            # Python's own helper lives as long as the process that started it.
            if pid == own or state == "Z" or "resource_tracker" in command:
                continue
            ours = run in (folder / "environ").read_bytes().split(b"\0")
            if ours or int(parent) == own or int(parent) in found:
                found[pid] = command
    return found


def kill_all() -> None:
    """SIGKILL every process of the run but this one."""
    for pid in processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _memory(pid: int) -> Iterator[str]:
    """Yield "memfd:kvfold... inode N" for each such memfd that the process maps or holds open."""
    seen = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/memfd:kvfold"):
                seen.add((fields[5], int(fields[4])))
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("/memfd:kvfold"):
                    seen.add((target, os.stat(entry.path).st_ino))
    for target, inode in sorted(seen):
        yield f"{target.removeprefix('/').removesuffix(' (deleted)')} inode {inode}"


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False
