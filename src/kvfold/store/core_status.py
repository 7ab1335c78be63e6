"""What `kvfold store status` tells: counters that never go down, and the state of now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfold.store.chunks import READY
from kvfold.store.messages import VERSION
from kvfold.store.tally import Tally

if TYPE_CHECKING:
    from kvfold.store.core import StoreCore

# Namespaces told one by one: those that hold the most bytes. The others are told together.
_NAMESPACES = 32


def report(core: StoreCore, tally: Tally) -> dict[str, object]:
    """Everything about a store that people or metrics ask for, ready for JSON."""
    connected = [c for c in core.clients.values() if c.connected]
    tickets, jobs = core.tickets, core.jobs
    return {
        "store": core.store_id,
        "pid": core.pid,
        "version": VERSION,
        "uptime_s": round(core.clock() - core.started_s, 3),
        "stopping": core.stopping,
        "scanning": core.disk.scanning,
        "clients": [
            {"role": c.role, "engine": c.engine.name, "rank": c.rank, "pid": c.pid}
            for c in connected
        ],
        "host": _host(core, tally),
        "disk": _disk(core, tally),
        "classes": _classes(core, tally),
        "namespaces": _namespaces(core, tally),
        "unique_chunks": int(tally.namespace_chunks.sum()),
        "lookups": core.lookups,
        "looked_up_keys": core.looked_up_keys,
        "found_host_keys": core.found_host_keys,
        "found_disk_keys": core.found_disk_keys,
        "tickets_opened": tickets.opened,
        "tickets_open": tickets.open,
        "tickets_queued": tickets.queued,
        "tickets_failed": tickets.failed,
        "announced_chunks": tickets.loaded_chunks,
        "announced_bytes": tickets.loaded_bytes,
        "announced_from_disk_chunks": tickets.loaded_from_disk_chunks,
        "announced_from_disk_bytes": tickets.loaded_from_disk_bytes,
        "jobs_open": sum(len(engine.jobs) for engine in core.engines.values()),
        "no_room_chunks": jobs.no_room,
        "declined_chunks": jobs.declined,
        "abandoned_chunks": jobs.abandoned,
        "audit_conflicts": jobs.conflicts,
        "quarantined_slots": len(core.quarantine),
        "quarantined_bytes": sum(c.quarantined * c.slot_bytes for c in core.table.classes),
        "departed_holders": len(core.clients) - len(connected),
        "untold_evictions": core.evictions.untold,
        "malformed_messages": core.malformed,
        "requests_told": core.requests_told,
        "latencies": {
            "lookup": core.lookup_latency.report(),
            "ticket": tickets.latency.report(),
            "disk_read": core.disk.read_latency.report(),
            "disk_write": core.disk.write_latency.report(),
        },
    }


def _host(core: StoreCore, tally: Tally) -> dict[str, object]:
    table = core.table
    used = [
        (table.arena.used(cls.arena), cls.slot_bytes) for cls in table.classes if cls.arena >= 0
    ]
    return {
        "total_bytes": table.arena.size_bytes,
        "used_slots": sum(slots for slots, _ in used),
        "used_bytes": sum(slots * size for slots, size in used),
        "chunks": tally.in_host,
        "payload_bytes": int(tally.tier_bytes[0].sum()),
        "pinned_chunks": tally.pinned,
        "stored_chunks": core.stored_chunks,
        "stored_bytes": core.stored_bytes,
        "stored_copies_bytes": core.stored_copies_bytes,
        "evicted_chunks": table.evicted_host,
    }


def _disk(core: StoreCore, tally: Tally) -> dict[str, object] | None:
    table, queue = core.table, core.disk
    if table.disk is None:
        return None
    return {
        **table.disk.report(),
        "chunks": int(tally.tier_chunks[1].sum()),
        "payload_bytes": int(tally.tier_bytes[1].sum()),
        "only_on_disk_chunks": tally.only_on_disk,
        "stored_chunks": queue.stored_chunks,
        "stored_bytes": queue.stored_bytes,
        "loaded_chunks": queue.loaded_chunks,
        "loaded_bytes": queue.loaded_bytes,
        "evicted_chunks": table.evicted_disk,
        "skipped_chunks": queue.skipped,
        "corrupt_chunks": queue.corrupt,
        "failed_reads": queue.failed_reads,
        "failed_writes": queue.failed_writes,
        "paused": queue.paused,
        "queued_reads": queue.queued_reads,
        "queued_writes": queue.queued_writes,
    }


def _classes(core: StoreCore, tally: Tally) -> list[dict[str, object]]:
    """Per slot size; `host_slots` and `disk_slots` include what the class could still get."""
    table = core.table
    rows: list[dict[str, object]] = []
    for cls, states, on_disk in zip(
        table.classes, tally.class_states, tally.class_on_disk, strict=False
    ):
        in_use = cls.arena >= 0
        disk_slots = int(on_disk)
        if table.disk is not None and in_use:
            disk_slots = table.disk.slots(cls.slot_bytes)
        rows.append(
            {
                "slot_bytes": cls.slot_bytes,
                "host_slots": table.arena.slots(cls.arena) if in_use else 0,
                "host_used_slots": table.arena.used(cls.arena) if in_use else 0,
                "host_chunks": int(states[READY]),
                "disk_slots": disk_slots,
                "disk_chunks": int(on_disk),
                "windows": cls.windows,
                "writing": cls.writing,
                "quarantined": cls.quarantined,
            }
        )
    return rows


def _namespaces(core: StoreCore, tally: Tally) -> list[dict[str, object]]:
    """What each namespace holds, and what TP copies of it would take (None: nobody said)."""
    table = core.table
    held = tally.tier_bytes.sum(axis=0)
    order = [n for n in held.argsort()[::-1].tolist() if held[n]]
    rows: list[dict[str, object]] = []
    for number in order[:_NAMESPACES]:
        digest = table.namespaces[number]
        each = core.namespaces.get(digest).copies_bytes or None
        row: dict[str, object] = {"namespace": digest.hex(), "chunk_copies_bytes": each}
        for tier, name in enumerate(("host", "disk")):
            chunks = int(tally.tier_chunks[tier, number])
            row[f"{name}_chunks"] = chunks
            row[f"{name}_bytes"] = int(tally.tier_bytes[tier, number])
            row[f"{name}_copies_bytes"] = None if each is None else chunks * each
        rows.append(row)
    if rest := order[_NAMESPACES:]:
        row = {"namespace": "others", "chunk_copies_bytes": None}
        for tier, name in enumerate(("host", "disk")):
            row[f"{name}_chunks"] = int(tally.tier_chunks[tier, rest].sum())
            row[f"{name}_bytes"] = int(tally.tier_bytes[tier, rest].sum())
            row[f"{name}_copies_bytes"] = None
        rows.append(row)
    return rows
