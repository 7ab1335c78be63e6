"""Stores, engines and workers killed at random times while they store or load, and what is left.

`KVFOLD_KILLS` is the number of kills of each kind (default 10), `KVFOLD_SEED` draws their moments.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from killing import (
    ALL_CHUNKS,
    ENGINE_ARGS,
    ENGINE_ENV,
    MODEL,
    SLOW_S,
    Killer,
    Phase,
    Status,
    Store,
    User,
    answers,
    arenas,
    batch,
    check_bytes,
    engines_own_memory_removed,
    eventually,
    wait_gone,
)

from kvfold.testing.checkpoints import llama
from kvfold.testing.engines import Engine, EngineFailed

KILLS = int(os.environ.get("KVFOLD_KILLS", "10"))
SEED = int(os.environ.get("KVFOLD_SEED", "1"))
BATCHES = [batch(number) for number in range(2 + KILLS // 2)]
"""The first is for measuring; every other is for a kill while it is stored, and one while loaded."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Callable[[int], tuple[Path, list[Any]]]:
    """model(KV heads) -> checkpoint, and the right answers to every batch."""

    @cache
    def made(heads: int) -> tuple[Path, list[Any]]:
        folder = llama(checkpoints, heads, **MODEL)
        return folder, answers(folder, BATCHES)

    return made


@pytest.fixture
def settings(tmp_runtime: Path, tmp_path: Path, no_leaks: None) -> dict[str, Any]:
    """A shared store whose host tier is smaller than a batch: loads stream from disk."""
    return {
        "host": "48MiB",
        "disk": "512MiB",
        "disk_path": str(tmp_path / "disk"),
        "runtime_dir": str(tmp_runtime),
        "digest_dir": str(tmp_path / "digests"),
        "lookup_wait_ms": 5000,  # a busy machine must not turn hits into misses here
    }


@pytest.fixture
def store(settings: dict[str, Any]) -> Iterator[Store]:
    found = Store(Path(settings["runtime_dir"]))
    yield found
    if found.status() is not None:  # only after a failure
        found.stop()


PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""Scheduler and worker are processes of their own, also at TP1."""


def start(folder: Path, settings: dict[str, Any], log: Path, env: Any = (), tp: int = 1) -> Engine:
    return Engine(
        folder,
        log=log,
        tp=tp,
        connector=settings,
        engine_args=ENGINE_ARGS,
        env={**ENGINE_ENV, **dict(env)},
        start_timeout_s=SLOW_S,
    )


def phase_of(number: int) -> Phase:
    return "loading" if number % 2 else "storing"


def pids(status: Status, role: str) -> list[int]:
    """Processes of the store's clients of a role, by rank."""
    clients = sorted(status["clients"], key=lambda client: client["rank"])
    return [client["pid"] for client in clients if client["role"] == role]


# ---------------------------------------------------------------- the store


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
def test_a_killed_store_costs_only_hits(private, model, settings, store, engine_log):
    """One engine loses its store again and again, answers, and finds a new one."""
    folder, right = model(2)
    if private:  # all in memory, for this engine alone
        settings = {k: v for k, v in settings.items() if not k.startswith("disk")}
        settings |= {"private": True, "host": "256MiB"}
    killer = Killer(store, SEED)
    print(f"seed {SEED}")

    def strike(status: Status) -> None:
        os.kill(status["pid"], signal.SIGKILL)
        wait_gone(status["pid"])

    with start(folder, settings, engine_log, PROCESSES) as running:
        engine = User(running, store, clients=2)
        killer.measure(engine, BATCHES[0])
        for number in range(KILLS):
            phase, ids, answer = phase_of(number), BATCHES[1 + number // 2], right[1 + number // 2]
            if phase == "loading":
                engine.fill(ids)
            killer.kill(engine, ids, phase, strike)
            assert engine.finish()[0] == answer
            status = store.settled(2, f"kill {number}: no store again")
            (worker,), (scheduler,) = pids(status, "worker"), pids(status, "scheduler")
            assert len(arenas(worker)) == 1, "the dead store's memory is still mapped"
            assert not arenas(scheduler)
            tokens, hits = engine.ask(ids)
            assert tokens == answer
            killer.tally.hits.append(hits)
            if phase == "loading" and not private:
                assert hits == ALL_CHUNKS, "the disk tier outlives the store"
        store.settled(2, "something is still held")
    if private:
        eventually(lambda: store.status() is None, "a private store outlives its engine")
    else:
        store.settled(0, "something is held for nobody")
        store.stop()
    print(killer.tally, check_bytes(Path(settings["digest_dir"])), sep="\n")


# ---------------------------------------------------------------- engines
