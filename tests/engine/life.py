"""What tests of requests' lives share: an engine stepped by hand, gates, and looks from outside."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvfold.store.client import StoreClient
from kvfold.store.launch import running_stores
from kvfold.testing.chaos_engine import Request, Stepper, figures
from kvfold.testing.checkpoints import prompt

SPAN = 32
ENGINE = {"block_size": SPAN, "max_model_len": 1024, "num_gpu_blocks_override": 200}
STORE = {
    "host": "32MiB",
    "private": True,
    "lookup_wait_ms": 60_000,  # only gates decide
    "load_deadline_s": 120,
    "store_deadline_s": 120,
}
SEEDS = itertools.count(7000)


class Recording(Stepper):
    """A `Stepper` whose requests are judged later."""

    def __init__(self, llm: Any, asked: list[Request]) -> None:
        super().__init__(llm)
        self._asked, self._base = asked, figures(llm)

    def ask(self, ids, tokens=8, **how):
        request = super().ask(ids, tokens, **how)
        self._asked.append(request)
        return request

    def answer(self, ids, tokens=8, **how):
        request = super().answer(ids, tokens, **how)
        assert request.finish_reason == "length"
        return request

    def count(self, name: str) -> int:
        """How often so far: a counter of vLLM's or ours ("kvfold_..."), over all labels."""
        now = figures(self.llm)
        keys = [key for key in now if key == name or key.startswith(f"{name}/")]
        return int(sum(now[key] - self._base.get(key, 0) for key in keys))

    def forget(self) -> None:
        """Empty the engine's own cache; everything ordered is stored before."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def store_pid(self) -> int:
        return self.connector._link.current[0].store_pid


class Gate:
    """Holds back calls of a method, on whatever thread they are made, until it is opened."""

    made: ClassVar[list[Gate]] = []

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self._open, self.waiting = threading.Event(), threading.Event()
        original = getattr(owner, name)

        def gated(*args: Any, **kwargs: Any) -> Any:
            if not self._open.is_set():
                self.waiting.set()
                assert self._open.wait(300)
            return original(*args, **kwargs)

        patch.setattr(owner, name, gated)
        Gate.made.append(self)

    def open(self) -> None:
        self._open.set()

    @classmethod
    def open_all(cls) -> None:
        """Also when a test fails: an engine ends only when its copies do."""
        while cls.made:
            cls.made.pop().open()


def wait_for(holds: Callable[[], Any], what: str) -> None:
    """Wait without stepping any engine."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def words(chunks: int, more: int = 9) -> list[int]:
    """A prompt of so many chunks and a rest, that nobody has seen."""
    return prompt(chunks * SPAN + more, seed=next(SEEDS))


def steps(engine: Stepper, count: int) -> None:
    for _ in range(count):
        engine.step()


@contextmanager
def tool(runtime: Path) -> Iterator[StoreClient]:
    """A client of the only store below `runtime`."""
    (folder,) = running_stores(None, str(runtime))
    client = StoreClient.connect_tool(folder)
    try:
        yield client
    finally:
        client.close()


def scanning(runtime: Path) -> bool:
    with tool(runtime) as client:
        return bool(client.status()["scanning"])


def cpu_s(group: int) -> float:
    """Processor time of all living processes of a process group, in seconds."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == group:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
