"""Qwen3-Next and Qwen3.5: gated delta nets, and full attention in every n-th layer."""

from __future__ import annotations

from kvfold.models import recurrent
from kvfold.models.builder import Builder


def build(builder: Builder) -> None:
    config = builder.config
    interval = config.count("full_attention_interval", 4)
    full = [(i + 1) % interval == 0 for i in range(config.layers)]
    if config.has("layer_types"):
        allowed = ("linear_attention", "full_attention")
        for i, kind in enumerate(config.choices("layer_types", config.layers, allowed)):
            if (kind == "full_attention") != full[i]:
                expected = f"the other kind, by full_attention_interval={interval}"
                config.refuse(f"layer_types[{i}]", expected, kind)
    for i, attends in enumerate(full):
        if attends:
            builder.attention(i)
        else:
            recurrent.gdn(builder, i, "linear_attn")
