"""The picture of `kvfold plan --plot`: bytes by layer kind, and capacity by layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfold.cli.plan_text import layout_label
from kvfold.errors import ConfigError

_STORED, _COPIES = "#2a6f97", "#c9c9c9"
_GIB = 1024**3


def save(path: str, report: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Draw one layout's `report` and the layouts in `rows` into `path`.

    Raises `ConfigError` if matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot", path, "matplotlib: pip install 'kvfold[plot]'") from error

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    model = report["model"]
    figure.suptitle(f"{model['name']}, KV cache {model['kv_cache_dtype']}")

    kinds: dict[str, tuple[float, float]] = {}
    for group in report["groups"]:
        for kind in group["kinds"]:
            unique = kind["unique_bytes_per_token"]
            if unique is not None:
                before = kinds.get(kind["kind"], (0.0, 0.0))
                kinds[kind["kind"]] = before[0] + unique, before[1] + unique * kind["replicas"]
    once, copied = ([pair[i] for pair in kinds.values()] for i in (0, 1))
    _bars(left, list(kinds), once, copied)
    left.set_title(f"Bytes per token by layer kind, {layout_label(report['layout'])}")
    left.set_xlabel("bytes per token")

    shown = [row for row in rows if "refused" not in row and row["unique_bytes"]]
    _bars(
        right,
        [layout_label(row["layout"]) for row in shown],
        [_GIB / row["stored_bytes"] for row in shown],
        [_GIB / row["copies_bytes"] for row in shown],
    )
    right.set_title("Tokens that a GiB holds, by layout")
    right.set_xlabel("tokens per GiB")
    figure.legend(["stored once", "every rank's copy"], loc="outside lower center", ncols=2)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError("--plot", path, f"a picture file such as plan.png ({error})") from error


def _bars(axes: Any, names: Sequence[str], ours: Sequence[float], copies: Sequence[float]) -> None:
    """Draw a pair of bars per name, the first one on top, each with its value."""
    places = range(len(names))
    for shift, values, colour in ((-0.2, ours, _STORED), (0.2, copies, _COPIES)):
        bars = axes.barh([place + shift for place in places], values, 0.38, color=colour)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=8)
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.locator_params(axis="x", nbins=5)
    axes.spines[["top", "right"]].set_visible(False)
