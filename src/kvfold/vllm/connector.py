"""`KvfoldConnector`: vLLM's connector interface, delegating to the scheduler's or the worker's
side.

Nothing kvfold does may fail a request: after start-up every call into our sides is guarded; an
error is logged and counts as a miss.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvfold.errors import PlanError
from kvfold.vllm import metrics, translate
from kvfold.vllm.agreement import agree, all_records
from kvfold.vllm.events import Events, event_groups
from kvfold.vllm.evictions import Evictions, listening_link
from kvfold.vllm.link import StoreLink
from kvfold.vllm.messages import Handshake, StepOrders, StepResults
from kvfold.vllm.requests import Geometry
from kvfold.vllm.room import Room
from kvfold.vllm.scheduler import SchedulerSide
from kvfold.vllm.settings import ConnectorSettings
from kvfold.vllm.summary import summary
from kvfold.vllm.worker import WorkerSide, peer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level

_local_workers: WeakValueDictionary[str, WorkerSide] = WeakValueDictionary()
"""Workers of this process by engine: an in-process engine is not stepped between calls, so its
scheduler side collects their results itself.
"""


class KvfoldConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads the prefix cache of one engine into the store of its machine."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = ConnectorSettings.parse(transfer.kv_connector_extra_config)
        translate.check_supported(vllm_config, kv_cache_config)
        self._engine = str(transfer.engine_id)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._link: StoreLink | None = None
        self._pool: BlockPool | None = None
        self._load_results: StepResults | None = None
        if role == KVConnectorRole.WORKER:
            self._worker = WorkerSide(vllm_config, kv_cache_config, self._settings)
            _local_workers[self._engine] = self._worker
        elif transfer.kv_load_failure_policy != "recompute":
            # The scheduler reads the policy right after building us. Its default fails a request
            # whose load failed; a cache must not.
            logger.info(
                "kvfold: kv_load_failure_policy=%s would fail requests on a failed load; "
                "using recompute",
                transfer.kv_load_failure_policy,
            )
            transfer.kv_load_failure_policy = "recompute"

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is only a future miss."""
        return False

    # -- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Agree on the plan and connect; errors here are start-up errors."""
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This worker's stage record, for the scheduler's side."""
        return None if self._worker is None else self._worker.handshake

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin this step's loads in the background."""
        if self._worker is not None and self.has_connector_metadata():
            orders = self._get_connector_metadata()
            assert isinstance(orders, StepOrders)
            _guarded(self._worker.start_loads, orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads finish before their request is scheduled: nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored whole, after the step: nothing to do per layer."""

    def wait_for_save(self) -> None:
        """Queue this step's stores; their blocks are held by reference counts, so nothing waits."""
        if self._worker is not None and self.has_connector_metadata():
            orders = self._get_connector_metadata()
            assert isinstance(orders, StepOrders)
            _guarded(self._worker.submit_stores, orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Ended loads; failed ones are named too and are recomputed."""
        if self._worker is None:
            return KVConnectorTransferResults()
        finished, self._load_results = self._worker.take_loads()
        failed = set() if self._load_results is None else set(self._load_results.failures)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Ended jobs, and where loads failed."""
        if self._worker is None:
            return None
        loads, self._load_results = self._load_results, None
        stores = self._worker.take_stores()
        if loads is None or stores is None:
            return loads or stores
        return loads.aggregate(stores)

    # -- scheduler ------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The pool whose reference counts keep the sources of running stores alive."""
        self._pool = gpu_block_pool
        if self._scheduler is not None:
            self._scheduler.holds.pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Rebuild the plan from all workers' records, compare, and connect.

        Raises `PlanError` naming the first field that differs.
        """
        config = self._vllm_config
        shakes = [shake for _, shake in sorted(metadata.items())]
        assert all(isinstance(shake, Handshake) for shake in shakes)
        agreed = agree(all_records([json.loads(shake.record) for shake in shakes]))
        for (pp, tp), shake in sorted(metadata.items()):
            if shake.fingerprint != agreed.fingerprint:
                raise PlanError(
                    f"worker pp {pp} tp {tp} plan fingerprint",
                    shake.fingerprint,
                    f"{agreed.fingerprint} as on the scheduler's side",
                )
        evictions = Evictions() if translate.events_enabled(config) else None
        link = self._link = listening_link(
            self._settings.store(), peer(config, "scheduler", 0, agreed), evictions
        )
        link.start()
        if translate.random_hash_seed(config):
            logger.warning(
                "kvfold: block hashes are seeded at random (prefix_caching_hash_algo=%s), so no "
                "other process finds what this one stores, and nothing is written to disk. Set "
                "PYTHONHASHSEED or use sha256.",
                config.cache_config.prefix_caching_hash_algo,
            )
        geometry = Geometry.of(
            agreed,
            hash_bytes=translate.hash_bytes(config),
            num_blocks=self._kv_cache_config.num_blocks,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
            draft_lag=translate.draft_lag(config),
        )
        recorder = metrics.Recorder()
        self.attach(
            SchedulerSide(
                geometry,
                [known.digest for known in agreed.identities],
                lambda: link.current,
                engine=self._engine,
                lookup_wait_s=self._settings.lookup_wait_ms / 1e3,
                room_wait_s=self._settings.load_deadline_s,
                audit_chunks=self._settings.audit_chunks,
                audit_every=self._settings.audit_every,
                recorder=recorder,
                room=Room(
                    translate.engine_groups(config, self._kv_cache_config),
                    geometry.num_blocks,
                    geometry.max_step_tokens,
                ),
                evictions=evictions,
                events=Events(
                    event_groups(agreed.plan.stored, self._kv_cache_config),
                    geometry.tokens_per_hash,
                    geometry.hash_bytes,
                    enabled=evictions is not None,
                    recorder=recorder,
                ),
            )
        )
        self._fragments = [
            [fragment.layer for fragment in group.fragments] for group in agreed.plan.stored
        ]
        logger.info("%s", summary(agreed, geometry, self._settings))

    def attach(self, scheduler: SchedulerSide) -> None:
        """Use this scheduler side from now on."""
        self._scheduler = scheduler
        scheduler.holds.pool = self._pool

    def on_new_request(self, request: Request) -> None:
        """Start the lookup of a request that arrived."""
        if self._scheduler is not None:
            _guarded(self._collect_local)
            _guarded(self._scheduler.on_new_request, request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded, always asynchronously; None while the lookup is on its way."""
        if self._scheduler is None:
            return 0, False
        tokens = _guarded(self._scheduler.offer, request, num_computed_tokens, default=0)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The engine took the offer: open a ticket."""
        if self._scheduler is not None and num_external_tokens > 0:
            self._scheduler.start_load(request, blocks.blocks, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """The groups whose new blocks a load fills: they need no zeros before."""
        return () if self._scheduler is None else self._scheduler.loaded_groups

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """The accepted tokens by the tier that has them."""
        if self._scheduler is None or num_external_tokens == 0:
            return {}
        host, disk = self._scheduler.hit_tiers(request.request_id)
        return translate.hit_sources(host, disk)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The orders of this step."""
        if self._scheduler is None:
            return StepOrders()
        _guarded(self._scheduler.withdraw)  # before chunks that were lost are ordered again
        return self._scheduler.build_orders(scheduler_output)  # guards each request by itself

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers finished."""
        if self._scheduler is not None:
            results = connector_output.kv_connector_worker_meta
            _guarded(self._scheduler.update, results, connector_output.finished_recving or set())
            _guarded(self._check_audit, results)

    def _check_audit(self, results: StepResults | None) -> None:
        if results is not None and results.conflicts and self._scheduler is not None:
            layers = sorted({self._fragments[group][i] for group, i in results.conflicts})
            if self._scheduler.enabled:
                logger.error(
                    "kvfold: ranks that should hold the same bytes do not, in layers %s. "
                    "Nothing is stored or loaded any more by this engine; their number of KV "
                    "heads is declared wrongly.",
                    ", ".join(layers),
                )
            self._scheduler.disable()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the freeing of blocks: running stores hold references of their own."""
        if self._scheduler is not None:
            _guarded(self._scheduler.request_finished, request, block_ids)
        return False, None

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """States that a finished request leaves inside a block; held by references as well."""
        if self._scheduler is not None:
            _guarded(self._scheduler.hand_over_at_end, request, partial_tail_offloads)
        return False

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping until the last source block is released."""
        return self._scheduler is not None and self._scheduler.holds.jobs > 0

    def has_pending_block_frees(self) -> bool:
        """Running copies will free blocks soon: waiting beats preempting."""
        return self._scheduler is not None and self._scheduler.holds.free_soon()

    def reset_cache(self) -> bool | None:
        """Nothing stored before is served from now on."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What the store has now and had not before, or has no more, for the engine's KV events."""
        if self._scheduler is None:
            return ()
        events: list[KVCacheEvent] = _guarded(self._scheduler.take_events, default=[])
        return events

    # -- metrics --------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What is new in this side's figures."""
        if self._worker is not None:
            return self._worker.take_stats()
        if self._scheduler is None:
            return None
        stats: KVConnectorStats | None = _guarded(self._scheduler.take_stats)
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Stats from their serialised form."""
        return metrics.build_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Our metrics in vLLM's registry."""
        return metrics.prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- both -----------------------------------------------------------------------------------

    def _collect_local(self) -> None:
        """Take finished jobs of a worker in this process, without waiting for the next step."""
        worker = _local_workers.get(self._engine)
        if worker is not None and self._scheduler is not None:
            results = worker.take_stores()
            self._scheduler.update(results, set())
            self._check_audit(results)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no store of an in-process engine runs any more; False if time ran out."""
        worker = _local_workers.get(self._engine)
        if worker is not None and self._scheduler is not None:
            worker.submit_stores(StepOrders(stores=self._scheduler.storing.take()))
        deadline = time.monotonic() + timeout_s
        while self.has_pending_push_work() and time.monotonic() < deadline:
            self._collect_local()
            time.sleep(0.002)
        return not self.has_pending_push_work()

    def shutdown(self) -> None:
        """Stop copying and leave the store."""
        if self._worker is not None:
            _local_workers.pop(self._engine, None)
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._link is not None:
            self._link.close()


def _guarded(call: Callable[..., Any], *args: Any, default: Any = None) -> Any:
    """Run `call`; an exception is logged and becomes `default`, so that no request fails for it."""
    try:
        return call(*args)
    except Exception:
        logger.exception("kvfold: %s failed; going on without", getattr(call, "__name__", call))
        return default
