"""Cache groups of many kinds of models, small, as the engine itself would form and configure them.

A `Shape` lists layers with vLLM's own spec classes. `virtual_config` groups and sizes them with
vLLM's own functions in the order in which its engine core does, so that block sizes, hash sizes and
alignments are the engine's.
"""

from __future__ import annotations

import atexit
import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR, CONNECTOR_MODULE = "VirtualConnector", "kvfold.testing.virtual_connector"
TARGET_LAYERS = 64
"""Layers of the target model: those numbered from here on belong to a draft."""
MAX_MODEL_TOKENS = 4096
KV_HEADS, HEAD_SIZE = 2, 8

Layers = Mapping[str, KVCacheSpec]


@dataclass(frozen=True)
class Shape:
    """The layers of one model and how they run."""

    name: str
    layers: Callable[[int], Layers]
    """From the number of KV heads per rank to specs by layer name, in the order of the layers."""
    tp: int = 1
    dcp: int = 1
    layout: str = "LBHNC"
    prefix_match_unit: int | None = None
    retention_interval: int | None = None
    draft_tokens: int = 0
    """Tokens that a draft model proposes per step."""
    max_tokens: int = 160
    """How long requests of random tests may get: a few periods of the shape."""

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class VirtualConfig:
    """An engine's configuration: the same objects that its processes would have."""

    shape: Shape
    vllm: VllmConfig
    worker: KVCacheConfig
    scheduler: KVCacheConfig
    scheduler_block_tokens: int
    hash_tokens: int


def full(block: int, heads: int, size: int = HEAD_SIZE) -> KVCacheSpec:
    """Full attention."""
    return FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=size, dtype=torch.float32
    )


def window(block: int, heads: int, tokens: int, size: int = HEAD_SIZE) -> KVCacheSpec:
    """Sliding-window attention."""
    return SlidingWindowSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=size,
        dtype=torch.float32,
        sliding_window=tokens,
    )


def mla(block: int, size: int = 32, **more: Any) -> KVCacheSpec:
    """MLA; `tokens_per_state` compresses."""
    return MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=size,
        dtype=torch.float32,
        max_tp_shards=1,
        **more,
    )


def mla_window(block: int, tokens: int, size: int = 32, **more: Any) -> KVCacheSpec:
    """Sliding-window MLA, as DeepSeek-V4 uses for windows and compressor states."""
    return SlidingWindowMLASpec(
        block_size=block,
        num_kv_heads=1,
        head_size=size,
        dtype=torch.float32,
        max_tp_shards=1,
        sliding_window=tokens,
        **more,
    )


def state(block: int, page_bytes: int) -> KVCacheSpec:
    """A recurrent state that is kept at block boundaries."""
    return MambaSpec(
        block_size=block,
        shapes=((page_bytes // 8,),),
        dtypes=(torch.float32,),
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
    )


def named(*specs: KVCacheSpec, drafts: tuple[KVCacheSpec, ...] = ()) -> Layers:
    """Layers numbered from 0, drafts behind the target's."""
    names = [f"model.layers.{i}.attn" for i in range(len(specs))]
    names += [f"model.layers.{TARGET_LAYERS + i}.attn" for i in range(len(drafts))]
    return dict(zip(names, (*specs, *drafts), strict=True))


def deepseek_v4(block: int = 256, scale: int = 1) -> Layers:
    """DeepSeek-V4-Flash's layers, five groups; at `scale` s all tokens are divided by s."""
    swa = mla_window(64 // scale, 128 // scale, 146, alignment=576, model_version="deepseek_v4")
    c4, c128 = (
        mla(block // scale, 146, alignment=576, model_version="deepseek_v4", tokens_per_state=n)
        for n in (4, 128 // scale)
    )
    index = mla(block // scale, 33, alignment=576, tokens_per_state=4, model_version="deepseek_v4")
    c4_state, c4_index_state = (mla_window(4, 8, size, alignment=576) for size in (2048, 512))
    c128_state = mla_window(8 if scale == 1 else 4, 128 // scale, 1024, alignment=576)
    specs: dict[str, KVCacheSpec] = {}
    for i in range(43):
        specs[f"model.layers.{i}.swa"] = swa
        if i >= 2:
            ratio4 = i % 2 == 0
            specs[f"model.layers.{i}.attn"] = c4 if ratio4 else c128
            specs[f"model.layers.{i}.compressor"] = c4_state if ratio4 else c128_state
            if ratio4:
                specs[f"model.layers.{i}.indexer"] = index
                specs[f"model.layers.{i}.indexer.compressor"] = c4_index_state
    return specs


PAGE_BYTES = 8 * KV_HEADS * HEAD_SIZE * 2 * 4
"""A page of 8 tokens at one rank; other kinds of the same shape are sized to it."""

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("full", lambda h: named(full(8, h), full(8, h))),
        Shape("window", lambda h: named(window(8, h, 20))),
        Shape("full+window", lambda h: named(full(8, h), window(8, h, 20))),
        Shape(
            "full+2 windows",
            lambda h: named(full(16, h), window(8, h, 20, 16), window(4, h, 37, 32)),
        ),
        Shape(
            "full+window, sparse",
            lambda h: named(full(8, h), window(8, h, 20)),
            retention_interval=0,
        ),
        Shape("full+chunked", lambda h: named(full(8, h), chunked(8, h, 24))),
        Shape(
            "full+states",
            lambda h: named(full(16, h, 4), *[state(16, PAGE_BYTES)] * 2, state(16, PAGE_BYTES)),
        ),
        Shape(
            "full+states, sparse",
            lambda h: named(full(16, h, 4), *[state(16, PAGE_BYTES)] * 2),
            retention_interval=0,
        ),
        Shape(
            "full+states, fine",
            lambda h: named(full(16, h, 4), *[state(16, PAGE_BYTES)] * 2),
            prefix_match_unit=4,
        ),
        Shape("deepseek v4", lambda h: deepseek_v4(scale=8), layout="BLNHC"),
        Shape("mla+draft", lambda h: named(mla(16), drafts=(full(16, h),)), draft_tokens=1),
        Shape(
            "full+window+draft",
            lambda h: named(full(8, h), window(8, h, 20), drafts=(window(8, h, 28),)),
            draft_tokens=2,
        ),
        Shape("mla, dcp", lambda h: named(mla(8), mla(8)), tp=2, dcp=2),
        Shape("full+states, dcp", lambda h: named(mla(8), state(8, 1024)), tp=2, dcp=2),
        Shape("full+ring", lambda h: named(full(8, h), ring(8, h))),
        Shape(
            "mla+replayed window", lambda h: named(mla(8), mla_window(8, 16, bounded_replay=True))
        ),
    )
}


def chunked(block: int, heads: int, tokens: int) -> KVCacheSpec:
    """Chunked local attention."""
    return ChunkedLocalAttentionSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=HEAD_SIZE,
        dtype=torch.float32,
        attention_chunk_size=tokens,
    )


def ring(block: int, heads: int) -> KVCacheSpec:
    """A ring per request, outside prefix caching."""
    return CircularBufferSpec(
        block_size=block, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32
    )


@cache
def _model_folder() -> Path:
    """A model configuration without weights."""
    folder = Path(tempfile.mkdtemp(prefix="kvfold-virtual-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": 65536,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def _base_config(connector: str, module: str | None, extra: str, max_tokens: int) -> VllmConfig:
    transfer: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": json.loads(extra),
    }
    if module is not None:
        transfer["kv_connector_module_path"] = module
    config = EngineArgs(
        model=str(_model_folder()),
        skip_tokenizer_init=True,
        load_format="dummy",
        enable_prefix_caching=True,
        max_model_len=max_tokens,
        kv_transfer_config=transfer,
    ).create_engine_config()
    register_all_kvcache_specs(config)
    return config


def draft_config(tokens: int) -> Any:
    """As much of a speculative configuration as scheduling asks for: a drafter of MTP's kind."""
    return SimpleNamespace(
        method="mtp",
        num_speculative_tokens=tokens,
        num_speculative_tokens_per_batch_size=None,
        max_num_new_slots_for_drafting=0,
        draft_model_config=None,
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        use_dspark=lambda: False,
        use_dflash=lambda: False,
        uses_draft_model=lambda: False,
        use_multi_module_mtp=lambda: False,
        use_extract_hidden_states=lambda: False,
        parallel_drafting=False,
    )


def virtual_config(
    shape: Shape,
    num_blocks: int,
    *,
    max_step_tokens: int = 64,
    max_requests: int = 8,
    max_model_tokens: int = MAX_MODEL_TOKENS,
    connector: str = CONNECTOR,
    module: str | None = CONNECTOR_MODULE,
    extra: Mapping[str, Any] | None = None,
    prefix_caching: bool = True,
) -> VirtualConfig:
    """Configure an engine of `num_blocks` blocks for `shape`, as its core process does."""
    base = _base_config(
        connector, module, json.dumps(extra or {}, sort_keys=True), max_model_tokens
    )
    config = copy.copy(base)
    config.kv_transfer_config = copy.copy(base.kv_transfer_config)
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.engine_id = f"virtual-{shape.name}-{num_blocks}"
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.tensor_parallel_size = shape.tp
    config.parallel_config.decode_context_parallel_size = shape.dcp
    config.parallel_config.world_size = shape.tp
    config.scheduler_config = copy.copy(base.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = max_step_tokens
    config.scheduler_config.max_num_scheduled_tokens = max_step_tokens
    config.scheduler_config.max_num_seqs = max_requests
    config.scheduler_config.async_scheduling = False
    cache_config = config.cache_config = copy.copy(base.cache_config)
    cache_config.kv_cache_layout = shape.layout
    cache_config.enable_prefix_caching = prefix_caching
    cache_config.mamba_cache_mode = "align"
    cache_config.prefix_match_unit = shape.prefix_match_unit
    cache_config.prefix_cache_retention_interval = shape.retention_interval
    cache_config.num_gpu_blocks_override = num_blocks
    if shape.draft_tokens:
        config.speculative_config = draft_config(shape.draft_tokens)
    return _resolved(shape, config, num_blocks)


def least_blocks(shape: Shape, tokens: int, max_step_tokens: int) -> int:
    """Blocks with which one request of `tokens` just fits; vLLM refuses less at its start."""
    config = virtual_config(
        shape, 16, max_step_tokens=max_step_tokens, max_model_tokens=tokens + 64
    )
    spread = max_step_tokens + config.vllm.num_lookahead_tokens
    blocks = 2
    for group in config.scheduler.kv_cache_groups:
        spec = group.kv_cache_spec
        span = kv_cache_utils.resolve_dcp_kv_block_size(spec, shape.dcp)
        most = -(-(tokens + config.vllm.num_lookahead_tokens) // span)
        if isinstance(spec, MambaSpec):
            most = min(most, 3)
        elif isinstance(spec, CircularBufferSpec):
            most = 1
        elif isinstance(spec, SlidingWindowSpec):
            most = min(most, -(-(spec.sliding_window + spread) // span) + 1)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            most = min(most, -(-(spec.attention_chunk_size + spread) // span) + 1)
        blocks += most
    return blocks


def _resolved(shape: Shape, config: VllmConfig, num_blocks: int) -> VirtualConfig:
    """What vLLM's engine core resolves between loading the model and making the scheduler."""
    specs = dict(shape.layers(max(1, KV_HEADS // shape.tp)))
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    per_block = kv_cache_utils._pool_bytes_per_block(config, groups)
    worker = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, num_blocks * per_block)
    worker.kv_tp_replicas = kv_cache_utils.kv_cache_groups_tp_replicas(groups, shape.tp, shape.dcp)
    worker.kv_cache_layout = shape.layout
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config([worker])
    config.cache_config.num_gpu_blocks = scheduler.num_blocks
    sizes = [g.kv_cache_spec.block_size for g in groups if g.kv_cache_spec.prefix_cacheable]
    config.cache_config.block_size = min(sizes)
    block, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(scheduler, config)
    alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(
        scheduler, config, block, hash_tokens
    )
    for cache_config in (worker, scheduler):
        cache_config.hash_block_size = hash_tokens
        cache_config.cache_hit_alignment_tokens = alignment
    return VirtualConfig(shape, config, worker, scheduler, block, hash_tokens)
