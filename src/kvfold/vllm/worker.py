"""The worker's side: plan with the peers, then run loads and stores beside the model."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvfold import identity
from kvfold.copy.cpu import CpuCopier, LayerPages, Sweep
from kvfold.errors import StoreGone
from kvfold.plan import GroupPlan
from kvfold.store.client import NO_FRAGMENT, Group, Role, StoreClient
from kvfold.vllm import translate
from kvfold.vllm.agreement import Agreed, agree, copies_bytes
from kvfold.vllm.link import Peer, StoreLink
from kvfold.vllm.loads import Loads
from kvfold.vllm.messages import Handshake, LoadFailure, StepOrders, StepResults
from kvfold.vllm.metrics import KvfoldStats, Recorder, group_label
from kvfold.vllm.saves import Saves, no_wait
from kvfold.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level


class DigestLog:
    """Debugging: one line per stored and loaded chunk with a digest of all bytes this rank holds of
    it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank{rank}-{os.getpid()}.jsonl"
        self._rank, self._lock = rank, threading.Lock()

    def write(self, event: str, group: int, key: bytes, digest: str) -> None:
        """Append a line: `event` is "store" or "load", `group` a number in `plan.stored`."""
        line = {
            "event": event, "rank": self._rank, "group": group, "key": key.hex(), "digest": digest,
        }  # fmt: skip
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class _Compiled:
    """One group's runs of this rank: to fill its pages, and to write slots, by rotation."""

    reads: tuple[Sweep, ...]
    writes: list[tuple[Sweep, ...]]


class ChunkCopies:
    """The plan's runs for this rank, compiled for its pages and each connection's arena.

    Groups are numbered as in the store. Of a group that lies on other pipeline stages this rank
    holds nothing: there is nothing to copy, compare or digest then.
    """

    def __init__(self, agreed: Agreed, rank: int, pages: Mapping[str, LayerPages]) -> None:
        self._groups, self.rank = agreed.plan.stored, rank
        self.world = agreed.plan.mesh.world_size
        self.labels: Sequence[str] = [group_label(group) for group in self._groups]
        self.copies_bytes: Sequence[int] = [
            copies_bytes(agreed, number) for number in range(len(self._groups))
        ]
        self.writer_masks: Sequence[NDArray[np.uint64]] = [
            _writer_masks(group) for group in self._groups
        ]
        self._pages = dict(pages)
        stage = agreed.plan.mesh.coords(rank).pp
        self._layers = [
            [layer.spec.name for layer in group.layers if layer.placement.stage == stage]
            for group in self._groups
        ]
        self._lock = threading.Lock()
        self._compiled: dict[int, list[_Compiled]] = {}
        # Audits and digests read pages only: an empty arena will do.
        self._reader = CpuCopier(
            self._pages, np.empty(max(group.slot_bytes for group in self._groups), dtype=np.uint8)
        )
        self._audited = [
            [
                (owned.id, self._reader.compile(owned.runs, group.slot_bytes))
                for owned in group.audited(rank)
            ]
            for group in self._groups
        ]

    def attach(self, connection: int, arena: memoryview) -> None:
        """Compile the runs for a connection's arena."""
        copier = CpuCopier(self._pages, arena)
        compiled = [
            _Compiled(
                copier.compile(group.reads(self.rank), group.slot_bytes),
                [
                    copier.compile(group.writes(self.rank, rotation), group.slot_bytes)
                    for rotation in range(group.rotations)
                ],
            )
            for group in self._groups
        ]
        with self._lock:
            self._compiled = {connection: compiled}  # others have ended

    def detach(self, connection: int) -> None:
        """Let go of the arena of a connection that has ended."""
        with self._lock:
            self._compiled.pop(connection, None)

    def _of(self, connection: int, group: int) -> _Compiled:
        try:
            return self._compiled[connection][group]
        except KeyError:
            raise StoreGone(f"the store is gone (connection {connection} has ended)") from None

    def copy_in(self, connection: int, group: int, blocks: Sequence[int], offset: int) -> int:
        """Fill this rank's pages from a slot, but of blocks `NO_BLOCK`; return bytes copied."""
        return CpuCopier.to_pages(self._of(connection, group).reads, blocks, offset)

    def copy(
        self, connection: int, group: int, rotation: int, blocks: Sequence[int], offset: int
    ) -> int:
        """Write this rank's part of a chunk into its slot; return bytes copied."""
        return CpuCopier.to_slot(self._of(connection, group).writes[rotation], blocks, offset)

    def audit_records(self, group: int, blocks: NDArray[np.int32]) -> bytes:
        """12 bytes per fragment that others hold too: its id, a checksum over all chunks."""
        records = bytearray()
        for number, sweeps in self._audited[group]:
            state = xxhash.xxh3_64()
            for row in blocks.tolist():
                CpuCopier.checksum(sweeps, row, state)
            records += number.to_bytes(4, "little") + state.intdigest().to_bytes(8, "little")
        # Whoever shares nothing says so: the store waits for everybody before it answers.
        return bytes(records) or NO_FRAGMENT.to_bytes(4, "little") + bytes(8)

    def page_digest(self, group: int, blocks: Sequence[int]) -> str | None:
        """A digest of all bytes this rank holds of a chunk, None if it holds none."""
        layers = self._layers[group]
        return self._reader.page_digest(blocks, layers) if layers else None


def _writer_masks(group: GroupPlan) -> NDArray[np.uint64]:
    """For each rotation, the mask of the ranks that write."""
    return np.array(
        [sum(1 << rank for rank in group.writers(i)) for i in range(group.rotations)],
        dtype=np.uint64,
    )


class WorkerSide:
    """Loads and stores of one worker."""

    def __init__(
        self, config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
    ) -> None:
        self._config, self._kv_cache_config, self._settings = config, kv_cache_config, settings
        self.rank = -1
        """This worker's rank within the engine, once it is described."""
        self.handshake: Handshake | None = None
        self._record: dict[str, Any] = {}
        self._pages: dict[str, LayerPages] = {}
        self._link: StoreLink | None = None
        self._loads: Loads | None = None
        self._saves: Saves | None = None
        self._copies: ChunkCopies | None = None
        self._recorder = Recorder()
        self._tell_stored = translate.events_enabled(config)
        self._attached = -1

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Agree on the plan with the other workers and connect to the store.

        Raises `PlanError` if workers differ, `StoreError` if the store cannot be started.
        """
        self.agree(translate.gather(self.describe(kv_caches, translate.rank(self._config))))

    def describe(self, kv_caches: Mapping[str, torch.Tensor], rank: int) -> dict[str, Any]:
        """This worker's stage record, JSON-ready: what its peers must know."""
        self.rank = rank
        self._pages = translate.pages(kv_caches, self._kv_cache_config)
        self._record = translate.stage_record(
            self._config, self._kv_cache_config, kv_caches, self._settings.blocks_per_chunk, rank
        )
        return self._record

    def agree(self, records: Sequence[dict[str, Any]]) -> None:
        """Build the plan that all workers' records say, and connect. Raises as `register`."""
        agreed = agree(records)
        self.handshake = Handshake(json.dumps(self._record, sort_keys=True), agreed.fingerprint)
        self._copies = copies = ChunkCopies(agreed, self.rank, self._pages)
        digests = None
        if self._settings.digest_dir is not None:
            digests = DigestLog(Path(self._settings.digest_dir), self.rank)
        self._loads = Loads(
            copies,
            self._settings.load_deadline_s,
            recorder=self._recorder,
            loaded=_digester("load", digests, copies),
        )
        self._saves = Saves(
            copies,
            self._settings.store_deadline_s,
            recorder=self._recorder,
            offered=_digester("store", digests, copies),
        )
        self._link = StoreLink(
            self._settings.store(),
            peer(self._config, "worker", self.rank, agreed),
            on_ready=self._loads.ready,
            on_failed=self._loads.lost,
            on_gone=self._loads.gone,
            on_client=self._connected,
        )
        self._link.start()
        if self.rank == 0:
            for warning in agreed.plan.warnings:
                logger.warning("kvfold: %s", warning)

    def _connected(self, client: StoreClient, connection: int) -> None:
        """Compile the runs for a new store's memory, on the link's thread: no step waits for it."""
        assert self._copies is not None
        assert self._loads is not None
        try:
            arena = client.arena
            if arena is not None:  # otherwise it is gone already
                self._copies.attach(connection, arena)
                self._attached = connection
        except Exception:
            logger.exception("kvfold: the store's memory cannot be used")
        self._loads.connected(client)

    def _client(self) -> tuple[StoreClient | None, int]:
        """The live client, or (None, 0): then orders end as misses."""
        current = None if self._link is None else self._link.current
        if current is None or current[1] != self._attached:
            return None, 0
        return current

    def start_loads(self, orders: StepOrders) -> None:
        """Begin this step's loads; never waits."""
        assert self._loads is not None
        if orders.reset:
            self._loads.reset()
        if orders.loads:
            client, connection = self._client()
            for order in orders.loads:
                self._loads.start(order, client, connection)

    def submit_stores(self, orders: StepOrders) -> None:
        """Queue this step's stores; called after its forward pass, also if there was none."""
        assert self._saves is not None
        if orders.stores:
            client, connection = self._client()
            for order in orders.stores:
                self._saves.submit(order, client, connection, no_wait)
        if orders.pause_s:
            time.sleep(orders.pause_s)

    def take_loads(self) -> tuple[set[str], StepResults | None]:
        """Requests whose loads ended, and why those that failed did."""
        reports = [] if self._loads is None else self._loads.take_reports()
        failures: dict[str, list[LoadFailure]] = {}
        for report in reports:
            if report.failures:
                failures.setdefault(report.req_id, []).extend(report.failures)
        drafts = [report.req_id for report in reports if report.without_draft]
        ended = {report.req_id for report in reports}
        if not failures and not drafts:
            return ended, None
        return ended, StepResults(failures=failures, without_draft=drafts)

    def take_stores(self) -> StepResults | None:
        """Jobs that ended, each once."""
        reports = [] if self._saves is None else self._saves.take_reports()
        if not reports:
            return None
        return StepResults(
            jobs={report.job: 1 for report in reports},
            conflicts=sorted({pair for report in reports for pair in report.conflicts}),
            stored={r.job: r.stored for r in reports} if self._tell_stored else {},
        )

    def take_stats(self) -> KvfoldStats | None:
        """What is new in this worker's figures."""
        return self._recorder.take()

    def close(self) -> None:
        """Stop copying, then leave the store."""
        ended = [part.close() for part in (self._loads, self._saves) if part is not None]
        if self._link is not None and all(ended):
            # While a copy runs the store must not think that we are done: then our exit says so.
            self._link.close()
            self._link = None


def _digester(
    event: str, digests: DigestLog | None, copies: ChunkCopies
) -> Callable[[int, bytes, Sequence[int]], None] | None:
    """What writes digests of stored or loaded chunks, if they are wanted."""
    if digests is None:
        return None

    def record(group: int, key: bytes, blocks: Sequence[int]) -> None:
        if all(block >= 0 for block in blocks):  # a part of a chunk compares with nothing
            digest = copies.page_digest(group, blocks)
            if digest is not None:
                digests.write(event, group, key, digest)

    return record


def peer(config: VllmConfig, role: Role, rank: int, agreed: Agreed) -> Peer:
    """How a process of this engine introduces itself to the store."""
    assert config.kv_transfer_config is not None
    # Keys that no other process can make would only fill the disk.
    durable = not translate.random_hash_seed(config)
    groups = [
        Group(
            group.slot_bytes,
            group.chunk_bytes,
            identity.namespace(known.digest, number),
            known.text,
            durable,
            copies_bytes(agreed, number),
        )
        for number, (group, known) in enumerate(
            zip(agreed.plan.stored, agreed.identities, strict=True)
        )
    ]
    return Peer(
        role,
        str(config.kv_transfer_config.engine_id),
        rank,
        agreed.plan.mesh.world_size,
        agreed.fingerprint,
        groups,
    )
