"""What `kvfold store status` tells: counters that never go down, and the state of now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvfold.store.chunks import DISK, READING, READY, WRITING
from kvfold.store.messages import VERSION

if TYPE_CHECKING:
    from kvfold.store.core import StoreCore


def report(core: StoreCore) -> dict[str, object]:
    """Everything about a store that people or metrics ask for, ready for JSON."""
    connected = [c for c in core.clients.values() if c.connected]
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
        "host": _host(core),
        "disk": _disk(core),
        "classes": _classes(core),
        "lookups": core.lookups,
        "looked_up_keys": core.looked_up_keys,
        "tickets_open": core.tickets.open,
        "tickets_queued": core.tickets.queued,
        "tickets_failed": core.tickets.failed,
        "announced_chunks": core.tickets.loaded_chunks,
        "announced_bytes": core.tickets.loaded_bytes,
        "jobs_open": sum(len(engine.jobs) for engine in core.engines.values()),
        "no_room_chunks": core.jobs.no_room,
        "audit_conflicts": core.jobs.conflicts,
        "quarantined_slots": len(core.quarantine),
        "departed_holders": len(core.clients) - len(connected),
        "malformed_messages": core.malformed,
    }


def _host(core: StoreCore) -> dict[str, object]:
    table = core.table
    in_host = np.isin(table.state, (WRITING, READING, READY))
    ready = table.state == READY
    used = [
        (table.arena.used(cls.arena), cls.slot_bytes) for cls in table.classes if cls.arena >= 0
    ]
    return {
        "total_bytes": table.arena.size_bytes,
        "used_slots": sum(slots for slots, _ in used),
        "used_bytes": sum(slots * size for slots, size in used),
        "chunks": int(np.count_nonzero(ready)),
        "payload_bytes": int(table.payload[ready].sum()),
        "pinned_chunks": int(np.count_nonzero(in_host & (table.pins > 0))),
        "stored_chunks": core.stored_chunks,
        "stored_bytes": core.stored_bytes,
        "evicted_chunks": table.evicted_host,
    }


def _disk(core: StoreCore) -> dict[str, object] | None:
    table, queue = core.table, core.disk
    if table.disk is None:
        return None
    on_disk = table.disk_slot >= 0
    return {
        **table.disk.report(),
        "chunks": int(np.count_nonzero(on_disk)),
        "payload_bytes": int(table.payload[on_disk].sum()),
        "only_on_disk_chunks": int(np.count_nonzero(table.state == DISK)),
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


def _classes(core: StoreCore) -> list[dict[str, object]]:
    table = core.table
    rows: list[dict[str, object]] = []
    for cls in table.classes:
        mine = table.cls == cls.number
        rows.append(
            {
                "slot_bytes": cls.slot_bytes,
                "host_slots": table.arena.slots(cls.arena) if cls.arena >= 0 else 0,
                "host_chunks": int(np.count_nonzero(mine & (table.state == READY))),
                "disk_chunks": int(np.count_nonzero(mine & (table.disk_slot >= 0))),
                "windows": cls.windows,
                "writing": cls.writing,
                "quarantined": cls.quarantined,
            }
        )
    return rows
