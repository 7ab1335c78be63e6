"""Faults of a store and of its disk, as a chaos run injects them.

Every fault heals: what is stopped goes on, what is full gets room, what is unreadable comes back.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

STOPPED_S = 3.0
"""How long a store is stopped: longer than the deadlines of a chaos run's engine."""
FULL_S = 2.0
AWAY_S = 1.5
PULSES, PULSE_S = 12, 0.06
"""A slow store runs only every other such time."""
FULL_BYTES = 1 << 20
"""No file of a full disk can grow beyond this."""
FLIPS = 24
"""Damaged bytes of each slab."""


class Faults:
    """Breaks one store, the one below `runtime`, whichever process it is now."""

    def __init__(self, runtime: Path, disk: Path) -> None:
        self._runtime, self._disk = runtime, disk
        self._threads: list[threading.Thread] = []
        self.injected: Counter[str] = Counter()
        self._by_name: dict[str, Callable[[random.Random], bool]] = {
            "kill": lambda draw: self._signal(signal.SIGKILL),
            "end": lambda draw: self._signal(signal.SIGTERM),
            "stop": lambda draw: self._stop(1, STOPPED_S),
            "slow": lambda draw: self._stop(PULSES, PULSE_S),
            "corrupt": self._corrupt,
            "truncate": self._truncate,
            "delete": self._delete,
            "full": lambda draw: self._full(),
            "unreadable": lambda draw: self._unreadable(),
        }

    def inject(self, name: str, seed: int) -> bool:
        """Let `name` happen now; False if there is nothing to break."""
        done = self._by_name[name](random.Random(seed))
        self.injected[name] += done
        return done

    def heal(self) -> None:
        """Wait until everything has healed."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    @property
    def pid(self) -> int | None:
        """The store's process, None while there is none."""
        for path in self._runtime.glob("*/store.json"):
            with suppress(OSError, ValueError, KeyError):
                pid = int(json.loads(path.read_text())["pid"])
                if b"kvfold.store" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    # -- the process ---------------------------------------------------------------------------

    def _signal(self, number: int) -> bool:
        pid = self.pid
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def _stop(self, times: int, length_s: float) -> bool:
        pid = self.pid
        if pid is None or not self._signal(signal.SIGSTOP):
            return False

        def go_on() -> None:
            for _ in range(times):
                time.sleep(length_s)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                if times > 1:
                    time.sleep(length_s)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._later(go_on)
        return True

    # -- the disk ------------------------------------------------------------------------------

    def _slabs(self) -> list[Path]:
        return sorted(self._disk.rglob("*.slab"))

    def _corrupt(self, draw: random.Random) -> bool:
        """Flip bits in the written parts of all slabs; then the host's copies are lost, too."""
        damaged = 0
        for slab in self._slabs():
            with suppress(OSError), slab.open("r+b", buffering=0) as file:
                for start, end in _written(file.fileno()):
                    for _ in range(FLIPS):
                        file.seek(draw.randrange(start, end))
                        byte = file.read(1)
                        if byte:
                            file.seek(-1, os.SEEK_CUR)
                            file.write(bytes([byte[0] ^ (1 << draw.randrange(8))]))
                            damaged += 1
        return bool(damaged) and self._signal(signal.SIGKILL)

    def _truncate(self, draw: random.Random) -> bool:
        slabs = self._slabs()
        if not slabs:
            return False
        slab = draw.choice(slabs)
        os.truncate(slab, draw.randrange(slab.stat().st_size // 2 + 1))
        return True

    def _delete(self, draw: random.Random) -> bool:
        slabs = self._slabs()
        if slabs:
            draw.choice(slabs).unlink()
        return bool(slabs)

    def _full(self) -> bool:
        """The store can write to no file beyond its first bytes, for a while."""
        pid = self.pid
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, hard))

            def make_room() -> None:
                time.sleep(FULL_S)
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

            self._later(make_room)
            return True
        return False

    def _unreadable(self) -> bool:
        """The root cannot be used for a while, and the store is killed: none can start meanwhile.

        A file takes its place, as nothing is unreadable to the superuser.
        """
        away = self._disk.with_name(self._disk.name + ".away")
        try:
            self._disk.rename(away)
        except OSError:  # no store has made it yet, or it is away
            return False
        self._disk.touch(mode=0)
        self._signal(signal.SIGKILL)

        def come_back() -> None:
            time.sleep(AWAY_S)
            self._disk.unlink()
            away.rename(self._disk)

        self._later(come_back)
        return True

    def _later(self, task: Callable[[], None]) -> None:
        thread = threading.Thread(target=task, name="chaos-heals")
        thread.start()
        self._threads.append(thread)


def _written(descriptor: int) -> list[tuple[int, int]]:
    """The parts of a sparse file that hold data."""
    parts, at, size = [], 0, os.fstat(descriptor).st_size
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole from here on
            break
        at = os.lseek(descriptor, start, os.SEEK_HOLE)
        parts.append((start, at))
    return parts
