"""MiniMax-M3: grouped-query attention; sparse layers also own a key-only indexer.

The indexer keeps one key per token in the model's dtype whatever the KV dtype, the same on every
rank; the engine does not say so (`models/minimax_m3/common/indexer.py`).
"""

from __future__ import annotations

from kvfold.models.builder import Builder
from kvfold.models.config import DTYPE_BYTES
from kvfold.spec import INDEXER


def build(builder: Builder) -> None:
    config = builder.config
    sparse = config.nested("sparse_attention_config")
    frequency = sparse.counts("sparse_attention_freq")
    if len(frequency) != config.layers:
        sparse.refuse(
            "sparse_attention_freq",
            f"one entry per layer, num_hidden_layers={config.layers}",
            len(frequency),
        )
    row_bytes = sparse.count("sparse_index_dim") * DTYPE_BYTES[builder.model_dtype]
    for i, owns in enumerate(frequency):
        builder.attention(i)
        if owns:
            builder.add(
                "attention",
                i,
                "self_attn.indexer.k_cache",
                kind=INDEXER,
                head_bytes=row_bytes,
                max_tp_shards=1,
                dtype=builder.model_dtype,
            )
