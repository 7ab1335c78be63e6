"""What a chaos run does: conversations, resets and faults, drawn from a seed.

The operations and their parameters depend on the seed alone. A prompt depends also on the answers
before it, and these are greedy; so two runs of one seed ask the same, unless a tie of two tokens
was broken otherwise.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvfold.testing.checkpoints import prompt

TALKS = 12
SYSTEMS = tuple(prompt(length, seed=length) for length in (60, 150, 290))
"""System prompts, as token ids; conversations share them."""
LONGEST = 760
"""Tokens of the longest prompt; a conversation that would be longer begins anew."""
MAX_TOKENS = 60
STORE_FAULTS = ("kill", "kill", "end", "stop", "stop", "slow")
DISK_FAULTS = ("corrupt", "corrupt", "truncate", "delete", "full", "unreadable")
ASKS = 120
"""Requests of one deck."""

Kind = Literal["next", "again", "edit", "branch", "fresh"]
KINDS: tuple[Kind, ...] = ("next", "again", "edit", "branch", "fresh")
Moment = Literal["loading", "storing", "any"]


@dataclass(frozen=True)
class Ask:
    """One request of conversation `talk`.

    "next" goes on, "again" sends the last prompt once more, "edit" replaces the last question,
    "branch" first takes over the turns of `other`, "fresh" begins anew. A request is aborted
    `abort_after` engine steps after it began.
    """

    talk: int
    kind: Kind
    other: int
    words: int
    seed: int
    tokens: int
    abort_after: int | None
    skip: bool
    stop: bool


@dataclass(frozen=True)
class Reset:
    """Empty the engine's prefix cache: "soft" at once, whether or not requests run; "quiet" when
    all have been answered; "hard" throws the running ones out of their blocks.
    """

    how: Literal["soft", "quiet", "hard"]
    connector: bool


@dataclass(frozen=True)
class Fault:
    """Something breaks at the next such moment."""

    name: str
    moment: Moment
    seed: int


@dataclass(frozen=True)
class Step:
    """An operation, and the engine steps until the next."""

    do: Ask | Reset | Fault
    steps: int


def operations(seed: int) -> Iterator[Step]:
    """All operations of a run, without end."""
    return itertools.chain.from_iterable(deck(seed, number) for number in itertools.count())


def deck(seed: int, number: int) -> list[Step]:
    """A stretch of the run in which everything happens: each fault, each kind of reset."""
    draw = random.Random(f"{seed}/{number}")
    moments: Sequence[Moment] = ("loading", "loading", "storing", "any")
    rest: list[Ask | Reset | Fault] = [
        Fault(name, draw.choice(moments), draw.getrandbits(32))
        for name in (*STORE_FAULTS, *DISK_FAULTS)
    ]
    rest += [Reset("quiet", False)] * 6 + [Reset("soft", False), Reset("hard", False)]
    rest += [Reset("soft", True), Reset("quiet", True), Reset("hard", True)]
    draw.shuffle(rest)
    asks: list[Ask | Reset | Fault] = [_ask(draw) for _ in range(ASKS)]
    mixed = asks[:]
    for at, operation in enumerate(rest):  # evenly, after some requests
        mixed.insert((at + 1) * (len(asks) // (len(rest) + 1)) + at, operation)
    return [Step(operation, draw.choice((0, 0, 1, 2, 5, 12))) for operation in mixed]


def _ask(draw: random.Random) -> Ask:
    return Ask(
        talk=draw.randrange(TALKS),
        kind=draw.choices(KINDS, (8, 3, 2, 3, 1))[0],
        other=draw.randrange(TALKS),
        words=draw.choice((3, 20, 32, 64, 90, 128)),
        seed=draw.getrandbits(32),
        tokens=draw.choice((1, 4, 8, 16, 32, MAX_TOKENS)),
        abort_after=draw.choice((0, 1, 3, 8, 20)) if draw.random() < 0.12 else None,
        skip=draw.random() < 0.06,
        stop=draw.random() < 0.15,
    )


@dataclass
class Talk:
    """One conversation: a system prompt, and questions with their answers as token ids."""

    system: list[int]
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    question: list[int] = field(default_factory=list)
    """The last one asked. It becomes a turn when it has been answered."""
    asked: int = 0
    """Turns before it."""

    @property
    def history(self) -> list[int]:
        return self.system + [token for asked, said in self.turns for token in (*asked, *said)]


class Talks:
    """All conversations of a run."""

    def __init__(self) -> None:
        self._talks = [Talk(SYSTEMS[i % len(SYSTEMS)]) for i in range(TALKS)]

    def ask(self, ask: Ask) -> list[int]:
        """The prompt of a request. The conversations that it concerns wait for no answer."""
        talk = self._talks[ask.talk]
        if ask.kind == "branch":
            other = self._talks[ask.other]
            talk.system, talk.turns = other.system, other.turns[: 1 + ask.seed % 4]
        elif ask.kind == "again" and talk.question:
            del talk.turns[talk.asked :]
            return talk.history + talk.question
        elif ask.kind == "edit" and talk.turns:
            talk.turns.pop()
        talk.question = prompt(ask.words, seed=ask.seed)
        if ask.kind == "fresh" or len(talk.history) + len(talk.question) > LONGEST:
            talk.system, talk.turns = SYSTEMS[ask.seed % len(SYSTEMS)], []
        talk.asked = len(talk.turns)
        return talk.history + talk.question

    def answered(self, talk: int, answer: list[int]) -> None:
        """The last question of a conversation has its whole answer."""
        self._talks[talk].turns.append((self._talks[talk].question, answer))
