"""DeepSeek-V4: latents compressed by 4 or 128, an indexer, a window cache on every layer, and the
compressors' own states: five groups (`models/deepseek_v4/`).

fp8 rows are 584 bytes (448 fp8, 128 of bf16 rope, 8 of scales; data first, scales at the page's
end) in pages padded to 576; plain rows are the head's elements in pages padded to 512.
"""

from __future__ import annotations

from typing import NamedTuple

from kvfold.errors import ConfigError, PlanError
from kvfold.models.builder import Builder
from kvfold.models.pages import Row, align, element_bytes, indexer_row
from kvfold.spec import INDEXER, MLA, SLIDING_WINDOW_MLA, Encoding, Kind

_WINDOW_BLOCK = 64
_PACKED_ROW_BYTES = 584
_FLOAT32_BYTES = 4


class _Compressor(NamedTuple):
    """A ratio's compressor state: tokens per block, tokens needed, rows of head_dim per token."""

    block: int
    window: int
    rows: int


_COMPRESSORS = {4: _Compressor(4, 8, 4), 128: _Compressor(8, 128, 2)}


def build(builder: Builder) -> None:
    config = builder.config
    check_common(builder)
    ratios = compress_ratios(builder, (0, 4, 128))
    row, padding = packed_row(builder)
    main_bytes = sum(_main_layer(builder, i, ratio, row, padding) for i, ratio in enumerate(ratios))
    page_bytes = align(_WINDOW_BLOCK * row.nbytes, padding)
    # The engine deals the window layers to as many groups as fit the widest one's block.
    window_groups = max(1, -(-len(ratios) * page_bytes // max(1, main_bytes)))
    for i in range(len(ratios)):
        add_row(
            builder,
            f"window {i % window_groups}",
            i,
            "self_attn.swa_cache",
            SLIDING_WINDOW_MLA,
            row.nbytes,
            padding,
            block=_WINDOW_BLOCK,
            window=config.count("sliding_window"),
            encoding=row.encoding,
            dtype=row.dtype,
        )
    for i, ratio in enumerate(ratios):
        if ratio:
            _states(builder, i, ratio, padding)


def check_common(builder: Builder) -> None:
    """Refuse what no DeepSeek-V4 runs with."""
    config = builder.config
    if config.has("o_groups") and builder.mesh.tp > (groups := config.count("o_groups")):
        raise PlanError("tp", builder.mesh.tp, f"at most o_groups={groups}")
    if builder.block_size % 128:
        raise ConfigError("block_size", builder.block_size, "a multiple of 128")


def compress_ratios(builder: Builder, allowed: tuple[int, ...]) -> list[int]:
    """Return each layer's ratio; 0 is window only. Further zeros are draft layers'."""
    config = builder.config
    ratios = config.counts("compress_ratios")
    if len(ratios) < config.layers or any(ratios[config.layers :]):
        config.refuse(
            "compress_ratios",
            f"one entry per layer (num_hidden_layers={config.layers}), then zeros for drafts",
            ratios[config.layers :] or len(ratios),
        )
    for i, ratio in enumerate(ratios):
        if ratio not in allowed:
            config.refuse(f"compress_ratios[{i}]", f"one of {allowed}", ratio)
    return ratios[: config.layers]


def packed_row(builder: Builder) -> tuple[Row, int]:
    """Return the latent row and what pages are padded to."""
    config, dtype = builder.config, builder.kv_dtype
    head_dim, rope = config.count("head_dim"), config.count("qk_rope_head_dim")
    if dtype in ("fp8", "fp8_e4m3", "fp8_ds_mla"):
        if (head_dim, rope) != (512, 64):
            config.refuse("head_dim", "512 with qk_rope_head_dim=64 for fp8 rows", head_dim)
        return Row(_PACKED_ROW_BYTES, "whole_page", "fp8_ds_mla"), 576
    size = element_bytes(dtype, builder.model_dtype)
    if size is None or size == 1:
        raise ConfigError("kv_cache_dtype", dtype, "auto, bfloat16, fp8 or fp8_ds_mla")
    return Row(
        head_dim * size, "whole_page", builder.model_dtype if dtype == "auto" else dtype
    ), 512


def _main_layer(builder: Builder, index: int, ratio: int, row: Row, padding: int) -> int:
    """Add a layer's compressed latent and, at ratio 4, its indexer; return their padded bytes."""
    if not ratio:
        return 0
    parts: list[tuple[str, Kind, Row]] = [("self_attn.attn", MLA, row)]
    if ratio == 4:
        indexer = indexer_row(builder.config.count("index_head_dim"))
        parts.append(("self_attn.indexer.k_cache", INDEXER, indexer))
    total_bytes = 0
    for part, kind, own in parts:
        total_bytes += add_row(
            builder,
            "attention",
            index,
            part,
            kind,
            own.nbytes,
            padding,
            ratio=ratio,
            encoding=own.encoding,
            dtype=own.dtype,
        )
    return total_bytes


def _states(builder: Builder, index: int, ratio: int, padding: int) -> None:
    """Add the compressor's fp32 state of a layer, and its indexer's."""
    shape = _COMPRESSORS[ratio]
    parts = [("self_attn.compressor.state", builder.config.count("head_dim"))]
    if ratio == 4:
        dim = builder.config.count("index_head_dim")
        parts.append(("self_attn.indexer.compressor.state", dim))
    for part, dim in parts:
        add_row(
            builder,
            f"compressor {ratio}",
            index,
            part,
            SLIDING_WINDOW_MLA,
            shape.rows * dim * _FLOAT32_BYTES,
            padding,
            block=shape.block,
            window=shape.window,
            dtype="float32",
        )


def add_row(
    builder: Builder,
    group: str,
    index: int,
    part: str,
    kind: Kind,
    row_bytes: int,
    padding: int,
    *,
    block: int | None = None,
    ratio: int = 1,
    window: int | None = None,
    encoding: Encoding = "heads_first",
    dtype: str,
    engine_declares: bool = True,
) -> int:
    """Add one replicated single-row cache; return its page as the engine pads it."""
    block = block or builder.block_size
    padded_bytes = align(block // ratio * row_bytes, padding)
    builder.add(
        group,
        index,
        part,
        engine_declares=engine_declares,
        kind=kind,
        block_size=block,
        tokens_per_state=ratio,
        head_bytes=row_bytes,
        max_tp_shards=1,
        engine_page_bytes=padded_bytes,
        window=window,
        encoding=encoding,
        dtype=dtype,
    )
    return padded_bytes
