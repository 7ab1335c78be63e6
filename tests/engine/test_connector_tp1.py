"""One real engine in this process: hits, restarts, faults, and answers that never change."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from kvfold.copy.cpu import CpuCopier
from kvfold.errors import ConfigError, StoreGone
from kvfold.store.client import StoreClient
from kvfold.testing.checkpoints import prompt
from kvfold.testing.engines import generate, local_engine
from kvfold.vllm.settings import ConnectorSettings

SPAN = 128
PROMPT = prompt(6 * SPAN + 40, seed=1)
HITS = 6 * SPAN


@pytest.fixture
def store(tmp_runtime: Path, tmp_path: Path, no_leaks: None):
    """Connector settings of a store of this test's own; the store is stopped at the end."""
    settings = {
        "host": "64MiB",
        "disk": "256MiB",
        "disk_path": str(tmp_path / "disk"),
        "runtime_dir": str(tmp_runtime),
        "lookup_wait_ms": 5000,  # a busy machine must not turn hits into misses here
    }
    yield settings
    stop(settings)


def tool(settings: dict) -> StoreClient:
    return StoreClient.connect_tool(ConnectorSettings.parse(settings).store().runtime_path())


def stop(settings: dict, drain: bool = True) -> None:
    try:
        client = tool(settings)
    except StoreGone:
        return
    if drain:
        client.flush(30)
    client.stop(drain)
    client.close()


def status(settings: dict) -> dict:
    client = tool(settings)
    try:
        return client.status()
    finally:
        client.close()


def connector(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def ask(llm, ids=PROMPT, *, fresh=True, tokens=8):
    """Answer `ids`; with `fresh` the engine's own prefix cache is emptied first."""
    if fresh:
        assert connector(llm).drain(20)
        assert llm.reset_prefix_cache()
    before = hits(llm)
    output = generate(llm, [ids], max_tokens=tokens)["outputs"][0]
    assert output["finish_reason"] == "length"
    return output["tokens"], hits(llm) - before


def hits(llm) -> int:
    from kvfold.testing.engines import counters

    return counters(llm).get("external_prefix_cache_hits", 0)


@pytest.fixture(scope="module")
def answer(llama_kv2):
    """What an engine without kvfold says."""
    with local_engine(llama_kv2) as llm:
        return generate(llm, [PROMPT], max_tokens=8)["outputs"][0]["tokens"]


def test_cold_then_warm_then_after_both_restarts(llama_kv2, store, answer):
    with local_engine(llama_kv2, connector=store) as llm:
        assert ask(llm) == (answer, 0)
        assert ask(llm) == (answer, HITS)
    with local_engine(llama_kv2, connector=store) as llm:
        assert ask(llm, fresh=False) == (answer, HITS), "the host tier outlives the engine"
    stop(store)
    with local_engine(llama_kv2, connector=store) as llm:
        wait_scanned(store)
        assert status(store)["disk"]["chunks"] >= 6
        assert ask(llm, fresh=False) == (answer, HITS), "the disk tier outlives the store"


def wait_scanned(settings):
    deadline = time.monotonic() + 30
    while status(settings)["scanning"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_loading_zeros_changes_the_answer(llama_kv2, store, answer, monkeypatch):
    """The negative control: these tests can tell right bytes from wrong ones."""
    with local_engine(llama_kv2, connector=store) as llm:
        assert ask(llm) == (answer, 0)

        def zeros(sweeps, blocks, offset):
            for sweep in sweeps:
                sweep.pages[blocks[sweep.block]][:] = 0
            return 0

        monkeypatch.setattr(CpuCopier, "to_pages", staticmethod(zeros))
        tokens, loaded = ask(llm)
        assert loaded == HITS
        assert tokens != answer


def test_stored_chunks_hold_the_pages_in_canonical_order(llama_kv2, store):
    from slab_reader import read_slots

    with local_engine(llama_kv2, connector=store) as llm:
        ask(llm)
        assert connector(llm).drain(20)
        runner = (
            llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        )
        pages = [np.ascontiguousarray(t.numpy()).view(np.uint8) for t in runner.kv_caches]
        stop(store)
        slots = list(read_slots(Path(store["disk_path"])))
    assert len(slots) == 6
    assert len({s.key for s in slots}) == 6
    on_disk = {bytes(s.payload) for s in slots}
    blocks = range(1, 7)  # the pool's first blocks, in order
    assert {b"".join(p[b].tobytes() for p in pages) for b in blocks} == on_disk


def test_a_killed_store_costs_only_hits(llama_kv2, store, answer):
    with local_engine(llama_kv2, connector=store) as llm:
        assert ask(llm) == (answer, 0)
        assert connector(llm).drain(20)
        os.kill(status(store)["pid"], signal.SIGKILL)
        assert ask(llm)[0] == answer
        deadline = time.monotonic() + 30
        while ask(llm)[1] != HITS:
            assert time.monotonic() < deadline, "the engine found no store again"
            time.sleep(0.2)
        assert ask(llm) == (answer, HITS)


def test_corrupt_chunks_are_recomputed_and_stored_again(llama_kv2, store, answer):
    with local_engine(llama_kv2, connector=store) as llm:
        ask(llm)
    stop(store)
    for slab in Path(store["disk_path"]).rglob("*.slab"):
        with slab.open("r+b") as file:
            file.seek(slab.stat().st_size // 40)
            size = len(file.read()) // 2
            file.seek(4096 + 4096 + 100_000)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
            assert size > 0
    with local_engine(llama_kv2, connector=store) as llm:
        wait_scanned(store)
        tokens, loaded = ask(llm, fresh=False)
        assert tokens == answer
        assert status(store)["disk"]["corrupt_chunks"] == 1
        assert loaded < 2 * HITS
        assert ask(llm) == (answer, HITS), "the lost chunk was stored again"


def test_a_prefix_larger_than_the_host_tier_streams_through_it(llama_kv2, store, answer):
    with local_engine(llama_kv2, connector=store) as llm:
        ask(llm)
    stop(store)
    chunk = 4 * 128 * 2 * 64 * 2 * 4
    small = {**store, "host": 4 * chunk}
    try:
        with local_engine(llama_kv2, connector=small) as llm:
            wait_scanned(small)
            assert status(small)["classes"][0]["host_slots"] < 6
            assert ask(llm, fresh=False) == (answer, HITS)
    finally:
        stop(small)


def test_after_a_reset_nothing_stored_before_is_served(llama_kv2, store, answer):
    with local_engine(llama_kv2, connector=store) as llm:
        ask(llm)
        assert connector(llm).drain(20)
        assert llm.reset_prefix_cache(reset_connector=True)
        assert ask(llm, fresh=False) == (answer, 0)
        assert ask(llm) == (answer, HITS), "what was stored after the reset is served"
    with local_engine(llama_kv2, connector=store) as llm:
        assert ask(llm, fresh=False) == (answer, HITS), (
            "a restarted engine has the weights as loaded"
        )


def test_keys_that_nobody_else_can_make_stay_off_the_disk(llama_kv2, store, answer):
    random_seed = {"prefix_caching_hash_algo": "xxhash"}
    with local_engine(llama_kv2, engine_args=random_seed, connector=store) as llm:
        assert ask(llm) == (answer, 0)
        assert ask(llm) == (answer, HITS), "16-byte hashes are keys too"
        assert connector(llm).drain(20)
        client = tool(store)
        client.flush(30)
        assert client.status()["disk"]["stored_chunks"] == 0
        client.close()


def test_a_tiny_pool_reuses_no_block_that_is_being_stored(llama_kv2, store):
    """Prompts that end at block boundaries, more than the pool holds, all answered right."""
    prompts = [prompt(3 * SPAN, seed=s) for s in range(8)]
    pool = {"num_gpu_blocks_override": 14, "max_model_len": 1024}
    with local_engine(llama_kv2, engine_args=pool) as llm:
        expected = [generate(llm, [p], max_tokens=4)["outputs"][0]["tokens"] for p in prompts]
    for _ in range(2):
        with local_engine(llama_kv2, engine_args=pool, connector=store) as llm:
            outputs = generate(llm, prompts, max_tokens=4)["outputs"]
            assert [o["tokens"] for o in outputs] == expected
            assert connector(llm).drain(20)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"hots": "4GiB"}, "hots"),
        ({"host": "lots"}, "host"),
        ({"host": 0}, "host"),
        ({"disk": "1GiB"}, "disk_path"),
        ({"disk_path": "/x"}, "disk"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk"),
        ({"private": "yes"}, "private"),
        ({"lookup_wait_ms": -1}, "lookup_wait_ms"),
        ({"store_name": ""}, "store_name"),
    ],
)
def test_bad_settings_name_the_field(extra, named):
    with pytest.raises(ConfigError) as caught:
        ConnectorSettings.parse(extra)
    assert named in caught.value.field
    assert caught.value.value == extra.get(named, caught.value.value)


def test_what_is_not_supported_is_refused_by_name(llama_kv2, store):
    from kvfold.testing.engines import kv_transfer_config

    transfer = {**kv_transfer_config(store), "kv_role": "kv_producer"}
    with (
        pytest.raises(Exception, match="kv_role"),
        local_engine(llama_kv2, connector=store, engine_args={"kv_transfer_config": transfer}),
    ):
        pass
