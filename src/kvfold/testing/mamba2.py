"""Let vLLM 0.32 run Mamba-2 with prefix caching on a CPU. Importing this changes the process.

In "align" mode a Mamba-2 prefill also keeps the state at the last block boundary that it crosses.
The CPU kernel of 0.32 returns only the final state, and the code that stores the kept one is
Triton: the engine dies on its first long prompt. Here both are replaced by the same in torch; the
scheduler and the cache manager do what they do on a GPU.

Engines load this by their argument `worker_extension_cls`; an extension of a test's own has to
import this module too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba import mamba_mixer2

_scan = mamba_mixer2.mamba_chunk_scan_combined_varlen


class Mamba2OnCpu:
    """What `worker_extension_cls` names; adds nothing to a worker."""


def _scan_chunks(*arrays: Any, **options: Any) -> Any:
    """Scan as vLLM's function does, also where it is to return the state after every chunk.

    `arrays` are x, dt, A, B, C: all but A have one row a token. Returns float states, one for each
    request, or for each chunk if `return_intermediate_states`.
    """
    if not options["return_intermediate_states"]:
        return _scan(*arrays, **options)
    x, dt, a, b, c = arrays
    bounds = options["cu_chunk_seqlens"].tolist()
    starts, out = options["initial_states"], options["out"]
    options["return_intermediate_states"] = False
    states: list[Any] = []
    requests = options["seq_idx"].tolist()
    for i, request in enumerate(requests):
        at = slice(bounds[i], bounds[i + 1])
        if i and requests[i - 1] == request:
            options["initial_states"] = states[-1]
        else:
            options["initial_states"] = None if starts is None else starts[request][None]
        options["cu_seqlens"] = torch.tensor([0, at.stop - at.start], dtype=torch.int32)
        options["out"] = out[at]
        states.append(_scan(x[at], dt[at], a, b[at], c[at], **options))
    return torch.cat(states)


def _store_states(
    checkpoint: Any,
    chunk_idx: Any,
    x: Any,
    conv_state: Any,
    chunk_states: Any,
    ssm_state: Any,
    query_start_loc: Any,
    *,
    state_len: int,
) -> None:
    """Write the kept states into their blocks: the convolution's last inputs, and the scan's."""
    for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
        if offset:
            block, end = int(checkpoint.state_indices[row]), int(query_start_loc[row]) + offset
            conv_state[block] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[int(chunk_idx[row])]


mamba_mixer2.mamba_chunk_scan_combined_varlen = _scan_chunks
mamba_mixer2.store_prefill_checkpoint = _store_states
