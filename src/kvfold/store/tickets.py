"""Load tickets: windows, pins, announcements and releases. See docs/protocol.md, 4.

A ticket takes its chunks strictly in order, each only when all before it have a host slot. So
whatever it has pinned will be announced and acknowledged without anything else happening, and
tickets that wait for a slot never wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import FormatError
from kvfold.store.chunks import DISK, READING, READY, ChunkTable, Ints, SlotClass
from kvfold.store.core_clients import Client, Engine, Send
from kvfold.store.core_room import window_fits, window_of
from kvfold.store.latency import Latency
from kvfold.store.messages import (
    Ack,
    Done,
    Failed,
    Keys64,
    OpenTicket,
    Ready,
    Released,
    as_indices,
    as_keys,
)

MAX_TICKETS = 4096
# Chunks that one step of one ticket looks at: bounds how long the store is deaf.
_STEP = 2048

QUEUED, OPEN, FAILED = range(3)
_HAD = np.zeros(5, np.bool_)  # states a ticket can use
_HAD[[READING, READY, DISK]] = True


class Ticket:
    """One load. Chunks [0, announced) were told to readers, [announced, taken) are pinned."""

    def __init__(self, message: OpenTicket, client: Client, now_s: float) -> None:
        self.group, self.cls = client.group(message.group)
        self.number = message.ticket
        self.engine = client.engine
        self.opener = client
        self.namespace = message.namespace
        self.readers = message.readers
        self.keys: Keys64 = as_keys(message.keys)
        count = len(self.keys)
        self.entries: Ints = np.full(count, -1, np.int64)
        self.acked: NDArray[np.uint64] = np.zeros(count, np.uint64)
        self.state = QUEUED
        self.window = 0
        self.taken = 0
        self.announced = 0
        self.released = 0
        self.done = 0  # ranks that said Done, or are gone
        self.from_disk = np.zeros(count, np.bool_)  # had to wait for the disk
        self.opened_s = now_s
        self.moved_s = now_s  # when the store last did something for it
        self.runnable = False

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def waits_for_store(self) -> bool:
        if self.state == QUEUED:
            return True
        room = self.window - (self.taken - self.released)
        return self.state == OPEN and (
            self.announced < self.taken or (self.taken < self.count and room > 0)
        )


class TicketBook:
    """All tickets of all engines."""

    def __init__(
        self,
        table: ChunkTable,
        send: Send,
        read: Callable[[Ints], None],
        ticket_wait_s: float,
    ) -> None:
        self._table = table
        self._send = send
        self._read = read
        self._ticket_wait_s = ticket_wait_s
        self._queued: dict[SlotClass, deque[Ticket]] = {}
        self._blocked: dict[Ticket, None] = {}  # in order
        self._runnable: deque[Ticket] = deque()
        self._reading: dict[int, list[Ticket]] = {}  # entry -> tickets that need it
        self._tickets: set[Ticket] = set()
        self.accepting = True
        self.failed = 0
        self.opened = 0
        self.loaded_chunks = 0
        self.loaded_bytes = 0
        self.loaded_from_disk_chunks = 0
        self.loaded_from_disk_bytes = 0
        self.latency = Latency()  # of complete loads, from opening to the last reader's `Done`

    @property
    def open(self) -> int:
        return len(self._tickets)

    @property
    def queued(self) -> int:
        return sum(map(len, self._queued.values()))

    # ---- messages ---------------------------------------------------------------------------

    def open_ticket(self, client: Client, message: OpenTicket, now_s: float) -> None:
        """Queue a new ticket. Raises `FormatError`."""
        engine = client.engine
        if message.ticket in engine.tickets:
            raise FormatError(f"ticket {message.ticket} is open already")
        if not message.readers:
            raise FormatError(f"ticket {message.ticket} has no readers")
        ticket = Ticket(message, client, now_s)
        full = len(engine.tickets) >= MAX_TICKETS
        engine.tickets[ticket.number] = ticket
        self._tickets.add(ticket)
        self._queued.setdefault(ticket.cls, deque()).append(ticket)
        ticket.cls.waiting_tickets += 1
        self.opened += 1
        early = engine.early_done_mask(ticket.number) & ticket.readers
        absent = ticket.readers & ~engine.connected
        ticket.done = early | absent
        if early:
            self._fail(ticket, 0, "a reader gave it up before it was opened")
        elif absent:
            self._fail(ticket, 0, f"reader {absent.bit_length() - 1} is not connected")
        elif full or not self.accepting:
            self._fail(ticket, 0, "too many tickets" if full else "the store is stopping")
        else:
            found = self._table.find(ticket.keys)
            self._table.touch(found[found >= 0])

    def ack(self, client: Client, message: Ack) -> None:
        """A reader has copied some announced chunks. Raises `FormatError`."""
        ticket = client.engine.tickets.get(message.ticket)
        if ticket is None or not ticket.readers & ~ticket.done & client.bit:
            return
        indices = as_indices(message.indices, ticket.announced)
        self._acknowledge(ticket, indices, client.bit)

    def done(self, client: Client, message: Done, now_s: float) -> None:
        """A reader touches the ticket's slots no more."""
        ticket = client.engine.tickets.get(message.ticket)
        if ticket is None or not ticket.readers & client.bit:
            client.engine.note_early_done(message.ticket, client.rank)
            self._send(client.number, Released(message.rid, False))
            return
        bit = np.uint64(client.bit)
        held = (
            ticket.state == OPEN
            and ticket.announced == ticket.count
            and not ticket.done & client.bit
            and bool(((ticket.acked & bit) != 0).all())
        )
        self._send(client.number, Released(message.rid, held))
        self._reader_done(ticket, client, held)
        if ticket.state == OPEN and ticket not in self._tickets:
            self.latency.note(now_s - ticket.opened_s)

    # ---- clients that go --------------------------------------------------------------------

    def leave(self, client: Client, *, process_gone: bool) -> None:
        """A worker is gone. What it may still read stays pinned until its process has exited."""
        for ticket in list(client.engine.tickets.values()):
            if not ticket.readers & ~ticket.done & client.bit:
                continue
            if not process_gone:
                told = ticket.entries[: ticket.announced]
                unread = (ticket.acked[: ticket.announced] & np.uint64(client.bit)) == 0
                reading = np.unique(told[unread])
                if len(reading):
                    self._table.pin(reading)
                    client.pinned.append(reading)
            self._reader_done(ticket, client, False)

    def leave_opener(self, client: Client) -> None:
        """A scheduler is gone: nobody wants its tickets any more."""
        for ticket in list(client.engine.tickets.values()):
            if ticket.opener is client:
                self._fail(ticket, ticket.announced, "the scheduler is gone")

    # ---- running ----------------------------------------------------------------------------

    def wake(self) -> None:
        """Something happened that may have freed a slot: try blocked tickets again, in order."""
        blocked, self._blocked = self._blocked, {}
        for ticket in blocked:
            self._make_runnable(ticket)

    def step(self, now_s: float) -> bool:
        """Do one bounded piece of work; return whether there was any."""
        worked = False
        for cls, queue in self._queued.items():
            while queue and self._admit(cls, queue[0], now_s):
                queue.popleft()
                worked = True
        if self._runnable:
            ticket = self._runnable.popleft()
            ticket.runnable = False
            worked = True
            if ticket.state == OPEN:
                self._take(ticket, now_s)
        return worked

    def tick(self, now_s: float) -> float | None:
        """Fail tickets that the store could not serve for too long; return when to look again."""
        waiting = [t for t in self._tickets if t.waits_for_store]
        for ticket in waiting:
            if now_s - ticket.moved_s > self._ticket_wait_s:
                self._fail(ticket, ticket.announced, "no slot became free in time")
        return now_s + 1.0 if waiting else None

    def read_finished(self, entry: int, ok: bool, reason: str, now_s: float) -> None:
        """A chunk came from disk, or did not; called after the table was told."""
        for ticket in self._reading.pop(entry, []):
            if ticket.state != OPEN:
                continue
            if ok:
                self._announce(ticket, now_s)
                continue
            lost = np.flatnonzero(ticket.entries[: ticket.taken] == entry)
            ticket.entries[lost] = -1  # their pins went with the entry
            at = int(lost[0])
            self._announce(ticket, now_s)
            self._fail(ticket, at, reason)

    # ---- steps ------------------------------------------------------------------------------

    def _admit(self, cls: SlotClass, ticket: Ticket, now_s: float) -> bool:
        window = window_of(self._table, cls, ticket.count)
        if not window_fits(self._table, cls, window):
            return False
        cls.waiting_tickets -= 1
        ticket.state = OPEN
        ticket.moved_s = now_s
        self._set_window(ticket, window)
        self._make_runnable(ticket)
        return True

    def _make_runnable(self, ticket: Ticket) -> None:
        if ticket.state == OPEN and not ticket.runnable:
            ticket.runnable = True
            self._runnable.append(ticket)

    def _take(self, ticket: Ticket, now_s: float) -> None:
        """Pin the next chunks, as many as the window has room for, and start their reads."""
        table = self._table
        room = ticket.window - (ticket.taken - ticket.released)
        begin, end = ticket.taken, min(ticket.taken + min(room, _STEP), ticket.count)
        if begin >= end:
            return
        entries = self._usable(ticket, begin, end)
        if not len(entries):
            self._announce(ticket, now_s)
            self._fail(ticket, begin, "neither in host memory nor on disk")
            return
        table.pin(entries)
        cold = np.flatnonzero(table.state[entries] == DISK)
        slots = table.take_host(ticket.cls, len(cold))
        if len(slots) < len(cold):
            cut = int(cold[len(slots)])
            table.unpin(entries[cut:])
            entries, cold = entries[:cut], cold[: len(slots)]
            self._blocked[ticket] = None
        else:
            self._make_runnable(ticket)
        table.begin_read(entries[cold], slots)
        reading = table.state[entries] == READING
        ticket.from_disk[begin : begin + len(entries)] = reading
        for entry in entries[reading].tolist():
            self._reading.setdefault(entry, []).append(ticket)
        ticket.entries[begin : begin + len(entries)] = entries
        ticket.taken += len(entries)
        self._read(entries[cold])
        self._announce(ticket, now_s)

    def _usable(self, ticket: Ticket, begin: int, end: int) -> Ints:
        """Distinct entries of the chunks from `begin` on, up to the first that cannot be had."""
        table = self._table
        entries = table.find(ticket.keys[begin:end])
        namespace = table.namespace_number(ticket.namespace)
        usable = (
            (entries >= 0)
            & _HAD[table.state[entries]]
            & (table.cls[entries] == ticket.cls.number)
            & (table.namespace[entries] == namespace)
            & (table.payload[entries] == ticket.group.payload_bytes)
        )
        if not usable.all():
            entries = entries[: int(usable.argmin())]
        _, first = np.unique(entries, return_index=True)
        if len(first) < len(entries):  # a key twice: the second has its turn in the next step
            again = np.ones(len(entries), np.bool_)
            again[first] = False
            entries = entries[: int(again.argmax())]
        return entries

    def _announce(self, ticket: Ticket, now_s: float) -> None:
        """Tell the readers of every chunk that is ready, in order."""
        table = self._table
        pending = ticket.entries[ticket.announced : ticket.taken]
        ready = (pending >= 0) & (table.state[pending] == READY)
        count = len(ready) if ready.all() else int(ready.argmin())
        if not count:
            return
        begin = ticket.announced
        ticket.announced += count
        ticket.moved_s = now_s
        payload = table.payload[pending[:count]]
        from_disk = ticket.from_disk[begin : begin + count]
        self.loaded_chunks += count
        self.loaded_bytes += int(payload.sum())
        self.loaded_from_disk_chunks += int(np.count_nonzero(from_disk))
        self.loaded_from_disk_bytes += int(payload[from_disk].sum())
        indices = np.arange(begin, begin + count, dtype="<u4").tobytes()
        offsets = table.offsets(pending[:count]).tobytes()
        for client in self._readers(ticket):
            self._send(client.number, Ready(ticket.number, indices, offsets))

    def _readers(self, ticket: Ticket) -> list[Client]:
        ranks = ticket.readers & ~ticket.done
        return [c for rank, c in ticket.engine.workers.items() if ranks >> rank & 1]

    def _acknowledge(self, ticket: Ticket, indices: Ints, bits: int) -> None:
        """Note readers' acknowledgements; unpin what all of them have copied."""
        everybody = np.uint64(ticket.readers)
        before = ticket.acked[indices]
        after = before | np.uint64(bits)
        ticket.acked[indices] = after
        freed = indices[(after == everybody) & (before != everybody)]
        if not len(freed):
            return
        self._unpin(ticket.entries[freed])
        ticket.released += len(freed)
        if ticket.state == OPEN:
            self._set_window(ticket, min(ticket.window, ticket.count - ticket.released))
            self._make_runnable(ticket)
        else:
            self._set_window(ticket, ticket.announced - ticket.released)

    def _unpin(self, entries: Ints) -> None:
        if len(np.unique(entries)) == len(entries):
            self._table.unpin(entries)
        else:
            for entry in entries:
                self._table.unpin(np.array([entry], np.int64))

    def _reader_done(self, ticket: Ticket, client: Client, held: bool) -> None:
        if ticket.done & client.bit:
            return
        ticket.done |= client.bit
        if not held and ticket.state != FAILED:
            self._fail(ticket, ticket.announced, f"reader {client.rank} is gone or gave it up")
        self._acknowledge(ticket, np.arange(ticket.announced), client.bit)
        self._close_if_done(ticket)

    def _fail(self, ticket: Ticket, index: int, reason: str) -> None:
        """Announce nothing more. What was announced stays pinned until its readers let go."""
        if ticket.state == FAILED:
            return
        self.failed += 1
        if ticket.state == QUEUED:
            self._queued[ticket.cls].remove(ticket)
            ticket.cls.waiting_tickets -= 1
        ticket.state = FAILED
        unannounced = ticket.entries[ticket.announced : ticket.taken]
        self._unpin(unannounced[unannounced >= 0])
        ticket.taken = ticket.announced
        self._set_window(ticket, ticket.announced - ticket.released)
        for client in self._readers(ticket):
            self._send(client.number, Failed(ticket.number, index, reason))
        gone = ticket.done & ticket.readers
        if gone:
            self._acknowledge(ticket, np.arange(ticket.announced), gone)
        self._close_if_done(ticket)

    def _set_window(self, ticket: Ticket, window: int) -> None:
        ticket.cls.windows += window - ticket.window
        ticket.window = window

    def _close_if_done(self, ticket: Ticket) -> None:
        if ticket.readers & ~ticket.done or ticket not in self._tickets:
            return
        assert ticket.released == ticket.announced
        self._set_window(ticket, 0)
        self._tickets.discard(ticket)
        del ticket.engine.tickets[ticket.number]
        for rank in range(64):
            ticket.engine.early_dones.pop((ticket.number, rank), None)

    def drop_engine(self, engine: Engine) -> None:
        """Forget what is left of an engine without clients; its tickets have no readers."""
        for ticket in list(engine.tickets.values()):
            ticket.done = ticket.readers
            self._fail(ticket, ticket.announced, "the engine is gone")
            self._close_if_done(ticket)
