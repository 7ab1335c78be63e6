"""Bytes of one state of one head, for every KV cache dtype.

The figures are those of vLLM 0.32: `v1/kv_cache_interface.py`, and the attention backends for the
packed formats.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvfold.errors import ConfigError
from kvfold.models.config import DTYPE_BYTES
from kvfold.spec import Encoding

_PLAIN: Final = {**DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
#: Data bits per element and scale bytes per token, head and side (K or V).
_PER_TOKEN_HEAD: Final = {
    "fp8_per_token_head": (8, 4),
    "int8_per_token_head": (8, 4),
    "int4_per_token_head": (4, 4),
}
#: Packed MLA rows of a 512 + 64 latent: 512 fp8, 16 of scales, 128 of bf16 rope; or nvfp4.
_PACKED_MLA: Final = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
KV_DTYPES: Final = ("auto", *_PLAIN, "nvfp4", *_PER_TOKEN_HEAD, *_PACKED_MLA)


class Row(NamedTuple):
    """One state of one head: its bytes, what is known of the page, and the dtype it is kept in."""

    nbytes: int
    encoding: Encoding
    dtype: str


def check_kv_dtype(kv_dtype: str) -> None:
    """Raise `ConfigError` unless `kv_dtype` is a KV cache dtype."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigError("kv_cache_dtype", kv_dtype, f"one of {', '.join(KV_DTYPES)}")


def element_bytes(kv_dtype: str, model_dtype: str) -> int | None:
    """Return the bytes of one element, or None if elements are packed with their scales."""
    return _PLAIN.get(model_dtype if kv_dtype == "auto" else kv_dtype)


def attention_row(head_size: int, head_size_v: int, kv_dtype: str, model_dtype: str) -> Row:
    """Return the row of one head of full or windowed attention: K and V of one token.

    Rows with their own scales (nvfp4, per token and head) are kept as opaque pages: where a
    backend puts the scales is not known.

    >>> attention_row(128, 128, "auto", "bfloat16").nbytes
    512
    >>> attention_row(128, 128, "int4_per_token_head", "bfloat16").nbytes
    136
    """
    dtype = model_dtype if kv_dtype == "auto" else kv_dtype
    size = element_bytes(kv_dtype, model_dtype)
    if size is not None:
        return Row((head_size + head_size_v) * size, "heads_first", dtype)
    if kv_dtype == "nvfp4":
        return Row(sum(d // 2 + d // 16 for d in (head_size, head_size_v)), "opaque", dtype)
    if kv_dtype in _PER_TOKEN_HEAD:
        bits, scale_bytes = _PER_TOKEN_HEAD[kv_dtype]
        data_bytes = sum(d * bits // 8 for d in (head_size, head_size_v))
        return Row(data_bytes + 2 * scale_bytes, "opaque", dtype)
    raise ConfigError("kv_cache_dtype", kv_dtype, "another one: layers with heads have no MLA rows")


def mla_row(lora_rank: int, rope_dim: int, kv_dtype: str, model_dtype: str, sparse: bool) -> Row:
    """Return the latent row of one token. Packed rows exist for sparse 512 + 64 latents only.

    >>> mla_row(512, 64, "auto", "bfloat16", False).nbytes
    1152
    >>> mla_row(512, 64, "fp8_ds_mla", "bfloat16", True).nbytes
    656
    """
    dtype = model_dtype if kv_dtype == "auto" else kv_dtype
    size = element_bytes(kv_dtype, model_dtype)
    if size is not None:
        return Row((lora_rank + rope_dim) * size, "heads_first", dtype)
    if kv_dtype in _PACKED_MLA and sparse and (lora_rank, rope_dim) == (512, 64):
        return Row(_PACKED_MLA[kv_dtype], "heads_first", dtype)
    if kv_dtype in _PACKED_MLA:
        expected = "auto or fp8: packed rows need a 512 + 64 latent and a sparse indexer"
    else:
        expected = "auto, fp8 or (sparse only) fp8_ds_mla: MLA rows have no scales per head"
    raise ConfigError("kv_cache_dtype", kv_dtype, expected)


def indexer_row(head_dim: int) -> Row:
    """Return a DSA indexer's row: fp8 keys and a float32 scale per 128 of them, whatever the KV
    dtype. A page holds all keys before all scales, so it is not divisible by token.

    >>> indexer_row(128).nbytes
    132
    """
    return Row(head_dim + 4 * -(-head_dim // 128), "whole_page", "uint8")


def align(nbytes: int, to: int) -> int:
    """Return `nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to
