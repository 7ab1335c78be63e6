"""What `kvfold store status` prints: a store's figures as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from kvfold.sizes import format_bytes


def tables(report: dict[str, Any], folder: Path) -> list[Table]:
    """What people want to know first; everything else is in the JSON."""
    tables = [_tiers(report, folder), _work(report)]
    if any(latency["count"] for latency in report["latencies"].values()):
        tables.append(_latencies(report["latencies"]))
    engines = [client for client in report["clients"] if client["role"] != "tool"]
    if engines:
        clients = Table("engine", "role", "rank", "process", title="Clients", title_justify="left")
        for client in engines:
            row = (client["engine"], client["role"], client["rank"], client["pid"])
            clients.add_row(*map(str, row))
        tables.append(clients)
    return tables


def _tiers(report: dict[str, Any], folder: Path) -> Table:
    state = "stopping" if report["stopping"] else "scanning" if report["scanning"] else "running"
    title = f"Store in {folder}\nprocess {report['pid']}, {state}, up {report['uptime_s']:.0f} s"
    table = Table("", "host", "disk", title=title, title_justify="left")
    host, disk = report["host"], report["disk"] or {}

    def row(label: str, host_text: str, disk_text: str) -> None:
        table.add_row(label, host_text, disk_text if disk else "-")

    def size(tier: dict[str, Any], total: str) -> str:
        used = tier.get("used_bytes", 0)
        return f"{format_bytes(used)} of {format_bytes(tier.get(total, 0))}"

    def counted(tier: dict[str, Any], what: str) -> str:
        chunks, size_bytes = tier.get(f"{what}chunks", 0), tier.get(f"{what}bytes", 0)
        return f"{chunks} ({format_bytes(size_bytes)})"

    row("used", size(host, "total_bytes"), size(disk, "quota_bytes"))
    row(
        "chunks",
        f"{host['chunks']} ({format_bytes(host['payload_bytes'])})",
        f"{disk.get('chunks', 0)} ({format_bytes(disk.get('payload_bytes', 0))})",
    )
    copies = [
        sum(known[f"{tier}_copies_bytes"] or 0 for known in report["namespaces"])
        for tier in ("host", "disk")
    ]
    if any(copies):
        row("as TP copies", *map(format_bytes, copies))
    row("stored", counted(host, "stored_"), counted(disk, "stored_"))
    from_disk = {kind: report[f"announced_from_disk_{kind}"] for kind in ("chunks", "bytes")}
    loaded = {kind: report[f"announced_{kind}"] - from_disk[kind] for kind in from_disk}
    row("loaded from", counted(loaded, ""), counted(from_disk, ""))
    row("keys found", str(report["found_host_keys"]), str(report["found_disk_keys"]))
    row("evicted", str(host["evicted_chunks"]), str(disk.get("evicted_chunks", 0)))
    row("waiting", f"{host['pinned_chunks']} pinned", f"{disk.get('queued_writes', 0)} to write")
    troubles = {
        "skipped": "skipped_chunks",
        "corrupt": "corrupt_chunks",
        "failed writes": "failed_writes",
        "failed reads": "failed_reads",
    }
    for label, field in troubles.items():
        row(label, "-", str(disk.get(field, 0)))
    if disk.get("paused"):
        row("writing", "-", "paused: the disk refuses writes")
    return table


def _work(report: dict[str, Any]) -> Table:
    table = Table("tickets", "jobs", "lookups", "trouble", title="Work", title_justify="left")
    trouble = {
        "audit conflicts": report["audit_conflicts"],
        "chunks without room": report["no_room_chunks"],
        "chunks abandoned": report["abandoned_chunks"],
        "quarantined slots": report["quarantined_slots"],
        "malformed messages": report["malformed_messages"],
    }
    table.add_row(
        f"{report['tickets_open']} open, {report['tickets_queued']} queued, "
        f"{report['tickets_failed']} failed",
        f"{report['jobs_open']} open",
        f"{report['lookups']} ({report['looked_up_keys']} keys)",
        ", ".join(f"{count} {what}" for what, count in trouble.items() if count) or "none",
    )
    return table


def _latencies(latencies: dict[str, Any]) -> Table:
    table = Table("", "times", "mean", "99 % within", title="Latencies", title_justify="left")
    for name, latency in latencies.items():
        if count := latency["count"]:
            mean = _time(latency["sum_s"] / count)
            table.add_row(name.replace("_", " "), str(count), mean, _within(latency, 0.99 * count))
    return table


def _within(latency: dict[str, Any], wanted: float) -> str:
    """The upper bound of the bucket that the wanted share falls into."""
    total = 0
    for bound_s, count in zip(latency["bounds_s"], latency["counts"], strict=False):
        total += count
        if total >= wanted:
            return _time(bound_s)
    return "more"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
