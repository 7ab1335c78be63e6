"""Kimi-K3: MLA in some layers, KDA states in the others; the config counts layers from 1."""

from __future__ import annotations

from kvfold.models import recurrent
from kvfold.models.builder import Builder


def build(builder: Builder) -> None:
    config = builder.config
    linear = config.nested("linear_attn_config")
    attends, states = linear.counts("full_attn_layers", 1), linear.counts("kda_layers", 1)
    if sorted(attends + states) != list(range(1, config.layers + 1)):
        linear.refuse(
            "kda_layers",
            f"with full_attn_layers each layer from 1 to num_hidden_layers={config.layers} once",
            f"{len(states)} layers beside {len(attends)}",
        )
    heads, dim = linear.count("num_heads"), linear.count("head_dim")
    kernel = linear.count("short_conv_kernel_size")
    rope = config.count("qk_rope_head_dim", minimum=0)
    for i in range(config.layers):
        if i + 1 in attends:
            builder.mla(i, rope)
        else:
            recurrent.kda(builder, i, "self_attn.kda", heads, dim, kernel)
