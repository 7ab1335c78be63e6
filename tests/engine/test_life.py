"""The life and death of requests on a real engine, one event at a time, and what is never served.

Gates hold back what runs beside the engine (lookups, copies), so that nothing here depends on who
is faster. All answers are judged at the end by engines without kvfold.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from life import (
    ENGINE,
    SPAN,
    STORE,
    Gate,
    Recording,
    cpu_s,
    scanning,
    steps,
    tool,
    wait_for,
    words,
)
from slab_reader import read_slots

pytest.importorskip("vllm")

from kvfold.errors import StoreGone
from kvfold.store.client import StoreClient
from kvfold.testing.chaos_engine import Request, Stepper
from kvfold.testing.chaos_oracle import judge
from kvfold.testing.checkpoints import gemma3, prompt
from kvfold.testing.engines import Engine, local_engine
from kvfold.testing.lora import ENGINE_ARGS as LORA
from kvfold.testing.lora import lora_adapter
from kvfold.vllm import connector as connector_module
from kvfold.vllm import holds
from kvfold.vllm.requests import RequestState
from kvfold.vllm.worker import ChunkCopies

IDLE_S = 10 if os.environ.get("KVFOLD_TEST_FULL") == "1" else 3

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def asked() -> dict[Path, list[Request]]:
    """All requests of this module, by model."""
    return {}


@pytest.fixture(scope="module")
def start(asked, runtime_root: Path) -> Callable[..., Any]:
    """start(model, runtime, engine={...}, **connector) -> context of a `Recording` engine; when it
    ends without an error, nothing may be held any more."""

    @contextmanager
    def started(model: Path, runtime: Path, engine: dict[str, Any] | None = None, **connector: Any):
        settings = {**STORE, "runtime_dir": str(runtime), **connector}
        with local_engine(
            model, engine_args={**ENGINE, **(engine or {})}, connector=settings
        ) as llm:
            stepper = Recording(llm, asked.setdefault(model, []))
            try:
                yield stepper
            finally:
                Gate.open_all()
            stepper.settle()
            assert stepper.held() == {}

    return started


@pytest.fixture
def gate(monkeypatch) -> Iterator[Callable[[type, str], Gate]]:
    """gate(class, method) -> a closed gate; all are open at the end."""
    yield partial(Gate, monkeypatch)
    Gate.open_all()


class TestOneEngine:
    """What one engine with a host tier of its own shows, one thing after another."""

    @pytest.fixture(scope="class")
    @staticmethod
    def shared(start, llama_kv2, runtime_root) -> Iterator[Recording]:
        with start(llama_kv2, runtime_root / "life") as engine:
            yield engine

    @pytest.fixture
    def engine(self, shared: Recording, gate) -> Iterator[Recording]:
        yield shared
        shared.settle()
        assert shared.held() == {}

    def test_abort_while_the_lookup_is_on_its_way(self, engine, gate):
        ids = words(4)
        engine.answer(ids)
        engine.forget()
        lookups = gate(StoreClient, "lookup")
        request = engine.ask(ids)
        assert lookups.waiting.wait(60)
        steps(engine, 5)
        assert not request.tokens
        engine.abort(request)
        steps(engine, 3)
        assert engine.held() == {}
        lookups.open()
        assert engine.answer(ids).cached_tokens == 4 * SPAN, "the next one is served"

    def test_abort_while_loading_keeps_the_blocks_until_the_worker_has_stopped(self, engine, gate):
        ids = words(4)
        engine.answer(ids)
        engine.forget()
        free = engine.pool.get_num_free_blocks()
        copies = gate(ChunkCopies, "copy_in")
        request = engine.ask(ids)
        engine.until(copies.waiting.is_set, "a copy")
        engine.abort(request)
        other = engine.answer(words(2, more=1), 1)
        assert other.cached_tokens == 0
        assert engine.pool.get_num_free_blocks() <= free - 4, "somebody else may get the blocks"
        copies.open()
        engine.settle()
        assert engine.held() == {}

    def test_a_lookup_is_asked_for_again_in_every_step(self, engine, gate):
        ids = words(4)
        engine.answer(ids)
        engine.forget()
        lookups = gate(StoreClient, "lookup")
        request = engine.ask(ids)
        assert lookups.waiting.wait(60)
        steps(engine, 10)
        assert not request.tokens
        lookups.open()
        engine.until(lambda: request.over, "an answer")
        assert request.cached_tokens == 4 * SPAN

    def test_a_lookup_that_takes_too_long_is_a_miss(self, engine, gate, monkeypatch):
        ids = words(4)
        engine.answer(ids)
        engine.forget()
        late = engine.count("kvfold_missed_requests/late")
        lookups = gate(StoreClient, "lookup")
        request = engine.ask(ids)
        assert lookups.waiting.wait(60)
        steps(engine, 3)
        assert not request.tokens
        monkeypatch.setattr(engine.side, "_clock", lambda: time.monotonic() + 61)
        engine.until(lambda: request.over, "an answer")
        assert request.cached_tokens == 0
        assert engine.count("kvfold_missed_requests/late") == late + 1
        monkeypatch.undo()
        lookups.open()

    def test_who_must_not_read_the_cache_loads_nothing_but_stores(self, engine):
        ids = words(4)
        for how in ({"prompt_logprobs": 1}, {"skip": True}):
            loads = engine.count("kvfold_loads")
            assert engine.answer(ids, **how).cached_tokens == 0
            engine.forget()
            assert engine.count("kvfold_loads") == loads
        assert engine.answer(ids).cached_tokens == 4 * SPAN

    def test_the_engines_own_hit_is_shorter_than_ours(self, engine):
        ids = words(6)
        engine.answer(ids)
        engine.forget()
        engine.answer(ids[: 3 * SPAN + 1], 1)
        hits = engine.count("kvfold_hit_tokens")
        assert engine.answer(ids).cached_tokens == 6 * SPAN
        assert engine.count("kvfold_hit_tokens") == hits + 3 * SPAN, "only what was missing"

    def test_the_engines_own_hit_is_longer_than_ours(self, engine, monkeypatch):
        ids = words(6)
        engine.answer(ids[: 3 * SPAN + 1], 1)
        engine.settle()
        with monkeypatch.context() as patch:
            patch.setattr(engine.side.storing, "store", lambda *args, **how: None)
            engine.answer(ids)
        loads = engine.count("kvfold_loads")
        assert engine.answer(ids).cached_tokens == 6 * SPAN
        assert engine.count("kvfold_loads") == loads
        engine.forget()
        assert engine.answer(ids).cached_tokens == 6 * SPAN, "the store was given what it lacked"

    def test_salts_are_worlds_of_their_own(self, engine):
        ids = words(3)
        for salt in (None, "a", "b"):
            assert engine.answer(ids, salt=salt).cached_tokens == 0
            engine.forget()
        for salt in (None, "a", "b"):
            assert engine.answer(ids, salt=salt).cached_tokens == 3 * SPAN
            engine.forget()

    def test_a_store_in_flight_across_a_reset_is_never_served(self, engine, gate):
        ids = words(4)
        copies = gate(ChunkCopies, "copy")
        engine.answer(ids, 1)
        assert copies.waiting.wait(60)
        engine.llm.reset_prefix_cache(reset_connector=True)  # its blocks are held: not the pool
        copies.open()
        engine.forget()
        assert engine.answer(ids).cached_tokens == 0
        engine.forget()
        assert engine.answer(ids).cached_tokens == 4 * SPAN, "what was stored since"

    def test_a_load_in_flight_across_a_reset_is_not_used(self, engine, gate):
        ids = words(4)
        engine.answer(ids)
        engine.forget()
        failed = engine.count("kvfold_load_failures/reset")
        copies = gate(ChunkCopies, "copy_in")
        request = engine.ask(ids)
        engine.until(copies.waiting.is_set, "a copy")
        engine.llm.reset_prefix_cache(reset_connector=True)
        steps(engine, 2)
        copies.open()
        engine.until(lambda: request.over, "an answer")
        assert request.cached_tokens == 0
        assert engine.count("kvfold_load_failures/reset") == failed + 1

    def test_two_images_with_the_same_text_have_different_keys(self, engine):
        from vllm import SamplingParams
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request as EngineRequest

        def keys(*images: str, salt: str | None = None) -> bytes:
            request = EngineRequest(
                "r",
                list(range(8, 8 + 4 * SPAN)),
                SamplingParams(max_tokens=1),
                None,
                mm_features=[
                    MultiModalFeatureSpec(None, "image", name, PlaceholderRange(5, 40))
                    for name in images
                ],
                cache_salt=salt,
                block_hasher=get_request_block_hasher(SPAN, sha256),
            )
            state = RequestState(request, engine.side.geometry)
            return engine.side.storing.keys(state, 0, np.arange(4))

        made = [keys(), keys("cat"), keys("dog"), keys("cat", salt="a"), keys("cat", salt="b")]
        chunks = {made[i][32 * j : 32 * j + 32] for i in range(5) for j in range(4)}
        assert len(chunks) == 5 * 4
        assert keys("cat") == made[1]

    def test_one_step_after_the_last_copy_the_engine_is_idle(self, engine, gate, monkeypatch):
        copies = gate(ChunkCopies, "copy")
        engine.answer(words(6), 1)
        steps(engine, 3)
        assert engine.connector.has_pending_push_work(), "copies still read the blocks"
        copies.open()
        saves = connector_module._local_workers[engine.connector._engine]._saves
        wait_for(lambda: len(saves._reports) == engine.side.holds.jobs, "reports of all jobs")
        reported_s = time.monotonic()
        engine.step()
        assert not engine.connector.has_pending_push_work()
        print(f"nothing is pending {1e3 * (time.monotonic() - reported_s):.1f} ms after that")
        engine.settle()
        made: list[None] = []
        monkeypatch.setattr(engine.scheduler, "schedule", lambda *args: made.append(None))
        steps(engine, 20)
        assert not made


# ---------------------------------------------------------------- pools of few blocks


def test_preemption_while_stores_are_in_flight_and_resumption(
    start, llama_kv2, tmp_runtime, no_leaks, monkeypatch
):
    """Long answers push one another out of a pool of few blocks, part of which copies hold."""
    copy = ChunkCopies.copy

    def slow(*args: Any) -> int:
        time.sleep(0.1)
        return copy(*args)

    monkeypatch.setattr(ChunkCopies, "copy", slow)
    monkeypatch.setattr(holds, "FREES_WAIT_S", 0)  # else the engine waits for copies that end soon
    pool = {"num_gpu_blocks_override": 26, "max_model_len": 512, "max_num_seqs": 6}
    with start(llama_kv2, tmp_runtime, pool) as engine:
        preempt, jobs = engine.scheduler._preempt_request, []

        def watched(*args: Any, **kwargs: Any) -> None:
            jobs.append(engine.side.holds.jobs)
            preempt(*args, **kwargs)

        monkeypatch.setattr(engine.scheduler, "_preempt_request", watched)
        for _ in range(4):
            requests = [engine.ask(words(3, more=20), 90) for _ in range(6)]
            engine.until(lambda: all(r.over for r in requests), "all answers")  # noqa: B023
        print(f"store jobs in flight at each preemption: {jobs}")
        assert any(jobs)


SMALL = {"num_gpu_blocks_override": 26, "max_model_len": 768}


def test_a_failed_load_of_a_request_that_needs_most_of_the_pool(
    start, llama_kv2, tmp_runtime, no_leaks, monkeypatch
):
    """The engine goes on reserving what such a request needs, beside what it needs to begin anew:
    a shorter offer never fits."""
    copy_in, copied = ChunkCopies.copy_in, []

    def failing(*args: Any) -> int:
        copied.append(None)
        if len(copied) == 19:
            raise StoreGone("a chunk is lost")
        return copy_in(*args)

    with start(llama_kv2, tmp_runtime, SMALL) as engine:
        engine.patience_s = 30
        ids = words(20)
        for _ in range(4):  # few blocks may be held at a time
            engine.answer(ids)
            engine.forget()
        monkeypatch.setattr(ChunkCopies, "copy_in", failing)
        engine.answer(ids)
        assert engine.count("kvfold_load_failures") == 1
        engine.forget()
        assert engine.answer(ids).cached_tokens == 20 * SPAN


def test_failed_loads_do_not_keep_one_another_from_their_turn(
    start, llama_kv2, tmp_runtime, no_leaks, monkeypatch, gate
):
    """Two fill the pool with their loads, and both fail: the first one to be asked again needs
    blocks that the other still holds."""
    with start(llama_kv2, tmp_runtime, SMALL) as engine:
        engine.patience_s = 30
        prompts = [words(9) for _ in range(2)]
        for ids in prompts:
            engine.answer(ids)
        engine.forget()
        copies = gate(ChunkCopies, "copy_in")
        gated, copied = ChunkCopies.copy_in, []

        def failing(*args: Any) -> int:
            copied.append(None)
            if len(copied) in (6, 12):
                raise StoreGone("a chunk is lost")
            return gated(*args)

        monkeypatch.setattr(ChunkCopies, "copy_in", failing)
        requests = [engine.ask(ids) for ids in prompts]
        engine.until(lambda: engine.side.waiting_loads == 2, "two loads")
        copies.open()
        loads = connector_module._local_workers[engine.connector._engine]._loads
        wait_for(lambda: len(loads._reports) == 2, "two failures")
        engine.until(lambda: all(request.over for request in requests), "all answers")
        assert engine.count("kvfold_load_failures") >= 2


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_blocks_recycled_mid_request_do_not_change_what_is_stored(
    model, checkpoints_of, start, tmp_runtime, tmp_path, no_leaks, monkeypatch
):
    """With windows, blocks are used again while their request still runs."""
    copy = ChunkCopies.copy

    def slow(*args: Any) -> int:
        time.sleep(0.003)
        return copy(*args)

    monkeypatch.setattr(ChunkCopies, "copy", slow)
    asked_for = [words(16) for _ in range(8)]

    def stored(blocks: int) -> dict[tuple[bytes, bytes], bytes]:
        """(namespace, key) -> payload on disk, of an engine with so many blocks."""
        disk = tmp_path / str(blocks)
        # One chunk a step, so that the last bits do not depend on the pool.
        args = {
            "num_gpu_blocks_override": blocks,
            "max_model_len": 576,
            "max_num_seqs": 1,
            "max_num_batched_tokens": SPAN,
        }
        on_disk = {"disk": "512MiB", "disk_path": str(disk)}
        with start(checkpoints_of(model), tmp_runtime, args, **on_disk) as engine:
            for ids in asked_for:
                engine.answer(ids, 2)
            engine.settle()
            with tool(tmp_runtime) as client:
                client.flush(120)
        return {(slot.namespace, slot.key): slot.payload for slot in read_slots(disk)}

    few, many = stored({"llama": 20, "gemma3": 36}[model]), stored(400)
    both = few.keys() & many.keys()  # what is held for copies is bounded, so some was not stored
    assert len(both) > len(few) // 2
    assert len({namespace for namespace, _ in both}) == {"llama": 1, "gemma3": 3}[model]
    assert [key for key in both if few[key] != many[key]] == []


@pytest.fixture
def checkpoints_of(checkpoints: Path, llama_kv2: Path) -> Callable[[str], Path]:
    return lambda name: llama_kv2 if name == "llama" else gemma3(checkpoints)


# ---------------------------------------------------------------- stores that are full, slow, gone


def test_a_store_of_few_slots(start, llama_kv2, tmp_runtime, no_leaks, gate):
    """Chunks that find no room, and chunks that are evicted between lookup and load."""
    with start(llama_kv2, tmp_runtime, {"max_num_seqs": 1}, host="1MiB") as engine:
        ids = words(24)
        engine.answer(ids)
        engine.settle()
        with tool(tmp_runtime) as client:
            slots = client.status()["classes"][0]["host_slots"]
        assert slots < 24

        few = words(3)
        engine.answer(few)
        engine.forget()
        stores = gate(StoreClient, "ask")
        first = engine.ask(words(2 * slots), 40)
        engine.until(stores.waiting.is_set, "a store of the request that runs first")
        second = engine.ask(few)
        wait_for(lambda: looked_up(engine, second), "a lookup")
        stores.open()
        saves = connector_module._local_workers[engine.connector._engine]._saves
        wait_for(lambda: len(saves._reports) == engine.side.holds.jobs, "its end")
        assert not first.over
        engine.until(lambda: first.over and second.over, "both answers")
        assert second.cached_tokens == 0
        engine.step()
        assert engine.count("kvfold_load_failures/lost") > 0
        assert engine.count("kvfold_chunks_no_room") > 0


def looked_up(engine: Recording, request: Request) -> bool:
    """Whether the store has told what it has of a request."""
    states = engine.side._requests
    (state,) = (states[name] for name in states if name.startswith(f"{request.id}-"))
    return state.lookup is not None and state.lookup.tiers is not None


def test_a_store_that_stops(start, llama_kv2, tmp_runtime, tmp_path, no_leaks, monkeypatch):
    """A load is given up, offered once more and shorter, then computed; a store is given up, too.
    The prefix is larger than the host tier, so that a load has always begun when the store stops.
    """
    with start(
        llama_kv2,
        tmp_runtime,
        host="1MiB",
        disk="256MiB",
        disk_path=str(tmp_path / "disk"),
        load_deadline_s=1,
        store_deadline_s=1,
        lookup_wait_ms=1000,
    ) as engine:
        ids = words(20)
        for _ in range(20):  # a job's chunks find room in a small host tier only bit by bit
            engine.answer(ids, 1)
            engine.settle()
            with tool(tmp_runtime) as client:
                client.flush(120)
                if client.status()["disk"]["chunks"] == 20:
                    break
            engine.llm.reset_prefix_cache()
        engine.forget()
        base = {name: engine.count(name) for name in ("kvfold_loads", "kvfold_load_failures/late")}
        pid, store_id = engine.store_pid(), engine.connector._link.current[0].store_id
        copy_in, copied = ChunkCopies.copy_in, []

        def stopping(*args: Any) -> int:
            copied.append(None)
            if len(copied) == 2:
                os.kill(pid, signal.SIGSTOP)
            return copy_in(*args)

        monkeypatch.setattr(ChunkCopies, "copy_in", stopping)
        try:
            begun_s = time.monotonic()
            request = engine.answer(ids)
            took_s = time.monotonic() - begun_s
            assert request.cached_tokens == 0
            assert engine.count("kvfold_loads") == base["kvfold_loads"] + 2
            late = engine.count("kvfold_load_failures/late")
            assert late == base["kvfold_load_failures/late"] + 2
            print(f"answered {took_s:.1f} s after the store stopped, with deadlines of 1 s")
            dropped = engine.count("kvfold_store_jobs_dropped")
            engine.answer(words(4), 1)
            engine.settle()
            assert engine.count("kvfold_store_jobs_dropped") > dropped
            assert engine.held() == {}
        finally:
            os.kill(pid, signal.SIGCONT)
        engine.forget()
        wait_for(lambda: engine.connector._link.current is not None, "the store")
        assert engine.answer(ids).cached_tokens > 0, "it serves again"
        assert engine.connector._link.current[0].store_id == store_id


# ---------------------------------------------------------------- epochs, adapters


def test_of_two_engines_with_one_reset_neither_sees_the_others_new_chunks(
    start, llama_kv2, tmp_runtime, engine_log, no_leaks
):
    shared = {**STORE, "private": False, "runtime_dir": str(tmp_runtime)}
    before, after, theirs = words(4), words(4), words(4)
    try:
        with Engine(llama_kv2, log=engine_log, engine_args=ENGINE, connector=shared) as other:

            def their_hits(ids: list[int]) -> int:
                """What the other engine, which no reset reaches, finds of `ids`; it stores them."""
                (output,) = other.generate([ids])["outputs"]
                return output["cached_tokens"]

            with start(llama_kv2, tmp_runtime, private=False) as engine:
                engine.answer(before)
                engine.settle()
                assert their_hits(before) == 4 * SPAN, "they share a store"
                engine.llm.reset_prefix_cache(reset_connector=True)
                engine.answer(after)
                engine.settle()
                assert their_hits(after[: 3 * SPAN + 5]) == 0
                assert their_hits(theirs) == 0
                assert their_hits(prompt(8)) == 0  # a step in which the last one's stores end
                engine.forget()
                assert engine.answer(theirs).cached_tokens == 0
                assert engine.answer(before).cached_tokens == 0
                engine.forget()
                assert engine.answer(after).cached_tokens == 4 * SPAN, "its own"
        with start(llama_kv2, tmp_runtime, private=False) as engine:
            assert engine.answer(before).cached_tokens == 4 * SPAN
            assert engine.answer(theirs).cached_tokens == 4 * SPAN
            found = engine.answer(after).cached_tokens
            assert found == 3 * SPAN, "only what the engine without a reset has stored of it"
    finally:
        with suppress(StoreGone, ValueError), tool(tmp_runtime) as client:
            client.stop(True)


def test_adapters_are_worlds_of_their_own_and_die_when_retrained(
    start, llama_kv2, checkpoints, tmp_runtime, tmp_path, no_leaks
):
    from vllm.lora.request import LoRARequest

    ids, adapters = words(4), []
    for seed in (1, 2):
        folder = tmp_path / f"adapter{seed}"
        shutil.copytree(lora_adapter(checkpoints, llama_kv2, seed), folder)
        adapters.append(LoRARequest(f"adapter{seed}", seed, str(folder)))
    on_disk = {"disk": "128MiB", "disk_path": str(tmp_path / "disk")}
    answers: dict[str, Any] = {}

    def ask(engine: Recording, adapter: Any) -> int:
        """Hits of a request; its answer must be the one that its adapter gave first."""
        engine.forget()
        request = Stepper.ask(engine, ids, adapter=adapter)  # not for the oracle, which has none
        engine.until(lambda: request.over, "an answer")
        said = (request.tokens, pytest.approx(request.logprobs, abs=1e-4))
        assert answers.setdefault(name(adapter), said) == (request.tokens, request.logprobs)
        return request.cached_tokens

    def name(adapter: Any) -> str:
        return "" if adapter is None else adapter.lora_name

    with start(llama_kv2, tmp_runtime, LORA, **on_disk) as engine:
        for adapter in (None, *adapters):
            assert ask(engine, adapter) == 0
        assert len({tuple(tokens) for tokens, _ in answers.values()}) == 3
        for adapter in (None, *adapters):
            assert ask(engine, adapter) == 4 * SPAN
        engine.settle()
        with tool(tmp_runtime) as client:
            client.flush(120)

    retrained = lora_adapter(checkpoints, llama_kv2, 3)
    shutil.copytree(retrained, adapters[0].lora_path, dirs_exist_ok=True)
    del answers["adapter1"]
    with start(llama_kv2, tmp_runtime, LORA, **on_disk) as engine:
        wait_for(lambda: not scanning(tmp_runtime), "the store's disk")
        assert ask(engine, adapters[0]) == 0, "what its predecessor stored"
        assert ask(engine, adapters[1]) == 4 * SPAN
        assert ask(engine, None) == 4 * SPAN


# ---------------------------------------------------------------- idle engines


@pytest.mark.parametrize("processes", ["0", "1"], ids=["in-process", "multiprocessing"])
def test_an_idle_engine_makes_no_step_and_no_call(
    processes, llama_kv2, tmp_runtime, engine_log, no_leaks
):
    """And uses as much time of the processors as one without kvfold: both are printed."""

    def spent_s(connector: dict[str, Any] | None) -> float:
        args = {**ENGINE, "worker_extension_cls": "kvfold.testing.chaos_idle.Counting"}
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": processes}
        with Engine(
            llama_kv2, log=engine_log, engine_args=args, connector=connector, env=env
        ) as engine:

            def calls() -> dict[str, int]:
                """Steps of the engine's core and calls of the connector so far."""
                return engine.do({"op": "rpc", "method": "calls"})["results"][0]

            seen = [calls()]
            engine.generate([words(6) for _ in range(4)], max_tokens=4)
            wait_for(lambda: seen.append(calls()) or seen[-1] == seen[-2], "an idle engine")
            begun_s = cpu_s(engine.pid)
            time.sleep(IDLE_S)
            used_s = cpu_s(engine.pid) - begun_s
            assert calls() == seen[-1]
            assert seen[-1]["steps"] > 0
            assert (seen[-1]["connector"] > 0) == (connector is not None)
            return used_s

    ours_s, theirs_s = spent_s({**STORE, "runtime_dir": str(tmp_runtime)}), spent_s(None)
    print(f"processor seconds in {IDLE_S} s of idling: {ours_s} with kvfold, {theirs_s} without")


# ---------------------------------------------------------------- all answers


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_every_answer_was_that_of_an_engine_without_kvfold(model, checkpoints_of, asked):
    """Judges what the tests before asked."""
    requests = asked.get(checkpoints_of(model), [])
    with local_engine(checkpoints_of(model), engine_args={"block_size": SPAN}) as oracle:
        verdict = judge(oracle, requests)
    print(verdict)
    assert verdict.mismatches == []
    assert verdict.answers > 0 or not requests
