"""Copies of 61 pages of 72 KiB to and from a slot, beside memcpy and the best plain loop.

The shape is DeepSeek-V3's latents in blocks of 64 tokens, layers outermost as on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvfold.copy.cpu import CpuCopier, LayerPages
from kvfold.mesh import Mesh
from kvfold.plan import plan
from kvfold.spec import MLA, GroupSpec, LayerSpec

LAYERS, TOKENS, ROW_BYTES = 61, 64, 1152
BLOCKS = 32
ROUNDS = 15


def _bench() -> tuple[dict[str, Callable[[], None]], int]:
    """The five ways to move BLOCKS chunks, and how many bytes each moves."""
    names = [f"layer {i}" for i in range(LAYERS)]
    specs = [
        LayerSpec(
            name=name, kind=MLA, block_size=TOKENS, num_kv_heads=1, head_bytes=ROW_BYTES,
            max_tp_shards=1,
        )
        for name in names
    ]  # fmt: skip
    group = plan([GroupSpec.of(0, specs)], Mesh()).groups[0]
    page, slot = specs[0].page_bytes, group.slot_bytes
    memory = np.random.default_rng(0).integers(0, 256, LAYERS * BLOCKS * page, dtype=np.uint8)
    arena = np.ones(BLOCKS * slot, dtype=np.uint8)
    pages = {
        name: LayerPages(memory, i * BLOCKS * page, page, page, BLOCKS)
        for i, name in enumerate(names)
    }
    copier = CpuCopier(pages, arena)
    sweeps = copier.compile(group.reads(0), slot)
    order = np.random.default_rng(1).permutation(BLOCKS).tolist()
    pairs = [
        (
            memory[(i * BLOCKS + block) * page :][:page],
            arena[n * slot + i * page :][:page],
        )
        for n, block in enumerate(order)
        for i in range(LAYERS)
    ]

    def to_slots() -> None:
        for n, block in enumerate(order):
            copier.to_slot(sweeps, [block], n * slot)

    def to_pages() -> None:
        for n, block in enumerate(order):
            copier.to_pages(sweeps, [block], n * slot)

    def loop_to_slots() -> None:
        for source, target in pairs:
            np.copyto(target, source)

    def loop_to_pages() -> None:
        for target, source in pairs:
            np.copyto(target, source)

    def memcpy() -> None:
        np.copyto(arena[: len(memory)], memory)

    ways = {
        "to": to_slots, "from": to_pages, "loop to": loop_to_slots, "loop from": loop_to_pages,
        "memcpy": memcpy,
    }  # fmt: skip
    return ways, len(memory)


def pages_and_slots() -> list[dict[str, Any]]:
    """Ratios of our copies to the plain loop in the same round; the median of all rounds."""
    ways, moved = _bench()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    rates = {name: moved / statistics.median(taken[1:]) / 1e9 for name, taken in seconds.items()}
    rows = []
    for way, text in (("to", "pages to a slot"), ("from", "a slot to pages")):
        ratio = statistics.median(
            theirs / ours
            for ours, theirs in zip(seconds[way][1:], seconds[f"loop {way}"][1:], strict=True)
        )
        rows.append(
            {
                "name": f"copy 61 x 72 KiB, {text}, of the plain loop",
                "value": ratio,
                "unit": "x",
                "aim": 0.95,
                "better": "higher",
                "detail": f"{rates[way]:.1f} GB/s, loop {rates[f'loop {way}']:.1f}, "
                f"memcpy {rates['memcpy']:.1f}",
            }
        )
    return rows


ROWS = [pages_and_slots]
