"""GLM-5.3-Flash: MLA without rope, with an indexer pooled over 16 tokens and a ring of the tokens
not pooled yet; KDA states in the other layers (`models/glm5next/`).
"""

from __future__ import annotations

from kvfold.errors import ConfigError
from kvfold.models import recurrent
from kvfold.models.builder import Builder

_RING_ROW_DTYPE_BYTES = 2


def build(builder: Builder) -> None:
    config = builder.config
    pool = config.count("index_kpool")
    if builder.block_size % pool:
        raise ConfigError("block_size", builder.block_size, f"a multiple of index_kpool={pool}")
    heads, dim = config.count("linear_num_heads"), config.count("linear_head_dim")
    kernel = config.count("linear_conv_kernel_dim")
    rope = config.count("qk_rope_head_dim", minimum=0)
    ring_bytes = 2 * config.count("index_head_dim") * _RING_ROW_DTYPE_BYTES
    allowed = ("linear_attention", "indexed_attention")
    for i, kind in enumerate(config.choices("layer_types", config.layers, allowed)):
        if kind == "linear_attention":
            recurrent.kda(builder, i, "self_attn.kda", heads, dim, kernel)
            continue
        builder.mla(i, rope, sparse=True)
        builder.indexer(i, tokens_per_state=pool)
        builder.ring(i, "self_attn.indexer.tail", pool, ring_bytes)
