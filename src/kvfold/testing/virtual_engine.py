"""A virtual engine: vLLM's scheduler, cache manager and requests, with workers that execute steps
on virtual pages instead of running a model.

Everything is deterministic: time passes, tasks of the I/O thread run and copies progress only in
`step`, by the random numbers that it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvfold.testing.virtual_execute import Execution, Promises, Run
from kvfold.testing.virtual_pages import Page, Pages, Strand
from kvfold.testing.virtual_plan import agreed, strands_of
from kvfold.testing.virtual_store import Client, VirtualIo, VirtualStore
from kvfold.testing.virtual_workers import VirtualWorker
from kvfold.vllm import translate
from kvfold.vllm.messages import StepOrders
from kvfold.vllm.requests import Geometry
from kvfold.vllm.room import Room
from kvfold.vllm.scheduler import SchedulerSide

if TYPE_CHECKING:
    from kvfold.testing.virtual_shapes import VirtualConfig


class _Errors(logging.Handler):
    """Keeps errors that kvfold logs instead of raising: in an engine, requests go on without it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record's text with its traceback."""
        errors.append(logging.Formatter().format(record))


errors: list[str] = []
_listener = _Errors(logging.ERROR)

STEP_S = 0.001
STILL_STEPS = 100
"""So many steps in which no request gets on mean that none ever will: nothing is slow in `drain`.
"""
SLACK_S = 2.5 * STEP_S
"""A request that is asked once per step learns of its deadline this much late."""


class StuckRequest(AssertionError):
    """A request waits for kvfold longer than its deadline."""


@dataclass
class Deadlines:
    """The settings that the engine's invariants are measured by, in seconds."""

    lookup_wait_s: float = 0.02
    room_wait_s: float = 0.05
    load_s: float = 30.0
    store_s: float = 10.0


@dataclass
class VirtualEngine:
    """One engine. `store` outlives it."""

    config: VirtualConfig
    store: VirtualStore
    deadlines: Deadlines = field(default_factory=Deadlines)
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        config = self.config
        _hash_seed()
        logging.getLogger("vllm.kvfold").addHandler(_listener)  # vLLM's start drops handlers
        self.scheduler = Scheduler(
            vllm_config=config.vllm,
            kv_cache_config=config.scheduler,
            structured_output_manager=_NO_GRAMMARS,
            block_size=config.scheduler_block_tokens,
            hash_block_size=config.hash_tokens,
            log_stats=True,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.connector: Any = self.scheduler.connector
        self.world = config.shape.tp
        self.strands = strands_of(config)
        self.io = VirtualIo()
        self.client: Client | None = Client(self.store)
        self.side: SchedulerSide | None = None
        self.runs: dict[str, Run] = {}
        self.version = 0
        self.broken = False
        """A step has failed: nothing more can be said of this engine."""
        self.promises = Promises(config.hash_tokens)
        self._waits: dict[str, float] = {}
        self._names = 0
        self._hasher = get_request_block_hasher(config.hash_tokens, sha256)
        self._aggregator = KVOutputAggregator(self.world)
        pages = [Pages(self.strands, config.scheduler.num_blocks) for _ in range(self.world)]
        self.execution = Execution(self.strands, pages)
        self.workers = [
            VirtualWorker(
                rank,
                pages[rank],
                self.strands,
                self.store,
                owns=self._owns,
                check=self._check_chunk,
                load_deadline_s=self.deadlines.load_s,
                store_deadline_s=self.deadlines.store_s,
            )
            for rank in range(self.world)
        ]

    def serve(self, blocks_per_chunk: int = 1) -> SchedulerSide:
        """Give the engine a kvfold scheduler side; without one it runs by itself."""
        config, planned = self.config, agreed(self.config, blocks_per_chunk)
        geometry = Geometry.of(
            planned,
            hash_bytes=translate.hash_bytes(config.vllm),
            num_blocks=config.scheduler.num_blocks,
            max_step_tokens=config.vllm.scheduler_config.max_num_batched_tokens,
            draft_lag=translate.draft_lag(config.vllm),
        )
        io: Any = self.io
        self.side = SchedulerSide(
            geometry,
            [known.digest for known in planned.identities],
            self.current,
            lookup_wait_s=self.deadlines.lookup_wait_s,
            room_wait_s=self.deadlines.room_wait_s,
            room=Room(
                translate.engine_groups(config.vllm, config.scheduler),
                geometry.num_blocks,
                geometry.max_step_tokens,
            ),
            clock=self.clock,
            io=io,
        )
        self.connector.attach(self.side)
        return self.side

    def current(self) -> tuple[Client, int] | None:
        """The connection to the store, for the scheduler side."""
        return None if self.client is None else (self.client, self.store.generation)

    def clock(self) -> float:
        """The engine's time in seconds."""
        return self.now_s

    # -- requests --------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        salt: str | None = None,
        skip_reading: bool = False,
    ) -> str:
        """Add a request; returns its id."""
        self._names += 1
        name = f"r{self._names}"
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=self.now_s,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        request.skip_reading_prefix_cache = skip_reading
        run = self.runs[name] = Run(request, salt or "", self.version, len(self.groups))
        self.promises.note(run)
        self.scheduler.add_request(request)
        return name

    @property
    def groups(self) -> list[Any]:
        """The engine's cache groups."""
        groups: list[Any] = self.config.scheduler.kv_cache_groups
        return groups

    def abort(self, name: str) -> None:
        """Abort a request, whatever it does."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._forget()

    def unfinished(self) -> list[str]:
        """Requests that are neither finished nor aborted."""
        return [n for n, r in self.scheduler.requests.items() if not r.is_finished()]

    def reset(self, *, running: bool, connector: bool) -> bool:
        """Reset the prefix cache as after an update of the weights; `running`: preempt first.

        Only if it succeeds the weights change: nothing computed before may be read again.
        """
        done: bool = self.scheduler.reset_prefix_cache(running, connector)
        if connector:
            self._waits.clear()  # what is waited for now is another answer
        if done and connector:
            self.version += 1
            for run in self.runs.values():
                run.retell(self.version)
        return done

    def can_reset_running(self) -> bool:
        """Whether nothing but running requests holds blocks: otherwise vLLM raises."""
        finished = any(request.is_finished() for request in self.scheduler.requests.values())
        waiting = self.scheduler.kv_holding_waiting
        return not finished and not waiting and not (self.side is not None and self.side.holds.jobs)

    # -- steps -----------------------------------------------------------------------------------

    def step(self, random: Random | None = None, *, pace: float = 1.0) -> bool:
        """One turn of the engine's loop; False if there was nothing to do.

        `random` decides how far tasks and copies get; None: to their end. `pace` is how likely it
        is that they move at all.
        """
        self.broken = True  # until this step went well
        moved = self._step(random, pace)
        self.broken = False
        return moved

    def _step(self, random: Random | None, pace: float) -> bool:
        self.now_s += STEP_S
        moves = random is None or random.random() < pace
        if moves:
            self.io.run(None if random is None else random.choice((None, 1, 0)))
        if not self.scheduler.has_requests():
            self._advance(random, moves)
            return False
        self.connector.asked.clear()
        errors.clear()
        output = self.scheduler.schedule()
        self._watch()
        sampled = self.execution.run(output, self.runs)
        orders = output.kv_connector_metadata
        assert isinstance(orders, StepOrders)
        for worker in self.workers:
            worker.begin(orders, self.client, self.now_s)
        self._advance(random, moves)
        self.scheduler.update_from_output(output, self._outputs(output, sampled, random))
        for name in output.num_scheduled_tokens:
            self.promises.note(self.runs[name])
        self._draft(sampled, random)
        self._forget()
        if errors:
            raise AssertionError(f"kvfold failed and went on: {errors}")
        return True

    def _advance(self, random: Random | None, moves: bool) -> None:
        for worker in self.workers:
            if moves:
                worker.advance(random, self.client, self.now_s)
            else:
                worker.expire(self.client, self.now_s)

    def _outputs(
        self, output: Any, sampled: dict[str, list[int]], random: Random | None
    ) -> ModelRunnerOutput:
        """What the workers report, aggregated as vLLM's executor does."""
        names = list(output.num_scheduled_tokens)
        results = []
        for worker in self.workers:
            report = KVConnectorOutput()
            if random is None or random.random() < 0.8:
                finished, failed, meta = worker.take()
                report = KVConnectorOutput(
                    finished_recving=finished or None,
                    failed_recving=failed,
                    kv_connector_worker_meta=meta,
                )
            results.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: i for i, name in enumerate(names)},
                    sampled_token_ids=[sampled[name] for name in names],
                    kv_connector_output=report,
                )
            )
        aggregated = self._aggregator.aggregate(results)
        assert aggregated is not None
        return aggregated

    def _draft(self, sampled: dict[str, list[int]], random: Random | None) -> None:
        """Propose tokens for requests that decode: right ones, and wrong ones."""
        count = self.config.shape.draft_tokens
        names = [n for n, tokens in sampled.items() if tokens and n in self.scheduler.requests]
        if not count or not names:
            return
        guesses = [
            [
                token if random is None or random.random() < 0.6 else token + 1
                for token in self.runs[name].prophecy(count)
            ]
            for name in names
        ]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, guesses))

    def pass_time(self, seconds: float) -> None:
        """The engine does not step for so long. Answers that are old then may be asked for again,
        and waited for again."""
        self.now_s += seconds
        self._waits.clear()

    def close(self) -> None:
        """Kill the engine; the store gives up what it held for it."""
        self.store.tickets.clear()
        self.store.jobs.clear()
        self.store.early.clear()

    def _watch(self) -> None:
        """Requests must not wait for lookups, and then for room, past their deadlines."""
        most_s = self.deadlines.lookup_wait_s + self.deadlines.room_wait_s + SLACK_S
        for name, waits in self.connector.asked.items():
            if not waits:
                self._waits.pop(name, None)
                continue
            # Steps in which the engine did not ask, as others were in front, are not ours.
            waited_s = self._waits[name] = self._waits.get(name, -STEP_S) + STEP_S
            if waited_s > most_s:
                raise StuckRequest(f"{name} waits for an offer for {waited_s:.4f} s")

    def _forget(self) -> None:
        gone = self.runs.keys() - self.scheduler.requests.keys()
        for name in gone:
            del self.runs[name]
            self._waits.pop(name, None)

    # -- what workers check ----------------------------------------------------------------------

    def _owns(self, name: str, group: int, block: int) -> bool:
        """Whether a request waits for its load and alone holds a block."""
        request = self.scheduler.requests.get(name)
        if request is None:
            return False
        loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished()
        held = self.scheduler.kv_cache_manager.get_block_ids(name)[group]
        kept = self.pool.blocks[block]
        return loading and block in held and kept.ref_cnt == 1 and kept.block_hash is None

    def _check_chunk(
        self, strand: Strand, namespace: bytes, key: bytes, pages: Sequence[Page | None]
    ) -> None:
        self.promises.check(strand, namespace, key, pages, self.version)

    # -- the store -------------------------------------------------------------------------------

    def lose_store(self) -> None:
        """The store dies; what waits for it learns so."""
        self.client = None

    def find_store(self, *, keep: bool) -> None:
        """Another store is there; `keep`: with what was on disk."""
        self.store.restart(keep)
        self.client = Client(self.store)

    # -- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Step until every request and every copy has ended. Raises `StuckRequest`."""
        still, before = 0, ""
        while still < STILL_STEPS:
            busy = self.step() or self.io.waiting > 0
            if not busy and not any(worker.busy for worker in self.workers):
                return
            now = str([(r.status, r.num_computed_tokens) for r in self.scheduler.requests.values()])
            still, before = (still + 1 if now == before else 0), now
        raise StuckRequest(
            f"nothing moves any more: running {[r.request_id for r in self.scheduler.running]}, "
            f"holding blocks {[r.request_id for r in self.scheduler.kv_holding_waiting]}, "
            f"waiting {[r.request_id for r in self.scheduler.waiting]}; "
            f"{self.pool.get_num_free_blocks()} blocks are free"
        )

    def check_idle(self) -> None:
        """After `drain`: nothing holds a block, a ticket or a job any more."""
        free = self.pool.get_num_free_blocks()
        held = [b.block_id for b in self.pool.blocks if b.ref_cnt and not b.is_null]
        assert not held, f"blocks {held} are still held"
        assert free == self.pool.num_gpu_blocks - 1, f"{free} blocks are free"
        assert not self.scheduler.requests
        if self.side is not None:
            left = (self.side.waiting_loads, self.side.holds.jobs, self.side.holds.blocks)
            assert left == (0, 0, 0), f"loads, jobs and held blocks are left: {left}"
            assert not self.side._requests, f"requests are still known: {self.side._requests}"
        assert not self.connector.has_pending_push_work()
        assert not self.store.tickets, f"tickets are still open: {self.store.tickets}"
        assert not self.store.jobs, f"jobs are still open: {self.store.jobs}"


_NO_GRAMMARS: Any = SimpleNamespace(
    accept_tokens=lambda request, tokens: True, validate_tokens=lambda request, tokens: tokens
)


@cache
def _hash_seed() -> None:
    init_none_hash(sha256)
