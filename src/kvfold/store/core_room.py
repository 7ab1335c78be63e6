"""How many slots of a class tickets may be promised and jobs may write at once.

Of S slots a reserve of max(1, S/8) is never promised. Windows may use S less two reserves, at
least one slot; windows and jobs together S less one. So jobs can always use about a reserve, and
while a ticket waits for its window they use no more than that: it is admitted some day.
"""

from __future__ import annotations

from kvfold.store.chunks import ChunkTable, SlotClass


def limits(table: ChunkTable, cls: SlotClass) -> tuple[int, int]:
    """Return (slots for windows and jobs together, slots for windows)."""
    slots = max(2, table.arena.slots(cls.arena))
    reserve = max(1, slots // 8)
    return slots - reserve, max(1, slots - 2 * reserve)


def window_of(table: ChunkTable, cls: SlotClass, chunks: int) -> int:
    """Slots that a ticket of so many chunks is promised."""
    return min(chunks, max(1, limits(table, cls)[1] // 2))


def window_fits(table: ChunkTable, cls: SlotClass, window: int) -> bool:
    together, windows = limits(table, cls)
    return cls.windows + window <= windows and cls.windows + cls.writing + window <= together


def room_for_writing(table: ChunkTable, cls: SlotClass) -> int:
    """How many more slots jobs may have now."""
    together, windows = limits(table, cls)
    used = max(windows, cls.windows) if cls.waiting_tickets else cls.windows
    return max(0, together - used - cls.writing)
