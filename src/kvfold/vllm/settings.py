"""The connector's settings: `kv_connector_extra_config`, checked before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvfold.errors import ConfigError
from kvfold.sizes import parse_bytes
from kvfold.store.settings import StoreSettings


@dataclass(frozen=True)
class ConnectorSettings:
    """What a user may set. Sizes are per machine, however many ranks or engines it runs."""

    host: str | int = "4GiB"
    """Host memory of the store."""
    disk: str | int = 0
    """Quota on disk; 0 means no disk tier."""
    disk_path: str | None = None
    """Folder of the disk tier; needed if `disk` is given."""
    store_name: str = "default"
    """Engines with equal store settings and name share one store."""
    private: bool = False
    """A store for this engine alone, which ends with it."""
    runtime_dir: str | None = None
    """Where sockets and locks live; default: the user's runtime folder."""
    blocks_per_chunk: int = 1
    """Engine blocks per chunk, the unit that is stored, looked up and evicted."""
    lookup_wait_ms: float = 20.0
    """How long a request may wait for a lookup's answer before it goes on without."""
    load_deadline_s: float = 30.0
    """A load without progress for this long is given up and recomputed."""
    store_deadline_s: float = 10.0
    """A store whose question is unanswered for this long is dropped."""
    linger_s: float = 900.0
    """How long a shared store without clients stays alive."""
    audit_chunks: int = 4
    """Chunks audited at the start of every run: replicas' bytes are compared before folding."""
    audit_every: int = 256
    """Later on, one store job in this many is audited; 0: none."""
    metrics_port: int = 0
    """Port at which a store that this engine starts serves its metrics; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address of that port."""
    digest_dir: str | None = None
    """Debugging: record a digest of every rank's bytes per stored and loaded chunk in this folder.
    """

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Check `kv_connector_extra_config`. Raises `ConfigError` naming the field."""
        known = {f.name: f for f in fields(cls)}
        for key in extra:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ConfigError(
                    f"kv_connector_extra_config.{key}",
                    extra[key],
                    f"one of {', '.join(known)}{hint}",
                )
        settings = cls(**extra)
        settings._check()
        return settings

    def _check(self) -> None:
        prefix = "kv_connector_extra_config."
        for f in fields(self):
            value, kind = getattr(self, f.name), str(f.type)
            name = prefix + f.name
            if kind == "bool" and not isinstance(value, bool):
                raise ConfigError(name, value, "true or false")
            if kind.startswith("str") and "int" not in kind:
                optional = "None" in kind
                if not (isinstance(value, str) and value) and not (optional and value is None):
                    raise ConfigError(name, value, "a non-empty text")
            if kind == "float" and (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6
            ):
                raise ConfigError(name, value, "a positive number")
            if kind == "int" and (
                isinstance(value, bool) or not isinstance(value, int) or value < 0
            ):
                raise ConfigError(name, value, "a whole number, 0 or more")
        if not 1 <= self.blocks_per_chunk <= 4096:
            raise ConfigError(prefix + "blocks_per_chunk", self.blocks_per_chunk, "1 to 4096")
        if parse_bytes(prefix + "host", self.host) == 0:
            raise ConfigError(prefix + "host", self.host, 'a size above 0, such as "4GiB"')
        if parse_bytes(prefix + "disk", self.disk) and self.disk_path is None:
            raise ConfigError(
                prefix + "disk_path", None, "the folder for the disk tier, as disk is set"
            )
        if self.disk_path is not None and not parse_bytes(prefix + "disk", self.disk):
            raise ConfigError(
                prefix + "disk", self.disk, "the quota of the disk tier, as disk_path is set"
            )

    def store(self) -> StoreSettings:
        """The settings of the store behind this connector."""
        return StoreSettings(
            host_bytes=parse_bytes("host", self.host),
            disk_path=None
            if self.disk_path is None
            else str(Path(self.disk_path).expanduser().absolute()),
            disk_bytes=parse_bytes("disk", self.disk),
            store_name=self.store_name,
            private=self.private,
            runtime_dir=self.runtime_dir,
            linger_s=self.linger_s,
            metrics_port=self.metrics_port,
            metrics_host=self.metrics_host,
        )
