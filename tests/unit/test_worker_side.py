"""The worker's side as a whole: every rank copies exactly its own bytes of every group."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvfold.copy.cpu import LayerPages
from kvfold.errors import StoreGone
from kvfold.identity import Identity, namespace
from kvfold.mesh import Mesh
from kvfold.plan import PlanOptions, plan
from kvfold.spec import GroupSpec, LayerSpec
from kvfold.store.client import NO_FRAGMENT, Verdicts
from kvfold.vllm import worker
from kvfold.vllm.agreement import Agreed
from kvfold.vllm.messages import (
    NO_BLOCK,
    LoadFailure,
    LoadOrder,
    LoadPart,
    StepOrders,
    StepResults,
    StoreOrder,
)
from kvfold.vllm.settings import ConnectorSettings
from kvfold.vllm.worker import ChunkCopies, WorkerSide, peer

MESH = Mesh(tp=2, pp=2)
BLOCKS = 6
FULL, WINDOW, STATE, DRAFT = range(4)


def layer(name: str, kind: str, heads: int = 1, **changes) -> LayerSpec:
    fields = {"block_size": 8, "num_kv_heads": heads, "head_bytes": 16}
    return LayerSpec(name=name, kind=kind, **(fields | changes))


def state(name: str) -> LayerSpec:
    return layer(name, "gdn", block_size=32, tokens_per_state=32, head_bytes=300, page_bytes=300,
                 dcp_sharded=False, encoding="whole_page", tp_replicated=True)  # fmt: skip


GROUPS = (
    GroupSpec(0, (layer("full.0", "mla", max_tp_shards=1),
                  layer("full.1", "full_attention", max_tp_shards=2)), (0, 1), blocks_per_chunk=4),
    GroupSpec(1, (), prefix_cacheable=False),
    GroupSpec(2, (layer("window.1", "sliding_window", max_tp_shards=1, window=9),), (1,),
              blocks_per_chunk=2),
    GroupSpec(3, (state("state.0"),), (0,), blocks_per_chunk=1),
    GroupSpec(0, (layer("draft.1", "full_attention", max_tp_shards=2),), (1,), is_draft=True,
              blocks_per_chunk=4),
)  # fmt: skip


def agreement() -> Agreed:
    planned = plan(GROUPS, MESH, PlanOptions(4, 8))
    known = tuple(Identity(f"text {i}", bytes([i]) * 32) for i in range(len(planned.stored)))
    return Agreed(planned, 32, ("", "", "align", ""), known)


AGREED = agreement()
STORED = AGREED.plan.stored
ON_STAGE = {0: ("full.0", "state.0"), 1: ("full.1", "window.1", "draft.1")}
SHARED = {"full.0", "window.1", "state.0"}
"""Layers whose bytes are the same on both ranks of their stage."""


def pages_of(rank: int) -> dict[str, LayerPages]:
    """The pages of all layers of a rank's stage, all in the same memory as an engine's pool."""
    stage = MESH.coords(rank).pp
    specs = {p.spec.name: p.spec for group in STORED for p in group.layers}
    width = 700
    names = ON_STAGE[stage]
    memory = np.zeros(BLOCKS * width * len(names), np.uint8)
    found = {}
    for i, name in enumerate(names):
        size = specs[name].page_bytes
        found[name] = LayerPages(memory, i * BLOCKS * width, width, size, BLOCKS)
        for block in range(BLOCKS):
            seed = [len(name), sum(name.encode()), block, 0 if name in SHARED else rank]
            page(found[name], block)[:] = np.random.default_rng(seed).integers(0, 256, size)
    return found


def page(at: LayerPages, block: int):
    start = at.offset + block * at.block_stride
    return at.memory[start : start + at.page_bytes]


class Ranks:
    """All four ranks' copies over one arena."""

    def __init__(self):
        self.pages = [pages_of(rank) for rank in range(MESH.world_size)]
        self.copies = [ChunkCopies(AGREED, r, self.pages[r]) for r in range(MESH.world_size)]
        self.arena = np.zeros(1 << 16, np.uint8)
        for copies in self.copies:
            copies.attach(1, memoryview(self.arena))

    def bytes_of(self, group, blocks):
        """{(rank, layer): its bytes of these blocks}"""
        names = {layer.spec.name for layer in STORED[group].layers}
        return {
            (rank, name): b"".join(page(at, b).tobytes() for b in blocks)
            for rank, pages in enumerate(self.pages)
            for name, at in pages.items()
            if name in names
        }

    def wipe(self):
        for pages in self.pages:
            for at in pages.values():
                at.memory[:] = 0


BLOCKS_OF = {FULL: [3, 1, 4, 5], WINDOW: [2, 4], STATE: [5], DRAFT: [1, 2, 3, 4]}


@pytest.mark.parametrize("group", range(4))
def test_every_rank_gets_back_its_own_bytes_of_every_group(group):
    ranks, blocks, offset = Ranks(), BLOCKS_OF[group], 8192
    wanted = ranks.bytes_of(group, blocks)
    for rotation in range(STORED[group].rotations):
        ranks.arena[:] = 0
        written = [c.copy(1, group, rotation, blocks, offset) for c in ranks.copies]
        assert sum(written) == STORED[group].chunk_bytes
        mask = int(ranks.copies[0].writer_masks[group][rotation])
        assert [rank for rank in range(4) if mask >> rank & 1] == [
            rank for rank in range(4) if written[rank]
        ]
    ranks.wipe()
    for rank, copies in enumerate(ranks.copies):
        held = sum(len(data) for (r, _), data in wanted.items() if r == rank)
        assert copies.copy_in(1, group, blocks, offset) == held
    assert ranks.bytes_of(group, blocks) == wanted
    others = [b for b in range(BLOCKS) if b not in blocks]
    assert not any(any(data) for data in ranks.bytes_of(group, others).values())


def test_blocks_that_are_not_wanted_are_left_alone():
    ranks = Ranks()
    for copies in ranks.copies:
        copies.copy(1, FULL, 0, [0, 1, 2, 3], 0)
    before = ranks.bytes_of(FULL, range(BLOCKS))
    wanted = ranks.bytes_of(FULL, [1, 3])
    for pages in ranks.pages:
        for at in pages.values():
            page(at, 4)[:] = page(at, 5)[:] = 0
    copied = [c.copy_in(1, FULL, [NO_BLOCK, 4, NO_BLOCK, 5], 0) for c in ranks.copies]
    assert ranks.bytes_of(FULL, [4, 5]) == wanted
    assert copied == [sum(len(d) for (r, _), d in wanted.items() if r == n) for n in range(4)]
    unchanged = {key: data[: len(data) // BLOCKS * 4] for key, data in before.items()}
    assert ranks.bytes_of(FULL, range(4)) == unchanged


@pytest.mark.parametrize(("group", "strangers"), [(WINDOW, (0, 1)), (STATE, (2, 3)), (FULL, ())])
def test_ranks_of_other_stages_hold_nothing_of_a_group(group, strangers):
    ranks, blocks = Ranks(), BLOCKS_OF[group]
    nothing = NO_FRAGMENT.to_bytes(4, "little") + bytes(8)
    rows = np.array([blocks], np.int32)
    for rank, copies in enumerate(ranks.copies):
        strange = rank in strangers
        assert (copies.copy_in(1, group, blocks, 0) == 0) == strange
        assert (copies.page_digest(group, blocks) is None) == strange
        if strange:
            assert copies.audit_records(group, rows) == nothing
            assert all(
                copies.copy(1, group, rotation, blocks, 0) == 0
                for rotation in range(STORED[group].rotations)
            )


def test_audits_compare_what_several_ranks_hold():
    ranks, rows = Ranks(), np.array([BLOCKS_OF[WINDOW]], np.int32)
    same = [copies.audit_records(WINDOW, rows) for copies in ranks.copies[2:]]
    assert same[0] == same[1]
    assert len(same[0]) == 12
    page(ranks.pages[3]["window.1"], BLOCKS_OF[WINDOW][1])[5] ^= 1
    assert ranks.copies[3].audit_records(WINDOW, rows) != same[1]


def test_an_ended_connection_has_no_slots():
    copies = Ranks().copies[0]
    copies.detach(1)
    with pytest.raises(StoreGone, match="the store is gone"):
        copies.copy_in(1, FULL, BLOCKS_OF[FULL], 0)
    copies.attach(2, memoryview(np.zeros(1 << 16, np.uint8)))
    with pytest.raises(StoreGone):
        copies.copy(1, FULL, 0, BLOCKS_OF[FULL], 0)
    assert copies.copy_in(2, FULL, BLOCKS_OF[FULL], 0) > 0
    copies.attach(3, memoryview(np.zeros(1 << 16, np.uint8)))
    with pytest.raises(StoreGone):
        copies.copy(2, FULL, 0, BLOCKS_OF[FULL], 0)


# -- WorkerSide --------------------------------------------------------------------------------


class Client:
    store_id, alive = "s", True

    def __init__(self):
        self.arena = memoryview(np.zeros(1 << 20, np.uint8))
        self.acked, self.asked, self.committed = [], [], []

    def ack(self, ticket, indices):
        self.acked.append((ticket, indices.tolist()))

    def done(self, ticket, callback):
        callback(True)

    def ask(self, job, group, namespace, keys, askers, writers, audit=b"", timeout_s=10):
        self.asked.append((job, group, askers))
        slots = np.arange(len(writers), dtype=np.uint64) * np.uint64(STORED[group].slot_bytes)
        return Verdicts(slots, np.array([2] if audit else [], np.uint32))

    def commit(self, job, indices, ok):
        self.committed.append((job, indices.tolist(), ok))


class Link:
    """A link whose store is always there, until the test takes it away."""

    def __init__(self, settings, peer, **callbacks):
        self.peer, self.callbacks, self.closed = peer, callbacks, False
        self.current = (Client(), 1)
        callbacks["on_client"](*self.current)

    def start(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def side(monkeypatch, tmp_path):
    return make_side(monkeypatch, tmp_path)


def make_side(monkeypatch, tmp_path, rank=0, events=False):
    """A worker of the four, over fake translation and a fake store."""
    monkeypatch.setattr(worker, "StoreLink", Link)
    monkeypatch.setattr(worker.translate, "pages", lambda caches, config: caches)
    monkeypatch.setattr(worker.translate, "stage_record", lambda *args: {"rank": args[-1]})
    monkeypatch.setattr(worker, "agree", lambda records: AGREED)
    monkeypatch.setattr(worker.translate, "events_enabled", lambda config: events)
    monkeypatch.setattr(worker.translate, "random_hash_seed", lambda config: False)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="e"))
    made = WorkerSide(config, None, ConnectorSettings(digest_dir=str(tmp_path)))
    caches = pages_of(rank)
    records = [{"rank": r} for r in range(4)]
    assert made.describe(caches, rank) == records[rank]
    made.agree(records)
    return made


def taken(side):
    """(finished requests, results), waiting for the first."""
    deadline = time.monotonic() + 10
    while True:
        finished, results = side.take_loads()
        stores = side.take_stores()
        if finished or stores:
            return finished, results or stores
        assert time.monotonic() < deadline
        time.sleep(0.001)


def order(parts, load=1, store="s"):
    return LoadOrder(load, "r", store, tuple(parts))


def load_part(ticket, group, blocks):
    keys = b"".join(bytes([16 * group + i]) * 32 for i in range(len(blocks)))
    return LoadPart(ticket, group, keys, np.array(blocks, np.int32))


def announce(side, ticket, count):
    side._link.callbacks["on_ready"](
        1, ticket, np.arange(count, dtype=np.uint32), np.zeros(count, np.uint64)
    )


def digests(folder):
    lines = [json.loads(x) for path in folder.glob("*") for x in path.read_text().splitlines()]
    return [(x["event"], x["rank"], x["group"], x["key"][:2]) for x in lines]


def test_a_load_of_two_groups_on_a_rank_that_holds_one(side, tmp_path):
    parts = [
        load_part(5, FULL, [[0, 1, 2, 3], [NO_BLOCK, NO_BLOCK, 4, 5]]),
        load_part(6, WINDOW, [[1, 2]]),
    ]
    side.start_loads(StepOrders(loads=[order(parts)]))
    announce(side, 6, 1)
    announce(side, 5, 2)
    assert taken(side) == ({"r"}, None)
    client, _ = side._link.current
    assert client.acked == [(6, [0]), (5, [0, 1])]
    assert digests(tmp_path) == [("load", 0, FULL, "00")], "no digest of part of a chunk"
    figures = side.take_stats().data
    assert figures["loaded_bytes"] == {"0 full_attention+mla": 6 * 128}
    assert figures["loaded_chunks"] == {"0 full_attention+mla": 2, "2 sliding_window": 1}
    assert side.take_stats() is None
    side.close()
    assert side._link is None


def test_failures_are_told_by_request(side):
    part = load_part(5, FULL, [[0, 1, 2, 3]])
    for event, reason in (
        (lambda: side._link.callbacks["on_failed"](1, 5, 0, "evicted"), "evicted"),
        (lambda: side.start_loads(StepOrders(reset=True)), "the cache was reset"),
        (lambda: side._link.callbacks["on_gone"](1), "the store is gone"),
    ):
        side.start_loads(StepOrders(loads=[order([part])]))
        event()
        finished, results = taken(side)
        assert finished == {"r"}
        assert results.failures == {"r": [LoadFailure(1, 0, 0, reason)]}
    side.start_loads(StepOrders(loads=[order([part], load=n, store="old") for n in (2, 3)]))
    side.close()
    finished, results = side.take_loads()
    assert finished == {"r"}
    assert [f.load for f in results.failures["r"]] == [2, 3]


@pytest.mark.parametrize("events", [False, True])
def test_jobs_are_told_with_their_conflicts_and_for_events_their_chunks(
    monkeypatch, tmp_path, events
):
    side = make_side(monkeypatch, tmp_path, rank=2, events=events)
    blocks = np.array([[1, 2], [3, 4]], np.int32)
    side.submit_stores(
        StepOrders(stores=[StoreOrder(9, WINDOW, b"n" * 32, bytes(64), blocks, True)])
    )
    _, results = taken(side)
    assert results == StepResults(
        jobs={9: 1}, conflicts=[(WINDOW, 2)], stored={9: b"\1\1"} if events else {}
    )
    client, _ = side._link.current
    assert client.asked == [(9, WINDOW, 0b1111)]
    assert client.committed == [(9, [0, 1], True)]
    assert digests(tmp_path) == [("store", 2, WINDOW, "00")] * 2
    side.close()


def test_without_a_store_orders_end_as_misses(side):
    side._link.current = None
    part = load_part(5, FULL, [[0, 1, 2, 3]])
    side.start_loads(StepOrders(loads=[order([part])]))
    _, results = taken(side)
    assert list(results.failures) == ["r"]
    row = np.array([[0, 1, 2, 3]], np.int32)
    side.submit_stores(StepOrders(stores=[StoreOrder(9, FULL, b"n" * 32, bytes(32), row, False)]))
    assert taken(side)[1].jobs == {9: 1}
    assert side.take_stats().data["store_jobs_dropped"] == {"": 1}
    side.close()


def test_a_step_without_orders_touches_nothing(side):
    side._client = None  # would raise
    side.start_loads(StepOrders())
    side.submit_stores(StepOrders())
    assert side.take_loads() == (set(), None)
    assert side.take_stores() is None
    assert side.take_stats() is None


def test_a_side_that_never_registered_has_nothing_to_say(monkeypatch):
    monkeypatch.setattr(worker.translate, "events_enabled", lambda config: False)
    side = WorkerSide(None, None, ConnectorSettings())
    assert side.take_loads() == (set(), None)
    assert side.take_stores() is None
    side.close()


def test_the_store_is_told_of_every_group_that_takes_part(side):
    told = side._link.peer
    assert (told.role, told.engine, told.rank, told.world) == ("worker", "e", 0, 4)
    assert told.fingerprint == AGREED.plan.fingerprint == side.handshake.fingerprint
    assert [g.slot_bytes for g in told.groups] == [g.slot_bytes for g in STORED]
    assert [g.payload_bytes for g in told.groups] == [g.chunk_bytes for g in STORED]
    assert [g.namespace for g in told.groups] == [namespace(bytes([i]) * 32, i) for i in range(4)]
    assert [g.text for g in told.groups] == [f"text {i}" for i in range(4)]
    # A layer of 128 B in blocks of 8 tokens on two ranks each; of the first group on both stages.
    assert [g.copies_bytes for g in told.groups] == [4 * 4 * 128, 2 * 2 * 128, 2 * 300, 4 * 2 * 128]
    assert all(g.durable for g in told.groups)
    side.close()


def test_keys_that_nobody_finds_again_are_not_durable(monkeypatch):
    monkeypatch.setattr(worker.translate, "random_hash_seed", lambda config: True)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="e"))
    assert not any(group.durable for group in peer(config, "scheduler", 0, AGREED).groups)


def test_results_of_workers_add_up_and_stored_chunks_are_what_all_agree_on():
    one = StepResults(
        jobs={1: 1}, failures={"r": [LoadFailure(1, 0, 3, "a")]}, conflicts=[(1, 4)],
        stored={1: bytes([1, 1, 0])},
    )  # fmt: skip
    other = StepResults(
        jobs={1: 1, 2: 1}, failures={"r": [LoadFailure(1, 1, 2, "b")]}, conflicts=[(0, 9), (1, 4)],
        stored={1: bytes([0, 1, 0]), 2: b"\1"},
    )  # fmt: skip
    assert one.aggregate(other) == StepResults(
        jobs={1: 2, 2: 1},
        failures={"r": [LoadFailure(1, 0, 3, "a"), LoadFailure(1, 1, 2, "b")]},
        conflicts=[(0, 9), (1, 4)],
        stored={1: bytes([0, 1, 0]), 2: b"\1"},
    )
