"""A virtual cluster: the ranks of a mesh, in one process, holding real paged memory.

Ranks are filled from one logical cache by the rules of `cluster_truth`, store and load through the
real plan and copies, and are compared byte by byte: their pages, and all that must stay untouched
(padding, and blocks that belong to nobody).

    cluster = Cluster(groups, mesh, layout="LBHNC", blocks=4)
    cluster.fill()
    stored = cluster.store(shelf)      # stored.suspects: ranks that differ from their replicas
    cluster.wipe()
    cluster.load(shelf)
    assert not cluster.differences()
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from kvfold import identity
from kvfold.copy.cpu import Bytes, CpuCopier, LayerPages
from kvfold.errors import ConfigError
from kvfold.mesh import Mesh
from kvfold.plan import OffloadPlan, PlanOptions, plan
from kvfold.spec import HALVES, Encoding, GroupSpec, LayerSpec
from kvfold.testing.cluster_copy import Joined, Loaded, Stored
from kvfold.testing.cluster_store import Shelf
from kvfold.testing.cluster_truth import Seat, Truth, seats

#: The engine's layout names: is a block outermost, and the order inside a page.
LAYOUTS: Final[dict[str, tuple[bool, Encoding]]] = {
    "LBHNC": (False, "heads_first"),
    "LBNHC": (False, "tokens_first"),
    "BLHNC": (True, "heads_first"),
    "BLNHC": (True, "tokens_first"),
}
#: The same orders in pages that have all K before all V, which no layout's name tells.
_IN_HALVES: Final[dict[Encoding, Encoding]] = {
    "heads_first": "halves_heads_first",
    "tokens_first": "halves_tokens_first",
}
FILLER, WIPED = 0xA5, 0x5A
NOBODYS = -1
"""The block of a difference in a page that belongs to no chunk."""


class Difference(NamedTuple):
    """A page that is not what it must be; `byte` counts within the padded page."""

    rank: int
    layer: str
    block: int
    byte: int


def in_layout(groups: Sequence[GroupSpec], layout: str) -> tuple[GroupSpec, ...]:
    """Return `groups` with the order inside pages that `layout` names, where it is understood.

    Pages in halves remain so.
    Raises `ConfigError` for a name that is not one of `LAYOUTS`.
    """
    if layout not in LAYOUTS:
        raise ConfigError("layout", layout, f"one of {', '.join(LAYOUTS)}")
    order = LAYOUTS[layout][1]

    def turned(spec: LayerSpec) -> LayerSpec:
        if spec.encoding in HALVES:
            return replace(spec, encoding=_IN_HALVES[order])
        return replace(spec, encoding=order) if spec.encoding in _IN_HALVES else spec

    return tuple(replace(g, layers=tuple(map(turned, g.layers))) for g in groups)


class Cluster:
    """All ranks of `mesh` with `blocks` blocks of every group that takes part in prefix caching.

    `seed` names the logical cache: clusters of the same seed hold the same bytes wherever their
    layouts can read each other's. Layers in `unlike` are filled differently on every rank, as if
    their `max_tp_shards` were wrong. Only `ranks` (default: all) have memory here. Raises
    `ConfigError` for a layout, a number of blocks or a layer that does not exist, `PlanError` for
    what cannot be planned.
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
        ranks: Collection[int] | None = None,
    ) -> None:
        self.plan: OffloadPlan = plan(in_layout(groups, layout), mesh, options)
        self.mesh, self.layout, self.blocks, self.seed = mesh, layout, blocks, seed
        per_chunk = self.plan.options.blocks_per_chunk
        if blocks < 1 or blocks % per_chunk:
            raise ConfigError("blocks", blocks, f"a multiple of blocks_per_chunk={per_chunk}")
        self.groups = tuple(g for g in self.plan.groups if g.participating)
        known = {layer.spec.name for g in self.groups for layer in g.layers}
        if strange := sorted(set(unlike) - known):
            raise ConfigError("layer", strange[0], f"one of {', '.join(sorted(known)[:4])}, ...")
        self.truth = Truth(mesh, blocks, seed, unlike)
        self.seats = tuple(s for s in seats(mesh) if ranks is None or s.rank in ranks)
        # Block ids are scattered, and the first and the last page belong to nobody.
        scatter = np.random.default_rng(seed).permutation(blocks) + 1
        self.table: list[int] = scatter.tolist()
        self._pages = {seat.rank: self._allocate(seat) for seat in self.seats}
        self._filler = FILLER

    def identities(self) -> list[dict[str, Any]]:
        """Return for each group what must be equal for another cluster to read its chunks."""
        return [
            {
                "group": identity.group_fields(group),
                "opaque": identity.opaque_fields(group, self.layout, 0, {}),
                "seed": self.seed,
            }
            for group in self.groups
        ]

    # -- contents ------------------------------------------------------------------------------

    def fill(self) -> None:
        """Give every rank its bytes of the logical cache."""
        self._overwrite(FILLER)
        for _, pages, truth in self._layers():
            pages[self.table, : truth.shape[1]] = truth

    def wipe(self) -> None:
        """Drop every page of every rank: all memory is overwritten."""
        self._overwrite(WIPED)

    def differences(
        self, only: Collection[int] | None = None, limit: int = 100
    ) -> list[Difference]:
        """Return the first byte of every page that is not what it must be, up to `limit` pages.

        `only` chooses some of `self.groups` by position.
        """
        found: list[Difference] = []
        for (seat, name), pages, truth in self._layers(only):
            expected = np.full(pages.shape, self._filler, np.uint8)
            expected[self.table, : truth.shape[1]] = truth
            if np.array_equal(pages, expected):
                continue
            wrong = pages != expected
            for page in np.flatnonzero(wrong.any(axis=1)).tolist():
                block = self.table.index(page) if page in self.table else NOBODYS
                found.append(Difference(seat.rank, name, block, int(wrong[page].argmax())))
                if len(found) == limit:
                    return found
        return found

    def _overwrite(self, filler: int) -> None:
        self._filler = filler
        for pages in self._pages.values():
            for memory in {id(p.memory): p.memory for p in pages.values()}.values():
                memory[:] = filler

    def _layers(
        self, only: Collection[int] | None = None
    ) -> Iterator[tuple[tuple[Seat, str], Bytes, Bytes]]:
        """Yield per layer and rank: all its padded pages by block id, and what they must hold."""
        chosen = range(len(self.groups)) if only is None else only
        for number in chosen:
            for layer in self.groups[number].layers:
                for seat in self.seats:
                    if seat.pp == layer.placement.stage:
                        spec, at = layer.spec, self._pages[seat.rank][layer.spec.name]
                        pages = np.lib.stride_tricks.as_strided(
                            at.memory[at.offset :],
                            (at.num_blocks, spec.engine_page_bytes),
                            (at.block_stride, 1),
                        )
                        yield (seat, spec.name), pages, self.truth.pages(spec, seat)

    def _allocate(self, seat: Seat) -> dict[str, LayerPages]:
        """Lay out this rank's pages: one allocation per group, as the layout's name says."""
        num_blocks, pages = self.blocks + 2, {}
        for group in self.groups:
            specs = [la.spec for la in group.layers if la.placement.stage == seat.pp]
            sizes = [spec.engine_page_bytes for spec in specs]
            memory = np.empty(sum(sizes) * num_blocks, np.uint8)
            before = 0
            for spec, size in zip(specs, sizes, strict=True):
                block_outermost = LAYOUTS[self.layout][0]
                offset, stride = (
                    (before, sum(sizes)) if block_outermost else (before * num_blocks, size)
                )
                pages[spec.name] = LayerPages(memory, offset, stride, spec.page_bytes, num_blocks)
                before += size
        return pages

    # -- to and from a shelf -------------------------------------------------------------------

    def store(self, shelf: Shelf) -> Stored:
        """Audit, and store every chunk that the shelf takes, through the plan and its copies."""
        with Joined(self, shelf) as joined:
            return joined.store()

    def load(self, shelf: Shelf, only: Collection[int] | None = None) -> Loaded:
        """Fill every rank's pages from the shelf's chunks (of the groups `only`, by position)."""
        with Joined(self, shelf) as joined:
            return joined.load(range(len(self.groups)) if only is None else only)

    def audit(self, number: int, blocks: Sequence[Sequence[int]]) -> list[dict[int, int]]:
        """Return per rank here a checksum of each fragment of a group that others hold too."""
        group, found = self.groups[number], []
        slot = np.empty(group.slot_bytes, np.uint8)
        for rank, pages in self._pages.items():
            copier, checksums = CpuCopier(pages, slot), {}
            for owned in group.audited(rank):
                sweeps, state = copier.compile(owned.runs, group.slot_bytes), xxhash.xxh3_64()
                for chunk in blocks:
                    CpuCopier.checksum(sweeps, chunk, state)
                checksums[owned.id] = state.intdigest()
            found.append(checksums)
        return found

    def pages(self, rank: int) -> dict[str, LayerPages]:
        """Return where the pages of `rank` lie."""
        return self._pages[rank]

    def chunks(self) -> list[list[int]]:
        """Return the block ids of every chunk, in the order of the logical cache."""
        step = self.plan.options.blocks_per_chunk
        return [self.table[at : at + step] for at in range(0, self.blocks, step)]
