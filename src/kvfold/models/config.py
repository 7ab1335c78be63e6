"""A model's config.json: found by file, folder or shipped name, and read field by field.

Every reader raises `ConfigError` naming the model and the field, with what would be accepted.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from kvfold.errors import ConfigError

MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 10_000
#: Bytes of one element of the dtypes a model may be stored or computed in.
DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


class Config:
    """The fields of one config.json; those of a nested `text_config` count as its own.

    `name` is what messages call the model, `source` the folder that a serving command would be
    given; None for a config that ships with kvfold.
    """

    def __init__(self, name: str, values: Mapping[str, Any], source: str | None = None) -> None:
        text = values.get("text_config")
        nested = dict(text) if isinstance(text, Mapping) else {}
        nested.pop("architectures", None)
        self.name = name
        self.source = source
        self.values: dict[str, Any] = {**values, **nested}

    def has(self, field: str) -> bool:
        """Return whether `field` is given and not null."""
        return self.values.get(field) is not None

    def count(self, field: str, default: int | None = None, minimum: int = 1) -> int:
        """Return a whole number of at least `minimum`; absent or null counts as `default`."""
        value = self.values.get(field)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.refuse(field, f"a whole number of at least {minimum}")
        return int(value)

    def counts(self, field: str, minimum: int = 0) -> list[int]:
        """Return a list of whole numbers of at least `minimum`."""
        value = self.values.get(field)
        if not isinstance(value, list) or not all(
            isinstance(v, int) and not isinstance(v, bool) and v >= minimum for v in value
        ):
            self.refuse(field, f"a list of whole numbers of at least {minimum}")
        return list(value)

    def choices(self, field: str, length: int, allowed: Sequence[str]) -> list[str]:
        """Return a list of `length` texts (or a text of that many letters), all of `allowed`."""
        value = self.values.get(field)
        if not isinstance(value, list | str):
            self.refuse(field, f"{length} of {', '.join(map(repr, allowed))}")
        if len(value) != length:
            self.refuse(field, f"{length} entries, as num_hidden_layers={length}", len(value))
        for i, entry in enumerate(value):
            if entry not in allowed:
                self.refuse(f"{field}[{i}]", f"one of {', '.join(map(repr, allowed))}", entry)
        return list(value)

    def dtype(self, field: str, default: str) -> str:
        """Return the name of a floating-point dtype."""
        value = self.values.get(field)
        if value in (None, "auto"):
            return default
        value = str(value).removeprefix("torch.")
        if value not in DTYPE_BYTES:
            self.refuse(field, f"one of {', '.join(DTYPE_BYTES)}")
        return value

    def nested(self, field: str) -> Config:
        """Return a mapping inside this config, as a config of its own."""
        value = self.values.get(field)
        if not isinstance(value, Mapping):
            self.refuse(field, "a mapping")
        return Config(f"{self.name} {field}", value)

    @property
    def model_dtype(self) -> str:
        return self.dtype("torch_dtype" if self.has("torch_dtype") else "dtype", "bfloat16")

    @property
    def layers(self) -> int:
        layers = self.count("num_hidden_layers")
        if layers > MAX_LAYERS:
            self.refuse("num_hidden_layers", f"at most {MAX_LAYERS}")
        return layers

    def head_dim(self) -> int:
        """Return `head_dim`, by default `hidden_size / num_attention_heads`."""
        if self.has("head_dim"):
            return self.count("head_dim")
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden % heads:
            self.refuse("head_dim", f"given: hidden_size={hidden} is no multiple of {heads} heads")
        return hidden // heads

    def refuse(self, field: str, expected: str, value: object = None) -> NoReturn:
        """Raise `ConfigError` for `field`."""
        given = self.values.get(field) if value is None else value
        raise ConfigError(f"{self.name} {field}", given, expected)


def shipped() -> tuple[str, ...]:
    """Return the names of the models that ship with kvfold."""
    folder = resources.files("kvfold.models") / "configs"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(n.removesuffix(".json") for n in names if n.endswith(".json")))


def load(model: str) -> Config:
    """Return the config of `model`: a config.json, a folder that holds one, or a shipped name.

    Raises `ConfigError` for what is none of these, is unreadable, or is not a JSON object.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return Config(path.resolve().name, _read(model, path / "config.json"), model)
    if path.is_file():
        folder = path.resolve().parent
        name = folder.name if path.name == "config.json" else path.stem
        return Config(name, _read(model, path), str(path.parent))
    names = shipped()
    if model.lower() in names:
        file = resources.files("kvfold.models") / "configs" / f"{model.lower()}.json"
        return Config(model.lower(), json.loads(file.read_text()))
    near = difflib.get_close_matches(model.lower().rpartition("/")[2], names, n=3, cutoff=0.5)
    hint = f" (did you mean {' or '.join(near)}?)" if near else f": {', '.join(names)}"
    raise ConfigError(
        "model", model, f"a config.json, a folder with one, or a name that ships with kvfold{hint}"
    )


def _read(model: str, path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError("model", model, f"a config of at most {MAX_CONFIG_BYTES} bytes")
        values = json.loads(data)
    except OSError as error:
        raise ConfigError("model", model, f"a readable {path.name} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("model", model, f"a JSON object in {path.name} ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError("model", model, f"a JSON object in {path.name}")
    return values
