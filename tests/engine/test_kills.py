"""Stores, engines and workers killed at random times while they store or load, and what is left.

`KVFOLD_KILLS` is the number of kills of each kind (4, or 10 with `KVFOLD_TEST_FULL`), and
`KVFOLD_SEED` draws their moments.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
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
from kvfold.testing.engines import Engine

KILLS = int(os.environ.get("KVFOLD_KILLS", "10" if os.environ.get("KVFOLD_TEST_FULL") else "4"))
SEED = int(os.environ.get("KVFOLD_SEED", "1"))
BATCHES = [batch(number) for number in range(2 + (KILLS + 1) // 2)]
"""Two for measuring; any other for a kill while it is stored, and one while it is loaded."""

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
    found.close()
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


@dataclass(frozen=True)
class Given:
    """What a test is given."""

    model: Callable[[int], tuple[Path, list[Any]]]
    settings: dict[str, Any]
    store: Store
    killer: Killer
    log: Path


@pytest.fixture
def given(model, settings, store, engine_log) -> Given:
    return Given(model, settings, store, Killer(store, SEED), engine_log)


def phase_of(number: int) -> Phase:
    return "loading" if number % 2 else "storing"


def pids(status: Status, role: str) -> list[int]:
    """Processes of the store's clients of a role, by rank."""
    clients = sorted(status["clients"], key=lambda client: client["rank"])
    return [client["pid"] for client in clients if client["role"] == role]


# ---------------------------------------------------------------- the store


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
def test_a_killed_store_costs_only_hits(private, given):
    """One engine loses its store again and again, answers, and finds a new one."""
    folder, right = given.model(2)
    settings, store, killer = given.settings, given.store, given.killer
    if private:  # all in memory, for this engine alone
        settings = {k: v for k, v in settings.items() if not k.startswith("disk")}
        settings |= {"private": True, "host": "256MiB"}

    def strike(status: Status) -> None:
        os.kill(status["pid"], signal.SIGKILL)
        wait_gone(status["pid"])

    with start(folder, settings, given.log, PROCESSES) as running:
        engine = User(running, store, clients=2)
        killer.measure(engine, BATCHES[:2])
        for number in range(KILLS):
            phase, ids, answer = phase_of(number), BATCHES[2 + number // 2], right[2 + number // 2]
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
    print(killer.tally.report(), check_bytes(Path(settings["digest_dir"])), sep="\n")


# ---------------------------------------------------------------- engines and workers

Strike = Callable[[Engine, Status], None]


def relay(
    heads: int, tp: int, victims: Callable[[int], tuple[dict[str, str], Strike]], given: Given
) -> None:
    """Engines follow one another on one store; each finds what the last left, and is killed.

    `victims(n)` tells the n-th engine's environment and how to kill it.
    """
    folder, right = given.model(heads)
    store, killer, clients = given.store, given.killer, tp + 1
    for number in range(KILLS + 1):
        env, strike = victims(number)
        with start(folder, given.settings, given.log, env, tp) as running:
            engine = User(running, store, clients)
            if number:
                tokens, hits = engine.ask(BATCHES[2 + (number - 1) // 2])
                assert tokens == right[2 + (number - 1) // 2]
                assert hits == ALL_CHUNKS or phase_of(number - 1) == "storing"
                killer.tally.hits.append(hits)
            else:
                killer.measure(engine, BATCHES[:2])
            with engines_own_memory_removed(running.pid):
                if number < KILLS:
                    ids = BATCHES[2 + number // 2]
                    killer.kill(engine, ids, phase_of(number), partial(strike, running))
                    # What is left of the engine ends by itself.
                    store.settled(0, f"kill {number}: something is held for the dead")
                else:
                    store.settled(clients, "something is still held")
                running.kill()
    store.settled(0, "something is held for the dead")
    store.stop()
    print(killer.tally.report(), check_bytes(Path(given.settings["digest_dir"])), sep="\n")


def kill_all(engine: Engine, status: Status) -> None:
    os.killpg(engine.pid, signal.SIGKILL)


def kill_core(engine: Engine, status: Status) -> None:
    """Only the process of the scheduler; its worker and its user live on for a while."""
    (core,), (worker,) = pids(status, "scheduler"), pids(status, "worker")
    assert len({engine.pid, core, worker}) == 3
    os.kill(core, signal.SIGKILL)


def test_a_killed_engine_s_store_serves_the_next(given):
    """Two of the whole engine, two of its scheduler alone, and so on."""

    def victims(number: int) -> tuple[dict[str, str], Strike]:
        return (PROCESSES, kill_core) if number // 2 % 2 else ({}, kill_all)

    relay(2, 1, victims, given)


def test_a_killed_worker_s_store_serves_the_next_engine(given):
    """One of two ranks that hold the same cache; each writes a part of every chunk."""

    def kill_worker(engine: Engine, status: Status) -> None:
        os.kill(given.killer.random.choice(pids(status, "worker")), signal.SIGKILL)

    relay(1, 2, lambda number: ({}, kill_worker), given)
