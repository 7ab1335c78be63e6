"""Operations of a chaos run on one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvfold.testing.chaos_check import held_by_store
from kvfold.testing.chaos_engine import Request, Stepper, Stuck
from kvfold.testing.chaos_faults import Faults
from kvfold.testing.chaos_report import Report
from kvfold.testing.chaos_talk import Ask, Fault, Reset, Step, Talks
from kvfold.testing.checkpoints import prompt
from kvfold.testing.drain import NotDrained, drain

AT_ONCE = 12
"""Requests that run or wait."""
ALONE = 6
"""Requests that begin while there is no store; the next ones wait for it."""
HEAL_S = 60.0
"""For a store to be there again after everything has healed."""


class Stretch:
    """Operations on one engine."""

    def __init__(self, llm: Any, report: Report, talks: Talks, faults: Faults) -> None:
        self.stepper = Stepper(llm)
        self.requests: list[Request] = []
        self._report, self._talks, self._faults = report, talks, faults
        self._by_talk: dict[int, Request] = {}
        self._talk_of: dict[str, int] = {}
        self._aborts: dict[str, int] = {}
        self._armed: list[Fault] = []
        self._alone = 0

    def run(self, steps: Iterator[Step], goes_on: Callable[[], bool]) -> None:
        """Carry out operations while `goes_on()`; then wait for answers and what has to heal."""
        while goes_on():
            step = next(steps)
            self._report.operations += 1
            match step.do:
                case Ask():
                    self._ask(step.do)
                case Reset():
                    self._reset(step.do)
                case Fault():
                    self._armed.append(step.do)
            for _ in range(step.steps):
                self._step()
        while self._armed:
            self._inject(self._armed.pop())
        self._until(lambda: not self.stepper.running, "the last answers")
        self._faults.heal()

    # -- operations ----------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        earlier = [self._by_talk[t] for t in (ask.talk, ask.other) if t in self._by_talk]
        self._until(lambda: all(request.over for request in earlier), "earlier answers")
        self._until(lambda: len(self.stepper.running) < AT_ONCE, "fewer requests")
        self._alone = 0 if self._store_is_there() else self._alone + 1
        if self._alone > ALONE:
            self._until(self._store_is_there, "a store", within_s=HEAL_S)
        ids = self._talks.ask(ask)
        salt = (None, "a", "b")[ask.talk % 3]
        stop = [8 + ask.seed % 500, 8 + ask.seed % 499] if ask.stop else []
        request = self.stepper.ask(ids, ask.tokens, skip=ask.skip, stop=stop, salt=salt)
        self._by_talk[ask.talk] = request
        self._talk_of[request.id] = ask.talk
        if ask.abort_after is not None:
            self._aborts[request.id] = ask.abort_after
        self.requests.append(request)
        self._report.requests += 1

    def _reset(self, reset: Reset) -> None:
        if reset.how != "soft":
            # The engine cannot reset while a load fills its blocks or a copy holds them.
            quiet = reset.how == "quiet"
            self._until(
                lambda: not (quiet and self.stepper.running) and not self.stepper.loading(),
                "an engine that can be reset",
            )
            with suppress(NotDrained):
                drain(self.stepper.llm, self.stepper.patience_s)
        done = self.stepper.llm.reset_prefix_cache(
            reset_running_requests=reset.how == "hard", reset_connector=reset.connector
        )
        name = f"{reset.how}{' with the connector' if reset.connector else ''}"
        self._report.resets[name] += 1
        if reset.how != "soft" and not done:
            self._report.problems.append(f"a reset ({name}) was refused")

    # -- steps ---------------------------------------------------------------------------------

    def _step(self) -> None:
        stepper, report = self.stepper, self._report
        for request in stepper.step():
            report.answered += 1
            if request.finish_reason not in ("length", "stop"):
                report.problems.append(f"{request.id} ended with {request.finish_reason}")
            self._talks.answered(self._talk_of[request.id], request.tokens)
        for request in list(stepper.running.values()):
            if request.steps >= self._aborts.get(request.id, 1 << 30):
                stepper.abort(request)
                report.aborted += 1
        if self._armed and self._store_is_there() and self._now(self._armed[0]):
            self._inject(self._armed.pop(0))
        if not stepper.running:
            time.sleep(0.002)  # only waits for something

    def _now(self, fault: Fault) -> bool:
        if len(self._armed) > 2:  # its moment does not come
            return True
        side = self.stepper.side
        busy = {"loading": side.waiting_loads, "storing": side.holds.jobs, "any": 1}
        return bool(busy[fault.moment])

    def _inject(self, fault: Fault) -> None:
        self._until(self._store_is_there, "a store", within_s=HEAL_S)
        self._faults.inject(fault.name, fault.seed)

    def _store_is_there(self) -> bool:
        current = self.stepper.connector._link.current
        if current is not None:
            self._report.stores.add(current[0].store_id)
        return current is not None

    def _until(self, holds: Callable[[], bool], what: str, within_s: float = 0) -> None:
        deadline = time.monotonic() + (within_s or self.stepper.patience_s)
        while not holds():
            if time.monotonic() > deadline:
                raise Stuck(f"{what} did not come: {self.stepper.story()}")
            self._step()

    # -- the end -------------------------------------------------------------------------------

    def check_end(self, runtime: Path) -> None:
        """Everything has healed: hits are back, and nobody holds anything."""
        stepper, problems = self.stepper, self._report.problems
        deadline = time.monotonic() + HEAL_S
        while not self._store_is_there() and time.monotonic() < deadline:
            time.sleep(0.05)
        try:
            ids = prompt(300, seed=self._report.requests)
            found = 0  # the first time; and a busy machine may miss a deadline
            while not found and time.monotonic() < deadline:
                stepper.settle()
                assert stepper.llm.reset_prefix_cache()
                self.requests.append(stepper.answer(ids))
                found = self.requests[-1].cached_tokens
            if not found:
                problems.append("after everything has healed, a prompt is not found again")
            stepper.settle()
            if held := stepper.held():
                problems.append(f"the engine still holds {held}")
        except (Stuck, NotDrained, AssertionError) as error:
            problems.append(f"the engine does not come to rest: {error!r}")
        if held := held_by_store(runtime):
            problems.append(f"the store still holds {held}")
