"""The store's state machine: messages and disk completions in, answers and disk orders out.

Single-threaded, no I/O of its own, no clock of its own. The server feeds it from sockets; the
tests feed it anything. A `FormatError` from `handle` means: close that connection (and call
`vanished`); the state is as if the message had not come.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvfold.errors import FormatError, StoreError, StoreRefused
from kvfold.store.arena import Arena
from kvfold.store.chunks import READY, ChunkTable, Ints, SlotClass
from kvfold.store.core_clients import Client, Engine, Quarantine, Send
from kvfold.store.core_disk import DiskQueue, Drained, Order, Sync
from kvfold.store.core_evictions import Evictions
from kvfold.store.core_status import report
from kvfold.store.core_why import report_why
from kvfold.store.disk import DiskTier, Found, ReadOutcome
from kvfold.store.jobs import JobBook
from kvfold.store.latency import Latency
from kvfold.store.messages import (
    VERSION,
    Ack,
    Ask,
    Commit,
    Done,
    Flush,
    FromClient,
    Group,
    Hello,
    Lookup,
    OpenTicket,
    Report,
    Status,
    Stop,
    Tell,
    Tiers,
    Welcome,
    Why,
    as_keys,
)
from kvfold.store.namespaces import NamespaceBook
from kvfold.store.records import RecordBook
from kvfold.store.tally import Tally, tally
from kvfold.store.tickets import TicketBook

# Counts what the store holds without stopping it, then hands the tally over in the store's loop.
Count = Callable[[Callable[[], Tally], Callable[[Tally], None]], None]


@dataclass(frozen=True)
class CoreSettings:
    """Deadlines in seconds: of a job's writers, and of a ticket that the store cannot serve."""

    job_deadline_s: float = 60.0
    ticket_wait_s: float = 30.0


class StoreCore:
    """One store's state. `send(client, message)` is called during the calls below."""

    def __init__(
        self,
        arena: Arena,
        disk: DiskTier | None,
        settings: CoreSettings,
        clock: Callable[[], float],
        send: Send,
        stop: Callable[[], None] = lambda: None,
        sync: Sync = lambda done: done(True),
        pid: int = 0,
        count: Count = lambda work, done: done(work()),
        backlog: Callable[[int], int] = lambda client: 0,
    ) -> None:
        self.store_id = secrets.token_hex(16)
        self.pid = pid
        self.clock = clock
        self.started_s = clock()
        self.table = ChunkTable(arena, disk)
        self.quarantine = Quarantine(self.table)
        self.disk = DiskQueue(self.table, clock, sync)
        self.tickets = TicketBook(self.table, send, self.disk.read, settings.ticket_wait_s)
        self.jobs = JobBook(
            self.table, self.quarantine, send, self._published, settings.job_deadline_s
        )
        self.evictions = Evictions(self.table, send, backlog)
        self.namespaces = NamespaceBook()
        self.records = RecordBook()
        self.clients: dict[int, Client] = {}
        self.engines: dict[str, Engine] = {}
        self.stopping = False
        self.stored_chunks = 0
        self.stored_bytes = 0
        self.stored_copies_bytes = 0
        self.lookups = 0
        self.looked_up_keys = 0
        self.found_host_keys = 0
        self.found_disk_keys = 0
        self.lookup_latency = Latency()
        self.requests_told = 0
        self.malformed = 0
        self._send = send
        self._stop = stop
        self._count = count

    # ---- clients ----------------------------------------------------------------------------

    def hello(self, number: int, pid: int, hello: Hello) -> Welcome:
        """Admit a client under a number of the caller's. Raises `StoreRefused`, `FormatError`."""
        if hello.version != VERSION:
            raise StoreRefused(
                "version", f"the store speaks version {VERSION}, the client {hello.version}"
            )
        if self.stopping:
            raise StoreRefused("stopping", "the store is stopping")
        if hello.evictions and hello.role != "scheduler":
            raise FormatError(f"a {hello.role} may not ask for evictions")
        engine = self.engines.get(hello.engine)
        if hello.role == "tool" or engine is None:
            engine = Engine(hello.engine, hello.fingerprint)
        elif engine.fingerprint != hello.fingerprint:
            raise StoreRefused(
                "fingerprint",
                f"engine {hello.engine!r} runs plan {engine.fingerprint!r}; this client's plan is "
                f"{hello.fingerprint!r}",
            )
        for other in engine.clients:
            if other.role == hello.role and other.rank == hello.rank:
                raise StoreRefused(
                    "rank",
                    f"{hello.role} {hello.rank} of engine {hello.engine!r} is process {other.pid}",
                )
        groups = [(group, self._use_group(group)) for group in hello.groups]
        for group in hello.groups:
            self.namespaces.learn(group.namespace, group.text, copies_bytes=group.copies_bytes)
            engine.learn(group.namespace)
        client = Client(number, pid, hello.role, hello.rank, engine, groups)
        self.clients[number] = client
        if hello.role != "tool":
            self.engines[hello.engine] = engine
            engine.clients.add(client)
            if hello.role == "worker":
                engine.workers[hello.rank] = client
        if hello.evictions:
            self.evictions.listen(client)
        return Welcome(number, self.store_id, self.table.arena.size_bytes, self.pid)

    def _use_group(self, group: Group) -> SlotClass:
        if group.slot_bytes % 4096 or group.payload_bytes > group.slot_bytes:
            raise StoreRefused(
                "slot_bytes",
                f"slot_bytes={group.slot_bytes}, payload_bytes={group.payload_bytes}: expected a "
                "multiple of 4096 that holds the payload",
            )
        try:
            self.table.arena.add_class(group.slot_bytes)
        except StoreError as error:
            raise StoreRefused("host_too_small", str(error)) from None
        try:
            return self.table.use_class(group.slot_bytes)
        except StoreError as error:
            raise StoreRefused("disk_too_small", str(error)) from None
        except ValueError as error:
            raise StoreRefused("slot_bytes", str(error)) from None

    def bye(self, number: int) -> None:
        """The client said that it touches the arena no more."""
        self._leave(number, process_gone=True)

    def vanished(self, number: int) -> None:
        """The connection is gone, but the process may live: what it was told of is kept."""
        self._leave(number, process_gone=False)

    def exited(self, number: int) -> None:
        """The client's process has exited, whether or not its connection was closed before."""
        self._leave(number, process_gone=True)

    def _leave(self, number: int, *, process_gone: bool) -> None:
        client = self.clients.get(number)
        if client is None:
            return
        if client.connected:
            client.connected = False
            engine = client.engine
            engine.clients.discard(client)
            if client.role == "worker":
                engine.workers.pop(client.rank, None)
                self.tickets.leave(client, process_gone=process_gone)
                self.jobs.leave(client, process_gone=process_gone)
            elif client.role == "scheduler":
                self.tickets.leave_opener(client)
                self.evictions.leave(client)
            if client.role != "tool" and not engine.clients:
                self.tickets.drop_engine(engine)
                self.jobs.drop_engine(engine)
                self.engines.pop(engine.name, None)
        if process_gone:
            self.quarantine.release(client.held_slots)
            for entries in client.pinned:
                self.table.unpin(entries)
            client.held_slots, client.pinned = [], []
        if not client.held_slots and not client.pinned:
            del self.clients[number]
        self.tickets.wake()

    # ---- messages ---------------------------------------------------------------------------

    def handle(self, number: int, message: FromClient) -> None:
        """Act on one message of a connected client. Raises `FormatError`."""
        client = self.clients[number]
        now_s = self.clock()
        match message:
            case Lookup():
                self._lookup(number, message)
                return
            case Ack() if client.role == "worker":
                self.tickets.ack(client, message)
            case Done() if client.role == "worker":
                self.tickets.done(client, message, now_s)
            case Ask() if client.role == "worker":
                self._learn_epoch(client, message)
                self.jobs.ask(client, message, now_s)
            case Commit() if client.role == "worker":
                self.jobs.commit(client, message)
            case OpenTicket() if client.role == "scheduler":
                self.tickets.open_ticket(client, message, now_s)
                return
            case Tell() if client.role == "scheduler":
                texts = [group.text for group, _ in client.groups]
                self.records.tell(client.engine.name, message.request, message.record, texts)
                self.requests_told += 1
                return
            case Status():
                self.status_later(lambda status: self._report(number, message.rid, status))
                return
            case Why() if client.role == "tool":
                self._tally_later(
                    lambda t: self._report(number, message.rid, report_why(self, message, t))
                )
                return
            case Flush():
                self.flush(lambda drained: self._report(number, message.rid, _told(drained)))
            case Stop():
                self.stop(message.drain, lambda d: self._report(number, message.rid, _told(d)))
            case _:
                raise FormatError(f"a {client.role} may not send {type(message).__name__}")
        self.tickets.wake()

    def _lookup(self, number: int, message: Lookup) -> None:
        began_s = self.clock()
        keys = as_keys(message.keys)
        tiers = self.table.tiers(keys)
        self.lookups += 1
        self.looked_up_keys += len(keys)
        self.found_disk_keys += tiers.count(1)
        self.found_host_keys += tiers.count(2)
        self._send(number, Tiers(message.rid, tiers))
        self.lookup_latency.note(self.clock() - began_s)

    def _learn_epoch(self, client: Client, ask: Ask) -> None:
        """A job under another namespace than its group's stores what a reset has set apart."""
        group, _ = client.group(ask.group)
        client.engine.learn(ask.namespace)
        if ask.namespace != group.namespace and ask.namespace not in self.namespaces:
            self.namespaces.learn(
                ask.namespace, group.text, copies_bytes=group.copies_bytes, epoch=True
            )

    def _report(self, number: int, rid: int, content: dict[str, object]) -> None:
        if number in self.clients and self.clients[number].connected:
            self._send(number, Report(rid, json.dumps(content).encode()))

    def _published(self, entries: Ints) -> None:
        self.stored_chunks += len(entries)
        self.stored_bytes += int(self.table.payload[entries].sum())
        number = int(self.table.namespace[entries[0]])  # all are of one job
        copies_bytes = self.namespaces.get(self.table.namespaces[number]).copies_bytes
        self.stored_copies_bytes += len(entries) * copies_bytes
        self.disk.published(entries)

    # ---- disk -------------------------------------------------------------------------------

    def read_done(self, order: Order, outcome: ReadOutcome | OSError, took_s: float = 0.0) -> None:
        self.disk.read_latency.note(took_s)
        reason = self.disk.read_done(order, outcome)
        self.tickets.read_finished(order.entry, reason is None, reason or "", self.clock())
        self.tickets.wake()

    def write_done(self, order: Order, error: OSError | None, took_s: float = 0.0) -> None:
        self.disk.write_latency.note(took_s)
        self.disk.write_done(order, error)
        self.tickets.wake()

    def found(self, batch: list[Found]) -> None:
        self.disk.found(batch)

    def scan_finished(self) -> None:
        self.disk.scan_finished()

    # ---- time and work ----------------------------------------------------------------------

    def step(self) -> bool:
        """Do one bounded piece of waiting work; return whether there was any."""
        return self.tickets.step(self.clock())

    def tick(self) -> float | None:
        """Act on what is overdue; return the clock's time at which to call again, if any."""
        now_s = self.clock()
        times = [self.jobs.tick(now_s), self.tickets.tick(now_s)]
        if any(t is not None for t in times):
            self.tickets.wake()
        return min((t for t in times if t is not None), default=None)

    def flush(self, done: Callable[[Drained], None]) -> None:
        self.disk.flush(done)

    def stop(self, drain: bool, done: Callable[[Drained], None]) -> None:
        """Take no more work; call `done` and then the `stop` given at the start when drained."""
        self.stopping = True
        self.tickets.accepting = self.jobs.accepting = False

        def finish(drained: Drained) -> None:
            done(drained)
            self._stop()

        if drain:
            self.flush(finish)
        else:
            finish(Drained(0, int(np.count_nonzero(self.table.state == READY))))

    # ---- what people ask --------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Everything `kvfold store status` and metrics tell; counts every chunk."""
        return report(self, tally(self.table))

    def status_later(self, done: Callable[[dict[str, object]], None]) -> None:
        """As `status`, without stopping the store while it counts."""
        self._tally_later(lambda counted: done(report(self, counted)))

    def _tally_later(self, done: Callable[[Tally], None]) -> None:
        self._count(lambda: tally(self.table), done)


def _told(drained: Drained) -> dict[str, object]:
    return {
        "written_chunks": drained.written,
        "host_only_chunks": drained.host_only,
        "synced": drained.synced,
    }
