"""Sizes of recurrent states on one rank (`model_executor/layers/mamba/mamba_utils.py`).

k is the convolution's kernel: it keeps the last k - 1 inputs. `parts` are elements by dtype.
"""

from __future__ import annotations

from kvfold.errors import PlanError
from kvfold.models.builder import Builder
from kvfold.spec import Kind


def mamba1(builder: Builder, index: int, name: str) -> None:
    """conv (k-1) x inner/TP, state inner/TP x d_state; inner = expand x hidden."""
    config, tp = builder.config, builder.mesh.tp
    inner = config.count("mamba_expand", 2) * config.count("hidden_size")
    if inner % tp:
        raise PlanError("tp", tp, f"a divisor of mamba_expand x hidden_size = {inner}")
    conv = (config.count("mamba_d_conv") - 1) * inner // tp
    state = inner // tp * config.count("mamba_d_state")
    _add(builder, index, "mamba1", name, conv, state, builder.model_dtype)


def mamba2(
    builder: Builder,
    index: int,
    name: str,
    *,
    heads: str,
    head_dim: str,
    groups: str,
    states: str,
    kernel: str,
    state_dtype: str,
) -> None:
    """conv (k-1) x (inner + 2 G' N)/TP, state heads/TP x head_dim x N; fields are named.

    G' is the number of groups, or TP if one group is copied to every rank; several groups that
    TP does not divide are refused, as the mixer refuses them.
    """
    config, tp = builder.config, builder.mesh.tp
    group_count = config.count(groups)
    if group_count % tp:
        if group_count != 1:
            raise PlanError("tp", tp, f"a divisor of {groups}={group_count}")
        group_count = tp
    head_count, n = builder.divides(heads), config.count(states)
    inner = head_count * config.count(head_dim)
    conv = (config.count(kernel) - 1) * (inner + 2 * group_count * n) // tp
    _add(builder, index, "mamba2", name, conv, inner // tp * n, state_dtype)


def gdn(builder: Builder, index: int, name: str) -> None:
    """conv (k-1) x (2 Kh Kd + Vh Vd)/TP, state Vh/TP x Vd x Kd."""
    config, tp = builder.config, builder.mesh.tp
    key_heads = builder.divides("linear_num_key_heads")
    value_heads = builder.divides("linear_num_value_heads")
    key_dim = config.count("linear_key_head_dim")
    value_dim = config.count("linear_value_head_dim")
    width = (2 * key_heads * key_dim + value_heads * value_dim) // tp
    conv = (config.count("linear_conv_kernel_dim") - 1) * width
    state = value_heads // tp * value_dim * key_dim
    _add(
        builder,
        index,
        "gdn",
        name,
        conv,
        state,
        config.dtype("mamba_ssm_dtype", builder.model_dtype),
    )


def kda(builder: Builder, index: int, name: str, heads: int, dim: int, kernel: int) -> None:
    """conv (k-1) x 3 h d/TP, state h/TP x d x d in float32."""
    tp = builder.mesh.tp
    if heads % tp:
        raise PlanError("tp", tp, f"a divisor of {heads} KDA heads")
    conv = (kernel - 1) * 3 * heads // tp * dim
    _add(builder, index, "kda", name, conv, heads // tp * dim * dim, "float32")


def _add(
    builder: Builder, index: int, kind: Kind, name: str, conv: int, state: int, state_dtype: str
) -> None:
    parts: dict[str, int] = {builder.model_dtype: conv}
    parts[state_dtype] = parts.get(state_dtype, 0) + state
    builder.state(index, kind, parts, name)
