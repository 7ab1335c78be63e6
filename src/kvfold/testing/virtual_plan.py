"""The plan of a virtual engine, by the path of a real one: from stage records of all its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvfold.testing.virtual_pages import CHUNKED, FULL, SCRATCH, STATE, WINDOW, Strand
from kvfold.vllm import translate
from kvfold.vllm.agreement import Agreed, agree

if TYPE_CHECKING:
    from kvfold.testing.virtual_shapes import VirtualConfig

_agreed: dict[tuple[str, int, int], Agreed] = {}


def agreed(config: VirtualConfig, blocks_per_chunk: int = 1) -> Agreed:
    """What all processes of the engine would agree on."""
    key = (config.shape.name, config.worker.num_blocks, blocks_per_chunk)
    if key not in _agreed:
        caches = _caches(config)
        _agreed[key] = agree(
            [
                translate.stage_record(config.vllm, config.worker, caches, blocks_per_chunk, rank)
                for rank in range(config.shape.tp)
            ]
        )
    return _agreed[key]


def _caches(config: VirtualConfig) -> dict[str, torch.Tensor]:
    """Views [blocks, heads, states, row] of every layer, without memory."""
    caches = {}
    for group in config.worker.kv_cache_groups:
        for name in group.layer_names:
            spec = _layer_spec(group.kv_cache_spec, name)
            if isinstance(spec, AttentionSpec):
                size = spec.state_content_size_bytes
                shape = (config.worker.num_blocks, spec.num_heads, int(spec.num_states), size)
            else:
                shape = (config.worker.num_blocks, 1, 1, spec.page_size_bytes)
            caches[name] = torch.empty(shape, dtype=torch.int8, device="meta")
    return caches


def _layer_spec(spec: KVCacheSpec, name: str) -> KVCacheSpec:
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def strands_of(config: VirtualConfig) -> list[Strand]:
    """The engine's groups as virtual pages have them: those that are stored in the order of their
    numbers, then the others."""
    stored = agreed(config).plan.stored
    strands = [
        _strand(config, number, group.index, group.is_draft) for number, group in enumerate(stored)
    ]
    known = {strand.group for strand in strands}
    for index in range(len(config.worker.kv_cache_groups)):
        if index not in known:
            strands.append(_strand(config, len(strands), index, draft=False))
    return strands


def _strand(config: VirtualConfig, number: int, index: int, draft: bool) -> Strand:
    spec = config.scheduler.kv_cache_groups[index].kv_cache_spec
    kind, window = FULL, 0
    if isinstance(spec, MambaSpec):
        kind = STATE
    elif isinstance(spec, CircularBufferSpec):
        kind = SCRATCH
    elif isinstance(spec, SlidingWindowSpec):
        kind, window = WINDOW, spec.sliding_window
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        kind, window = CHUNKED, spec.attention_chunk_size
    dcp = config.shape.dcp if spec.dcp_sharded else 1
    replayed = spec.prefix_replay_tokens > 0
    return Strand(number, index, draft, kind, spec.block_size * dcp, window, replayed)
