"""A virtual cluster whose ranks are processes: each has its own pages, plan, copies and connection.

This process only orders the steps (fill, store, wipe, load, compare) and gathers what the ranks
found. A rank that dies or does not answer is told as `RankLost`, and the other ranks are ended.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from signal import Signals
from typing import Any

from kvfold.errors import ConfigError, KvfoldError, StoreError
from kvfold.mesh import Mesh
from kvfold.plan import PlanOptions
from kvfold.spec import GroupSpec
from kvfold.store.client import StoreClient
from kvfold.testing.cluster import Cluster, Difference
from kvfold.testing.cluster_copy import Loaded, Membership, Stored, suspects
from kvfold.testing.cluster_rank import Failed, Setup
from kvfold.testing.cluster_store import (
    ANSWER_S,
    Shelf,
    StoreShelf,
    check_world,
    unpublished,
)

STEP_S = 2 * ANSWER_S
"""A rank that takes longer for a step is lost."""
END_S = 10.0


class RankLost(KvfoldError):
    """The process of `rank` died or did not answer."""

    def __init__(self, rank: int, step: str, what: str) -> None:
        super().__init__(f"rank {rank} {what} in step {step!r}")
        self.rank = rank


class ProcessCluster(Cluster):
    """A `Cluster` with a process per rank; needs a real store, and `close` at the end.

    The processes start with the first step. Every step raises `RankLost` as above, and
    `StoreError` in the words of a rank that could not do it.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        mesh: Mesh,
        options: PlanOptions | None = None,
        layout: str = "LBHNC",
        blocks: int = 2,
        seed: int = 0,
        unlike: Collection[str] = (),
    ) -> None:
        super().__init__(groups, mesh, options, layout, blocks, seed, unlike, ranks=())
        check_world(mesh.world_size)
        self._setup = Setup(tuple(groups), mesh, options, layout, blocks, seed, tuple(unlike), 0)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection] = []
        self._count = 0

    def __enter__(self) -> ProcessCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- steps ---------------------------------------------------------------------------------

    def fill(self) -> None:
        self.order("fill")

    def wipe(self) -> None:
        self.order("wipe")

    def differences(
        self, only: Collection[int] | None = None, limit: int = 100
    ) -> list[Difference]:
        chosen = None if only is None else list(only)
        return [one for found in self.order("compare", chosen, limit) for one in found][:limit]

    def store(self, shelf: Shelf) -> Stored:
        done, answers = Stored(), []
        with self._joined(shelf):
            for number, group in enumerate(self.groups):
                self._count += 1
                answers = self.order("write", number, self._count)
                offsets = answers[0].offsets
                for rank, answer in enumerate(answers):
                    if answer.offsets != offsets:
                        raise StoreError(f"the store answered rank {rank} otherwise than rank 0")
                done.suspects += tuple(suspects(group, [a.checksums for a in answers]))
                done.count(offsets)
                (wrong,) = self.order("judge", number, offsets, ranks=(0,))
                done.misplaced += tuple(wrong)
                self.order("commit", self._count)
        done.nbytes, done.copy_s = sum(a.nbytes for a in answers), sum(a.copy_s for a in answers)
        return done

    def load(self, shelf: Shelf, only: Collection[int] | None = None) -> Loaded:
        done, answers = Loaded(), []
        with self._joined(shelf) as (scheduler, member):
            for number in range(len(self.groups)) if only is None else only:
                self._count += 1
                keys = member.keys(self, number)
                failure = unpublished(scheduler, keys)
                if failure is None:
                    space = member.groups[number].namespace
                    readers = (1 << self.mesh.world_size) - 1
                    scheduler.open_ticket(self._count, number, space, keys, readers)
                    answers = self.order("read", number, self._count)
                    failure = next((a.failure for a in answers if a.failure), None)
                if failure is None:
                    done.chunks += len(self.chunks())
                else:
                    done.failures += (f"{self.groups[number].name}: {failure}",)
        done.nbytes, done.copy_s = sum(a.nbytes for a in answers), sum(a.copy_s for a in answers)
        return done

    @contextmanager
    def _joined(self, shelf: Shelf) -> Iterator[tuple[StoreClient, Membership]]:
        """Connect a scheduler here and every rank over there."""
        if not isinstance(shelf, StoreShelf):
            raise ConfigError("shelf", type(shelf).__name__, "a store process, as ranks are")
        member = Membership.of(self)
        scheduler = StoreClient.connect(
            shelf.settings,
            role="scheduler",
            engine=member.engine,
            world=self.mesh.world_size,
            fingerprint=member.fingerprint,
            groups=member.groups,
        )
        try:
            self.order("join", shelf.settings)
            yield scheduler, member
            self.order("leave")
        finally:
            scheduler.close()

    # -- processes -----------------------------------------------------------------------------

    def order(self, step: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Have `ranks` (default: all) do `step` at the same time; return their answers."""
        try:
            if not self.processes:
                self._start()
            return self._order(step, arguments, range(len(self._lines)) if ranks is None else ranks)
        except BaseException:
            self._end(kill=True)
            raise

    def close(self) -> None:
        """End the ranks."""
        self._end(kill=False)

    def _start(self) -> None:
        for _ in range(self.mesh.world_size):
            ours, theirs = Pipe()
            self._lines.append(ours)
            with theirs:
                # Not as a main module: its classes must be found here by the same name.
                code = f"from kvfold.testing.cluster_rank import serve; serve({theirs.fileno()})"
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-c", code],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                )
        for rank in range(len(self._lines)):
            self._send(rank, "start", tuple(self._setup._replace(rank=rank)))
        self._gather("start", range(len(self._lines)))

    def _order(self, step: str, arguments: tuple[Any, ...], ranks: Sequence[int]) -> list[Any]:
        for rank in ranks:
            self._send(rank, step, arguments)
        return self._gather(step, ranks)

    def _send(self, rank: int, step: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._lines[rank].send((step, arguments))
        except OSError:
            raise self._lost(rank, step) from None

    def _gather(self, step: str, ranks: Sequence[int]) -> list[Any]:
        waiting: dict[Any, int] = {self._lines[rank]: rank for rank in ranks}
        answers: dict[int, Any] = {}
        until_s = time.monotonic() + STEP_S
        while waiting:
            ready = wait(list(waiting), max(0.0, until_s - time.monotonic()))
            if not ready:
                rank = min(waiting.values())
                raise RankLost(rank, step, f"did not answer for {STEP_S:.0f} s")
            for line in ready:
                rank = waiting.pop(line)
                try:
                    answers[rank] = self._lines[rank].recv()
                except (EOFError, OSError):
                    raise self._lost(rank, step) from None
                if isinstance(answers[rank], Failed):
                    raise self._failure(rank, step, answers[rank].why)
        return [answers[rank] for rank in ranks]

    def _failure(self, rank: int, step: str, why: str) -> KvfoldError:
        """Return what to raise for a rank that could not: the death of another explains it."""
        time.sleep(0.1)  # who dies is heard of by its sockets a little earlier
        for other, process in enumerate(self.processes):
            if process.poll() is not None:
                return self._lost(other, step)
        return StoreError(f"rank {rank} in step {step!r}: {why}")

    def _lost(self, rank: int, step: str) -> RankLost:
        try:
            status = self.processes[rank].wait(END_S)
        except subprocess.TimeoutExpired:
            return RankLost(rank, step, "closed its pipe")
        if status < 0:
            return RankLost(rank, step, f"was ended by {Signals(-status).name}")
        return RankLost(rank, step, f"ended with exit status {status}")

    def _end(self, kill: bool) -> None:
        for line in self._lines:
            line.close()
        for process in self.processes:
            if kill:
                process.kill()
        for process in self.processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._lines, self.processes = [], []
