"""DeepSeek-V4.1: a few source layers own a compressed latent and index keys, all others read
them; every layer has a window cache (`models/deepseek_v41/`).

The engine keeps windows out of prefix caching and replays them after a hit (swa_bounded_replay,
on by default, off under PCP). It does not declare that latents and index keys are the same on
every rank, though they are.
"""

from __future__ import annotations

from kvfold.errors import PlanError
from kvfold.models.builder import Builder
from kvfold.models.deepseek_v4 import add_row, check_common, compress_ratios, packed_row
from kvfold.models.pages import Row, indexer_row
from kvfold.spec import INDEXER, MLA, SLIDING_WINDOW_MLA, Kind

_WINDOW_BLOCK = 32
_RING_SLOTS = 8
_FLOAT32_BYTES = 4


def build(builder: Builder) -> None:
    config = builder.config
    check_common(builder)
    ratios = compress_ratios(builder, (0, 1, 2))
    sources = _sources(builder, ratios)
    row, padding = packed_row(builder)
    keys = indexer_row(config.count("index_head_dim"))
    parts: tuple[tuple[str, Kind, Row], ...] = (
        ("self_attn.attn", MLA, row),
        ("self_attn.indexer.k_cache", INDEXER, keys),
    )
    for i in sources:
        for part, kind, own in parts:
            add_row(
                builder,
                "attention",
                i,
                part,
                kind,
                own.nbytes,
                padding,
                ratio=ratios[i],
                encoding=own.encoding,
                dtype=own.dtype,
                engine_declares=False,
            )
    for i in range(len(ratios)):
        add_row(
            builder,
            "window",
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
    for i in sources:
        if ratios[i] > 1:
            slot_bytes = 2 * config.count("head_dim") * _FLOAT32_BYTES
            builder.ring(i, "self_attn.compressor.state_cache", _RING_SLOTS, slot_bytes)
    if builder.mesh.pcp == 1:
        builder.keep_outside("window")
        builder.notes.append("windows are replayed, not stored (swa_bounded_replay, the default)")
    if row.dtype == "fp8_ds_mla":
        builder.notes.append("packed rows as on Hopper; Blackwell keeps larger MXFP8 records")


def _sources(builder: Builder, ratios: list[int]) -> list[int]:
    """Return the layers that own a latent; each other compressed layer reads the last one."""
    config = builder.config
    sources = config.counts("kv_source_layer_ids")
    first = next((i for i, ratio in enumerate(ratios) if ratio), None)
    if first not in sources or any(i >= len(ratios) or not ratios[i] for i in sources):
        config.refuse(
            "kv_source_layer_ids",
            f"layers with a ratio in compress_ratios, among them the first such layer, {first}",
        )
    for i, ratio in enumerate(ratios):
        source = max((s for s in sources if s <= i), default=0)
        if ratio and builder.stage(source) != builder.stage(i):
            raise PlanError(
                "pp",
                builder.mesh.pp,
                f"stages that keep readers with their source: layer {source} is not on the stage "
                f"of layer {i}",
            )
    return sorted(sources)
