"""Copies between pages in host memory and slots of the arena.

A chunk's runs are few kinds of the same thing repeated for every layer. `CpuCopier.compile` folds
runs that follow each other at constant distances into *sweeps*: three-dimensional strided views of
the page memory and of the arena. Copying one block of a chunk is then one `numpy.copyto` per sweep,
a single call without the interpreter lock for all layers, so that it keeps memcpy's speed beside a
busy Python thread (a Python loop of small copies falls to a quarter there).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

SLOT_ALIGN_BYTES = 4096
"""Slots begin at multiples of this in the arena, so slot number = offset / this."""


class RunLike(Protocol):
    """One strided copy between a page and a slot; see `kvfold.plan.Run`."""

    @property
    def layer(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def page_offset(self) -> int: ...
    @property
    def slot_offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def page_stride(self) -> int: ...
    @property
    def slot_stride(self) -> int: ...


@dataclass(frozen=True)
class LayerPages:
    """Where one layer's pages lie: page of block b = memory[offset + b *
    block_stride:][:page_bytes].
    """

    memory: Bytes
    offset: int
    block_stride: int
    page_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class Sweep:
    """Views indexed by block (pages) and by slot number (slots): same shape (layers, pieces,
    bytes).
    """

    block: int
    pages: Bytes
    slots: Bytes
    nbytes: int


def _distance(a: RunLike, b: RunLike, pages: dict[str, LayerPages]) -> tuple[int, int] | None:
    """Constant (page, slot) distance from run `a` to `b`, or None if they cannot share a sweep."""
    pa, pb = pages[a.layer], pages[b.layer]
    same = (
        a.block == b.block
        and a.nbytes == b.nbytes
        and a.count == b.count
        and (a.count == 1 or (a.page_stride, a.slot_stride) == (b.page_stride, b.slot_stride))
        and pa.memory is pb.memory
        and pa.block_stride == pb.block_stride
        and pa.num_blocks == pb.num_blocks
    )
    if not same:
        return None
    page = (pb.offset + b.page_offset) - (pa.offset + a.page_offset)
    slot = b.slot_offset - a.slot_offset
    return (page, slot) if page > 0 and slot > 0 else None


def _fold(
    runs: Sequence[RunLike], pages: dict[str, LayerPages]
) -> Iterator[tuple[list[RunLike], tuple[int, int]]]:
    """Split runs into longest series of constant distance."""
    ordered = sorted(runs, key=lambda r: (r.block, r.slot_offset))
    at = 0
    while at < len(ordered):
        series, step = [ordered[at]], (0, 0)
        for run in ordered[at + 1 :]:
            distance = _distance(series[-1], run, pages)
            if distance is None or (len(series) > 1 and distance != step):
                break
            step = distance
            series.append(run)
        yield series, step
        at += len(series)


class CpuCopier:
    """Copies chunks between a rank's pages and the arena."""

    def __init__(self, pages: dict[str, LayerPages], arena: memoryview | Bytes | bytes) -> None:
        self.pages = pages
        self._arena: Bytes = np.frombuffer(arena, dtype=np.uint8)

    def compile(self, runs: Sequence[RunLike], slot_bytes: int) -> tuple[Sweep, ...]:
        """Fold a chunk's `runs` into sweeps. Raises ValueError for a run outside page or slot."""
        for run in runs:
            page_end = run.page_offset + (run.count - 1) * run.page_stride + run.nbytes
            slot_end = run.slot_offset + (run.count - 1) * run.slot_stride + run.nbytes
            if page_end > self.pages[run.layer].page_bytes or slot_end > slot_bytes:
                raise ValueError(f"run {run} leaves its page or its slot of {slot_bytes} bytes")
        num_slots = (len(self._arena) - slot_bytes) // SLOT_ALIGN_BYTES + 1
        sweeps = []
        for series, (page_step, slot_step) in _fold(runs, self.pages):
            first, layer = series[0], self.pages[series[0].layer]
            inner = (len(series), first.count, first.nbytes)
            pages = as_strided(
                layer.memory[layer.offset + first.page_offset :],
                (layer.num_blocks, *inner),
                (layer.block_stride, page_step, first.page_stride, 1),
            )
            slots = as_strided(
                self._arena[first.slot_offset :],
                (num_slots, *inner),
                (SLOT_ALIGN_BYTES, slot_step, first.slot_stride, 1),
            )
            sweeps.append(
                Sweep(first.block, pages, slots, len(series) * first.count * first.nbytes)
            )
        return tuple(sweeps)

    @staticmethod
    def to_slot(sweeps: Iterable[Sweep], blocks: Sequence[int], offset: int) -> int:
        """Copy the pages of `blocks` (block ids of the chunk) to the slot at `offset`; return bytes
        copied.
        """
        slot, copied = offset // SLOT_ALIGN_BYTES, 0
        for sweep in sweeps:
            np.copyto(sweep.slots[slot], sweep.pages[blocks[sweep.block]])
            copied += sweep.nbytes
        return copied

    @staticmethod
    def to_pages(sweeps: Iterable[Sweep], blocks: Sequence[int], offset: int) -> int:
        """Copy the slot at `offset` to the pages of `blocks`; blocks with a negative id are
        skipped.
        """
        slot, copied = offset // SLOT_ALIGN_BYTES, 0
        for sweep in sweeps:
            block = blocks[sweep.block]
            if block >= 0:
                np.copyto(sweep.pages[block], sweep.slots[slot])
                copied += sweep.nbytes
        return copied

    @staticmethod
    def checksum(sweeps: Iterable[Sweep], blocks: Sequence[int], state: Any) -> None:
        """Feed the bytes of `blocks` that `sweeps` cover into the hash `state`, in slot order."""
        for sweep in sweeps:
            state.update(np.ascontiguousarray(sweep.pages[blocks[sweep.block]]))

    def page_digest(self, blocks: Sequence[int], layers: Iterable[str]) -> str:
        """xxh3_128 over the whole pages of `blocks`, layer by layer: all bytes this rank holds of a
        chunk.
        """
        state = xxhash.xxh3_128()
        for name in layers:
            at = self.pages[name]
            for block in blocks:
                start = at.offset + block * at.block_stride
                state.update(at.memory[start : start + at.page_bytes].data)
        return str(state.hexdigest())
