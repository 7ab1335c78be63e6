"""What `kvfold plan` tells about one model on one layout, as JSON-ready data."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import lcm
from typing import Any

from kvfold.capacity import Costs, costs, holding, is_growing
from kvfold.errors import ConfigError
from kvfold.grouping import block_bytes
from kvfold.identity import group_fields
from kvfold.mesh import Mesh
from kvfold.models import FAMILIES, Config, Model, build
from kvfold.placement import kv_cache_groups_tp_replicas, tokens_per_block
from kvfold.plan import GroupPlan, LayerPlan, OffloadPlan, PlanOptions, plan, round_up
from kvfold.sizes import parse_bytes
from kvfold.spans import with_chunks

MAX_RANKS = 16_384
#: The disk tier's folder in the command line that is printed.
DISK_PATH = "/var/cache/kvfold"


@dataclass(frozen=True)
class Layout:
    """What a user may vary. `block_size` None is the model's own."""

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    pp: int = 1
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    blocks_per_chunk: int = 1
    dp: int = 1

    @property
    def mesh(self) -> Mesh:
        return Mesh(tp=self.tp, dcp=self.dcp, pcp=self.pcp, pp=self.pp)


@dataclass(frozen=True)
class Planned:
    """A model on a layout, planned."""

    layout: Layout
    model: Model
    plan: OffloadPlan
    costs: Costs


def planned(config: Config, layout: Layout) -> Planned:
    """Plan `config`'s model. Raises `ConfigError` or `PlanError` naming the field."""
    mesh = layout.mesh
    if mesh.world_size > MAX_RANKS:
        raise ConfigError("tp x pcp x pp", mesh.world_size, f"at most {MAX_RANKS} ranks")
    model = build(config, mesh, layout.kv_cache_dtype, layout.block_size)
    spans = (tokens_per_block(g, mesh.dcp) for g in model.groups if g.prefix_cacheable)
    _, groups = with_chunks(model.groups, mesh.dcp, lcm(*spans), layout.blocks_per_chunk)
    made = plan(groups, mesh, PlanOptions(layout.blocks_per_chunk))
    return Planned(layout, model, made, costs(made))


def report(found: Planned, tiers: Mapping[str, str], sequence_tokens: int) -> dict[str, Any]:
    """Return everything that is told about one layout; sizes in bytes, spans in tokens.

    `tiers` gives "host" and "disk" as sizes for people; empty ones are left out.
    """
    model, made, cost = found.model, found.plan, found.costs
    engine = model.engine_view()
    sizes = {name: parse_bytes(f"--{name}", text) for name, text in tiers.items()}
    used = {name: tiers[name] for name, size_bytes in sizes.items() if size_bytes}
    return {
        "model": {
            "name": model.config.name,
            "architecture": model.architecture,
            "layers": model.config.layers,
            "kv_cache_dtype": model.kv_cache_dtype,
            "block_size": model.block_size,
        },
        "layout": {**asdict(found.layout), "ranks": made.mesh.world_size},
        "tokens_per_hash": made.tokens_per_hash,
        "kv_tp_replicas": made.kv_tp_replicas,
        "engine_kv_tp_replicas": kv_cache_groups_tp_replicas(engine, made.mesh.tp, made.mesh.dcp),
        "replicated_layout": made.replicated_layout,
        "fingerprint": made.fingerprint,
        "groups": [_group(p, s.layers) for p, s in zip(made.groups, made.sources, strict=True)],
        "per_token": {
            "unique_bytes": _number(cost.unique_per_token),
            "copies_bytes": _number(cost.copies_per_token),
            "rank_bytes": _number(cost.rank_per_token),
            "engine_padded_bytes": _number(cost.padded_per_token),
            "stored_bytes": _number(cost.stored_per_token),
        },
        "per_sequence": {
            "window_bytes": _number(cost.window_per_sequence),
            "state_bytes": cost.state_per_sequence,
            "stored_bytes": cost.stored_per_sequence,
        },
        "engine_groups": len(engine),
        "engine_slot_bytes": _engine_slot(found, block_bytes(engine)),
        "sequence_tokens": sequence_tokens,
        "tiers": [
            {"tier": n, "bytes": sizes[n], **asdict(holding(cost, sizes[n], sequence_tokens))}
            for n in used
        ],
        "command": command(found, used),
        "notes": list(notes(found)),
        "warnings": list(made.warnings),
    }


def notes(found: Planned) -> Iterator[str]:
    """Yield what a reader should know beside the figures."""
    yield from found.model.notes
    groups = found.plan.groups
    if found.layout.dp > 1:
        yield (
            f"{found.layout.dp} data-parallel replicas are engines of their own; those of one "
            "machine share its store"
        )
    kernel = FAMILIES[found.model.architecture].kernel_block
    if found.layout.block_size and found.layout.block_size % kernel:
        yield (
            f"the model's kernels take blocks of {kernel} tokens (on Hopper): --block-size "
            f"{found.layout.block_size} is no multiple"
        )
    if bound := [str(group.index) for group in groups if group.topology_bound]:
        yield (
            f"what group {', '.join(bound)} stores can only be read at the same tp, dcp, pcp and "
            "pp: pages are kept whole"
        )
    if found.model.config.source is None:
        name = found.model.config.name
        yield f"{name} is a config that ships with kvfold: the command needs the model itself"


def command(found: Planned, tiers: Mapping[str, str]) -> str:
    """Return the serving command for this layout, ready to paste."""
    layout, config = found.layout, found.model.config
    flags: tuple[tuple[str, object, object], ...] = (
        ("--tensor-parallel-size", layout.tp, 1),
        ("--decode-context-parallel-size", layout.dcp, 1),
        ("--prefill-context-parallel-size", layout.pcp, 1),
        ("--pipeline-parallel-size", layout.pp, 1),
        ("--data-parallel-size", layout.dp, 1),
        ("--block-size", layout.block_size, None),
        ("--kv-cache-dtype", layout.kv_cache_dtype, "auto"),
    )
    options = [f"{flag} {value}" for flag, value, default in flags if value != default]
    extra: dict[str, object] = dict(tiers)
    if "disk" in tiers:
        extra["disk_path"] = DISK_PATH
    if layout.blocks_per_chunk != 1:
        extra["blocks_per_chunk"] = layout.blocks_per_chunk
    transfer = {
        "kv_connector": "KvfoldConnector",
        "kv_connector_module_path": "kvfold.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    body = shlex.quote(textwrap.indent(json.dumps(transfer, indent=2), "  ").strip())
    lines = [f"vllm serve {shlex.quote(config.source or config.name)}", *options]
    return " \\\n  ".join([*lines, f"--kv-transfer-config {body}"])


def comparison(base: Planned, config: Config, other: Layout) -> dict[str, Any]:
    """Return one row of a comparison: `other` beside `base`, or why it is refused.

    Unless the layout says its block size, it takes the one that gives base's block hashes
    (block_size x dcp equal), or the model's own if the kernels cannot take that; then
    `base_block_size` is the least for base with which they could. `reads_base` tells whether it
    could load what base has stored.
    """
    row: dict[str, Any] = {"layout": asdict(other), "base_block_size": None}
    if other.block_size is None:
        kernel = FAMILIES[base.model.architecture].kernel_block
        size, rest = divmod(base.model.block_size * base.layout.dcp, other.dcp)
        if rest or size % kernel:
            row["base_block_size"] = kernel * lcm(other.dcp, base.layout.dcp) // base.layout.dcp
        else:
            other = replace(other, block_size=size)
    try:
        found = base if row["layout"] == asdict(base.layout) else planned(config, other)
    except ConfigError as error:
        return row | {"refused": str(error)}
    mine, theirs = ([group_fields(g) for g in p.plan.groups] for p in (found, base))
    bound = any(g.topology_bound for g in found.plan.groups) and other.mesh != base.layout.mesh
    return row | {
        "block_size": found.model.block_size,
        "unique_bytes": _number(found.costs.unique_per_token),
        "copies_bytes": _number(found.costs.copies_per_token),
        "stored_bytes": _number(found.costs.stored_per_token),
        "kv_tp_replicas": found.plan.kv_tp_replicas,
        "reads_base": mine == theirs and not bound,
    }


def explanation(found: Planned, layer: str) -> list[dict[str, Any]]:
    """Return all about the layers that `layer` (a number, a name or a part of one) means."""
    result = []
    for group in found.plan.groups:
        for placed in group.layers:
            name = placed.spec.name
            if layer == name or layer in name.split("."):
                result.append(_layer(group, placed))
    if not result:
        names = [x.spec.name for g in found.plan.groups for x in g.layers]
        raise ConfigError(
            "--explain", layer, f"a layer's number or name with a cache, such as {names[0]}"
        )
    return result


def _layer(group: GroupPlan, placed: LayerPlan) -> dict[str, Any]:
    fragments = []
    for i, fragment in enumerate(placed.placement.fragments, placed.first_fragment):
        [owned] = [o for o in group.owned(fragment.owners[0]) if o.id == i]
        fragments.append(
            {
                "head_shard": fragment.head_shard,
                "token_shard": fragment.token_shard,
                "owners": list(fragment.owners),
                "first_writer": group.writer(i, 0, 0),
                "runs_per_chunk": len(owned.runs),
            }
        )
    return {
        **asdict(placed.spec),
        "group": group.index,
        "stage": placed.placement.stage,
        "slot_offset": placed.slot_offset,
        "block_bytes": placed.block_bytes,
        "canonical": placed.placement.canonical,
        "reason": placed.placement.reason,
        "warning": placed.placement.warning,
        "fragments": fragments,
    }


def _group(group: GroupPlan, layers: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "index": group.index,
        "participating": group.participating,
        "layers": len(layers),
        "tokens_per_block": group.tokens_per_block,
        "tokens_per_chunk": group.tokens_per_chunk,
        "chunk_bytes": group.chunk_bytes,
        "slot_bytes": group.slot_bytes,
        "topology_bound": group.topology_bound,
        "kinds": [_kind(group, alike) for alike in _alike(group)],
        "outside": sorted({layer.kind for layer in layers}) if not group.participating else [],
    }


def _alike(group: GroupPlan) -> list[list[LayerPlan]]:
    """Return the layers gathered by what is told about them; stages do not matter."""
    found: dict[object, list[LayerPlan]] = {}
    for layer in group.layers:
        spec, placed = layer.spec, layer.placement
        looks = (spec.kind, spec.page_bytes, spec.tokens_per_state, spec.window, placed.reason)
        found.setdefault(looks, []).append(layer)
    return list(found.values())


def _kind(group: GroupPlan, alike: list[LayerPlan]) -> dict[str, Any]:
    spec, placed = alike[0].spec, alike[0].placement
    total = sum(layer.block_bytes for layer in alike)
    per_token = _number(Fraction(total, group.tokens_per_block))
    return {
        "kind": spec.kind,
        "layers": len(alike),
        "dtype": spec.dtype,
        "window": spec.window,
        "tokens_per_state": spec.tokens_per_state,
        "page_bytes": spec.page_bytes,
        "fragments": len(placed.fragments),
        "replicas": placed.fragments[0].replicas,
        "owners_of_first": list(placed.fragments[0].owners),
        "unique_bytes_per_block": total,
        "unique_bytes_per_token": per_token if is_growing(alike[0]) else None,
        "folded": placed.fragments[0].replicas > 1,
        "reason": placed.reason,
    }


def _engine_slot(found: Planned, one_block_bytes: int) -> dict[str, int]:
    """Return the engine's own slot, once and for every rank, rounded up once at the end."""
    chunk_bytes = one_block_bytes * found.layout.blocks_per_chunk
    copies = found.plan.mesh.world_size
    return {"single": round_up(chunk_bytes), "copies": round_up(chunk_bytes * copies)}


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
