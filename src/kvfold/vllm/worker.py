"""The worker's side: plan with the peers, then run loads and stores beside the model."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvfold import identity
from kvfold.copy.cpu import CpuCopier, LayerPages, Sweep
from kvfold.errors import StoreGone
from kvfold.plan import OffloadPlan, PlanOptions
from kvfold.store.client import Group, Role, StoreClient
from kvfold.store.messages import NO_FRAGMENT
from kvfold.vllm import translate
from kvfold.vllm.link import Peer, StoreLink
from kvfold.vllm.loads import Loads
from kvfold.vllm.messages import Handshake, StepOrders, StepResults
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

    def write(self, event: str, key: bytes, digest: str) -> None:
        """Append a line: `event` is "store" or "load"."""
        line = {"event": event, "rank": self._rank, "key": key.hex(), "digest": digest}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


_Compiled = tuple[CpuCopier, tuple[Sweep, ...], list[tuple[Sweep, ...]]]
"""Copier, reads, and writes by rotation."""


class ChunkCopies:
    """The plan's runs for this rank, compiled for its pages and each connection's arena."""

    def __init__(self, planned: OffloadPlan, rank: int, pages: Mapping[str, LayerPages]) -> None:
        self._group, self.rank, self.world = planned.groups[0], rank, planned.mesh.world_size
        self._pages = dict(pages)
        self.rotations = self._group.rotations
        self.writer_masks: NDArray[np.uint64] = np.array(
            [sum(1 << r for r in self._group.writers(i)) for i in range(self.rotations)],
            dtype=np.uint64,
        )
        self._lock = threading.Lock()
        self._compiled: dict[int, _Compiled] = {}
        # Audits read pages only: an empty arena will do.
        auditor = CpuCopier(self._pages, np.empty(self._group.slot_bytes, dtype=np.uint8))
        self._audited = [
            (owned.id, auditor.compile(owned.runs, self._group.slot_bytes))
            for owned in self._group.audited(rank)
        ]

    def attach(self, connection: int, arena: memoryview) -> None:
        """Compile the runs for a connection's arena."""
        copier = CpuCopier(self._pages, arena)
        size = self._group.slot_bytes
        reads = copier.compile(self._group.reads(self.rank), size)
        writes = [
            copier.compile(self._group.writes(self.rank, i), size) for i in range(self.rotations)
        ]
        with self._lock:
            self._compiled = {connection: (copier, reads, writes)}  # others have ended

    def detach(self, connection: int) -> None:
        """Let go of the arena of a connection that has ended."""
        with self._lock:
            self._compiled.pop(connection, None)

    def _of(self, connection: int) -> _Compiled:
        try:
            return self._compiled[connection]
        except KeyError:
            raise StoreGone(f"connection {connection} to the store has ended") from None

    def copy_in(self, connection: int, blocks: Sequence[int], offset: int) -> int:
        """Fill this rank's pages from a slot; return bytes copied."""
        copier, reads, _ = self._of(connection)
        return copier.to_pages(reads, blocks, offset)

    def copy(self, connection: int, rotation: int, blocks: Sequence[int], offset: int) -> int:
        """Write this rank's part of a chunk into its slot; return bytes copied."""
        copier, _, writes = self._of(connection)
        return copier.to_slot(writes[rotation], blocks, offset)

    def audit_records(self, blocks: NDArray[np.int32]) -> bytes:
        """12 bytes per fragment that others hold too: its id, a checksum over all chunks."""
        records = bytearray()
        for number, sweeps in self._audited:
            state = xxhash.xxh3_64()
            for row in blocks.tolist():
                CpuCopier.checksum(sweeps, row, state)
            records += number.to_bytes(4, "little") + state.intdigest().to_bytes(8, "little")
        # Whoever shares nothing says so: the store waits for everybody before it answers.
        return bytes(records) or NO_FRAGMENT.to_bytes(4, "little") + bytes(8)

    def page_digest(self, blocks: Sequence[int]) -> str:
        """A digest of all bytes this rank holds of a chunk."""
        copier = CpuCopier(self._pages, np.empty(0, dtype=np.uint8))
        return copier.page_digest(blocks, [layer.spec.name for layer in self._group.layers])


class WorkerSide:
    """Loads and stores of one worker."""

    def __init__(
        self, config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
    ) -> None:
        self._config, self._kv_cache_config, self._settings = config, kv_cache_config, settings
        self.handshake: Handshake | None = None
        self._link: StoreLink | None = None
        self._loads: Loads | None = None
        self._saves: Saves | None = None
        self._copies: ChunkCopies | None = None
        self._digests: DigestLog | None = None
        self._attached = -1

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Agree on the plan with the other workers and connect to the store.

        Raises `PlanError` if workers differ, `StoreError` if the store cannot be started.
        """
        from vllm.distributed.parallel_state import get_tp_group

        tp = get_tp_group()
        rank = tp.rank_in_group
        record = translate.stage_record(
            self._config,
            self._kv_cache_config,
            kv_caches,
            PlanOptions(
                blocks_per_chunk=self._settings.blocks_per_chunk,
                tokens_per_hash=self._kv_cache_config.hash_block_size,
            ),
            rank,
        )
        planned = translate.build_plan(_gather(record, tp))
        known = translate.build_identity(record, planned)
        self.handshake = Handshake(json.dumps(record, sort_keys=True), planned.fingerprint)
        self._copies = ChunkCopies(planned, rank, translate.pages(kv_caches, self._kv_cache_config))
        if self._settings.digest_dir is not None:
            self._digests = DigestLog(Path(self._settings.digest_dir), rank)
        self._loads = Loads(
            self._copies.copy_in,
            self._settings.load_deadline_s,
            loaded=self._recorder("load"),
            detach=self._copies.detach,
        )
        self._saves = Saves(
            self._copies, self._settings.store_deadline_s, stored=self._recorder("store")
        )
        self._link = StoreLink(
            self._settings.store(),
            peer(self._config, "worker", rank, planned, known),
            on_ready=self._loads.ready,
            on_failed=self._loads.lost,
            on_gone=self._loads.gone,
            on_client=self._loads.connected,
        )
        self._link.start()
        self._client()
        if rank == 0:
            for warning in planned.warnings:
                logger.warning("kvfold: %s", warning)

    def _recorder(self, event: str) -> Callable[[bytes, Sequence[int]], None] | None:
        """What writes digests of stored or loaded chunks, if they are wanted."""
        if self._digests is None:
            return None

        def record(key: bytes, blocks: Sequence[int]) -> None:
            assert self._digests is not None
            assert self._copies is not None
            if all(block >= 0 for block in blocks):
                self._digests.write(event, key, self._copies.page_digest(blocks))

        return record

    def _client(self) -> tuple[StoreClient | None, int]:
        """The live client with its runs compiled, or (None, 0): then orders end as misses."""
        current = None if self._link is None else self._link.current
        if current is None:
            return None, 0
        client, connection = current
        try:
            if connection != self._attached:
                assert self._copies is not None
                arena = client.arena
                if arena is None:  # gone, just now
                    return None, 0
                self._copies.attach(connection, arena)
                self._attached = connection
        except Exception:
            logger.exception("kvfold: the store's memory cannot be used")
            return None, 0
        return client, connection

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
        """Requests whose loads ended, failed ones with their reason."""
        if self._loads is None:
            return set(), None
        reports = self._loads.take_reports()
        failures = {r.req_id: r.failure for r in reports if r.failure is not None}
        return {r.req_id for r in reports}, StepResults(failures=failures) if failures else None

    def take_stores(self) -> StepResults | None:
        """Jobs that ended, each once."""
        reports = [] if self._saves is None else self._saves.take_reports()
        if not reports:
            return None
        conflicts = sorted({c for report in reports for c in report.conflicts})
        return StepResults(jobs={r.job: 1 for r in reports}, conflicts=conflicts)

    def close(self) -> None:
        """Stop copying, then leave the store."""
        ended = [part.close() for part in (self._loads, self._saves) if part is not None]
        if self._link is not None and all(ended):
            # While a copy runs the store must not think that we are done: then our exit says so.
            self._link.close()
            self._link = None


def _gather(record: dict[str, Any], group: Any) -> list[dict[str, Any]]:
    """The records of all workers; unconditional, so that no rank waits for another."""
    import torch.distributed as dist

    gathered: list[dict[str, Any]] = [{} for _ in range(group.world_size)]
    dist.all_gather_object(gathered, record, group=group.cpu_group)
    return gathered


def peer(
    config: VllmConfig, role: Role, rank: int, planned: OffloadPlan, known: identity.Identity
) -> Peer:
    """How a process of this engine introduces itself to the store."""
    assert config.kv_transfer_config is not None
    group = planned.groups[0]
    return Peer(
        role,
        str(config.kv_transfer_config.engine_id),
        rank,
        planned.mesh.world_size,
        planned.fingerprint,
        [
            Group(
                group.slot_bytes,
                group.chunk_bytes,
                identity.namespace(known.digest, 0),
                known.text,
                # Keys that no other process can make would only fill the disk.
                durable=not translate.random_hash_seed(config),
            )
        ],
    )
