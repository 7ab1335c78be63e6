"""Virtual pages: instead of bytes, a block holds which token prefix each of its positions was
computed from.

A *tag* stands for a token prefix (and for the cache salt and the version of the weights). Whoever
reads a position compares its tag with what it must be, so a wrong, stale or half-written block is
found at once, without a model.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

FULL, WINDOW, CHUNKED, STATE, SCRATCH = "full", "window", "chunked", "state", "scratch"
EMPTY = 0

Page = list[int]


class WrongBlock(AssertionError):
    """Something read, stored or overwrote a block that it should not have."""


@dataclass(frozen=True)
class Strand:
    """Layers whose pages are written, stored and loaded together.

    `group` is the engine's group. A draft inside the target's group is a strand of its own, as it
    may be loaded or not independently of the target's.
    """

    number: int
    group: int
    draft: bool
    kind: str
    block_tokens: int
    window_tokens: int = 0
    replayed: bool = False
    """Outside prefix caching, and rebuilt after a hit from `Request.replay_start` on."""

    def reads(self, computed: int, replay_start: int = 0) -> int:
        """The first position that the token at `computed` attends to."""
        if self.kind == FULL:
            return 0
        if self.kind == WINDOW:
            first = max(0, computed - self.window_tokens + 1)
            return max(first, replay_start) if self.replayed else first
        assert self.kind == CHUNKED
        return computed // self.window_tokens * self.window_tokens


class Tale:
    """The tags of one request's tokens, and from them what every strand must hold."""

    def __init__(self, salt: str, version: int) -> None:
        self.version = version
        self._seed = hash((zlib.crc32(salt.encode()), version))
        self.tags: list[int] = []
        self._values: dict[int, list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Know the request's tokens: `tokens` are all of them, from the first."""
        tags = self.tags
        tag = tags[-1] if tags else self._seed
        for token in tokens[len(tags) :]:
            tag = hash((tag, token))
            tags.append(tag)

    def after(self, known: int, guesses: Sequence[int]) -> list[int]:
        """Tags of `guesses` that follow the first `known` tokens."""
        tag = self.tags[known - 1] if known else self._seed
        tags = []
        for token in guesses:
            tag = hash((tag, token))
            tags.append(tag)
        return tags

    def values(self, strand: Strand) -> list[int]:
        """What each position must hold in `strand`."""
        values = self._values.setdefault(strand.number, [])
        if len(values) < len(self.tags):
            number = strand.number
            values.extend([tag + number for tag in self.tags[len(values) :]])
        return values

    def state(self, strand: Strand, tokens: int) -> Page:
        """What a block of states must hold after `tokens` tokens."""
        return [tokens, self.tags[tokens - 1] + strand.number]


def next_token(tag: int) -> int:
    """What the model says after a prefix."""
    return tag % 50_000 + 1000


class Pages:
    """The blocks of one worker. A block belongs to one engine group at a time, as all groups share
    one memory.
    """

    def __init__(self, strands: Sequence[Strand], num_blocks: int) -> None:
        self.strands = strands
        self._by_group: dict[int, list[Strand]] = {}
        for strand in strands:
            self._by_group.setdefault(strand.group, []).append(strand)
        self._owner = [-1] * num_blocks
        self._pages: list[dict[int, Page]] = [{} for _ in range(num_blocks)]

    def page(self, strand: Strand, block: int) -> Page:
        """The block's page for writing; a block of another group loses its content."""
        pages = self._pages[block]
        if self._owner[block] != strand.group:
            pages.clear()
            self._owner[block] = strand.group
        page = pages.get(strand.number)
        if page is None:
            size = 2 if strand.kind == STATE else strand.block_tokens
            page = pages[strand.number] = [EMPTY] * size
        return page

    def peek(self, strand: Strand, block: int) -> Page | None:
        """The block's page for reading; None if it holds something else."""
        return self._pages[block].get(strand.number)

    def clear(self, block: int) -> None:
        """Zero a block."""
        self._pages[block].clear()

    def copy(self, source: int, target: int) -> None:
        """Copy a block, whatever it holds."""
        self._owner[target] = self._owner[source]
        self._pages[target] = {number: list(page) for number, page in self._pages[source].items()}

    def write(self, strand: Strand, table: Sequence[int], first: int, values: Page) -> None:
        """Write `values` at positions from `first` on."""
        span, at, end = strand.block_tokens, first, first + len(values)
        while at < end:
            block = table[at // span]
            stop = min(end, (at // span + 1) * span)
            if block:
                begin = at % span
                self.page(strand, block)[begin : begin + stop - at] = values[
                    at - first : stop - first
                ]
            elif not strand.replayed and strand.kind != SCRATCH:
                raise WrongBlock(f"{strand}: position {at} has no block to be written to")
            at = stop

    def check(
        self, strand: Strand, table: Sequence[int], first: int, last: int, values: Page, who: str
    ) -> None:
        """Check that positions [first, last) hold what they must."""
        span, at = strand.block_tokens, first
        while at < last:
            stop = min(last, (at // span + 1) * span)
            block = table[at // span]
            page = self._pages[block].get(strand.number) if block else None
            begin = at % span
            if page is None or page[begin : begin + stop - at] != values[at:stop]:
                raise WrongBlock(
                    f"{who}: block {block} does not hold positions {at} to {stop} of its prefix, "
                    f"but {page}; {strand}"
                )
            at = stop
