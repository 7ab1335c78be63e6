"""Which vLLM this is, and what older ones lack. Imports nothing that a supported vLLM may lack."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import vllm

from kvfold.errors import PlanError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SUPPORTED = ((0, 31), (0, 32))


def check_version() -> None:
    """Raises `PlanError` if kvfold was not written for this vLLM."""
    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if found is None or (int(found[1]), int(found[2])) not in SUPPORTED:
        known = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise PlanError("vllm version", vllm.__version__, known)


def hit_sources(host: int, disk: int) -> dict[Any, int]:
    """Tokens by the tier they came from, in vLLM's terms; 0.31 has none and never asks."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    counts = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
    return {source: tokens for source, tokens in counts.items() if tokens}


def hash_tokens(config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one block hash, the same in every process; 0.31 does not hand it out."""
    known = getattr(kv_cache_config, "hash_block_size", None)
    return int(known) if known is not None else _block_sizes(config, kv_cache_config)[1]


def alignment_tokens(config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that every hit is a multiple of, as the engine's cache manager decides it."""
    known = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    if known is not None:
        return int(known)
    scheduler, hashed = _block_sizes(config, kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1 or not config.cache_config.enable_prefix_caching:
        return scheduler
    return hashed if _fine_grained(config, kv_cache_config, hashed) else scheduler


def _block_sizes(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """(scheduler, hash) tokens."""
    from vllm.v1.core.kv_cache_utils import (
        resolve_dcp_kv_block_size,
        resolve_kv_cache_block_sizes,
    )

    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:  # a worker's cache_config.block_size may be older than the groups
        dcp = config.parallel_config.decode_context_parallel_size
        tokens = int(resolve_dcp_kv_block_size(groups[0].kv_cache_spec, dcp))
        return tokens, tokens
    scheduler, hashed = resolve_kv_cache_block_sizes(kv_cache_config, config)
    return int(scheduler), int(hashed)


def _fine_grained(config: VllmConfig, kv_cache_config: KVCacheConfig, hashed: int) -> bool:
    """Whether hits end within blocks: states saved at hashes, and all groups can look them up."""
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    dcp = config.parallel_config.decode_context_parallel_size
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    if not any(
        isinstance(spec, MambaSpec)
        and spec.mamba_cache_mode == "align"
        and spec.block_size >= hashed + (dcp == 1)
        for spec in specs
    ):
        return False
    return all(
        KVCacheSpecRegistry.get_manager_class(
            group.kv_cache_spec, group.role
        ).supports_fine_grained_hash_lookup
        or resolve_dcp_kv_block_size(group.kv_cache_spec, dcp) == hashed
        for group in groups
        if group.kv_cache_spec.prefix_cacheable
    )
