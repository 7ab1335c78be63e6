"""A store's status as Prometheus metrics, and over HTTP. docs/metrics.md lists them all.

Everything comes from one status report, whichever way it was had: a scrape and a report agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

_PREFIX = "kvfold_store_"

Report = dict[str, Any]
# Label values, then the value.
Sample = tuple[str | float, ...]


def exposition(report: Report) -> str:
    """The metrics of a status report as Prometheus text."""
    registry = CollectorRegistry()
    registry.register(_Source(lambda: report))
    return generate_latest(registry).decode()


class HttpEndpoint:
    """Serves metrics over HTTP, on threads of its own, once `serve` said where from.

    Raises `OSError` if the address cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self._source = _Source()
        registry = CollectorRegistry()
        registry.register(self._source)
        self._http, self._thread = start_http_server(port, host, registry)

    def serve(self, snapshot: Callable[[], dict[str, object]]) -> None:
        self._source.snapshot = snapshot

    def close(self) -> None:
        self._source.snapshot = None
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Source:
    """Makes families of one snapshot per scrape; none before there is a store."""

    def __init__(self, snapshot: Callable[[], Report] | None = None) -> None:
        self.snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        return [] if self.snapshot is None else families(self.snapshot())


def families(report: Report) -> Iterator[Metric]:
    """All metrics of one status report."""
    yield InfoMetricFamily(
        _PREFIX.rstrip("_"),
        "The store's identity, new at every start, and its protocol.",
        {"store": report["store"], "version": str(report["version"])},
    )
    for part in (_traffic, _held, _namespaces, _trouble, _now, _latencies):
        yield from part(report)


def _counter(name: str, help_text: str, labels: str, *samples: Sample) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, help_text, labels=labels.split())
    return _fill(family, samples)


def _gauge(name: str, help_text: str, labels: str, *samples: Sample) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, help_text, labels=labels.split())
    return _fill(family, samples)


def _fill(family: Any, samples: Iterable[Sample]) -> Metric:
    for *labels, value in samples:
        family.add_metric([str(label) for label in labels], value)
    filled: Metric = family
    return filled


def _traffic(r: Report) -> Iterator[Metric]:
    host, disk = r["host"], r["disk"]
    found = {"host": r["found_host_keys"], "disk": r["found_disk_keys"]}
    absent = r["looked_up_keys"] - sum(found.values())
    yield _counter("lookups", "Lookups answered.", "", (r["lookups"],))
    yield _counter(
        "lookup_keys",
        "Keys looked up, by where their chunk was found.",
        "found",
        *found.items(),
        ("absent", absent),
    )
    for unit, what in (("chunks", "Chunks"), ("bytes", "Payload")):
        yield _counter(
            f"stored_{unit}", f"{what} that engines stored.", "", (host[f"stored_{unit}"],)
        )
        from_disk = r[f"announced_from_disk_{unit}"]
        yield _counter(
            f"loaded_{unit}",
            f"{what} handed to tickets, once for all readers, by the tier that it came from.",
            "tier",
            ("host", r[f"announced_{unit}"] - from_disk),
            ("disk", from_disk),
        )
        if disk is not None:
            yield _counter(
                f"disk_written_{unit}", f"{what} written to disk.", "", (disk[f"stored_{unit}"],)
            )
            yield _counter(
                f"disk_read_{unit}", f"{what} read from disk.", "", (disk[f"loaded_{unit}"],)
            )
    yield _counter(
        "stored_copies_bytes",
        "What the engines' own TP copies of the chunks stored would have taken.",
        "",
        (host["stored_copies_bytes"],),
    )
    yield _counter(
        "evicted_chunks",
        "Chunks evicted to make room for others.",
        "tier",
        *((tier, r[tier]["evicted_chunks"]) for tier in _tiers(r)),
    )
    yield _counter("tickets_opened", "Loads that engines asked for.", "", (r["tickets_opened"],))
    yield _counter("requests_told", "Requests that engines told of.", "", (r["requests_told"],))


def _tiers(r: Report) -> list[str]:
    return ["host"] if r["disk"] is None else ["host", "disk"]


def _held(r: Report) -> Iterator[Metric]:
    sizes = {"host": r["host"]["total_bytes"]}
    if r["disk"] is not None:
        sizes["disk"] = r["disk"]["quota_bytes"]
    used = {tier: r[tier]["used_bytes"] for tier in sizes}
    yield _gauge("capacity_bytes", "Size of a tier.", "tier", *sizes.items())
    yield _gauge(
        "occupancy_bytes",
        "Bytes of a tier in slots that are used (host) or in slabs (disk), and the rest.",
        "tier state",
        *((tier, "used", used[tier]) for tier in sizes),
        *((tier, "free", max(0, size - used[tier])) for tier, size in sizes.items()),
    )
    slots: list[Sample] = []
    for row in r["classes"]:
        for tier in sizes:
            have = row["host_used_slots" if tier == "host" else "disk_chunks"]
            free = max(0, row[f"{tier}_slots"] - have)
            slots += [
                (tier, row["slot_bytes"], "used", have),
                (tier, row["slot_bytes"], "free", free),
            ]
    yield _gauge(
        "slots",
        "Slots of a size, used and free; free ones include what no other size owns yet.",
        "tier slot_bytes state",
        *slots,
    )
    yield _gauge("unique_chunks", "Chunks held, in whichever tiers.", "", (r["unique_chunks"],))
    yield _gauge("chunks", "Chunks held by a tier.", "tier", *((t, r[t]["chunks"]) for t in sizes))
    yield _gauge(
        "payload_bytes",
        "Bytes of chunks held by a tier, each distinct byte once.",
        "tier",
        *((t, r[t]["payload_bytes"]) for t in sizes),
    )


def _namespaces(r: Report) -> Iterator[Metric]:
    rows = [(row, row["namespace"][:16], tier) for row in r["namespaces"] for tier in _tiers(r)]
    labels = "namespace tier"
    yield _gauge(
        "namespace_chunks",
        "Chunks of a namespace held by a tier.",
        labels,
        *((name, tier, row[f"{tier}_chunks"]) for row, name, tier in rows),
    )
    yield _gauge(
        "namespace_bytes",
        "Bytes of a namespace's chunks held by a tier, each distinct byte once.",
        labels,
        *((name, tier, row[f"{tier}_bytes"]) for row, name, tier in rows),
    )
    yield _gauge(
        "namespace_copies_bytes",
        "What the engine's own TP copies of these chunks would take, where it told.",
        labels,
        *(
            (name, tier, row[f"{tier}_copies_bytes"])
            for row, name, tier in rows
            if row[f"{tier}_copies_bytes"] is not None
        ),
    )


def _trouble(r: Report) -> Iterator[Metric]:
    kinds = {
        "no_room": r["no_room_chunks"],
        "declined": r["declined_chunks"],
        "abandoned": r["abandoned_chunks"],
        "audit": r["audit_conflicts"],
        "ticket": r["tickets_failed"],
        "message": r["malformed_messages"],
        "untold": r["untold_evictions"],
    }
    if (disk := r["disk"]) is not None:
        kinds |= {
            "corrupt": disk["corrupt_chunks"],
            "disk_read": disk["failed_reads"],
            "disk_write": disk["failed_writes"],
            "not_written": disk["skipped_chunks"],
        }
    yield _counter("failures", "What went wrong, by kind.", "kind", *kinds.items())


def _now(r: Report) -> Iterator[Metric]:
    roles = {"scheduler": 0, "worker": 0, "tool": 0}
    for client in r["clients"]:
        roles[client["role"]] += 1
    yield _gauge("uptime_seconds", "Since the store's start.", "", (r["uptime_s"],))
    yield _gauge("clients", "Connected clients.", "role", *roles.items())
    yield _gauge("tickets", "Loads under way, queued ones included.", "", (r["tickets_open"],))
    yield _gauge("tickets_queued", "Loads that wait for slots.", "", (r["tickets_queued"],))
    yield _gauge("jobs", "Stores under way.", "", (r["jobs_open"],))
    yield _gauge("pinned_chunks", "Chunks in use.", "", (r["host"]["pinned_chunks"],))
    yield _gauge(
        "quarantined_bytes",
        "Host slots that belong to nobody, and that some client may still touch.",
        "",
        (r["quarantined_bytes"],),
    )
    if (disk := r["disk"]) is not None:
        yield _gauge(
            "disk_queue_chunks",
            "Chunks that wait for the disk.",
            "operation",
            ("read", disk["queued_reads"]),
            ("write", disk["queued_writes"]),
        )
        yield _gauge("disk_paused", "1 while the disk refuses writes.", "", (int(disk["paused"]),))
        yield _gauge(
            "disk_scanning", "1 while what is on disk is being read.", "", (int(r["scanning"]),)
        )


_LATENCIES = {
    "lookup": "Time to answer a lookup, all its keys together.",
    "ticket": "Time of a complete load, from its ticket to its last reader's end.",
    "disk_read": "Time to read one chunk from disk and check it.",
    "disk_write": "Time to write one chunk to disk.",
}


def _latencies(r: Report) -> Iterator[Metric]:
    for name, help_text in _LATENCIES.items():
        if name.startswith("disk_") and r["disk"] is None:
            continue
        latency = r["latencies"][name]
        buckets, total = [], 0
        bounds = [*map(str, latency["bounds_s"]), "+Inf"]
        for bound, count in zip(bounds, latency["counts"], strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(
            f"{_PREFIX}{name}_seconds", help_text, buckets=buckets, sum_value=latency["sum_s"]
        )
