"""The namespace of stored bytes: every field that must be equal for two engines to share them.

An identity is canonical JSON in clear text beside its digest, so a miss can be explained by the
first field that differs. The namespace adds the group and the epoch; a chunk's key is its block
hash, right-padded to 32 bytes, XOR the namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from kvfold.errors import ConfigError, FormatError
from kvfold.plan import FORMAT, GroupPlan

KEY_BYTES = 32
#: A file is sampled in this many windows; smaller files are read whole.
WINDOWS = 16
WINDOW_BYTES = 64 * 1024
#: The format's own cap on a header, checked before it is read.
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


class Identity(NamedTuple):
    """Canonical JSON in clear, and the sha256 digest (32 bytes) of its `fields`.

    `text` also holds `notes`, which explain a miss but are no part of the digest.
    """

    text: str
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class IdentityFields:
    """What must be equal for bytes to be interchangeable; all values JSON-ready.

    `weights` is `weights_digest`, `loading` how they are loaded (format, quantisation),
    `text_config` the effective one after overrides, `rope` the rope choice (LongRoPE depends on
    max_model_len), `kv_encoding` and `kv_scales` how rows are quantised, `group` comes from
    `group_fields`. `opaque` is needed if and only if the group is bound to its topology:
    `opaque_fields`. Raises `ConfigError` naming the field.
    """

    weights: str
    loading: Mapping[str, Any]
    text_config: Mapping[str, Any]
    rope: Mapping[str, Any]
    dtype: str
    kv_encoding: str
    kv_scales: Mapping[str, Any]
    group: Mapping[str, Any]
    opaque: Mapping[str, Any] | None = None
    format: int = field(default=FORMAT, init=False)

    def __post_init__(self) -> None:
        for name in ("weights", "dtype", "kv_encoding"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"identity {name}", value, "a non-empty text")
        for name in ("loading", "text_config", "rope", "kv_scales", "group"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"identity {name}", getattr(self, name), "a mapping")
        if not self.group.get("layers"):
            raise ConfigError("identity group", self.group, "the result of group_fields")
        if self.group.get("topology_bound") and not self.opaque:
            raise ConfigError(
                "identity opaque", self.opaque, "layout and topology, since pages are kept whole"
            )
        if self.opaque and not self.group.get("topology_bound"):
            raise ConfigError("identity opaque", self.opaque, "nothing: all pages are understood")

    def values(self) -> dict[str, Any]:
        """Return all fields by name, as plain data."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def group_fields(group: GroupPlan) -> dict[str, Any]:
    """Return what a plan says about a group's bytes: spans, and per layer kind, heads and sizes.

    Nothing in it depends on the mesh unless a layer's pages are kept whole.
    """
    layers = []
    for layer in group.layers:
        spec, placed = layer.spec, layer.placement
        entry: dict[str, Any] = {
            "name": spec.name,
            "kind": spec.kind,
            "dtype": spec.dtype,
            "head_bytes": spec.head_bytes,
            "tokens_per_state": spec.tokens_per_state,
            "block_bytes": layer.block_bytes,
        }
        if placed.canonical:
            entry["total_heads"] = spec.num_kv_heads * placed.head_shards
        else:
            entry["kept_whole"] = {
                "head_shards": placed.head_shards,
                "token_shards": placed.token_shards,
                "num_kv_heads": spec.num_kv_heads,
                "total_kv_heads": spec.total_kv_heads,
                "encoding": spec.encoding,
            }
            if spec.key_bytes:
                entry["kept_whole"]["key_bytes"] = spec.key_bytes
        layers.append(entry)
    return {
        "layers": layers,
        "tokens_per_block": group.tokens_per_block,
        "tokens_per_chunk": group.tokens_per_chunk,
        "is_draft": group.is_draft,
        "topology_bound": group.topology_bound,
    }


def opaque_fields(
    group: GroupPlan, layout: str, kernel_block_size: int, strides: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the fields that pages kept whole depend on, or None if there are none.

    `layout` is the engine's layout name, `strides` gives each such layer's strides within a page.
    """
    if not group.topology_bound:
        return None
    kept = {layer.spec.name for layer in group.layers if not layer.placement.canonical}
    return {
        "layout": layout,
        "kernel_block_size": kernel_block_size,
        "strides": {name: value for name, value in strides.items() if name in kept},
        "topology": asdict(group.mesh),
    }


def identity(
    given: Mapping[str, Any] | IdentityFields, notes: Mapping[str, Any] | None = None
) -> Identity:
    """Return the identity of the `given` fields.

    `notes` (hash algorithm, seed, ...) stay in clear and out of the digest.
    Raises `ConfigError` if a value has no JSON form, because its text would not be canonical.
    """
    values = dict(given) if isinstance(given, Mapping) else given.values()
    text = _canonical_json({"fields": values, "notes": dict(notes or {})})
    return Identity(text, hashlib.sha256(_canonical_json(values).encode()).digest())


def namespace(identity_digest: bytes, group_index: int, epoch: bytes = b"") -> bytes:
    """Return the 32-byte namespace of one group in one epoch (empty: the weights as loaded)."""
    if len(identity_digest) != KEY_BYTES:
        raise ConfigError("identity digest", identity_digest, f"{KEY_BYTES} bytes")
    head = b"kvfold namespace" + identity_digest + group_index.to_bytes(4, "little")
    return hashlib.sha256(head + epoch).digest()


def chunk_keys(namespace: bytes, block_hashes: bytes, hash_bytes: int) -> bytes:
    """Return the keys (32 bytes each, joined) of the joined `block_hashes` of `hash_bytes` each.

    No work per key: one XOR over the whole batch. Raises `ConfigError` for hashes that are longer
    than a key, or do not fill the batch.
    """
    if len(namespace) != KEY_BYTES:
        raise ConfigError("namespace", namespace, f"{KEY_BYTES} bytes")
    if not 1 <= hash_bytes <= KEY_BYTES:
        raise ConfigError("block hash bytes", hash_bytes, f"1 to {KEY_BYTES}")
    count, rest = divmod(len(block_hashes), hash_bytes)
    if rest:
        raise ConfigError("block hashes", len(block_hashes), f"a multiple of {hash_bytes} bytes")
    padded: bytes | bytearray = block_hashes
    if hash_bytes < KEY_BYTES:
        padded = bytearray(count * KEY_BYTES)
        for column in range(hash_bytes):
            padded[column::KEY_BYTES] = block_hashes[column::hash_bytes]
    mask = int.from_bytes(namespace * count, "little")
    return (int.from_bytes(padded, "little") ^ mask).to_bytes(count * KEY_BYTES, "little")


def first_difference(a: Any, b: Any) -> str | None:
    """Return the path of the first field in which `a` and `b` differ, or None if they are equal.

    Both are JSON-like data, or JSON text of it. Mappings are compared in sorted order of their
    keys, sequences in order.

    >>> first_difference('{"layers": [{"block": 16}]}', '{"layers": [{"block": 32}]}')
    'layers[0].block'
    """
    return _difference(_parsed(a), _parsed(b), "")


def weights_digest(folder: Path, files: Iterable[str] | None = None) -> str:
    """Return the digest (hex) of a model's weights without reading them all.

    Covers each weight file's name, size, safetensors header and sampled windows (16 of 64 KiB,
    evenly spread, first and last included), and the quantisation config. `files` (names within
    `folder`) replaces the search for weight files. Raises `ConfigError` if there are none,
    `FormatError` for a damaged safetensors header.
    """
    if files is None:
        names = sorted(
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.suffix in WEIGHT_SUFFIXES and path.is_file()
        )
    else:
        names = sorted(files)
    if not names:
        raise ConfigError("model folder", str(folder), f"files ending in {WEIGHT_SUFFIXES}")
    digest = hashlib.sha256()
    for name in names:
        entry = [name, *_file_fields(folder / name)]
        digest.update(_canonical_json(entry).encode())
    digest.update(_canonical_json(_quantisation(folder)).encode())
    return digest.hexdigest()


def _file_fields(path: Path) -> list[Any]:
    """Return a weight file's size, header digest (safetensors only) and digest of its windows."""
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            header = _header_digest(path, file.read(8), file, size_bytes)
            windows = hashlib.sha256()
            for offset in _window_offsets(size_bytes):
                file.seek(offset)
                windows.update(file.read(WINDOW_BYTES))
    except OSError as error:
        raise ConfigError(
            "weight file", str(path), f"a readable file ({error.strerror})"
        ) from error
    return [size_bytes, header, windows.hexdigest()]


def _header_digest(path: Path, prefix: bytes, file: Any, size_bytes: int) -> str | None:
    if path.suffix != ".safetensors":
        return None
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MAX_SAFETENSORS_HEADER_BYTES, size_bytes - 8):
        raise FormatError(f"{path}: not a safetensors file (header of {length} bytes)")
    return hashlib.sha256(file.read(length)).hexdigest()


def _window_offsets(size_bytes: int) -> list[int]:
    if size_bytes <= WINDOWS * WINDOW_BYTES:
        return list(range(0, size_bytes, WINDOW_BYTES))
    return [(size_bytes - WINDOW_BYTES) * i // (WINDOWS - 1) for i in range(WINDOWS)]


def _quantisation(folder: Path) -> dict[str, Any]:
    """Return the quantisation settings beside the weights: config.json's part, and own files."""
    found: dict[str, Any] = {}
    for name in ("config.json", *QUANTISATION_FILES):
        try:
            content = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise FormatError(f"{folder / name}: {error}") from error
        if name == "config.json":
            content = content.get("quantization_config") if isinstance(content, dict) else None
        found[name] = content
    return found


def _canonical_json(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError("identity", value, f"values with a JSON form ({error})") from error


def _parsed(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _difference(a: Any, b: Any, path: str) -> str | None:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}, key=str):
            here = f"{path}.{key}" if path else str(key)
            if key not in a or key not in b:
                return here
            if found := _difference(a[key], b[key], here):
                return found
        return None
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if found := _difference(x, y, f"{path}[{i}]"):
                return found
        return None if len(a) == len(b) else f"{path}[{min(len(a), len(b))}]"
    return None if type(a) is type(b) and a == b else path or "value"
