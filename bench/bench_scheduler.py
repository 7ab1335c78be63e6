"""What the connector's scheduler side costs the engine's loop, beside vLLM's own offloading.

Both drive vLLM's real scheduler with real requests in the same process, in turns, with one and
with three cache groups; workers and stores answer at once. Only the connector's own calls are
timed. What kvfold's I/O thread does instead of the loop is timed too and given as a detail.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvfold.testing.virtual_plan import agreed
from kvfold.testing.virtual_shapes import Shape, VirtualConfig, full, named, virtual_config, window
from kvfold.testing.virtual_store import VirtualIo
from kvfold.vllm import translate
from kvfold.vllm.messages import StepOrders, StepResults
from kvfold.vllm.requests import Geometry
from kvfold.vllm.scheduler import SchedulerSide

REQUESTS = 256
IDLE_STEPS, TURN_STEPS = 100, 20
KEYS = 8192
ROUNDS = 5
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_loaded_kv_cache_group_ids",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "take_events",
    "has_pending_block_frees",
    "has_pending_push_work",
)
VLLM_EXTRA = {"cpu_bytes_to_use": 1 << 40}


def shape(groups: int, block: int) -> Shape:
    """A model of full attention, or with two kinds of windows besides."""
    windows = [window(block, 2, tokens) for tokens in (block * 2, block * 4)][: groups - 1]
    return Shape(f"bench {groups} {block}", lambda heads: named(full(block, heads), *windows))


class Loop(ABC):
    """An engine's loop without a model: every request says the same token for ever."""

    def __init__(self, config: VirtualConfig) -> None:
        init_none_hash(sha256)
        self.scheduler = Scheduler(
            vllm_config=config.vllm,
            kv_cache_config=config.scheduler,
            structured_output_manager=SimpleNamespace(accept_tokens=lambda request, tokens: True),
            block_size=config.scheduler_block_tokens,
            hash_block_size=config.hash_tokens,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        self.spent_s = 0.0
        self.aside_s = 0.0
        self._hasher = get_request_block_hasher(config.hash_tokens, sha256)
        self._config = config
        for name in CALLS:
            setattr(self.connector, name, self._timed(getattr(self.connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s += time.perf_counter() - start

        return timed

    def request(self, name: str, tokens: list[int], output: int) -> Request:
        """A request with its block hashes."""
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    @abstractmethod
    def aside(self) -> None:
        """What the connector does beside the loop."""

    def step(self) -> int:
        """One step; returns how many tokens were scheduled."""
        self.connector.has_pending_push_work()  # as the engine's loop asks before every step
        output = self.scheduler.schedule()
        self.aside()
        meta, names = output.kv_connector_metadata, list(output.num_scheduled_tokens)
        report = self.results(meta)
        said: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            decodes = request.num_computed_tokens >= request.num_tokens
            said.append([7] if decodes else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=said,
                kv_connector_output=report,
            ),
        )
        return int(output.total_num_scheduled_tokens)

    @abstractmethod
    def results(self, meta: Any) -> KVConnectorOutput:
        """What a worker that copies at once reports."""

    def finish(self) -> None:
        """Step until nothing is left."""
        while self.scheduler.has_requests():
            self.step()


class VllmLoop(Loop):
    """With vLLM's own offloading connector and its LRU manager."""

    def results(self, meta: Any) -> KVConnectorOutput:
        assert isinstance(meta, OffloadingConnectorMetadata)
        jobs = dict.fromkeys([*meta.load_jobs, *meta.store_jobs], 1)
        loaded = {job.req_id for job in meta.load_jobs.values()}
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=OffloadingWorkerMetadata(jobs) if jobs else None,
        )

    def aside(self) -> None:
        """Nothing: all of it runs in the loop."""


class Client:
    """A store that answers at once, from a set of keys."""

    store_id = "bench"

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def lookup(self, keys: bytes, timeout_s: float) -> bytes:
        """The host has what it was given."""
        there = self.keys
        return bytes(2 if keys[i : i + 32] in there else 0 for i in range(0, len(keys), 32))

    def open_ticket(self, *args: Any) -> None:
        """Nothing is copied here."""

    def tell(self, *args: Any) -> None:
        """Nobody asks why."""


class KvfoldLoop(Loop):
    """With kvfold's scheduler side."""

    def __init__(self, config: VirtualConfig) -> None:
        super().__init__(config)
        planned = agreed(config)
        self._io, self._client = VirtualIo(), Client()
        io: Any = self._io
        self.side = SchedulerSide(
            Geometry.of(
                planned,
                hash_bytes=translate.hash_bytes(config.vllm),
                num_blocks=config.scheduler.num_blocks,
                max_step_tokens=config.vllm.scheduler_config.max_num_batched_tokens,
            ),
            [known.digest for known in planned.identities],
            lambda: (self._client, 1),
            io=io,
        )
        self.connector.attach(self.side)

    def aside(self) -> None:
        """Run what waits for the I/O thread."""
        start = time.perf_counter()
        self._io.run()
        self.aside_s += time.perf_counter() - start

    def results(self, meta: Any) -> KVConnectorOutput:
        assert isinstance(meta, StepOrders)
        for order in meta.stores:
            keys = order.keys
            self._client.keys.update(keys[i : i + 32] for i in range(0, len(keys), 32))
        jobs = {order.job: 1 for order in meta.stores}
        loaded = {order.req_id for order in meta.loads}
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=StepResults(jobs=jobs) if jobs else None,
        )


def loops(groups: int, block: int, blocks: int, step_tokens: int) -> tuple[Loop, Loop]:
    """The same engine twice: kvfold's, vLLM's."""
    options: dict[str, Any] = {
        "max_step_tokens": step_tokens,
        "max_requests": REQUESTS,
        "max_model_tokens": 1 << 18,
    }
    model = shape(groups, block)
    ours = virtual_config(model, blocks, **options)
    theirs = virtual_config(
        model, blocks, connector="OffloadingConnector", module=None, extra=VLLM_EXTRA, **options
    )
    return KvfoldLoop(ours), VllmLoop(theirs)


def idle_steps(groups: int) -> tuple[list[float], list[float]]:
    """Seconds per step of each side with 256 decoding requests that complete no block."""
    block = 128
    both = loops(groups, block, REQUESTS * 3 * groups + 64, 8192)
    random = Random(1)
    for loop in both:
        for i in range(REQUESTS):
            prompt = [random.randrange(1000) for _ in range(block + 2)]
            loop.scheduler.add_request(loop.request(f"r{i}", prompt, block * 8))
        while loop.step() != REQUESTS:
            pass
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(IDLE_STEPS // TURN_STEPS):
        for loop, times in zip(both, spent, strict=True):
            for _ in range(TURN_STEPS):
                loop.spent_s = 0.0
                assert loop.step() == REQUESTS
                times.append(loop.spent_s)
    return spent


def long_prompts(groups: int) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Seconds of each side, and of kvfold's thread, to store and to find a prompt of 8,192 keys."""
    block = 16
    both = loops(groups, block, KEYS + 4096 * groups, 8192)
    found: dict[str, tuple[list[float], list[float], list[float]]] = {
        "store": ([], [], []),
        "lookup": ([], [], []),
    }
    for number in range(ROUNDS):
        random = Random(number)
        prompt = [random.randrange(1000) for _ in range(KEYS * block + 1)]
        for kind, figures in found.items():
            for loop, times in zip(both, figures, strict=False):
                request = loop.request(f"{kind}{number}", prompt, 1)
                loop.spent_s = loop.aside_s = 0.0
                loop.scheduler.add_request(request)
                if isinstance(loop, KvfoldLoop):
                    loop.aside()  # the answer is there when the scheduler asks
                if kind == "lookup":
                    loop.step()
                    times.append(loop.spent_s)
                    hit = request.num_computed_tokens
                    assert hit >= (KEYS - 1) * block, hit
                loop.finish()
                if kind == "store":
                    times.append(loop.spent_s)
                if isinstance(loop, KvfoldLoop):
                    figures[2].append(loop.aside_s)
                assert loop.scheduler.reset_prefix_cache()
    return found


def _us(times: list[float]) -> float:
    return statistics.median(times) * 1e6


def _figure(
    name: str, ours: list[float], theirs: list[float], aim: float, more: str = ""
) -> dict[str, Any]:
    return {
        "name": name,
        "value": _us(ours),
        "unit": "us",
        "aim": aim * _us(theirs),
        "better": "lower",
        "detail": f"vLLM's: {_us(theirs):,.0f} us, {_us(theirs) / _us(ours):.1f} x{more}",
    }


def idle() -> list[dict[str, Any]]:
    """A step in which nothing changes."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    figures = []
    for groups in (1, 3):
        ours, theirs = idle_steps(groups)
        name = f"scheduler, idle step of {REQUESTS} requests, {_plural(groups)}"
        figures.append(_figure(name, ours, theirs, 0.1))
    return figures


def prompts() -> list[dict[str, Any]]:
    """All calls for one long prompt."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    figures = []
    for groups in (1, 3):
        for kind, (ours, theirs, aside) in long_prompts(groups).items():
            name = f"scheduler, {kind} of {KEYS:,} keys, {_plural(groups)}"
            more = f"; beside the loop {_us(aside):,.0f} us"
            figures.append(_figure(name, ours, theirs, 1.0, more))
    return figures


def _plural(groups: int) -> str:
    return f"{groups} group{'s' if groups > 1 else ''}"


ROWS = [idle, prompts]

if __name__ == "__main__":
    print(json.dumps([figure for row in ROWS for figure in row()], indent=2))
