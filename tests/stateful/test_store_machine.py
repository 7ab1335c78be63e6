"""Two engines against one store, in any order of events, with deaths and disk faults.

The clients behave as real ones may: they write their half of a slot at any time from being told
until they have let go of it, read announced slots at any time until they have acknowledged them,
are slow, give up, lose their connection, die, and come back. The bytes of a key are a function of
the key, so every byte that a reader sees can be judged; the rest is judged by counting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from core_world import (
    NO_SPACE,
    PAYLOAD,
    SPACE,
    Peer,
    World,
    content,
    counters,
    indices,
    key,
    keys,
    words,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfold.store.arena import PAGE_BYTES as PAGE
from kvfold.store.chunks import WRITING
from kvfold.store.core_disk import Order
from kvfold.store.disk import ReadOutcome
from kvfold.store.messages import (
    REFUSED,
    Ack,
    Ask,
    Commit,
    Done,
    Failed,
    Lookup,
    OpenTicket,
    Ready,
    Released,
    Tiers,
    Verdicts,
    as_keys,
)

DISK_SLOTS = 10
KEYS = 14
RANKS = 2
HALF = PAYLOAD // RANKS

some_keys = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=8)
which_engine = st.integers(0, 1)
which_rank = st.integers(0, RANKS - 1)


@dataclass
class Job:
    number: int
    keys: list[int]
    masks: list[int]
    first: list[int] | None = None  # the first asker's verdicts
    asked: set[int] = field(default_factory=set)


@dataclass
class Told:
    """A slot that a worker may write until it has committed."""

    offset: int
    key: int


@dataclass
class Load:
    """A ticket as one reader sees it."""

    keys: list[int]
    slots: dict[int, int] = field(default_factory=dict)  # index -> offset: readable now
    seen: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)
    failed: bool = False


class Worker:
    """One worker process and its present connection, if any."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.peer: Peer | None = None
        self.ghosts: list[tuple[Peer, list[Told], list[Told]]] = []
        self.told: dict[tuple[int, int], Told] = {}  # (job, position)
        self.loads: dict[int, Load] = {}
        self.early: set[int] = set()  # tickets that it gave up before they were opened

    def connect(self, world: World) -> None:
        self.peer = world.connect("worker", self.engine.name, self.rank)
        self.told, self.loads = {}, {}

    def may_write(self) -> list[Told]:
        return [*self.told.values(), *(told for _, slots, _ in self.ghosts for told in slots)]

    def may_read(self) -> list[Told]:
        return [*self._reading(), *(told for _, _, slots in self.ghosts for told in slots)]

    def _reading(self) -> list[Told]:
        loads = self.loads.values()
        return [Told(at, load.keys[i]) for load in loads for i, at in load.slots.items()]

    def write(self, world: World) -> None:
        """Write its own half of everything that it may still write."""
        at = self.rank * HALF
        for slot in self.may_write():
            half = content(key(slot.key))[at : at + HALF]
            world.arena.memory[slot.offset + at : slot.offset + at + HALF] = half

    def read(self, world: World) -> None:
        """Look at everything that it may still read."""
        for slot in self.may_read():
            seen = bytes(world.arena.memory[slot.offset : slot.offset + PAYLOAD])
            assert seen == content(key(slot.key)), "a wrong byte is visible"

    def lose_connection(self) -> None:
        """The old connection's slots stay in the hands of the process."""
        assert self.peer is not None
        self.ghosts.append((self.peer, list(self.told.values()), self._reading()))
        self.peer, self.told, self.loads = None, {}, {}


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.scheduler: Peer | None = None
        self.workers = [Worker(self, rank) for rank in range(RANKS)]
        self.jobs: dict[int, Job] = {}
        self.tickets: dict[int, list[int]] = {}
        self.next_number = 1


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.engines = [Engine("left"), Engine("right")]
        self.in_flight: list[Order] = []
        self.published: set[int] = set()

    def _connect(self, engine: Engine) -> None:
        if engine.scheduler is None:
            engine.scheduler = self.world.connect("scheduler", engine.name)
        for worker in engine.workers:
            if worker.peer is None:
                worker.connect(self.world)

    def _forget_if_alone(self, engine: Engine) -> None:
        """An engine without clients starts anew, as the store sees it."""
        if engine.scheduler is None and all(w.peer is None for w in engine.workers):
            engine.jobs, engine.tickets = {}, {}
            for worker in engine.workers:
                worker.early = set()

    @initialize(slots=st.sampled_from([3, 6]), full=st.sampled_from([True, True, False]))
    def begin(self, slots: int, full: bool) -> None:
        """Mostly with a full store: most of what is of interest happens there."""
        self.world = World(slots, DISK_SLOTS)
        self.counted: dict[str, float] = {}
        for engine in self.engines:
            self._connect(engine)
        for number in range(KEYS) if full else ():
            self.store(number % 2, [number])
            self.disk_catches_up()

    # ---- stores -----------------------------------------------------------------------------

    @rule(engine=which_engine, wanted=some_keys, data=st.data())
    def new_job(self, engine: int, wanted: list[int], data: st.DataObject) -> None:
        here = self.engines[engine]
        masks = data.draw(st.lists(st.integers(0, 3), min_size=len(wanted), max_size=len(wanted)))
        # Every byte needs a writer: both halves, or the job would publish rubbish.
        masks = [3 if mask else 0 for mask in masks]
        here.jobs[here.next_number] = Job(here.next_number, wanted, masks)
        here.next_number += 1
        for worker in here.workers:
            self._ask(worker, here.jobs[here.next_number - 1], data.draw(st.booleans()))

    @rule(engine=which_engine, rank=which_rank, data=st.data())
    def ask_late(self, engine: int, rank: int, data: st.DataObject) -> None:
        here = self.engines[engine]
        open_jobs = [job for job in here.jobs.values() if rank not in job.asked]
        if open_jobs:
            self._ask(here.workers[rank], data.draw(st.sampled_from(open_jobs)), True)

    def _ask(self, worker: Worker, job: Job, now: bool) -> None:
        if not now or worker.peer is None:
            return
        known = job.number in self.world.core.engines[worker.engine.name].jobs
        job.asked.add(worker.rank)
        masks = words(*job.masks)
        worker.peer.send(Ask(1, job.number, 0, SPACE, keys(*job.keys), 3, masks, b""))
        verdicts = np.frombuffer(worker.peer.take(Verdicts).offsets, "<u8").tolist()
        if not known:  # new, or forgotten after its deadline
            job.first = verdicts
        assert job.first is not None
        for at, verdict in enumerate(verdicts):
            same = verdict == job.first[at] or (verdict == 2**64 - 2 and job.first[at] < REFUSED)
            assert same, "askers of one job got different answers"
            if verdict < REFUSED and job.masks[at] >> worker.rank & 1:
                worker.told[job.number, at] = Told(verdict, job.keys[at])

    @rule(engine=which_engine, wanted=some_keys)
    def store(self, engine: int, wanted: list[int]) -> None:
        """A whole job, as it mostly goes."""
        here = self.engines[engine]
        here.jobs[here.next_number] = Job(here.next_number, wanted, [3] * len(wanted))
        here.next_number += 1
        for worker in here.workers:
            self._ask(worker, here.jobs[here.next_number - 1], True)
        for worker in here.workers:
            while worker.told and worker.peer is not None:
                self.commit(engine, worker.rank, True)

    @rule(engine=which_engine, rank=which_rank, ok=st.sampled_from([True, True, True, False]))
    def commit(self, engine: int, rank: int, ok: bool) -> None:
        worker = self.engines[engine].workers[rank]
        if worker.peer is None or not worker.told:
            return
        worker.write(self.world)  # a real one commits what it has written
        job = next(iter(worker.told))[0]
        positions = [at for number, at in worker.told if number == job]
        worker.peer.send(Commit(job, indices(*positions), ok))
        for at in positions:
            self.published.add(worker.told.pop((job, at)).key)

    # ---- loads ------------------------------------------------------------------------------

    @rule(
        engine=which_engine,
        at_once=st.sampled_from([True, True, False]),
        sensible=st.sampled_from([True, True, True, False]),
        data=st.data(),
    )
    def open_ticket(self, engine: int, at_once: bool, sensible: bool, data: st.DataObject) -> None:
        """Mostly for chunks that are there, as after a lookup."""
        here = self.engines[engine]
        there = [n for n in range(KEYS) if self.world.core.table.tiers(as_keys(key(n))) != b"\0"]
        wanted = data.draw(
            st.lists(st.sampled_from(there), min_size=1, max_size=8)
            if sensible and there
            else some_keys
        )
        if here.scheduler is None:
            return
        here.scheduler.send(OpenTicket(here.next_number, 0, SPACE, keys(*wanted), 3))
        here.tickets[here.next_number] = wanted
        for worker in here.workers:
            if worker.peer is not None and here.next_number not in worker.early:
                worker.loads[here.next_number] = Load(wanted)
        here.next_number += 1
        if at_once:
            self.world.pump()

    @rule(engine=which_engine, rank=which_rank)
    def receive(self, engine: int, rank: int) -> None:
        self._receive(self.engines[engine].workers[rank])

    def _receive(self, worker: Worker) -> None:
        if worker.peer is None:
            return
        self.world.pump()
        for message in worker.peer.inbox:
            if isinstance(message, Ready):
                load = worker.loads.get(message.ticket)
                assert load is not None, "announced after it was done"
                at = np.frombuffer(message.indices, "<u4").tolist()
                assert at == list(range(len(load.seen), len(load.seen) + len(at))), "out of order"
                offsets = np.frombuffer(message.offsets, "<u8").tolist()
                load.slots |= dict(zip(at, offsets, strict=True))
                load.seen |= set(at)
                assert not load.failed, "announced after it had failed"
            if isinstance(message, Failed) and message.ticket in worker.loads:
                worker.loads[message.ticket].failed = True
        worker.peer.inbox.clear()
        worker.read(self.world)

    @rule(engine=which_engine, rank=which_rank, data=st.data())
    def acknowledge(self, engine: int, rank: int, data: st.DataObject) -> None:
        worker = self.engines[engine].workers[rank]
        self._receive(worker)
        ready = [(ticket, i) for ticket, load in worker.loads.items() for i in load.slots]
        if worker.peer is None or not ready:
            return
        for ticket, i in data.draw(st.lists(st.sampled_from(ready), unique=True, max_size=4)):
            self._ack(worker, ticket, [i])

    def _ack(self, worker: Worker, ticket: int, which: list[int]) -> None:
        assert worker.peer is not None
        load = worker.loads[ticket]
        for i in which:
            del load.slots[i]
            load.acked.add(i)
        worker.peer.send(Ack(ticket, indices(*which)))

    @rule()
    def all_goes_well(self) -> None:
        """Everything that is announced is copied, and the disk does what it is told."""
        if not self.in_flight:
            self.world.run_disk()
        for engine in self.engines:
            for worker in engine.workers:
                self._receive(worker)
                for ticket, load in list(worker.loads.items()):
                    if load.slots:
                        self._ack(worker, ticket, list(load.slots))
                    if load.failed or len(load.acked) == len(load.keys):
                        self._done(worker, ticket)

    @rule(engine=which_engine, rank=which_rank, data=st.data())
    def say_done(self, engine: int, rank: int, data: st.DataObject) -> None:
        """Also too early, and before the ticket was opened."""
        worker = self.engines[engine].workers[rank]
        if worker.peer is not None:
            self._receive(worker)
            next_number = self.engines[engine].next_number
            choices = [*worker.loads, next_number] if data.draw(st.booleans()) else [*worker.loads]
            if choices:
                self._done(worker, data.draw(st.sampled_from(choices)))

    def _done(self, worker: Worker, ticket: int) -> None:
        assert worker.peer is not None
        load = worker.loads.pop(ticket, None)
        if load is None:
            worker.early.add(ticket)
        worker.peer.send(Done(1, ticket))
        held = worker.peer.take(Released).held
        complete = load is not None and load.acked == set(range(len(load.keys)))
        assert not held or complete, "held without having all"
        assert held or not complete or load is None or load.failed or self._somebody_left(worker)

    def _somebody_left(self, worker: Worker) -> bool:
        """Whether a `Failed` may be on its way to a reader that has everything already."""
        assert worker.peer is not None
        return bool(worker.peer.got(Failed))

    # ---- lookups, disk, time ----------------------------------------------------------------

    @rule(engine=which_engine, wanted=some_keys)
    def lookup(self, engine: int, wanted: list[int]) -> None:
        scheduler = self.engines[engine].scheduler
        if scheduler is not None:
            scheduler.send(Lookup(1, keys(*wanted)))
            tiers = scheduler.take(Tiers).tiers
            for number, tier in zip(wanted, tiers, strict=True):
                assert not tier or number in self.published, "a chunk that nobody has written"

    @rule(most=st.integers(1, 3))
    def start_disk(self, most: int) -> None:
        if len(self.in_flight) < 4:
            self.in_flight += self.world.orders(most)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), fault=st.sampled_from([None] * 6 + [NO_SPACE, "corrupt"]))
    def finish_disk(self, data: st.DataObject, fault: object) -> None:
        order = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        if fault == "corrupt":
            fault = ReadOutcome.CORRUPT_CHECKSUM if order.is_read else None
        if not order.is_read:
            assert bytes(order.view) == content(order.key), "a wrong byte goes to disk"
        self.world.finish(order, fault)

    @precondition(lambda self: not self.in_flight)
    @rule()
    def disk_catches_up(self) -> None:
        self.world.run_disk()

    @rule()
    def flush(self) -> None:
        self.world.core.flush(lambda _: None)

    @rule(seconds=st.sampled_from([1, 10, 70]))
    def time_passes(self, seconds: int) -> None:
        self.world.advance(seconds)

    @rule()
    def step(self) -> None:
        self.world.core.step()

    # ---- deaths -----------------------------------------------------------------------------

    @rule(
        engine=which_engine,
        who=st.sampled_from([0, 1, 0, 1, 0, 1, None]),
        how=st.sampled_from(["bye", "vanish", "vanish", "exit"]),
        back=st.booleans(),
    )
    def somebody_leaves(self, engine: int, who: int | None, how: str, back: bool) -> None:
        here = self.engines[engine]
        if who is None:
            self._scheduler_leaves(here, how)
        else:
            self._worker_leaves(here.workers[who], how)
        self._forget_if_alone(here)
        if back:
            self._connect(here)

    def _worker_leaves(self, worker: Worker, how: str) -> None:
        if worker.peer is None:
            return
        worker.write(self.world)
        self._receive(worker)
        if how == "vanish":
            peer = worker.peer
            worker.lose_connection()
            peer.vanish()
        else:
            if how == "exit":  # the process: earlier connections end with it
                for ghost, _, _ in worker.ghosts:
                    ghost.exit()
                worker.ghosts = []
            peer, worker.peer = worker.peer, None
            worker.told, worker.loads = {}, {}
            getattr(peer, how)()

    @rule(engine=which_engine, rank=which_rank)
    def ghosts_exit(self, engine: int, rank: int) -> None:
        """A worker's earlier processes exit, if they were others than its present one."""
        worker = self.engines[engine].workers[rank]
        for ghost, _, _ in worker.ghosts:
            ghost.exit()
        worker.ghosts = []

    def _scheduler_leaves(self, here: Engine, how: str) -> None:
        if here.scheduler is not None:
            peer, here.scheduler = here.scheduler, None
            getattr(peer, how)()

    @rule(engine=which_engine)
    def reconnect(self, engine: int) -> None:
        self._connect(self.engines[engine])

    # ---- what must hold ---------------------------------------------------------------------

    @invariant()
    def everybody_does_what_he_may(self) -> None:
        """Whoever may write a slot does, whoever may read one does, at every moment."""
        workers = [worker for engine in self.engines for worker in engine.workers]
        for worker in workers:
            worker.write(self.world)
        for worker in workers:
            worker.read(self.world)
        self.world.check(self.in_flight)
        self.world.check_bytes()
        self._slots_are_safe(workers)

    @invariant()
    def counters_only_rise(self) -> None:
        now = counters(self.world)
        fell = {name for name, value in self.counted.items() if now[name] < value}
        assert not fell
        self.counted = now

    def _slots_are_safe(self, workers: list[Worker]) -> None:
        """A slot is nobody else's while a client may write it, and pinned while one may read it."""
        table = self.world.core.table
        held = {int(s) * PAGE for s in self.world.core.quarantine._holders}
        by_offset = {
            int(table.host_slot[e]) * PAGE: int(e) for e in np.flatnonzero(table.host_slot >= 0)
        }
        for worker in workers:
            for told in worker.may_write():
                if told.offset not in held:
                    entry = by_offset[told.offset]
                    assert table.state[entry] == WRITING
                    assert table.index.keys[entry].tobytes() == key(told.key)
            for told in worker.may_read():
                entry = by_offset[told.offset]
                assert table.index.keys[entry].tobytes() == key(told.key)
                assert table.pins[entry] > 0

    def teardown(self) -> None:
        """Let everybody who lives finish, without any time passing: nothing may be stuck."""
        for order in self.in_flight:
            self.world.finish(order)
        self.in_flight = []
        workers = [worker for engine in self.engines for worker in engine.workers]
        for worker in workers:
            for ghost, _, _ in worker.ghosts:
                ghost.exit()
            worker.ghosts = []
        for worker in workers:
            while worker.told:
                self.commit(self.engines.index(worker.engine), worker.rank, True)
        for engine in self.engines:  # who was never asked is the deadline's business, not ours
            for job in [j for j in engine.jobs.values() if len(j.asked) < RANKS]:
                for worker in engine.workers:
                    if worker.rank not in job.asked:
                        self._ask(worker, job, True)
                        while worker.told:
                            self.commit(self.engines.index(engine), worker.rank, True)
        assert not len(self.world.core.quarantine), "a slot that nobody may touch is not given back"
        self._finish_loads(workers)
        for worker in workers:
            for load in worker.loads.values():
                assert load.failed or load.acked == set(range(len(load.keys))), "stuck"
            for ticket in list(worker.loads):
                self._done(worker, ticket)
        for engine in self.engines:
            for peer in [engine.scheduler, *(w.peer for w in engine.workers)]:
                if peer is not None:
                    peer.exit()
        self.world.run_disk()
        self.world.check_empty()
        self.world.check_bytes()
        self.world.arena.close()

    def _finish_loads(self, workers: list[Worker]) -> None:
        moved = True
        while moved:
            moved = False
            self.world.pump()
            self.world.run_disk()
            for worker in workers:
                self._receive(worker)
                for ticket, load in worker.loads.items():
                    if worker.peer is not None and load.slots:
                        self._ack(worker, ticket, list(load.slots))
                        moved = True


StoreMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestStoreMachine = StoreMachine.TestCase
