"""What all processes of an engine must agree on: the plan and the identities, from stage records.

Every worker describes its own pipeline stage in a *stage record* (JSON-ready, see
`translate.stage_record`). Nobody sees more; whoever has the records of all ranks builds the same
plan from them, and the fingerprints are compared before the first request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfold import identity
from kvfold.errors import PlanError
from kvfold.mesh import Mesh
from kvfold.plan import OffloadPlan, PlanOptions, plan
from kvfold.spans import with_chunks
from kvfold.spec import GroupSpec, LayerSpec

Record = dict[str, Any]

SKELETON = ("index", "prefix_cacheable", "block_size", "mode")
"""What stages must agree on in every group, also one that has no layers of it."""


@dataclass(frozen=True)
class Agreed:
    """The plan of an engine and the identity of each group that takes part (`plan.stored`)."""

    plan: OffloadPlan
    period_tokens: int
    modes: tuple[str, ...]
    """Per stored group: "" or how its states are cached ("align", "all")."""
    identities: tuple[identity.Identity, ...]

    @property
    def fingerprint(self) -> str:
        return self.plan.fingerprint


def agree(records: Sequence[Record]) -> Agreed:
    """Build what the records of all ranks say, in any order.

    Raises `PlanError` naming the rank and the first field in which it differs from another of its
    stage, or the first part of a group in which a stage differs from stage 0; `ConfigError` for a
    layer on two stages.
    """
    ordered = sorted(records, key=lambda record: record["rank"])
    first = ordered[0]
    mesh = Mesh(**first["mesh"])
    ranks = [record["rank"] for record in ordered]
    if ranks != list(range(mesh.world_size)):
        raise PlanError("worker records", ranks, f"one of each rank 0 to {mesh.world_size - 1}")
    stages = [ordered[mesh.stage_ranks(stage)[0]] for stage in range(mesh.pp)]
    for record in ordered:
        leader = stages[mesh.coords(record["rank"]).pp]
        _same(leader, record, {**leader, "rank": None}, {**record, "rank": None})
    for stage in stages[1:]:
        _same(first, stage, _common(first), _common(stage))
    period, groups = with_chunks(
        _groups(stages), mesh.dcp, first["alignment_tokens"], first["blocks_per_chunk"]
    )
    planned = plan(groups, mesh, PlanOptions(first["blocks_per_chunk"], first["tokens_per_hash"]))
    if not planned.stored:
        raise PlanError("cache groups", len(groups), "one that takes part in prefix caching")
    modes = {group["index"]: group["mode"] for group in first["groups"]}
    return Agreed(
        planned,
        period,
        tuple(modes[group.index] for group in planned.stored),
        tuple(_identity(stages, planned, number) for number in range(len(planned.stored))),
    )


def all_records(records: Sequence[Record]) -> list[Record]:
    """`records` completed by those of prefill-context ranks, which an engine does not hand over.

    They are equal to those of their stage: the workers compared all, and fingerprints tell.
    """
    mesh = Mesh(**records[0]["mesh"])
    if mesh.pcp == 1:
        return list(records)
    known = {record["rank"]: record for record in records}
    by_stage = {mesh.coords(rank).pp: record for rank, record in known.items()}
    missing = [
        r for r in range(mesh.world_size) if r not in known and mesh.coords(r).pp in by_stage
    ]
    return [*records, *({**by_stage[mesh.coords(r).pp], "rank": r} for r in missing)]


def _same(one: Record, other: Record, mine: Any, theirs: Any) -> None:
    field = identity.first_difference(mine, theirs)
    if field is not None:
        raise PlanError(
            f"worker {other['rank']} {field}",
            _at(theirs, field),
            f"{_at(mine, field)!r} as on worker {one['rank']}",
        )


def _common(record: Record) -> Record:
    """What does not depend on a stage's own layers."""
    own = ("rank", "groups", "strides", "shapes", "backends")
    skeletons = [{name: group[name] for name in SKELETON} for group in record["groups"]]
    return {**{k: v for k, v in record.items() if k not in own}, "groups": skeletons}


def _at(record: Any, path: str) -> Any:
    """The value at a path such as `groups[0].layers[0].dtype`, or "absent". Keys may hold dots."""
    while path:
        if isinstance(record, list):
            number, _, path = path[1:].partition("]")
            record = record[int(number)] if int(number) < len(record) else "absent"
        elif isinstance(record, dict):
            keys = [key for key in record if re.match(rf"{re.escape(key)}(?=$|[.\[])", path)]
            if not keys:
                return "absent"
            key = max(keys, key=len)
            record, path = record[key], path[len(key) :]
        else:
            return "absent"
        path = path.removeprefix(".")
    return record


def _groups(stages: Sequence[Record]) -> list[GroupSpec]:
    """The engine's groups over all stages; draft layers form a group of their own behind."""
    groups = []
    for position, skeleton in enumerate(stages[0]["groups"]):
        index = skeleton["index"]
        if not skeleton["prefix_cacheable"]:
            groups.append(GroupSpec(index, (), prefix_cacheable=False))
            continue
        for draft in (False, True):
            layers = [
                (LayerSpec(**layer["spec"]), number)
                for number, stage in enumerate(stages)
                for layer in stage["groups"][position]["layers"]
                if layer["draft"] == draft
            ]
            if layers:
                specs, owners = zip(*layers, strict=True)
                groups.append(GroupSpec(index, specs, owners, is_draft=draft))
    return groups


def _identity(stages: Sequence[Record], planned: OffloadPlan, number: int) -> identity.Identity:
    group, first = planned.stored[number], stages[0]
    names = [layer.spec.name for layer in group.layers]
    model = dict(first["model"])
    if group.is_draft:
        model["loading"] = {**model["loading"], "draft": first["draft"]}
    backends = {b for stage in stages for n, b in stage["backends"].items() if n in names}
    model["kv_encoding"] = "/".join([model["kv_encoding"], *sorted(backends)])
    strides = {name: strides for stage in stages for name, strides in stage["strides"].items()}
    opaque = identity.opaque_fields(
        group, str(first["layout"]), max(layer.spec.block_size for layer in group.layers), strides
    )
    return identity.identity(
        identity.IdentityFields(**model, group=identity.group_fields(group), opaque=opaque),
        notes=first["notes"],
    )


def copies_bytes(agreed: Agreed, number: int) -> int:
    """Bytes that all ranks together hold of one chunk of a stored group: what TP copies take."""
    group = agreed.plan.stored[number]
    held = sum(
        layer.spec.page_bytes * len(fragment.owners)
        for layer in group.layers
        for fragment in layer.placement.fragments
    )
    return held * group.blocks_per_chunk
