"""vLLM's cache specs and tensors in kvfold's terms: kinds, sizes, encodings, pages.

Depends on vLLM's version, like `translate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from kvfold.copy.cpu import LayerPages
from kvfold.errors import PlanError
from kvfold.spec import (
    CHUNKED_LOCAL,
    FULL_ATTENTION,
    HEAD_KINDS,
    INDEXER,
    MLA,
    ROW_KINDS,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    Encoding,
    Kind,
    LayerSpec,
    declared_shards,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STATES: Mapping[str, Kind] = {
    "MAMBA1": "mamba1",
    "MAMBA2": "mamba2",
    "SHORT_CONV": "short_conv",
    "LINEAR": "mamba2",
    "GDN_ATTN": "gdn",  # KDA layers, too
}


def layer_specs(config: KVCacheConfig, group: int) -> dict[str, KVCacheSpec]:
    """Each layer's own spec: containers are unwrapped."""
    spec = config.kv_cache_groups[group].kv_cache_spec
    names = config.kv_cache_groups[group].layer_names
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in names}
    return dict.fromkeys(names, spec)


def kind(name: str, spec: KVCacheSpec) -> Kind:
    """The cache kind of a layer in a group that takes part in prefix caching.

    Raises `PlanError` naming the layer if its blocks cannot be stored.
    """
    if type(spec) is MLAAttentionSpec:
        return INDEXER if spec.cache_role.value == "indexer" else MLA
    if type(spec) is FullAttentionSpec:
        return FULL_ATTENTION  # a window whose tokens are all kept counts as full attention
    if type(spec) is SlidingWindowSpec:
        return SLIDING_WINDOW
    if type(spec) is SlidingWindowMLASpec:
        return SLIDING_WINDOW_MLA
    if type(spec) is ChunkedLocalAttentionSpec:
        return CHUNKED_LOCAL
    if type(spec) is MambaSpec and spec.mamba_type.name in STATES:
        if spec.mamba_cache_mode != "align":
            raise PlanError(
                f"layer {name!r} mamba_cache_mode",
                spec.mamba_cache_mode,
                "align, with enable_prefix_caching: otherwise no state is kept that can be found "
                "again",
            )
        return STATES[spec.mamba_type.name]
    raise PlanError(
        f"layer {name!r} cache",
        type(spec).__name__,
        "full, sliding-window or chunked attention, MLA, or a recurrent state",
    )


def participates(config: KVCacheConfig, group: int) -> bool:
    """Whether the engine looks this group's blocks up by their hashes."""
    described = config.kv_cache_groups[group]
    return bool(described.kv_cache_spec.prefix_cacheable and described.enable_kv_transfer)


def window_tokens(spec: KVCacheSpec) -> int | None:
    """The window in tokens, with what the engine keeps besides; None if there is none."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window + spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return None


def total_heads(config: VllmConfig, layer: str, draft: bool) -> int | None:
    """Total KV heads of `layer` over all ranks, by the configuration of the model it belongs to."""
    from vllm.model_executor.models.utils import extract_layer_index

    model = config.model_config
    if draft and config.speculative_config is not None:
        model = config.speculative_config.draft_model_config or model
    arch = model.model_arch_config
    if arch.per_layer_overrides:
        try:
            arch = arch[extract_layer_index(layer)]
        except (AssertionError, IndexError, ValueError):
            return None
    return int(arch.total_num_kv_heads)


def layer_record(
    config: VllmConfig, name: str, spec: KVCacheSpec, tensor: torch.Tensor, *, draft: bool
) -> dict[str, Any]:
    """One layer as `LayerSpec` fields, JSON-ready. `tensor` is its view [blocks, heads, states,
    row]."""
    what = kind(name, spec)
    if isinstance(spec, MambaSpec):
        return asdict(_state(name, what, spec))
    assert isinstance(spec, AttentionSpec)
    tp = config.parallel_config.tensor_parallel_size
    total, shards = (1, 1) if what in ROW_KINDS else (total_heads(config, name, draft), None)
    if what in HEAD_KINDS:
        shards = declared_shards(spec.num_kv_heads, tp, total)
        total = total if shards is not None else None
    heads = spec.num_heads
    slots_are_heads = heads == spec.num_kv_heads
    # The view's first dimension may count the kernel's smaller blocks.
    blocks = int(tensor.shape[0] * tensor.shape[2] // spec.num_states)
    return asdict(
        LayerSpec(
            name=name,
            kind=what,
            block_size=spec.block_size,
            num_kv_heads=heads,
            head_bytes=spec.state_content_size_bytes,
            total_kv_heads=total if slots_are_heads else None,
            max_tp_shards=shards if slots_are_heads else None,
            dcp_sharded=spec.dcp_sharded,
            encoding="whole_page" if what == INDEXER else encoding(tensor, blocks, heads),
            dtype=str(spec.dtype).removeprefix("torch."),
            tokens_per_state=int(spec.tokens_per_state),
            page_bytes=spec.unpadded_page_size_bytes,
            engine_page_bytes=spec.page_size_bytes,
            window=window_tokens(spec),
        )
    )


def _state(name: str, what: Kind, spec: MambaSpec) -> LayerSpec:
    return LayerSpec(
        name=name,
        kind=what,
        block_size=spec.block_size,
        num_kv_heads=1,
        head_bytes=spec.state_content_size_bytes,
        dcp_sharded=False,
        encoding="whole_page" if spec.tp_replicated else "opaque",
        dtype="+".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        tokens_per_state=spec.block_size,
        engine_page_bytes=spec.page_size_bytes,
        tp_replicated=spec.tp_replicated,
    )


def encoding(tensor: torch.Tensor, blocks: int, heads: int) -> Encoding:
    """The order inside a page, from the strides of a layer's view [blocks, heads, states, row].

    Raises `PlanError` for pages with gaps: copies of whole pages would miss or add bytes.
    """
    grouped = group_kernel_blocks(tensor, blocks)
    split = grouped.dim() == tensor.dim() + 1
    page = grouped[0]
    if page.numel() * page.element_size() != _page_extent_bytes(page):
        raise PlanError("page strides", tuple(page.stride()), "pages without gaps")
    if split and heads > 1:
        return "opaque"  # kernel blocks of [head, state, row] each: no order of heads as a whole
    inner = page.flatten(0, 1) if split else page
    if inner.is_contiguous():
        return "heads_first"
    return "tokens_first" if inner.transpose(0, 1).is_contiguous() else "opaque"


def _page_extent_bytes(page: torch.Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(page.shape, page.stride(), strict=True))
    return int((last + 1) * page.element_size())


def pages(kv_caches: Mapping[str, torch.Tensor], config: KVCacheConfig) -> dict[str, LayerPages]:
    """Where each storable layer's pages lie. Layers of one allocation share its memory."""
    memory: dict[int, Any] = {}
    found = {}
    for name, spec in stored_layers(config):
        tensor = kv_caches[name]
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memory:
            view = torch.empty(0, dtype=torch.uint8).set_(storage)
            memory[storage.data_ptr()] = view.numpy()
        grouped = group_kernel_blocks(tensor, config.num_blocks)
        content = (
            spec.state_content_size_bytes
            if isinstance(spec, MambaSpec)
            else spec.unpadded_page_size_bytes
        )
        found[name] = LayerPages(
            memory[storage.data_ptr()],
            tensor.data_ptr() - storage.data_ptr(),
            grouped.stride(0) * tensor.element_size(),
            content,
            config.num_blocks,
        )
    return found


def stored_layers(config: KVCacheConfig) -> Iterator[tuple[str, AttentionSpec | MambaSpec]]:
    """Layers of all groups that take part, with their own specs."""
    for group in range(len(config.kv_cache_groups)):
        if participates(config, group):
            for name, spec in layer_specs(config, group).items():
                assert isinstance(spec, AttentionSpec | MambaSpec)
                yield name, spec
