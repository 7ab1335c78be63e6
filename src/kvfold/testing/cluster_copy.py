"""What ranks of a virtual cluster do with a shelf: ask, copy, compare the slots, commit, read back.

`Joined` does it for a cluster whose ranks are all in this process; the functions and `Copies` are
what a rank in a process of its own uses as well.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvfold import identity
from kvfold.copy.cpu import Bytes, CpuCopier
from kvfold.plan import GroupPlan
from kvfold.store.client import NO_ROOM, REFUSED, Group
from kvfold.store.messages import NO_FRAGMENT
from kvfold.testing.cluster_store import KEY_BYTES, Session, Shelf

if TYPE_CHECKING:
    from kvfold.testing.cluster import Cluster


class Suspect(NamedTuple):
    """A rank whose bytes differ from those of the ranks that are said to hold the same."""

    layer: str
    rank: int
    others: tuple[int, ...]


class Misplaced(NamedTuple):
    """A layer whose bytes in the slot of a chunk are not what the format says."""

    layer: str
    chunk: int


@dataclass
class Stored:
    """What one `store` did: bytes copied into slots, time in copies, and what was refused."""

    chunks: int = 0
    nbytes: int = 0
    copy_s: float = 0.0
    no_room: int = 0
    refused: int = 0
    suspects: tuple[Suspect, ...] = ()
    misplaced: tuple[Misplaced, ...] = ()

    def count(self, offsets: Sequence[int]) -> None:
        """Count the store's answers for one group: offsets of slots, or marks."""
        self.no_room += offsets.count(NO_ROOM)
        self.refused += offsets.count(REFUSED)
        self.chunks += sum(offset < REFUSED for offset in offsets)


@dataclass
class Loaded:
    """What one `load` did; `failures` say which group could not be had and why."""

    chunks: int = 0
    nbytes: int = 0
    copy_s: float = 0.0
    failures: tuple[str, ...] = ()


class Membership(NamedTuple):
    """How a cluster introduces itself to a store: alike on all its ranks."""

    engine: str
    fingerprint: str
    groups: list[Group]

    @classmethod
    def of(cls, cluster: Cluster) -> Membership:
        told = [identity.identity(fields) for fields in cluster.identities()]
        groups = [
            Group(group.slot_bytes, group.chunk_bytes, identity.namespace(one.digest, i), "")
            for i, (group, one) in enumerate(zip(cluster.groups, told, strict=True))
        ]
        print_ = cluster.plan.fingerprint
        engine = hashlib.sha256(f"{print_} {cluster.layout}".encode()).hexdigest()[:16]
        return cls(engine, print_, groups)

    def keys(self, cluster: Cluster, number: int) -> bytes:
        """Return the key of every chunk of group `number`."""
        count = len(cluster.chunks())
        told = (f"seed {cluster.seed} chunk {i}".encode() for i in range(count))
        hashes = b"".join(hashlib.sha256(text).digest() for text in told)
        return identity.chunk_keys(self.groups[number].namespace, hashes, KEY_BYTES)


def writers(group: GroupPlan, keys: bytes) -> list[int]:
    """Return for every key the mask of ranks that write its chunk."""
    masks = [sum(1 << r for r in group.writers(i)) for i in range(group.rotations)]
    return [masks[rotation] for rotation in _rotations(group, keys)]


def records(checksums: dict[int, int]) -> bytes:
    """Return a rank's audit as the store takes it; a rank that shares nothing says so."""
    found = list(checksums.items()) or [(NO_FRAGMENT, 0)]
    return b"".join(i.to_bytes(4, "little") + v.to_bytes(8, "little") for i, v in found)


def suspects(group: GroupPlan, checksums: Sequence[dict[int, int]]) -> Iterator[Suspect]:
    """Yield the owners that differ from most of a fragment's owners; `Cluster.audit` by rank.

    Where no content has a majority, the first owner's is taken for right.
    """
    for number, fragment in enumerate(group.fragments):
        if fragment.replicas > 1:
            seen = {rank: checksums[rank][number] for rank in fragment.owners}
            right = Counter(seen.values()).most_common(1)[0][0]
            others = tuple(rank for rank, value in seen.items() if value == right)
            for rank, value in seen.items():
                if value != right:
                    yield Suspect(fragment.layer, rank, others)


def misplaced(
    cluster: Cluster, number: int, arena: memoryview | Bytes, offsets: Sequence[int]
) -> Iterator[Misplaced]:
    """Compare slots, before they are published, with the format: layer, block, head, state."""
    memory, group = np.frombuffer(arena, np.uint8), cluster.groups[number]
    step, before = group.blocks_per_chunk, 0
    for layer in group.layers:
        content = cluster.truth.slots(layer.spec, layer.placement.stage)
        if content is None:
            before += layer.block_bytes * step
            continue
        nbytes = content.shape[1] * step
        for i, offset in enumerate(offsets):
            slot = memory[offset + before :][:nbytes] if offset < REFUSED else None
            if slot is not None and not np.array_equal(
                slot, content[i * step : (i + 1) * step].reshape(-1)
            ):
                yield Misplaced(layer.spec.name, i)
        before += nbytes


class Copies:
    """One rank's copies between its pages and a shelf's memory; counts bytes and time."""

    def __init__(self, cluster: Cluster, rank: int, arena: memoryview | Bytes) -> None:
        self.rank, self.nbytes, self.copy_s = rank, 0, 0.0
        self._groups, self._blocks = cluster.groups, cluster.chunks()
        self._copier = CpuCopier(cluster.pages(rank), arena)
        self._reads: dict[int, Any] = {}

    def write(self, number: int, keys: bytes, offsets: Sequence[int]) -> list[int]:
        """Copy this rank's part of every granted chunk; return the chunks that have one."""
        group = self._groups[number]
        rotations = _rotations(group, keys)
        granted = [
            i
            for i, offset in enumerate(offsets)
            if offset < REFUSED and self.rank in group.writers(rotations[i])
        ]
        sweeps = {
            rotation: self._copier.compile(group.writes(self.rank, rotation), group.slot_bytes)
            for rotation in {rotations[i] for i in granted}
        }
        started_s = time.perf_counter()
        for i in granted:
            self.nbytes += CpuCopier.to_slot(sweeps[rotations[i]], self._blocks[i], offsets[i])
        self.copy_s += time.perf_counter() - started_s
        return granted

    def read(self, number: int, index: int, offset: int) -> None:
        """Fill this rank's pages from chunk `index` of group `number`, whose slot is there."""
        if number not in self._reads:
            group = self._groups[number]
            self._reads[number] = self._copier.compile(group.reads(self.rank), group.slot_bytes)
        started_s = time.perf_counter()
        self.nbytes += CpuCopier.to_pages(self._reads[number], self._blocks[index], offset)
        self.copy_s += time.perf_counter() - started_s


def _rotations(group: GroupPlan, keys: bytes) -> list[int]:
    return [first % group.rotations for first in keys[::KEY_BYTES]]


class Joined:
    """A cluster with a session on a shelf, and its runs compiled for that shelf's memory."""

    def __init__(self, cluster: Cluster, shelf: Shelf) -> None:
        self._cluster, self._member = cluster, Membership.of(cluster)
        engine, fingerprint, groups = self._member
        world = cluster.mesh.world_size
        self._session: Session = shelf.open(engine, world, fingerprint, groups)
        self._copies = [Copies(cluster, r, self._session.arena(r)) for r in range(world)]

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies = []
        self._session.close()

    def store(self) -> Stored:
        """Audit every group and store the chunks that the shelf takes."""
        done, cluster, session = Stored(), self._cluster, self._session
        for number, group in enumerate(cluster.groups):
            keys = self._member.keys(cluster, number)
            checksums = cluster.audit(number, cluster.chunks())
            done.suspects += tuple(suspects(group, checksums))
            audits = [*map(records, checksums)]
            job, offsets, _ = session.ask(number, keys, writers(group, keys), audits)
            done.count(offsets)
            written = [copies.write(number, keys, offsets) for copies in self._copies]
            done.misplaced += tuple(misplaced(cluster, number, session.arena(0), offsets))
            for rank, granted in enumerate(written):
                session.commit(job, rank, granted)
        self._sum(done)
        return done

    def load(self, chosen: Collection[int]) -> Loaded:
        """Fill every rank's pages of the `chosen` groups."""
        done, chunks = Loaded(), len(self._cluster.chunks())
        for number in chosen:

            def copy(rank: int, index: int, offset: int, number: int = number) -> None:
                self._copies[rank].read(number, index, offset)

            keys = self._member.keys(self._cluster, number)
            failure = self._session.load(number, keys, copy)
            if failure is None:
                done.chunks += chunks
            else:
                done.failures += (f"{self._cluster.groups[number].name}: {failure}",)
        self._sum(done)
        return done

    def _sum(self, done: Stored | Loaded) -> None:
        done.nbytes = sum(copies.nbytes for copies in self._copies)
        done.copy_s = sum(copies.copy_s for copies in self._copies)
