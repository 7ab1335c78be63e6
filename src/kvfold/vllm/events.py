"""KV events: what the store has of this engine, told block by block to whoever routes requests.

A chunk is announced by the blocks in it, as the engine announces its own: one hash per block of the
group, and `block_size` is the tokens of such a block over all DCP ranks (`block_size` x dcp).
Consumers keep hashes at that granularity, whether they take the engine's or hash `token_ids`
themselves; an event per whole chunk would match only prompts that end with a chunk, and another
`block_size` than that of the medium GPU not at all. Chunks that follow each other make one event.

* Full attention: chunk i covers the whole period before its boundary b.
* A window: the blocks [b - n x block, b) that a hit at b looks back on; the parent is the hash
  before them, although the blocks in between are not stored.
* A state: the block that ends at b. Where the engine hits inside its blocks and b is in one, it is
  announced as the engine does it, by the last hash: [b - tokens_per_hash, b).

The medium is CPU: the chunk can be loaded from this machine. Whether host memory or disk has it is
the store's business, and it is removed when neither does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvfold import identity
from kvfold.identity import KEY_BYTES
from kvfold.spans import is_state
from kvfold.vllm import metrics

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvfold.plan import GroupPlan
    from kvfold.vllm.messages import StoreOrder

MAX_JOBS = 4096
"""Jobs whose end is awaited; the oldest are forgotten."""
MAX_PENDING = 16_384
"""Events that wait to be taken; the oldest are dropped."""
MAX_ANNOUNCED = 1 << 18
"""Chunks of one group that are remembered, to name all their blocks when they go."""
LOCAL = "LOCAL"


@dataclass(frozen=True)
class EventGroup:
    """A group as its events tell of it; `told` is False if they would be another group's."""

    index: int
    tokens_per_block: int
    blocks_per_chunk: int
    state: bool
    kind: str | None
    sliding_window: int | None
    told: bool = True


def event_groups(
    stored: Sequence[GroupPlan], kv_cache_config: KVCacheConfig
) -> tuple[EventGroup, ...]:
    """What events need of each stored group, by its number.

    A draft that shares its target's engine group is not told of: the engine does not tell them
    apart, and losing the draft's chunk loses no hit.
    """
    targets = {group.index for group in stored if not group.is_draft}
    return tuple(
        EventGroup(
            group.index,
            group.tokens_per_block,
            group.blocks_per_chunk,
            is_state(group.layers[0].spec),
            get_kv_cache_spec_kind(spec).value,
            get_kv_cache_spec_sliding_window(spec),
            told=not (group.is_draft and group.index in targets),
        )
        for group in stored
        for spec in [kv_cache_config.kv_cache_groups[group.index].kv_cache_spec]
    )


@dataclass(frozen=True)
class _Run:
    """Chunks that follow each other: an event that would tell of all, and the unconverted hashes
    of its blocks."""

    event: Any
    hashes: list[bytes]
    chunks: int


@dataclass
class _Job:
    group: int
    keys: bytes
    runs: list[_Run]
    stored: NDArray[np.bool_] | None = None
    """Per chunk, whether all workers that have ended say that the store has it."""


class Events:
    """The events of one engine. All methods run in the engine's loop; nothing here waits.

    A request stays as it is up to what was computed, but it may be gone before its job ends, so
    tokens and hashes are copied when the store is ordered.
    """

    def __init__(
        self,
        groups: Sequence[EventGroup],
        tokens_per_hash: int,
        hash_bytes: int,
        *,
        enabled: bool,
        recorder: metrics.Recorder,
    ) -> None:
        self.enabled = enabled
        self._groups, self._recorder = groups, recorder
        self._tokens_per_hash, self._hash_bytes = tokens_per_hash, hash_bytes
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._pending: deque[KVCacheEvent] = deque()
        # By group: a chunk's key -> the hashes of its blocks.
        self._announced: list[OrderedDict[bytes, tuple[bytes, ...]]] = [
            OrderedDict() for _ in groups
        ]
        self._forgotten = False
        # Keys lost while jobs ran -> the last job ordered by then: it or one before it may have
        # stored a key, or found it, just before it was lost.
        self._gone: OrderedDict[bytes, int] = OrderedDict()

    # -- stores --------------------------------------------------------------------------------

    def ordered(self, order: StoreOrder, request: Request, ends_tokens: Sequence[int]) -> None:
        """The store of chunks of `request` was ordered; they end at these tokens, ascending."""
        if not self.enabled or not self._groups[order.group].told or not len(ends_tokens):
            return
        facts, ends = self._groups[order.group], np.asarray(ends_tokens, dtype=np.int64)
        span = facts.tokens_per_block * facts.blocks_per_chunk
        # States may begin anywhere, so each is told of by itself.
        breaks = np.full(len(ends) - 1, True) if facts.state else np.diff(ends) != span
        runs = np.split(ends, np.flatnonzero(breaks) + 1)
        told = [self._run(facts, request, int(run[0]), len(run)) for run in runs]
        self._jobs[order.job] = _Job(order.group, order.keys, told)
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
            self._recorder.add(metrics.EVENTS_DROPPED)
        self._forget_gone()

    def _run(self, facts: EventGroup, request: Request, first_end: int, chunks: int) -> _Run:
        per_hash, block = self._tokens_per_hash, facts.tokens_per_block
        if first_end % block:  # a state inside a block
            block = per_hash
        start = first_end - block * facts.blocks_per_chunk
        end = start + block * facts.blocks_per_chunk * chunks
        step = block // per_hash
        known = request.block_hashes
        hashes = list(known[start // per_hash + step - 1 : end // per_hash : step])
        parent = known[start // per_hash - 1] if start else None
        lora = request.lora_request
        event = BlockStored(
            block_hashes=_external(hashes),
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(request.all_token_ids[start:end]),
            block_size=block,
            lora_id=None if lora is None else lora.adapter_id,
            medium=MEDIUM_CPU,
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(request, start, end, block),
            group_idx=facts.index,
            kv_cache_spec_kind=facts.kind,
            kv_cache_spec_sliding_window=facts.sliding_window,
            locality=LOCAL,
            session_id=request.session_id,
        )
        return _Run(event, hashes, chunks)

    def reported(self, job: int, stored: bytes) -> None:
        """Some workers have ended `job`. `stored` has a byte per chunk in the order of the job, not
        0 if the store has the chunk, from now or before, as far as they know."""
        waiting = self._jobs.get(job)
        if waiting is not None:
            flags = np.frombuffer(stored, dtype=np.uint8) != 0
            waiting.stored = flags if waiting.stored is None else waiting.stored & flags

    def ended(self, job: int, stored: bytes | None = None) -> None:
        """All workers have ended `job`; `stored` is what the last of them report, if they do.

        What was announced and has not been removed is not announced again.
        """
        if stored is not None:
            self.reported(job, stored)
        ended = self._jobs.pop(job, None)
        if ended is None or ended.stored is None:
            return
        announced, at = self._announced[ended.group], 0
        width = self._groups[ended.group].blocks_per_chunk
        for run in ended.runs:
            keys = _split(ended.keys[at * KEY_BYTES : (at + run.chunks) * KEY_BYTES])
            known = np.fromiter(map(announced.__contains__, keys), np.bool_, run.chunks)
            flags = ended.stored[at : at + run.chunks] & ~known
            if self._gone:
                lost = (self._gone.get(key, -1) >= job for key in keys)
                flags &= ~np.fromiter(lost, np.bool_, run.chunks)
            at += run.chunks
            edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).tolist()
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                self._tell(_part(run, first, last, width))
                blocks = zip(*[iter(run.hashes[first * width : last * width])] * width, strict=True)
                announced.update(zip(keys[first:last], blocks, strict=True))
        while len(announced) > MAX_ANNOUNCED:
            announced.popitem(last=False)
            self._forgotten = True
        self._forget_gone()

    # -- removals ------------------------------------------------------------------------------

    def removed(self, group: int, namespace: bytes, keys: bytes) -> None:
        """The store has lost chunks of this group and namespace, in every tier.

        Chunks that were not announced (another engine's) are passed over, and will not be by jobs
        that run now. Of those announced so long ago that they were forgotten only the last block
        is named, which ends the prefix.
        """
        if not self.enabled or not self._groups[group].told:
            return
        announced, gone = self._announced[group], list[bytes]()
        ends = _split(identity.chunk_keys(namespace, keys, KEY_BYTES))  # its own inverse
        running = next(reversed(self._jobs), None)
        for key, end in zip(_split(keys), ends, strict=True):
            if running is not None:
                self._gone[key] = running
                self._gone.move_to_end(key)
            gone += announced.pop(key, (end[: self._hash_bytes],) if self._forgotten else ())
        self._tell_removed(group, gone)
        if len(self._gone) > MAX_ANNOUNCED:  # then these jobs announce nothing
            self._recorder.add(metrics.EVENTS_DROPPED, len(self._jobs))
            self._jobs.clear()
            self._gone.clear()

    def _forget_gone(self) -> None:
        """Forget losses from before the oldest running job."""
        if not self._jobs:
            self._gone.clear()
            return
        oldest = next(iter(self._jobs))
        while self._gone and next(iter(self._gone.values())) < oldest:
            self._gone.popitem(last=False)

    def _tell_removed(self, group: int, hashes: list[bytes]) -> None:
        if hashes:
            self._tell(
                BlockRemoved(
                    block_hashes=_external(hashes),
                    medium=MEDIUM_CPU,
                    group_idx=self._groups[group].index,
                    locality=LOCAL,
                )
            )

    def cleared(self) -> None:
        """Nothing stored before will be served any more, nor what is being stored now.

        vLLM's event for that has no medium. It would take with it what the engine has cached
        since, which is told before ours, so it is sent only if we do not know all that we told.
        """
        self._jobs.clear()
        self._gone.clear()
        for group, announced in enumerate(self._announced):
            if not self._forgotten:
                self._tell_removed(group, [h for blocks in announced.values() for h in blocks])
            announced.clear()
        if self._forgotten:
            self._tell(AllBlocksCleared())
            self._forgotten = False

    # -- the engine ----------------------------------------------------------------------------

    def _tell(self, event: KVCacheEvent) -> None:
        self._pending.append(event)
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self._recorder.add(metrics.EVENTS_DROPPED)

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call, in order."""
        events = list(self._pending)
        self._pending.clear()
        return events


def _split(keys: bytes) -> list[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def _external(hashes: list[bytes]) -> list[bytes | int]:
    return [maybe_convert_block_hash(block_hash) for block_hash in hashes]


def _extra_keys(request: Request, start: int, end: int, block: int) -> Any:
    """What the hash of each block took beside its tokens, None for most blocks."""
    if not (request.lora_request or request.mm_features or request.cache_salt) and (
        request.prompt_embeds is None
    ):
        return [None] * ((end - start) // block)
    keys, multimodal = [], 0
    for at in range(start, end, block):
        found, multimodal = generate_block_hash_extra_keys(request, at, at + block, multimodal)
        keys.append(found)
    return to_event_extra_keys(keys)


def _part(run: _Run, first: int, last: int, width: int) -> Any:
    """The event of chunks [first, last) of a run, each of `width` blocks."""
    event = run.event
    if (first, last) == (0, run.chunks):
        return event
    begin, end = first * width, last * width
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[begin:end],
        parent_block_hash=event.block_hashes[begin - 1] if begin else event.parent_block_hash,
        token_ids=event.token_ids[begin * event.block_size : end * event.block_size],
        extra_keys=event.extra_keys[begin:end],
    )
