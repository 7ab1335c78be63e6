"""A store core in a world of its own: fake clients, a disk in memory, a clock that is set by hand.

`World.check` knows what must hold between any two events, by counting from the outside.
"""

from __future__ import annotations

import errno
import hashlib
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from kvfold.store.arena import Arena
from kvfold.store.chunks import DISK, READING, READY, WRITING
from kvfold.store.core import CoreSettings, StoreCore
from kvfold.store.core_disk import Order
from kvfold.store.core_room import limits
from kvfold.store.disk import Found, ReadOutcome
from kvfold.store.messages import (
    VERSION,
    Ack,
    Ask,
    Commit,
    Done,
    Failed,
    Group,
    Hello,
    Lookup,
    Message,
    OpenTicket,
    Ready,
    Released,
    Tiers,
    Verdicts,
    Welcome,
)
from kvfold.store.metrics import families
from kvfold.store.tally import tally
from kvfold.store.tickets import FAILED

SLOT = 4096
PAYLOAD = 64
SPACE = hashlib.sha256(b"namespace").digest()
OTHER_SPACE = hashlib.sha256(b"another namespace").digest()


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def content(one_key: bytes) -> bytes:
    """The only right payload of a key."""
    return hashlib.sha512(one_key).digest()


def words(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


def indices(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


class FakeDisk:
    """As `DiskTier`, in memory, with so many slots for all classes together."""

    direct = False

    def __init__(self, slots: int) -> None:
        self.total = slots
        self.held: dict[int, tuple[bytes, bytes, bytes] | None] = {}
        self.classes: list[int] = []
        self.class_of: dict[int, int] = {}
        self._next = 100

    def add_class(self, slot_bytes: int) -> None:
        if slot_bytes not in self.classes:
            self.classes.append(slot_bytes)

    def slots(self, slot_bytes: int) -> int:
        others = sum(1 for slot in self.held if self.class_of[slot] != slot_bytes)
        return self.total - others

    def alloc(self, slot_bytes: int) -> int:
        if len(self.held) >= self.total:
            return -1
        self._next += 1
        self.held[self._next] = None
        self.class_of[self._next] = slot_bytes
        return self._next

    def free(self, slot: int) -> None:
        del self.held[slot]

    def steal_candidate(self, slot_bytes: int) -> list[int] | None:
        others = [slot for slot in self.held if self.class_of[slot] != slot_bytes]
        return others[:1] or None

    def put(self, number: int, sequence: int = 1, space: bytes = SPACE) -> Found:
        """A chunk as an earlier store left it."""
        slot = self.alloc(SLOT)
        self.held[slot] = (key(number), space, content(key(number)))
        return Found(slot, key(number), space, PAYLOAD, SLOT, sequence)

    def write(self, order: Order) -> None:
        assert order.slot in self.held, "a write into a free slot"
        self.held[order.slot] = (order.key, order.namespace, bytes(order.view))

    def read(self, order: Order) -> ReadOutcome:
        held = self.held[order.slot]
        if held is None or held[:2] != (order.key, order.namespace):
            return ReadOutcome.CORRUPT_KEY
        order.view[:] = held[2]
        return ReadOutcome.OK

    def report(self) -> dict[str, object]:
        return {"used_bytes": len(self.held) * SLOT, "quota_bytes": self.total * SLOT}


class Peer:
    """A client and what it has been told."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.inbox: list[Message] = []
        self.copied: defaultdict[int, set[int]] = defaultdict(set)  # ticket -> indices

    def send(self, message: Any) -> None:
        self.world.core.handle(self.number, message)

    def take(self, kind: type[Any]) -> Any:
        """The first message of a kind that came; it is taken out."""
        found = next(m for m in self.inbox if isinstance(m, kind))
        self.inbox.remove(found)
        return found

    def got(self, kind: type[Any]) -> list[Any]:
        return [m for m in self.inbox if isinstance(m, kind)]

    def lookup(self, *numbers: int) -> list[int]:
        self.send(Lookup(1, keys(*numbers)))
        return list(self.take(Tiers).tiers)

    def ask(
        self,
        job: int,
        numbers: tuple[int, ...],
        askers: int = 1,
        masks: tuple[int, ...] = (),
        audit: bytes = b"",
        space: bytes = SPACE,
        group: int = 0,
    ) -> list[int]:
        """Ask and return the offsets; [] if there is no answer yet."""
        masks = masks or (askers,) * len(numbers)
        self.send(Ask(1, job, group, space, keys(*numbers), askers, words(*masks), audit))
        got = self.got(Verdicts)
        return np.frombuffer(self.take(Verdicts).offsets, "<u8").tolist() if got else []

    def write(self, offset: int, number: int) -> None:
        self.world.arena.memory[offset : offset + PAYLOAD] = content(key(number))

    def commit(self, job: int, *positions: int, ok: bool = True) -> None:
        self.send(Commit(job, indices(*positions), ok))
        self.world.pump()

    def store(self, job: int, *numbers: int) -> list[int]:
        """Write chunks from ask to commit, as the only writer."""
        offsets = self.ask(job, numbers, 1)
        given = [i for i, offset in enumerate(offsets) if offset < 2**63]
        for i in given:
            self.write(offsets[i], numbers[i])
        self.commit(job, *given)
        return offsets

    def open(self, ticket: int, *numbers: int, readers: int = 1, space: bytes = SPACE) -> None:
        self.send(OpenTicket(ticket, 0, space, keys(*numbers), readers))
        self.world.pump()

    def ready(self, ticket: int) -> dict[int, int]:
        """index -> offset of everything announced for a ticket so far."""
        found: dict[int, int] = {}
        for message in self.got(Ready):
            if message.ticket == ticket:
                at = np.frombuffer(message.indices, "<u4").tolist()
                found |= dict(zip(at, np.frombuffer(message.offsets, "<u8").tolist(), strict=True))
        return found

    def failed(self, ticket: int) -> Failed | None:
        return next((m for m in self.got(Failed) if m.ticket == ticket), None)

    def ack(self, ticket: int, *positions: int) -> None:
        self.send(Ack(ticket, indices(*positions)))
        self.world.pump()

    def done(self, ticket: int) -> bool:
        self.send(Done(1, ticket))
        self.world.pump()
        return bool(self.take(Released).held)

    def read(self, offset: int) -> bytes:
        return bytes(self.world.arena.memory[offset : offset + PAYLOAD])

    def bye(self) -> None:
        self.world.core.bye(self.number)
        self.world.pump()

    def vanish(self) -> None:
        self.world.core.vanished(self.number)
        self.world.pump()

    def exit(self) -> None:
        self.world.core.exited(self.number)
        self.world.pump()


class World:
    """A core with an arena of `slots` host slots and a disk of `disk_slots` (0: no disk)."""

    def __init__(
        self, slots: int = 16, disk_slots: int = 0, slot_bytes: int = SLOT, scanned: bool = True
    ) -> None:
        self.now_s = 1000.0
        self.arena = Arena(slots * slot_bytes, populate=False)
        self.slot_bytes = slot_bytes
        self.disk = FakeDisk(disk_slots) if disk_slots else None
        self.peers: dict[int, Peer] = {}
        self.stopped = False
        self.backlog_bytes = 0  # what clients have not read
        self.core = StoreCore(
            self.arena,
            self.disk,
            CoreSettings(60.0, 30.0),
            lambda: self.now_s,
            self._send,
            self._stop,
            backlog=lambda number: self.backlog_bytes,
        )  # type: ignore[arg-type]
        self._next_number = 0
        if scanned:
            self.core.scan_finished()

    def _send(self, number: int, message: Message) -> None:
        self.peers[number].inbox.append(message)

    def _stop(self) -> None:
        self.stopped = True

    def group(self, **changes: Any) -> Group:
        return Group(
            **{
                "slot_bytes": self.slot_bytes,
                "payload_bytes": PAYLOAD,
                "namespace": SPACE,
                "text": "{}",
                **changes,
            }
        )

    def connect(
        self,
        role: Any = "worker",
        engine: str = "e",
        rank: int = 0,
        world: int = 2,
        fingerprint: str = "f",
        groups: list[Group] | None = None,
        version: int = VERSION,
        evictions: bool = False,
    ) -> Peer:
        self._next_number += 1
        peer = Peer(self, self._next_number)
        groups = [self.group()] if groups is None else groups
        hello = Hello(version, role, engine, rank, world, fingerprint, groups, evictions)
        welcome = self.core.hello(peer.number, 1, hello)
        assert isinstance(welcome, Welcome)
        self.peers[peer.number] = peer
        return peer

    def pump(self) -> None:
        """Let the core do all that it can do without a client, a disk or time."""
        while self.core.step():
            pass

    def orders(self, most: int = 1) -> list[Order]:
        return self.core.disk.take(most, 1 << 30)

    def finish(self, order: Order, error: Any = None) -> None:
        """Complete an order; `error`: an errno, or a `ReadOutcome` for a damaged chunk."""
        assert self.disk is not None
        failed = OSError(error, "injected") if isinstance(error, int) else None
        if order.is_read:
            if isinstance(error, ReadOutcome):
                order.view[:] = b"?" * len(order.view)
                self.core.read_done(order, error)
            else:
                self.core.read_done(order, failed or self.disk.read(order))
        else:
            if failed is None:
                self.disk.write(order)
            self.core.write_done(order, failed)
        self.pump()

    def run_disk(self) -> None:
        """Complete all orders, and those that follow."""
        while orders := self.orders(1):
            for order in orders:
                self.finish(order)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.core.tick()
        self.pump()

    # ---- what must always hold --------------------------------------------------------------

    def check(self, in_flight: list[Order] | None = None) -> None:
        """Compare the core's books with counts made from the outside."""
        table = self.core.table
        live = np.flatnonzero(table.state)
        assert len(table.index) == len(live)
        assert (table.index.find(table.index.keys[live]) == live).all()
        in_host = live[np.isin(table.state[live], (WRITING, READING, READY))]
        slots = table.host_slot[in_host].tolist()
        held = list(self.core.quarantine._holders)
        assert len(set(slots + held)) == len(slots + held), "a host slot belongs to two"
        assert (table.host_slot[table.state == DISK] == -1).all()
        used = sum(self.arena.used(c.arena) for c in table.classes if c.arena >= 0)
        assert used == len(slots) + len(held), "host slots leak"
        self._check_pins()
        self._check_tally(live)
        self._check_disk(in_flight or [])
        for cls in table.classes:
            mine = table.cls == cls.number
            assert cls.writing == np.count_nonzero(mine & (table.state == WRITING))
            tickets = [t for e in self.core.engines.values() for t in e.tickets.values()]
            assert cls.windows == sum(t.window for t in tickets if t.cls is cls)
            if cls.arena >= 0 and len(table.classes) == 1:
                assert cls.windows + cls.writing <= limits(table, cls)[0]

    def _check_pins(self) -> None:
        table = self.core.table
        expected: Counter[int] = Counter()
        for engine in self.core.engines.values():
            for ticket in engine.tickets.values():
                told = ticket.entries[: ticket.announced]
                full = ticket.acked[: ticket.announced] == np.uint64(ticket.readers)
                expected.update(told[~full].tolist())
                if ticket.state != FAILED:
                    expected.update(ticket.entries[ticket.announced : ticket.taken].tolist())
        for client in self.core.clients.values():
            for entries in client.pinned:
                expected.update(entries.tolist())
        expected.update(np.flatnonzero(table.queued).tolist())
        pinned = np.flatnonzero(table.pins)
        actual = dict(zip(pinned.tolist(), table.pins[pinned].tolist(), strict=True))
        assert actual == dict(expected)

    def _check_tally(self, live: np.ndarray[Any, Any]) -> None:
        """The tally against a count of one chunk after the other."""
        table, counted = self.core.table, tally(self.core.table)
        states: Counter[tuple[int, int]] = Counter()
        tiers: Counter[tuple[int, int]] = Counter()
        size: Counter[tuple[int, int]] = Counter()
        for entry in live.tolist():
            states[int(table.cls[entry]), int(table.state[entry])] += 1
            space = int(table.namespace[entry])
            for tier, here in enumerate((table.state[entry] == READY, table.disk_slot[entry] >= 0)):
                tiers[tier, space] += int(here)
                size[tier, space] += int(here) * int(table.payload[entry])
        assert {at: n for at, n in np.ndenumerate(counted.class_states) if n} == dict(states)
        assert dict(np.ndenumerate(counted.tier_chunks)).items() >= tiers.items()
        assert dict(np.ndenumerate(counted.tier_bytes)).items() >= size.items()
        assert counted.tier_chunks.sum() == sum(tiers.values())
        assert counted.tier_bytes.sum() == sum(size.values())

    def _check_disk(self, in_flight: list[Order]) -> None:
        if self.disk is None:
            return
        table = self.core.table
        placed = table.disk_slot[table.disk_slot >= 0].tolist()
        writing = [order.slot for order in in_flight if not order.is_read]
        assert sorted(placed + writing) == sorted(self.disk.held), "disk slots leak"

    def check_empty(self) -> None:
        """Nobody is connected and nothing is under way: no pin, promise or slot may be left."""
        self.check()
        assert not self.core.engines
        assert not self.core.clients
        assert not len(self.core.quarantine)
        assert not self.core.table.pins.any()
        assert not np.isin(self.core.table.state, (WRITING, READING)).any()
        assert not any(
            c.windows or c.writing or c.waiting_tickets or c.quarantined
            for c in self.core.table.classes
        )

    def check_bytes(self) -> None:
        """Every chunk in either tier has its own bytes."""
        table = self.core.table
        for entry in np.flatnonzero(table.state == READY):
            assert bytes(table.view(entry)) == content(table.index.keys[entry].tobytes())
        for held in self.disk.held.values() if self.disk else ():
            assert held is None or held[2] == content(held[0])


NO_SPACE = errno.ENOSPC


def counters(world: World) -> dict[str, float]:
    """Every sample that must never go down: counters, and the buckets of histograms."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in families(world.core.status())
        for sample in family.samples
        if family.type in ("counter", "histogram")
    }
