"""Jamba: Mamba-1, and attention in every n-th layer."""

from __future__ import annotations

from kvfold.models import recurrent
from kvfold.models.builder import Builder


def build(builder: Builder) -> None:
    config = builder.config
    period = config.count("attn_layer_period")
    offset = config.count("attn_layer_offset", minimum=0)
    if offset >= period:
        config.refuse("attn_layer_offset", f"less than attn_layer_period={period}")
    for i in range(config.layers):
        if i % period == offset:
            builder.attention(i)
        else:
            recurrent.mamba1(builder, i, "mamba")
