"""What the README says about settings is what the code does."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvfold.vllm.settings import ConnectorSettings

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_lists_every_setting_with_its_default():
    table = re.search(r"\| setting \|.*?\n\n", README.read_text(), re.S)
    assert table is not None
    told: dict[str, object] = {}
    for row in table[0].strip().splitlines()[2:]:
        names, defaults, _ = [cell.strip() for cell in row.strip("|").split("|")]
        values = [
            json.loads(d) for d in defaults.replace("none", "`null`").strip("`").split("`, `")
        ]
        told |= dict(zip([n.strip("`") for n in names.split(", ")], values, strict=True))
    assert told == {f.name: f.default for f in fields(ConnectorSettings)}


def test_the_example_is_accepted():
    example = re.search(r'"kv_connector_extra_config": (\{.*?\})', README.read_text())
    assert example is not None
    store = ConnectorSettings.parse(json.loads(example[1])).store()
    assert (store.host_bytes, store.disk_bytes) == (16 << 30, 200 << 30)
    assert store.disk_path == "/var/cache/kvfold"
