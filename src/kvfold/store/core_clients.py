"""Who is connected, and what each client may still touch after its connection is gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvfold.errors import FormatError
from kvfold.store.chunks import ChunkTable, Ints, SlotClass
from kvfold.store.messages import Group, Message

if TYPE_CHECKING:
    from kvfold.store.jobs import Job
    from kvfold.store.tickets import Ticket

# How tickets and jobs answer: (client number, message). The server or a test says how.
Send = Callable[[int, Message], None]

# How many namespaces of an engine are known: those of its groups and of its latest epochs.
_NAMESPACES = 1024
# How many `Done`s of unknown tickets an engine's record remembers.
_EARLY_DONES = 4096


@dataclass(eq=False)
class Engine:
    """What belongs to one engine as long as any of its clients is connected."""

    name: str
    fingerprint: str
    clients: set[Client] = field(default_factory=set)
    workers: dict[int, Client] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    namespaces: dict[bytes, None] = field(default_factory=dict)
    early_dones: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)

    @property
    def connected(self) -> int:
        """Mask of the ranks whose workers are connected."""
        return sum(1 << rank for rank in self.workers)

    def learn(self, namespace: bytes) -> None:
        """The engine stores under this namespace."""
        if namespace not in self.namespaces:
            self.namespaces[namespace] = None
            if len(self.namespaces) > _NAMESPACES:
                del self.namespaces[next(iter(self.namespaces))]

    def note_early_done(self, ticket: int, rank: int) -> None:
        self.early_dones[ticket, rank] = None
        while len(self.early_dones) > _EARLY_DONES:
            self.early_dones.popitem(last=False)

    def early_done_mask(self, ticket: int) -> int:
        return sum(1 << rank for rank in range(64) if (ticket, rank) in self.early_dones)


@dataclass(eq=False)
class Client:
    """One connection. `held_slots` and `pinned` outlive it until the process has exited."""

    number: int
    pid: int
    role: str
    rank: int
    engine: Engine
    groups: list[tuple[Group, SlotClass]]
    connected: bool = True
    held_slots: list[int] = field(default_factory=list)
    pinned: list[Ints] = field(default_factory=list)

    @property
    def bit(self) -> int:
        return 1 << self.rank

    def group(self, index: int) -> tuple[Group, SlotClass]:
        if index >= len(self.groups):
            raise FormatError(f"group {index} of {len(self.groups)}")
        return self.groups[index]


class Quarantine:
    """Host slots of aborted jobs that some client may still touch: slot -> how many may."""

    def __init__(self, table: ChunkTable) -> None:
        self._table = table
        self._holders: dict[int, tuple[int, SlotClass]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def hold(self, slot: int, holders: int, cls: SlotClass) -> None:
        """Keep a slot from use until `holders` clients have let go of it."""
        if holders:
            self._holders[slot] = (holders, cls)
            cls.quarantined += 1
        else:
            self._table.free_host([slot])

    def release(self, slots: list[int] | Ints) -> None:
        """One client lets go of each of the slots."""
        for slot in map(int, slots):
            holders, cls = self._holders[slot]
            if holders > 1:
                self._holders[slot] = (holders - 1, cls)
                continue
            del self._holders[slot]
            cls.quarantined -= 1
            self._table.free_host([slot])
