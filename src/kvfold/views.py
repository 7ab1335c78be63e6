"""A plan in the field's coarser words: how many copies of a row, which rank's slot, who writes.

kvfold itself stores fragments; this is what systems that share whole rows between ranks would do
with the same configuration, for comparison and for people.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.plan import OffloadPlan
from kvfold.spec import STATE_KINDS


@dataclass(frozen=True)
class CompatibleView:
    """Rows shared by `ranks_per_copy` consecutive ranks: `copies` of them, `row_bytes` in all.

    `replicated_layout`: one copy serves every rank. `canonical_layout`: the one that was asked
    for is certified; if not, `fallback` says why, and nothing is shared.
    """

    replicated_layout: bool
    canonical_layout: bool
    copies: int
    ranks_per_copy: int
    row_bytes: int
    fallback: str | None = None

    def slot(self, rank: int) -> int:
        """Return the copy that `rank` reads."""
        return rank // self.ranks_per_copy

    def writes(self, rank: int) -> bool:
        """Return whether `rank` is its copy's one writer."""
        return rank % self.ranks_per_copy == 0


def compatible_view(plan: OffloadPlan, canonical_layout: bool = False) -> CompatibleView:
    """Return the view of `plan`, with `canonical_layout` if it is asked for and can be certified.

    A canonical layout that cannot be certified falls back and resets `replicated_layout`; the
    sizes follow, on every side that computes them from the same plan.
    """
    fallback = _uncertified(plan) if canonical_layout else None
    ranks = 1 if fallback else plan.kv_tp_replicas
    copies = plan.mesh.world_size // ranks
    return CompatibleView(
        plan.replicated_layout and fallback is None,
        canonical_layout and fallback is None,
        copies,
        ranks,
        plan.engine_slot_bytes(copies),
        fallback,
    )


def _uncertified(plan: OffloadPlan) -> str | None:
    """Return why pages do not have one layout for every topology, or None if they do."""
    for axis in ("pp", "pcp", "dcp"):
        if (size := getattr(plan.mesh, axis)) != 1:
            return f"{axis} is {size}"
    for group in plan.groups:
        for layer in group.layers:
            name = layer.spec.name
            if layer.spec.kind in STATE_KINDS:
                return f"layer {name!r} is a recurrent state"
            if not layer.placement.canonical:
                return f"layer {name!r}: {layer.placement.reason}"
            if layer.spec.tokens_per_state != 1:
                return f"layer {name!r} keeps one state for {layer.spec.tokens_per_state} tokens"
    if not any(group.participating for group in plan.groups):
        return "no group takes part in prefix caching"
    return None
