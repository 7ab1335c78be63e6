"""Nemotron-H: Mamba-2, attention and feed-forward layers, told by a text with one letter each."""

from __future__ import annotations

from kvfold.models import recurrent
from kvfold.models.builder import Builder


def build(builder: Builder) -> None:
    config = builder.config
    state_dtype = config.dtype("mamba_ssm_cache_dtype", "float32")
    letters = config.choices("hybrid_override_pattern", config.layers, ("M", "*", "-", "E"))
    for i, letter in enumerate(letters):
        if letter == "*":
            builder.attention(i)
        elif letter == "M":
            recurrent.mamba2(
                builder,
                i,
                "mixer",
                heads="mamba_num_heads",
                head_dim="mamba_head_dim",
                groups="n_groups",
                states="ssm_state_size",
                kernel="conv_kernel",
                state_dtype=state_dtype,
            )
