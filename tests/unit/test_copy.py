"""Folded copies move exactly the bytes that the runs name, one by one."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvfold.copy.cpu import CpuCopier, LayerPages
from kvfold.mesh import Mesh
from kvfold.placement import Run
from kvfold.plan import PlanOptions, plan
from kvfold.spec import FULL_ATTENTION, MLA, GroupSpec, LayerSpec

BLOCKS = 7


def pages_of(
    names: list[str], page_bytes: int, rng: np.random.Generator, outer: str
) -> dict[str, LayerPages]:
    """Pages of all layers in one allocation, layer-outermost or block-outermost, with padding."""
    padded = page_bytes + 64
    memory = rng.integers(0, 256, len(names) * BLOCKS * padded, dtype=np.uint8)
    if outer == "layer":
        place = {n: (i * BLOCKS * padded, padded) for i, n in enumerate(names)}
    else:
        place = {n: (i * padded, len(names) * padded) for i, n in enumerate(names)}
    return {n: LayerPages(memory, o, s, page_bytes, BLOCKS) for n, (o, s) in place.items()}


def page(at: LayerPages, block: int) -> np.ndarray:
    start = at.offset + block * at.block_stride
    return at.memory[start : start + at.page_bytes]


def naive(runs: tuple[Run, ...], pages: dict[str, LayerPages], blocks: list[int], slot: np.ndarray):
    """Yield (page piece, slot piece) for every piece of every run."""
    for run in runs:
        for i in range(run.count):
            a = run.page_offset + i * run.page_stride
            b = run.slot_offset + i * run.slot_stride
            yield (
                page(pages[run.layer], blocks[run.block])[a : a + run.nbytes],
                slot[b : b + run.nbytes],
            )


@given(
    tp=st.sampled_from([1, 2, 4]),
    heads=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 4),
    bpc=st.integers(1, 3),
    encoding=st.sampled_from(["heads_first", "tokens_first"]),
    outer=st.sampled_from(["layer", "block"]),
    mla=st.booleans(),
    seed=st.integers(0, 99),
)
def test_copies_equal_the_runs_piece_by_piece(tp, heads, layers, bpc, encoding, outer, mla, seed):
    rng = np.random.default_rng(seed)
    per_rank = 1 if mla else max(1, heads // tp)
    specs = tuple(
        LayerSpec(
            name=f"l{i}",
            kind=MLA if mla else FULL_ATTENTION,
            block_size=4,
            num_kv_heads=per_rank,
            head_bytes=24,
            max_tp_shards=1 if mla else heads,
            total_kv_heads=1 if mla else heads,
            encoding=encoding,
        )
        for i in range(layers)
    )
    group = plan([GroupSpec(0, specs)], Mesh(tp=tp), PlanOptions(blocks_per_chunk=bpc)).groups[0]
    arena = rng.integers(0, 256, 3 * group.slot_bytes, dtype=np.uint8)
    blocks = rng.permutation(BLOCKS)[:bpc].tolist()
    offset = group.slot_bytes
    for rank in range(tp):
        pages = pages_of([s.name for s in specs], specs[0].page_bytes, rng, outer)
        copier = CpuCopier(pages, arena)
        for rotation in range(group.rotations):
            runs = group.writes(rank, rotation)
            expected = arena.copy()
            slot = expected[offset : offset + group.slot_bytes]
            for source, target in naive(runs, pages, blocks, slot):
                target[:] = source
            copied = copier.to_slot(copier.compile(runs, group.slot_bytes), blocks, offset)
            assert np.array_equal(arena, expected)
            assert copied == sum(r.nbytes * r.count for r in runs)
        memory = pages["l0"].memory
        shared = memory.copy()
        expected_pages = {
            n: LayerPages(shared, p.offset, p.block_stride, p.page_bytes, BLOCKS)
            for n, p in pages.items()
        }
        slot = arena[offset : offset + group.slot_bytes]
        for target, source in naive(group.reads(rank), expected_pages, blocks, slot):
            target[:] = source
        copier.to_pages(copier.compile(group.reads(rank), group.slot_bytes), blocks, offset)
        assert np.array_equal(memory, shared)


def test_skipped_blocks_are_left_alone():
    rng = np.random.default_rng(1)
    pages = pages_of(["a", "b"], 32, rng, "layer")
    runs = [Run(n, b, 0, (i * 2 + b) * 32, 32) for i, n in enumerate("ab") for b in range(2)]
    copier = CpuCopier(pages, rng.integers(0, 256, 8192, dtype=np.uint8))
    before = pages["a"].memory.copy()
    assert copier.to_pages(copier.compile(runs, 4096), [-1, 3], 4096) == 64
    changed = np.flatnonzero(before != pages["a"].memory)
    inside = np.concatenate(
        [np.arange(32) + pages[n].offset + 3 * pages[n].block_stride for n in "ab"]
    )
    assert len(changed) > 0
    assert set(changed) <= set(inside)


def test_layers_at_constant_distance_become_one_sweep():
    pages = pages_of([f"l{i}" for i in range(61)], 64, np.random.default_rng(0), "layer")
    runs = [Run(f"l{i}", 0, 0, i * 64, 64) for i in range(61)]
    copier = CpuCopier(pages, np.zeros(8192, dtype=np.uint8))
    assert len(copier.compile(runs, 4096)) == 1


@pytest.mark.parametrize(
    "run", [Run("a", 0, 1, 0, 32), Run("a", 0, 0, 4090, 32), Run("a", 0, 0, 0, 16, 3, 16, 16)]
)
def test_a_run_outside_its_page_or_slot_is_refused(run):
    copier = CpuCopier(pages_of(["a"], 32, np.random.default_rng(0), "layer"), bytes(8192))
    with pytest.raises(ValueError, match="leaves its page or its slot"):
        copier.compile([run], 4096)


def test_checksums_tell_pages_apart_by_content_only():
    rng = np.random.default_rng(2)
    first, second = (pages_of(["a", "b"], 32, rng, outer) for outer in ("layer", "block"))
    for name in "ab":
        page(second[name], 1)[:] = page(first[name], 4)
    copiers = [CpuCopier(p, bytes(8192)) for p in (first, second)]
    assert copiers[0].page_digest([4], "ab") == copiers[1].page_digest([1], "ab")
    page(second["b"], 1)[31] ^= 1
    assert copiers[0].page_digest([4], "ab") != copiers[1].page_digest([1], "ab")
    sums = []
    for copier, block in zip(copiers, (4, 1), strict=True):
        state = xxhash.xxh3_64()
        copier.checksum(copier.compile([Run("a", 0, 0, 0, 32)], 4096), [block], state)
        sums.append(state.intdigest())
    assert sums[0] == sums[1], "only layer b differs"
