"""Stores, engines and workers killed at random times while they store or load, and what is left.

`KVFOLD_KILLS` is the number of kills of each kind (default 10), `KVFOLD_SEED` draws their moments.
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

KILLS = int(os.environ.get("KVFOLD_KILLS", "10"))
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
    """What a test of engines that follow one another is given."""

    model: Callable[[int], tuple[Path, list[Any]]]
    settings: dict[str, Any]
    store: Store
    log: Path

    @property
    def digests(self) -> Path:
        return Path(self.settings["digest_dir"])


@pytest.fixture
def given(model, settings, store, engine_log) -> Given:
    return Given(model, settings, store, engine_log)


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

    def strike(status: Status) -> None:
        os.kill(status["pid"], signal.SIGKILL)
        wait_gone(status["pid"])

    with start(folder, settings, engine_log, PROCESSES) as running:
        engine = User(running, store, clients=2)
        killer.measure(engine, BATCHES[:2])
        for number in range(KILLS):
            phase, ids, answer = phase_of(number), BATCHES[2 + number // 2], right[2 + number // 2]
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


# ---------------------------------------------------------------- engines and workers

Strike = Callable[[Engine, Status], None]


def relay(
    heads: int,
    tp: int,
    kills: range,
    killer: Killer,
    victims: Callable[[int], tuple[dict[str, str], Strike]],
    given: Given,
) -> None:
    """Engines follow one another on one store; each finds what the last left, and is killed.

    `victims(n)` tells the n-th engine's environment and how to kill it.
    """
    folder, right = given.model(heads)
    for number in (*kills, None):
        env, strike = ({}, kill_all) if number is None else victims(number)
        with start(folder, given.settings, given.log, env, tp) as running:
            clients = tp + 1
            engine = User(running, given.store, clients)
            if number == kills[0]:
                killer.measure(engine, BATCHES[:2])
            else:
                last = kills[-1] if number is None else number - 1
                tokens, hits = engine.ask(BATCHES[2 + last // 2])
                assert tokens == right[2 + last // 2]
                assert hits == ALL_CHUNKS or phase_of(last) == "storing"
                killer.tally.hits.append(hits)
            if number is None:
                given.store.settled(clients, "something is still held")
                break
            phase, ids = phase_of(number), BATCHES[2 + number // 2]
            if phase == "loading":
                engine.fill(ids)
            given.store.settled(clients, "something is still held")
            with engines_own_memory_removed(running.pid):
                killer.kill(engine, ids, phase, partial(strike, running))
                # What is left of the engine ends by itself.
                given.store.settled(0, f"kill {number}: something is held for the dead")
                running.kill()


def kill_all(engine: Engine, status: Status) -> None:
    os.killpg(engine.pid, signal.SIGKILL)


def kill_core(engine: Engine, status: Status) -> None:
    """Only the process of the scheduler; its worker and its user live on for a while."""
    (core,) = pids(status, "scheduler")
    (worker,) = pids(status, "worker")
    assert len({engine.pid, core, worker}) == 3
    os.kill(core, signal.SIGKILL)


def test_a_killed_engine_s_store_serves_the_next(given):
    """Two of the whole engine, two of its scheduler alone, and so on."""
    killer = Killer(given.store, SEED)

    def victims(number: int) -> tuple[dict[str, str], Strike]:
        return (PROCESSES, kill_core) if number // 2 % 2 else ({}, kill_all)

    relay(2, 1, range(KILLS), killer, victims, given)
    given.store.stop()
    print(killer.tally, check_bytes(given.digests), sep="\n")


def test_a_killed_worker_s_store_serves_the_next_engine(given):
    """Of two ranks that hold the same cache, each of which writes a part of every chunk, one dies;
    then of two that hold one KV head each.
    """
    killer = Killer(given.store, SEED)

    def kill_worker(engine: Engine, status: Status) -> None:
        os.kill(killer.random.choice(pids(status, "worker")), signal.SIGKILL)

    half = KILLS // 4 * 2
    for heads, kills in ((1, range(half)), (2, range(half, KILLS))):
        if kills:
            relay(heads, 2, kills, killer, lambda number: ({}, kill_worker), given)
    given.store.stop()
    print(killer.tally, check_bytes(given.digests), sep="\n")
