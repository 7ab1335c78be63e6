"""Falcon-H1 (attention and Mamba-2 in every layer) and Bamba (attention in the layers listed)."""

from __future__ import annotations

from kvfold.models import recurrent
from kvfold.models.builder import Builder


def build(builder: Builder) -> None:
    for i in range(builder.config.layers):
        builder.attention(i)
        _mamba(builder, i)


def build_bamba(builder: Builder) -> None:
    config = builder.config
    attends = config.counts("attn_layer_indices")
    if any(i >= config.layers for i in attends):
        config.refuse("attn_layer_indices", f"numbers below num_hidden_layers={config.layers}")
    builder.notes.append("vLLM 0.32 does not serve BambaForCausalLM")
    for i in range(config.layers):
        if i in attends:
            builder.attention(i)
        else:
            _mamba(builder, i)


def _mamba(builder: Builder, index: int) -> None:
    recurrent.mamba2(
        builder,
        index,
        "mamba",
        heads="mamba_n_heads",
        head_dim="mamba_d_head",
        groups="mamba_n_groups",
        states="mamba_d_state",
        kernel="mamba_d_conv",
        state_dtype=builder.model_dtype,
    )
