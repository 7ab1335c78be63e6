"""What the connector counts, for vLLM's own metrics endpoint and its periodic log line.

`METRICS` is the one table of names, labels and meanings; docs/metrics.md lists the same.
Every worker and the scheduler side have a `Recorder`; once per step vLLM takes what is new in each,
adds it up, and hands it to the front end, which keeps the totals per engine. So a recorder gives
differences: totals live in one place only and never go down, whoever restarts.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import inf, nextafter
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvfold.plan import GroupPlan

PREFIX = "vllm:kvfold_"
"""vLLM reads and resets only metrics whose names begin with "vllm:"."""
SECONDS = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
    30, 60,
)  # fmt: skip
"""Upper bounds of the buckets of all histograms; what took longer is in one more."""

TIERS = HOST, DISK = "host", "disk"
MISSES = ABSENT, LATE, NO_STORE, SKIPPED, FAILED, NO_ROOM, ADAPTER, DISABLED = (
    "absent", "late", "no_store", "skipped", "failed", "no_room", "adapter", "disabled",
)  # fmt: skip
FAILURES = ("store_gone", "late", "lost", "corrupt", "disk", "unpinned", "reset", "other")
_FAILURE_TEXTS = (
    ("the store is", "store_gone"),  # gone, stopping
    ("no progress", "late"),
    ("in time", "late"),
    ("neither in host", "lost"),
    ("corrupt", "corrupt"),
    ("disk:", "disk"),
    ("hold the pins", "unpinned"),
    ("was reset", "reset"),
)


@dataclass(frozen=True)
class Metric:
    """One row of the table. `values` of its label that are known beforehand are shown from the
    start, as 0."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    label: str = ""
    values: tuple[str, ...] = ()


HIT_TOKENS = Metric(
    "hit_tokens", "counter",
    "Prompt tokens that loads were ordered for, by the tier that had them.", "tier", TIERS,
)  # fmt: skip
LOOKUP_TOKENS = Metric(
    "lookup_tokens", "counter", "Prompt tokens in whole chunks that the store was asked for."
)
FOUND_TOKENS = Metric(
    "found_tokens", "counter",
    "Prompt tokens in chunks that the store had of this group: of full attention from the first on "
    "without a gap, of windows and states all.", "group",
)  # fmt: skip
MISSED_REQUESTS = Metric(
    "missed_requests", "counter",
    "Requests that were offered nothing: the store has nothing of them (absent), its answer did "
    "not come in time (late), there is no store (no_store), the request asks for no cached tokens "
    "(skipped), loads of it failed twice (failed), the engine had no room for one more load "
    "(no_room), the files of its adapter are not known (adapter), the engine stores nothing any "
    "more (disabled).",
    "reason", MISSES,
)  # fmt: skip
LOADS = Metric("loads", "counter", "Loads ordered.")
LOAD_FAILURES = Metric(
    "load_failures", "counter",
    "Loads that failed, whose tokens were offered shorter or computed: the store is gone or stops "
    "(store_gone), nothing arrived in time (late), a chunk is in no tier any more (lost), was "
    "corrupt on disk (corrupt) or could not be read (disk), the store let go of it before the end "
    "(unpinned), the cache was reset meanwhile (reset).",
    "reason", FAILURES,
)  # fmt: skip
LOADED_CHUNKS = Metric("loaded_chunks", "counter", "Chunks of completed loads.", "group")
LOADED_BYTES = Metric(
    "loaded_bytes", "counter", "Bytes copied into pages, over all workers.", "group"
)
STORED_CHUNKS = Metric(
    "stored_chunks", "counter", "Chunks written, each counted by its first writer.", "group"
)
STORED_BYTES = Metric("stored_bytes", "counter", "Bytes copied to the store, each once.", "group")
STORED_AS_TP_COPIES_BYTES = Metric(
    "stored_as_tp_copies_bytes", "counter",
    "Bytes that the stored chunks would be if every rank stored its own copy.", "group",
)  # fmt: skip
STORE_JOBS_DROPPED = Metric(
    "store_jobs_dropped", "counter",
    "Store jobs that a worker ended without storing: no store, or past their deadline.",
)  # fmt: skip
CHUNKS_NO_ROOM = Metric(
    "chunks_no_room", "counter", "Chunks that the store had no slot for at that moment."
)
CHUNKS_DROPPED = Metric(
    "chunks_dropped", "counter",
    "Chunks of finished requests that were not stored, as too many blocks were held already.",
)  # fmt: skip
EVENTS_DROPPED = Metric(
    "events_dropped", "counter", "KV events that nobody took in time, or whose job never ended."
)
PINNED_BLOCKS = Metric(
    "pinned_blocks", "gauge", "Engine blocks that running store jobs hold for copying."
)
WAITING_LOADS = Metric("waiting_loads", "gauge", "Requests that wait for their load.")
LOOKUP_SECONDS = Metric(
    "lookup_seconds", "histogram", "From a lookup's start to the store's answer."
)
LOAD_SECONDS = Metric(
    "load_seconds", "histogram", "From the order of a load to its end, on each worker."
)
STORE_SECONDS = Metric(
    "store_seconds", "histogram", "From the order of a store job to its end, on each worker."
)
LOAD_WAIT_SECONDS = Metric(
    "load_wait_seconds", "histogram",
    "How long a request waited for its load, from the order until all workers had ended it.",
)  # fmt: skip

METRICS = {row.name: row for row in list(globals().values()) if isinstance(row, Metric)}
"""All of the above, by name."""


def failure_kind(reason: str) -> str:
    """The label for a reason in words, one of `FAILURES`."""
    return next((kind for text, kind in _FAILURE_TEXTS if text in reason), "other")


def group_label(group: GroupPlan) -> str:
    """A group's short name: the engine's number and what its layers are, "1 sliding_window"."""
    kinds = sorted({layer.spec.kind for layer in group.layers})
    return f"{group.index} {'+'.join(kinds)}{' draft' if group.is_draft else ''}"


class KvfoldStats(KVConnectorStats):
    """What is new since the last step. Differences of counters add up, the later gauge wins.

    `data` is {metric: {label value, or "": x}}: x is a number, or of a histogram
    {bucket as a text: [count, sum of seconds]}, so that its size does not grow with its events.
    """

    data: dict[str, dict[str, Any]]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data

    def aggregate(self, other: KvfoldStats) -> KvfoldStats:
        """Add what another worker, the scheduler side or a later step tells."""
        for name, theirs in other.data.items():
            ours = self.data.setdefault(name, {})
            for label, value in theirs.items():
                if METRICS[name].kind == "histogram":
                    _add_buckets(ours.setdefault(label, {}), value)
                elif METRICS[name].kind == "counter":
                    ours[label] = ours.get(label, 0) + value
                else:
                    ours[label] = value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The few figures of vLLM's periodic log line, for the time since the last line."""
        rows = (HIT_TOKENS, LOADED_BYTES, STORED_BYTES, LOAD_FAILURES, STORE_JOBS_DROPPED)
        return {
            f"kvfold_{row.name}": sum(self.data[row.name].values()) if row.name in self.data else 0
            for row in rows
        }


def _add_buckets(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> None:
    for bucket, (count, total) in theirs.items():
        held = ours.setdefault(bucket, [0, 0.0])
        held[0] += count
        held[1] += total


def build_stats(data: dict[str, Any] | None) -> KvfoldStats:
    """Stats from their serialised form. Several loggers may be handed the same `data` and each
    adds to its own, so it is copied."""
    return KvfoldStats().aggregate(KvfoldStats(data=data or {}))


class Recorder:
    """Collects one process's figures from any of its threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stats = KvfoldStats()
        self._gauges: dict[tuple[str, str], float] = {}

    def add(self, metric: Metric, value: int = 1, **labels: str) -> None:
        """Count `value` more. The label is named as in the table: add(HIT_TOKENS, 64, tier=HOST)"""
        assert metric.kind == "counter"
        label = _label(metric, labels)
        if value > 0:
            with self._lock:
                held = self._stats.data.setdefault(metric.name, {})
                held[label] = held.get(label, 0) + int(value)  # also numpy's

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """The gauge is `value` now; told only if that is new."""
        assert metric.kind == "gauge"
        label, value = _label(metric, labels), float(value)
        with self._lock:
            if self._gauges.get((metric.name, label)) != value:
                self._gauges[metric.name, label] = value
                self._stats.data.setdefault(metric.name, {})[label] = value

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """One more event of a histogram."""
        assert metric.kind == "histogram"
        value = float(value)
        label, bucket = _label(metric, labels), str(bisect_left(SECONDS, value))
        with self._lock:
            held = self._stats.data.setdefault(metric.name, {}).setdefault(label, {})
            _add_buckets(held, {bucket: [1, value]})

    def take(self) -> KvfoldStats | None:
        """What is new since the last call, None if nothing is."""
        if not self._stats.data:  # the common case: nothing since the last step
            return None
        with self._lock:
            stats, self._stats = self._stats, KvfoldStats()
        return stats


def _label(metric: Metric, labels: dict[str, str]) -> str:
    assert labels.keys() == ({metric.label} if metric.label else set())
    return labels[metric.label] if metric.label else ""


class PromMetrics(KVConnectorPromMetrics):
    """The totals of all engines of a front end, in vLLM's own registry."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {name: self._family(row) for name, row in METRICS.items()}
        self._children: dict[tuple[int, str, str], Any] = {}
        for row in METRICS.values():
            for engine in per_engine_labelvalues:
                for value in row.values if row.label else ("",):
                    self._child(engine, row, value)

    def _family(self, row: Metric) -> Any:
        common = {
            "name": PREFIX + row.name,
            "documentation": row.meaning,
            "labelnames": [*self._labelnames, *([row.label] if row.label else [])],
        }
        if row.kind == "counter":
            return self._counter_cls(**common)
        if row.kind == "gauge":
            # Several front ends: each tells of the steps it was told of.
            return self._gauge_cls(**common, multiprocess_mode="mostrecent")
        return self._histogram_cls(**common, buckets=list(SECONDS))

    def _child(self, engine: int, row: Metric, value: str) -> Any:
        key = (engine, row.name, value)
        if key not in self._children:
            labels = [*self.per_engine_labelvalues[engine], *([value] if row.label else [])]
            self._children[key] = self._families[row.name].labels(*labels)
        return self._children[key]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's stats to the totals of an engine."""
        for name, by_label in transfer_stats_data.items():
            row = METRICS[name]
            for label, value in by_label.items():
                child = self._child(engine_idx, row, label)
                if row.kind == "counter":
                    child.inc(value)
                elif row.kind == "gauge":
                    child.set(value)
                else:
                    _observe(child, value)


def _observe(child: Any, buckets: dict[str, list[float]]) -> None:
    """Give a histogram counts and sums by bucket, by what every histogram has: `observe`.

    The mean of a bucket's events lies in the bucket, and as many of it as there were events have
    the same sum; the bounds only guard against rounding.
    """
    for bucket, (count, total) in buckets.items():
        at = int(bucket)
        least = nextafter(SECONDS[at - 1], inf) if at else -inf
        most = SECONDS[at] if at < len(SECONDS) else inf
        for _ in range(int(count)):
            child.observe(min(max(total / count, least), most))


def prom_metrics(
    vllm_config: VllmConfig,
    metric_types: dict[type[Any], type[Any]],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> PromMetrics:
    """What `KVConnectorBase_V1.build_prom_metrics` is to return."""
    assert {Counter, Gauge, Histogram} <= metric_types.keys()
    return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
