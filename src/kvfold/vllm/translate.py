"""Everything that depends on vLLM's version: its configuration in, kvfold's terms out.

Written for vLLM 0.31 and 0.32. Besides `translate_layers` and `translate_versions` no module reads
a vLLM configuration or spec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from kvfold import identity
from kvfold.errors import FormatError, PlanError
from kvfold.mesh import Mesh
from kvfold.vllm.room import EngineGroup
from kvfold.vllm.translate_layers import (
    kind,
    layer_record,
    layer_specs,
    pages,
    participates,
    stored_layers,
    window_tokens,
)
from kvfold.vllm.translate_versions import (
    SUPPORTED,
    alignment_tokens,
    check_version,
    hash_tokens,
    hit_sources,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.request import Request

__all__ = ["SUPPORTED", "hit_sources", "pages"]

VOLATILE_CONFIG_FIELDS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Fields of a model's config that do not shape its KV cache, or that the identity has elsewhere."""


def check_supported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse, by name of the setting, what kvfold cannot offload correctly.

    Raises `PlanError`; runs in every process before anything is stored.
    """
    check_version()
    parallel = config.parallel_config
    if parallel.nnodes != 1:
        raise PlanError("nnodes", parallel.nnodes, "1: all ranks share one machine's store")
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "extract_hidden_states":
        raise PlanError(
            "speculative_config", speculative.method, "another: a hit computes no hidden states"
        )
    assert config.kv_transfer_config is not None
    if config.kv_transfer_config.kv_role != "kv_both":
        raise PlanError("kv_role", config.kv_transfer_config.kv_role, "kv_both")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise PlanError("calculate_kv_scales", True, "false: scales differ from run to run")
    if config.device_config.device_type != "cpu":
        raise PlanError(
            "device", config.device_config.device_type, "cpu: other devices have no copy path yet"
        )
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        if group.host_resident:
            raise PlanError(f"cache group {i}", "host resident", "caches on the device")
    for name, spec in stored_layers(kv_cache_config):
        kind(name, spec)


def mesh(config: VllmConfig) -> Mesh:
    """The engine's parallel layout; data-parallel replicas are other engines."""
    parallel = config.parallel_config
    return Mesh(
        tp=parallel.tensor_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dcp_interleave=parallel.cp_kv_cache_interleave_size or 1,
    )


def rank(config: VllmConfig) -> int:
    """This worker's rank within the engine."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    return mesh(config).rank(
        get_pp_group().rank_in_group, get_pcp_group().rank_in_group, get_tp_group().rank_in_group
    )


def gather(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of all workers of the engine.

    Unconditional on every rank and axis, so that no rank waits for one that skipped.
    """
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    records = [record]
    for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
        gathered: list[list[dict[str, Any]]] = [[] for _ in range(group.world_size)]
        dist.all_gather_object(gathered, records, group=group.cpu_group)
        records = [one for part in gathered for one in part]
    return records


def stage_record(
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    blocks_per_chunk: int,
    rank: int,
) -> dict[str, Any]:
    """What this worker knows and the plan needs, JSON-ready.

    Equal on all ranks of a pipeline stage but for `rank`.
    """
    names = [name for name, _ in stored_layers(kv_cache_config)]
    layout = mesh(config)
    return {
        "rank": rank,
        "groups": [
            _group_record(config, kv_cache_config, kv_caches, group)
            for group in range(len(kv_cache_config.kv_cache_groups))
        ],
        # Within a page: the distance of blocks is no part of their bytes.
        "strides": {name: list(kv_caches[name].stride()[1:]) for name in names},
        "shapes": {name: list(kv_caches[name].shape[1:]) for name in names},
        "backends": {name: _backend(config, name) for name in names},
        "mesh": {
            "tp": layout.tp,
            "dcp": layout.dcp,
            "pcp": layout.pcp,
            "pp": layout.pp,
            "dcp_interleave": layout.dcp_interleave,
        },
        "blocks_per_chunk": blocks_per_chunk,
        "tokens_per_hash": hash_tokens(config, kv_cache_config),
        "alignment_tokens": alignment_tokens(config, kv_cache_config),
        "num_blocks": kv_cache_config.num_blocks,
        "layout": kv_cache_config.kv_cache_layout,
        "model": _model_fields(config),
        "draft": _draft_fields(config),
        "notes": hash_notes(config),
    }


def _group_record(
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    group: int,
) -> dict[str, Any]:
    spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
    cached = participates(kv_cache_config, group)
    layers = []
    if cached:
        for name, own in layer_specs(kv_cache_config, group).items():
            if _shares_cache(config, name):
                continue
            draft = is_draft(config, name)
            record = layer_record(config, name, own, kv_caches[name], draft=draft)
            layers.append({"draft": draft, "spec": record})
    return {
        "index": group,
        "prefix_cacheable": cached,
        "block_size": spec.block_size,
        "mode": _state_mode(spec),
        "layers": layers,
    }


def _state_mode(spec: KVCacheSpec) -> str:
    """How a group of states is cached; "" for other groups."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    return str(spec.mamba_cache_mode) if isinstance(spec, MambaSpec) else ""


def _shares_cache(config: VllmConfig, name: str) -> bool:
    """Whether a layer has no pages of its own but reads another's."""
    layer = config.compilation_config.static_forward_context.get(name)
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None


def is_draft(config: VllmConfig, name: str) -> bool:
    """Whether a layer belongs to the draft model: drafts number theirs behind the target's."""
    if config.speculative_config is None:
        return False
    if name.startswith("draft_model."):
        return True
    from vllm.model_executor.models.utils import extract_layer_index

    try:
        return bool(extract_layer_index(name) >= config.model_config.get_total_num_hidden_layers())
    except (AssertionError, ValueError):
        return False


def _backend(config: VllmConfig, name: str) -> str:
    layer = config.compilation_config.static_forward_context.get(name)
    try:
        return str(layer.get_attn_backend().get_name())
    except (AttributeError, NotImplementedError):
        return type(layer).__name__


def _model_fields(config: VllmConfig) -> dict[str, Any]:
    """The identity's fields that come from the model and not from the plan."""
    model = config.model_config
    text = _text_config(model)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    long = "longrope" in json.dumps(rope)
    return {
        "weights": _weights(config, model),
        "loading": {
            "format": str(config.load_config.load_format),
            "quantization": None if model.quantization is None else str(model.quantization),
            "quantization_config": _plain(model.quantization_config),
        },
        "text_config": text,
        "rope": {"parameters": rope, "max_model_len": model.max_model_len if long else None},
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_encoding": str(config.cache_config.cache_dtype),
        "kv_scales": {},
    }


def _draft_fields(config: VllmConfig) -> dict[str, Any] | None:
    """What tells draft models apart; None without one. Their caches depend on the target too."""
    speculative = config.speculative_config
    model = None if speculative is None else speculative.draft_model_config
    if speculative is None or model is None:
        return None
    return {
        "method": str(speculative.method),
        "weights": _weights(config, model),
        "text_config": _text_config(model),
        "quantization": None if model.quantization is None else str(model.quantization),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _text_config(model: ModelConfig) -> dict[str, Any]:
    text = json.loads(model.hf_text_config.to_json_string(use_diff=False))
    return {k: v for k, v in text.items() if k not in VOLATILE_CONFIG_FIELDS}


def _plain(value: Any) -> Any:
    """A setting in JSON terms: mappings as they are, anything else by its text."""
    return value if value is None or isinstance(value, dict) else str(value)


def _weights(config: VllmConfig, model: ModelConfig) -> str:
    """A digest of the weights as loaded; a model that is not on this disk counts by name and
    revision.
    """
    if str(config.load_config.load_format) == "dummy":
        return f"dummy {model.seed}"
    path = Path(model.model)
    if path.is_file():
        return identity.weights_digest(path.parent, [path.name])
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            path = Path(
                snapshot_download(model.model, revision=model.revision, local_files_only=True)
            )
        except (LocalEntryNotFoundError, ValueError):
            return f"{model.model} at {model.revision}"
    try:
        return identity.weights_digest(path)
    except FormatError as error:
        raise PlanError("model", str(path), f"readable weights ({error})") from error


def hash_notes(config: VllmConfig) -> dict[str, Any]:
    """How block hashes are made: inside every key already, told in clear to explain misses."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    return {
        "vllm": vllm.__version__,
        "hash_algorithm": algorithm,
        "hash_seed": seed if seed is not None else ("random" if "xx" in algorithm else "fixed"),
    }


def random_hash_seed(config: VllmConfig) -> bool:
    """Whether block hashes differ from process to process, so that nothing can be found again."""
    return bool(hash_notes(config)["hash_seed"] == "random")


def hash_bytes(config: VllmConfig) -> int:
    """Bytes of one block hash."""
    return 16 if "xx" in str(config.cache_config.prefix_caching_hash_algo) else 32


def engine_groups(config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[EngineGroup]:
    """What a request holds of each of the engine's groups, also of those that are not stored."""
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

    dcp = config.parallel_config.decode_context_parallel_size
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        span = int(resolve_dcp_kv_block_size(spec, dcp))
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.first_spec
        window = window_tokens(spec)
        if isinstance(spec, MambaSpec):
            found.append(EngineGroup("state", span))
        elif isinstance(spec, CircularBufferSpec):
            found.append(EngineGroup("ring", span))
        elif window is not None:
            found.append(EngineGroup("window", span, window))
        else:
            found.append(EngineGroup("all", span))
    return found


def draft_lag(config: VllmConfig) -> int:
    """Tokens behind which a draft's cache is final: proposals may be rejected and rewritten."""
    speculative = config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0) + 1


def events_enabled(config: VllmConfig) -> bool:
    """Whether the engine publishes KV events."""
    events = config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def adapter(request: Request) -> tuple[int, str] | None:
    """(id, path) of the request's adapter, or None."""
    lora = request.lora_request
    return None if lora is None else (int(lora.lora_int_id), str(lora.lora_path))


def mark_junction(request: Request, tokens: int) -> None:
    """Have the engine keep a state, or a window, at `tokens`: others share the prefix up to there.

    The engine looks for such junctions in its own cache right before it asks the connector; the
    store knows of more.
    """
    request.shared_prefix_boundary = max(request.shared_prefix_boundary, tokens)
