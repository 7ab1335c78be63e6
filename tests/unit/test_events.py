"""KV events of the store, beside those that vLLM's block pool makes for the same blocks."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvfold import identity
from kvfold.mesh import Mesh
from kvfold.plan import plan
from kvfold.spec import GroupSpec, LayerSpec
from kvfold.vllm import events as room
from kvfold.vllm.events import EventGroup, Events, event_groups
from kvfold.vllm.messages import StoreOrder
from kvfold.vllm.metrics import Recorder

HASH, BLOCK = 4, 8
FULL = EventGroup(0, BLOCK, 2, False, "full_attention", None)
WINDOW = EventGroup(1, BLOCK, 1, False, "sliding_window", 9)
STATE = EventGroup(2, 16, 1, True, "mamba", None)
SPAN = FULL.tokens_per_block * FULL.blocks_per_chunk

init_none_hash(sha256)


@pytest.fixture(autouse=True)
def _hashes_as_bytes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def make_request(tokens=64, first=0, **changes):
    return Request(
        f"r{first}",
        list(range(first, first + tokens)),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(HASH, sha256),
        **changes,
    )


def feature(name, offset, length):
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset, length)
    )


def make_events(*groups, recorder=None):
    return Events(groups or (FULL,), HASH, 32, enabled=True, recorder=recorder or Recorder())


def namespace(group=0):
    return identity.namespace(bytes(32), group)


def keys_of(request, ends, group=0):
    hashes = b"".join(request.block_hashes[end // HASH - 1] for end in ends)
    return identity.chunk_keys(namespace(group), hashes, 32)


def order(events, request, ends, group=0, job=1, keys=None):
    """As `Storing` orders the chunks that end there."""
    keys = keys_of(request, ends, group) if keys is None else keys
    blocks = np.ones((len(ends), 1), np.int32)
    events.ordered(StoreOrder(job, group, namespace(group), keys, blocks, False), request, ends)


def told(events, request, ends, group=0, stored=None, job=1):
    """The events after a store of chunks with these ends."""
    order(events, request, ends, group, job)
    assert events.take() == []
    events.ended(job, bytes([1] * len(ends)) if stored is None else stored)
    return events.take()


def remove(events, request, ends, group=0):
    events.removed(group, namespace(group), keys_of(request, ends, group))
    return events.take()


def engine_events(request, first, last, block=BLOCK, group=0):
    """What vLLM says when it caches blocks [first, last) of `request`."""
    pool = BlockPool(64, True, HASH, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(last)
    pool.cache_full_blocks(request, blocks, first, last, block, group)
    return pool.take_events()


def as_ours(event, kind, window=None):
    return msgspec.structs.replace(
        event, medium="CPU", locality="LOCAL", kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache_salt": "s"},
        {"lora_request": LoRARequest("adapter", 3, "/nowhere")},
        {"mm_features": [feature("a", 2, 3), feature("b", 14, 20), feature("c", 40, 8)]},
        {"prompt_embeds": torch.arange(64.0).reshape(64, 1)},
        {"session_id": "session"},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_stored_chunks_are_announced_as_the_engine_announces_the_same_blocks(changes, first):
    request = make_request(**changes)
    ends = [SPAN * (i + 1) for i in range(first, 4)]
    [theirs] = engine_events(request, first * 2, 8)
    assert told(make_events(), request, ends) == [as_ours(theirs, "full_attention")]


def test_blocks_are_as_long_as_over_all_ranks_of_dcp():
    request, scaled = make_request(), EventGroup(0, 2 * BLOCK, 1, False, "mla_attention", None)
    [event] = told(make_events(scaled), request, [16, 32])
    [theirs] = engine_events(request, 0, 2, block=2 * BLOCK)
    assert event == as_ours(theirs, "mla_attention")
    assert (event.block_size, len(event.block_hashes), len(event.token_ids)) == (16, 2, 32)


def test_a_window_chunk_is_only_its_blocks_before_the_boundary():
    request = make_request()
    first, second = told(make_events(FULL, WINDOW), request, [32, 64], group=1)
    for event, end in ((first, 32), (second, 64)):
        [theirs] = engine_events(request, end // BLOCK - 1, end // BLOCK, group=1)
        assert event == as_ours(theirs, "sliding_window", 9)
        assert event.token_ids == list(range(end - BLOCK, end))


def test_a_state_is_its_block_or_inside_one_its_last_hash():
    request = make_request()
    inside, at_end = told(make_events(FULL, WINDOW, STATE), request, [40, 48], group=2)
    [theirs] = engine_events(request, 2, 3, block=16, group=2)
    assert at_end == as_ours(theirs, "mamba")
    pool = BlockPool(64, True, HASH, enable_kv_cache_events=True)
    pool.cache_partial_block(request, pool.get_new_blocks(1)[0], 40, 2, 16)
    [theirs] = pool.take_events()
    assert inside == as_ours(theirs, "mamba")
    both = told(make_events(FULL, WINDOW, STATE), request, [40, 56], group=2)
    assert [event.token_ids for event in both] == [[36, 37, 38, 39], [52, 53, 54, 55]]


def test_only_chunks_that_the_store_has_are_announced_each_part_with_its_parent():
    request = make_request(tokens=6 * SPAN)
    ends = [SPAN * (i + 1) for i in range(6)]
    found = told(make_events(), request, ends, stored=bytes([0, 1, 3, 0, 0, 2]))
    expected = [engine_events(request, 2, 6), engine_events(request, 10, 12)]
    assert found == [as_ours(event, "full_attention") for [event] in expected]
    events = make_events()
    told(events, request, ends, stored=bytes([0, 1, 3, 0, 0, 2]))
    events.cleared()
    [withdrawn] = events.take()
    assert withdrawn.block_hashes == [h for event in found for h in event.block_hashes]
    assert told(make_events(), request, ends, stored=bytes(6)) == []
    assert told(make_events(), request, ends, stored=None, job=2) != []


def test_a_job_that_stored_nothing_or_is_unknown_says_nothing():
    events = make_events()
    order(events, make_request(), [SPAN])
    events.ended(1, None)
    events.ended(1, b"\1")
    events.ended(7, b"\1\1")
    assert events.take() == []


def test_gaps_between_chunks_part_the_events():
    request = make_request()
    events = told(make_events(), request, [16, 32, 64])
    assert [(e.token_ids[0], len(e.token_ids)) for e in events] == [(0, 32), (48, 16)]
    assert events[1].parent_block_hash == request.block_hashes[11]
    assert told(make_events(), request, [16, 64], stored=b"\0\1") == events[1:]


def test_what_was_ordered_is_told_although_the_request_went_on():
    events, request = make_events(), make_request()
    order(events, request, [SPAN])
    request._all_token_ids[:] = [7] * 64
    request.block_hashes[:] = [b"x" * 32] * 16
    events.ended(1, b"\1")
    [theirs] = engine_events(make_request(), 0, 2)
    assert events.take() == [as_ours(theirs, "full_attention")]


def test_a_consumer_that_matches_block_by_block_finds_the_whole_prefix():
    """One that knows no chunks: it asks for hashes at the engine's own granularity."""
    request, known = make_request(), {}
    for event in told(make_events(), request, [16, 32, 48]):
        parent = event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            known[block_hash] = (parent, tokens)
            parent = block_hash
    same, longer = make_request(), make_request(tokens=80)
    for other, blocks in ((same, 6), (longer, 6), (make_request(first=1), 0)):
        hashes, parent, matched = other.block_hashes[1::2], None, 0
        while matched < len(hashes) and hashes[matched] in known:
            linked, tokens = known[hashes[matched]]
            assert (linked, tokens) == (parent, other.all_token_ids[matched * 8 : matched * 8 + 8])
            parent = hashes[matched]
            matched += 1
        assert matched == blocks


def test_a_chunk_is_announced_once_until_it_is_removed():
    events, request = make_events(), make_request()
    [event] = told(events, request, [16, 32])
    assert told(events, request, [16, 32]) == []
    [rest] = told(events, request, [16, 32, 48])
    assert rest.block_hashes == request.block_hashes[9:12:2]
    [removed] = remove(events, request, [32])
    assert removed == BlockRemoved(event.block_hashes[2:], "CPU", 0, "LOCAL")
    assert remove(events, request, [32]) == []
    [again] = told(events, request, [16, 32, 48])
    assert again.block_hashes == event.block_hashes[2:]


def test_removals_name_the_blocks_of_their_own_group_whatever_its_keys_were_made_of():
    events, request = make_events(FULL, WINDOW), make_request()
    told(events, request, [16, 32])
    told(events, request, [16, 32], group=1)
    assert remove(events, request, [48], group=1) == []
    [event] = remove(events, request, [16, 32], group=1)
    assert (event.block_hashes, event.group_idx) == ([request.block_hashes[i] for i in (3, 7)], 1)
    order(events, request, [48], keys=b"k" * 32)  # as an adapter's
    events.ended(1, b"\1")
    [stored] = events.take()
    events.removed(0, namespace(), b"k" * 32)
    [event] = events.take()
    assert event.block_hashes == stored.block_hashes


def test_a_chunk_is_announced_if_all_workers_say_that_it_is_stored():
    events, request = make_events(), make_request()
    order(events, request, [16, 32, 48])
    events.reported(1, b"\1\1\0")
    events.reported(7, b"\1")
    events.ended(1, b"\0\1\1")
    [event] = events.take()
    assert event.token_ids == list(range(16, 32))
    order(events, request, [16], job=2)
    events.reported(2, b"\1")
    events.ended(2)
    assert len(events.take()) == 1


def test_after_a_reset_everything_told_is_withdrawn_and_running_jobs_say_nothing():
    events, request = make_events(FULL, WINDOW), make_request()
    told(events, request, [16])
    told(events, request, [16, 64], group=1)
    order(events, request, [32], job=5)
    events.cleared()
    events.ended(5, b"\1")
    full, window = events.take()
    assert (full.block_hashes, full.group_idx) == (request.block_hashes[1:4:2], 0)
    assert (window.block_hashes, window.group_idx) == (
        [request.block_hashes[i] for i in (3, 15)],
        1,
    )
    events.cleared()
    assert events.take() == []
    assert len(told(events, request, [16], job=6)) == 1


def test_chunks_told_too_long_ago_end_at_their_last_block_and_a_reset_clears_all(monkeypatch):
    monkeypatch.setattr(room, "MAX_ANNOUNCED", 2)
    events, request = make_events(), make_request()
    told(events, request, [16, 32, 48])
    [event] = remove(events, request, [16, 32])
    assert event.block_hashes == [request.block_hashes[i] for i in (3, 5, 7)]
    events.cleared()
    assert events.take() == [AllBlocksCleared()]
    assert remove(events, request, [16]) == []
    events.cleared()
    assert events.take() == []


def test_jobs_that_never_end_are_forgotten_and_counted(monkeypatch):
    monkeypatch.setattr(room, "MAX_JOBS", 2)
    recorder, request = Recorder(), make_request()
    events = make_events(recorder=recorder)
    for job in (1, 2, 3):
        order(events, request, [SPAN * job], job=job)
    for job in (1, 2, 3):
        events.ended(job, b"\1")
    assert [event.token_ids[0] for event in events.take()] == [SPAN, 2 * SPAN]
    assert recorder.take().data == {"events_dropped": {"": 1}}


def test_events_that_nobody_takes_are_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(room, "MAX_PENDING", 1)
    recorder, request = Recorder(), make_request()
    events = make_events(recorder=recorder)
    for job in (1, 2, 3):
        order(events, request, [SPAN * job], job=job)
        events.ended(job, b"\1")
    assert [event.token_ids[0] for event in events.take()] == [2 * SPAN]
    assert recorder.take().data == {"events_dropped": {"": 2}}


def test_nothing_is_told_if_events_are_off():
    events = Events((), HASH, 32, enabled=False, recorder=Recorder())
    assert told(events, make_request(), [16]) == []
    assert remove(events, make_request(), [16]) == []
    events.cleared()
    assert events.take() == []


def test_hashes_are_whole_numbers_where_vllm_is_set_so(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    events, request = make_events(), make_request()
    [theirs] = engine_events(request, 2, 4)
    assert isinstance(theirs.block_hashes[0], int)
    assert told(events, request, [32]) == [as_ours(theirs, "full_attention")]
    [removed] = remove(events, request, [32])
    assert removed.block_hashes == theirs.block_hashes


def test_groups_are_described_as_the_engine_describes_them():
    def layer(name, kind="full_attention", **changes):
        return LayerSpec(name=name, kind=kind, **{"block_size": 8, "num_kv_heads": 1} | changes)

    state = layer(
        "m", "mamba2", block_size=16, tokens_per_state=16, head_bytes=8, dcp_sharded=False,
        encoding="opaque", page_bytes=8,
    )  # fmt: skip
    groups = [
        GroupSpec(0, [layer("a", head_bytes=8)], blocks_per_chunk=2),
        GroupSpec(0, [layer("d", head_bytes=8)], is_draft=True, blocks_per_chunk=2),
        GroupSpec(1, [layer("w", "sliding_window", head_bytes=8, window=9)]),
        GroupSpec(3, [state]),
        GroupSpec(4, [layer("own", head_bytes=8)], is_draft=True),
    ]
    stored = plan(groups, Mesh()).stored
    attention = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=8, **attention)
    specs = [
        full,
        SlidingWindowSpec(block_size=8, sliding_window=9, **attention),
        full,
        MambaSpec(block_size=16, shapes=((2,),), dtypes=(torch.float32,)),
        full,
    ]
    config = KVCacheConfig(8, [], [KVCacheGroupSpec([str(i)], s) for i, s in enumerate(specs)])
    described = event_groups(stored, config)
    assert described == (
        FULL,
        EventGroup(0, 8, 2, False, "full_attention", None, told=False),
        WINDOW,
        EventGroup(3, 16, 1, True, "mamba", None),
        EventGroup(4, 8, 1, False, "full_attention", None),
    )
    assert told(make_events(*described), make_request(), [16], group=1) == []


def test_a_subscriber_decodes_them_with_vllms_types(tmp_path):
    events, request = make_events(FULL, WINDOW), make_request()
    sent = told(events, request, [16, 32]) + told(events, request, [64], group=1)
    events.cleared()
    sent += [*events.take(), AllBlocksCleared()]
    endpoint = f"ipc://{tmp_path}/events"
    publisher = ZmqEventPublisher(0, endpoint=endpoint)
    socket = zmq.Context.instance().socket(zmq.SUB)
    try:
        socket.connect(endpoint)
        socket.subscribe(b"")
        deadline = time.monotonic() + 30
        while not socket.poll(50):  # what is published before the subscription arrives is lost
            assert time.monotonic() < deadline
            publisher.publish(KVEventBatch(ts=0.0, events=sent))
        _, _, payload = socket.recv_multipart()
    finally:
        socket.close(linger=0)
        publisher.shutdown()
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert [type(event) for event in batch.events] == [
        BlockStored, BlockStored, BlockRemoved, BlockRemoved, AllBlocksCleared,
    ]  # fmt: skip
    assert batch.events == sent
    assert batch.events[0].kv_cache_spec_kind == "full_attention"


def test_a_long_prompt_is_one_event():
    request = SimpleNamespace(
        all_token_ids=list(range(131_072)), lora_request=None,
        block_hashes=[i.to_bytes(32, "big") for i in range(32_768)],
        mm_features=[], cache_salt=None, prompt_embeds=None, session_id=None,
    )  # fmt: skip
    events = make_events()
    [event] = told(events, request, np.arange(SPAN, 131_073, SPAN))
    assert len(event.token_ids) == 131_072
    assert len(event.block_hashes) == 131_072 // BLOCK
