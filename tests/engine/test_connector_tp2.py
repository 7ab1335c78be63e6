"""Two ranks as processes: one copy of what they share, each rank's own bytes back, lies caught."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import xxhash
from slab_reader import read_slots

import kvfold
from kvfold.errors import StoreGone
from kvfold.store.client import StoreClient
from kvfold.testing.checkpoints import prompt
from kvfold.testing.engines import Engine, kv_transfer_config
from kvfold.vllm.settings import ConnectorSettings

MODULES = Path(__file__).parent / "modules"
SOURCE = Path(kvfold.__file__).parents[1]
LAYERS = 4


@pytest.fixture
def store(tmp_runtime: Path, tmp_path: Path, no_leaks: None):
    """Connector settings of a store of this test's own; the store is stopped at the end."""
    settings = {
        "host": "64MiB",
        "disk": "256MiB",
        "disk_path": str(tmp_path / "disk"),
        "runtime_dir": str(tmp_runtime),
        "digest_dir": str(tmp_path / "digests"),
        "lookup_wait_ms": 5000,  # a busy machine must not turn hits into misses here
    }
    yield settings
    stop(settings)


def stop(settings: dict) -> dict:
    """Flush and stop the store; return its last status."""
    try:
        client = StoreClient.connect_tool(ConnectorSettings.parse(settings).store().runtime_path())
    except StoreGone:
        return {}
    client.flush(30)
    last = client.status()
    client.stop(True)
    client.close()
    return last


def digests(settings: dict) -> dict[str, dict[int, dict[str, set[str]]]]:
    """event -> rank -> key -> digests of all bytes that the rank held of that chunk."""
    found: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for path in Path(settings["digest_dir"]).glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found[entry["event"]][entry["rank"]][entry["key"]].add(entry["digest"])
    return found


def hits(result: dict) -> int:
    return result["counters"].get("external_prefix_cache_hits", 0)


def expected_digest(payload: bytes, rank: int, heads: int) -> str:
    """What `rank` must hold of a one-block chunk: its head of every layer, in layer order."""
    state = xxhash.xxh3_128()
    piece = len(payload) // LAYERS // heads
    for layer in range(LAYERS):
        start = (layer * heads + (rank if heads > 1 else 0)) * piece
        state.update(payload[start : start + piece])
    return state.hexdigest()


@pytest.mark.parametrize(
    ("model", "span", "heads"), [("mla", 16, 1), ("llama_kv1", 128, 1), ("llama_kv2", 128, 2)]
)
def test_one_copy_and_every_rank_gets_its_own_bytes_back(
    model, span, heads, store, engine_log, request
):
    folder = request.getfixturevalue(model)
    chunks = 3
    ids = prompt(chunks * span + 12, seed=3)
    with Engine(folder, log=engine_log, tp=2, connector=store) as engine:
        cold = engine.generate([ids], max_tokens=4)
        assert hits(cold) == 0
        engine.do({"op": "sleep", "seconds": 2.0})
    status = stop(store)

    slots = list(read_slots(Path(store["disk_path"])))
    assert len(slots) == chunks, "chunks x 1 valid slots"
    assert len({slot.key for slot in slots}) == chunks
    assert status["disk"]["chunks"] == chunks
    stored = digests(store)["store"]
    for slot in slots:
        for rank in (0, 1):
            assert stored[rank][slot.key.hex()] == {expected_digest(slot.payload, rank, heads)}
    shared = stored[0] == stored[1]
    assert shared == (heads == 1), "the control: two heads are two different shards"

    with Engine(folder, log=engine_log, tp=2, connector=store) as engine:
        warm = engine.generate([ids], max_tokens=4)
        assert hits(warm) == chunks * span
        assert warm["outputs"][0]["tokens"] == cold["outputs"][0]["tokens"]
    loaded = digests(store)["load"]
    assert loaded[0] == {k: v for k, v in stored[0].items() if k in loaded[0]}
    assert loaded[1] == {k: v for k, v in stored[1].items() if k in loaded[1]}
    assert [len(loaded[rank]) for rank in (0, 1)] == [chunks, chunks]


def lying(store: dict) -> dict:
    transfer = kv_transfer_config(store)
    transfer |= {"kv_connector": "LyingConnector", "kv_connector_module_path": "lying_connector"}
    return {"kv_transfer_config": transfer}


def test_folding_what_differs_is_caught_by_the_audit(llama_kv2, store, engine_log):
    env = {"PYTHONPATH": f"{MODULES}:{SOURCE}"}
    ids = prompt(3 * 128 + 20, seed=3)
    with Engine(llama_kv2, log=engine_log, tp=2, engine_args=lying(store), env=env) as engine:
        first = engine.generate([ids], max_tokens=8)
        second = engine.generate([ids[:200] + ids[:300]], max_tokens=8)
        assert hits(first) == hits(second) == 0
    assert "do not, in layers model.layers.0.self_attn.attn" in engine_log.read_text()
    status = stop(store)
    assert status["audit_conflicts"] > 0
    assert status["host"]["stored_chunks"] == 0
    assert list(read_slots(Path(store["disk_path"]))) == []


def test_folding_what_differs_is_seen_by_the_byte_check(llama_kv2, store, engine_log):
    """The other control: without the audit the lie is stored, and the digests tell."""
    env = {"PYTHONPATH": f"{MODULES}:{SOURCE}"}
    unaudited = {**store, "audit_chunks": 0, "audit_every": 0}
    ids = prompt(3 * 128 + 20, seed=3)
    with Engine(llama_kv2, log=engine_log, tp=2, engine_args=lying(unaudited), env=env) as engine:
        engine.generate([ids], max_tokens=8)
        engine.do({"op": "sleep", "seconds": 1.0})
        engine.do({"op": "reset_prefix_cache"})
        assert hits(engine.generate([ids], max_tokens=8)) == 3 * 128
    stored, loaded = digests(store)["store"], digests(store)["load"]
    wrong = [
        rank for rank in (0, 1) if any(loaded[rank][k] != stored[rank][k] for k in loaded[rank])
    ]
    assert wrong
