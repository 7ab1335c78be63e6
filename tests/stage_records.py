"""Stage records as workers make them, for tests of what an engine's processes agree on."""

from __future__ import annotations

import copy
from dataclasses import asdict


def group_record(index, *layers, cached=True, mode="", block=16, drafts=()):
    """One group of a stage: its layers, and draft layers."""
    return {
        "index": index,
        "prefix_cacheable": cached,
        "block_size": block,
        "mode": mode,
        "layers": [
            {"draft": draft, "spec": asdict(spec)}
            for draft, specs in ((False, layers), (True, drafts))
            for spec in specs
        ],
    }


def record(rank, groups, *, backend="ATTN", draft=None, **changes):
    """A worker's record. `changes`: fields of the record, or axes of its mesh."""
    mesh = {"tp": 1, "dcp": 1, "pcp": 1, "pp": 1, "dcp_interleave": 1}
    mesh |= {axis: changes.pop(axis) for axis in list(changes) if axis in mesh}
    names = [layer["spec"]["name"] for group in groups for layer in group["layers"]]
    return {
        "rank": rank,
        "groups": copy.deepcopy(groups),
        "strides": {name: [8, 4, 1] for name in names},
        "shapes": {name: [2, 16, 4] for name in names},
        "backends": dict.fromkeys(names, backend),
        "mesh": mesh,
        "blocks_per_chunk": 1,
        "tokens_per_hash": 16,
        "alignment_tokens": 16,
        "num_blocks": 100,
        "layout": "LBHNC",
        "model": {
            "weights": "w", "loading": {}, "text_config": {"a": 1}, "rope": {}, "dtype": "float32",
            "kv_encoding": "auto", "kv_scales": {},
        },
        "draft": draft,
        "notes": {"hash_seed": "fixed"},
    } | changes  # fmt: skip
