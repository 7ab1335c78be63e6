"""Small layers and groups of any kind, for tests of what many groups have in common."""

from __future__ import annotations

from kvfold.spec import ROW_KINDS, STATE_KINDS, WINDOW_KINDS, GroupSpec, LayerSpec


def layer(name, kind="full_attention", block=16, window=None, **changes):
    """A small layer of any kind."""
    fields = {"num_kv_heads": 1 if kind in ROW_KINDS else 2, "head_bytes": 4}
    if kind in STATE_KINDS:
        fields = {
            "num_kv_heads": 1, "head_bytes": 64, "dcp_sharded": False, "tokens_per_state": block,
            "encoding": "opaque",
        }  # fmt: skip
    if kind in WINDOW_KINDS:
        fields["window"] = window
    return LayerSpec(name=name, kind=kind, block_size=block, **fields | changes)


def group(index, kind="full_attention", block=16, window=None, draft=False, **changes):
    """A group of one layer."""
    name = f"{'draft' if draft else 'layers'}.{index}"
    return GroupSpec(index, (layer(name, kind, block, window, **changes),), is_draft=draft)


def outside(index):
    """A group outside prefix caching."""
    return GroupSpec(index, (), prefix_cacheable=False)
