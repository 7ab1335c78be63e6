"""The demo's chart: time to first token by condition, and bytes stored by checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfold.testing.demo_fold import PROMPT_TOKENS, Folded
from kvfold.testing.demo_report import Findings

_PLAIN, _OURS, _COPIES, _AIM = "#8a8f98", "#2a7f62", "#c9ccd1", "#b5473c"

_LABELS = {
    "cold": "without kvfold:\nnothing cached",
    "own": "without kvfold:\nengine's own cache",
    "first": "kvfold:\nfirst question",
    "again": "kvfold: same engine,\nits own cache emptied",
    "host": "kvfold: engine restarted,\nfrom host memory",
    "disk": "kvfold: store restarted too,\nfrom disk",
}


def draw(found: Findings, path: Path) -> None:
    """Write the chart as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = 2 if found.folded else 1
    figure, axes = pyplot.subplots(
        1,
        panels,
        figsize=(7 + 5 * (panels - 1), 4.6),
        width_ratios=[7, 5][:panels],
        layout="constrained",
        squeeze=False,
    )
    _draw_ttft(axes[0][0], found)
    if found.folded:
        _draw_bytes(axes[0][1], found.folded)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_ttft(axes: Any, found: Findings) -> None:
    """One row per condition: every question a dot, the median a bar's end, the aim a mark."""
    passes = [one for one in found.asking.passes if one.asked]
    aims = {aim.name: aim for aim in found.aims}
    for row, one in enumerate(passes):
        colour = _PLAIN if one.name in ("cold", "own") else _OURS
        times_ms = [1e3 * asked.ttft_s for asked in one.asked]
        median_ms = 1e3 * one.ttft_s
        axes.plot(times_ms, [row] * len(times_ms), "o", color=colour, alpha=0.45, markersize=6)
        axes.plot([median_ms], [row], "|", color=colour, markersize=22, markeredgewidth=3)
        reach_ms = max(times_ms)
        text = f"median {median_ms:,.0f} ms" if len(times_ms) > 1 else f"{median_ms:,.0f} ms"
        if aim := aims.get(one.name):
            aim_ms = 1e3 * aim.aim_s
            axes.plot([aim_ms], [row], "<", color=_AIM, markersize=9)
            reach_ms = max(reach_ms, aim_ms)
            text += f", aim at most {aim_ms:,.0f} ms"
        axes.annotate(
            text,
            (reach_ms, row),
            xytext=(12, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.3, high * 3)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.set_yticks(range(len(passes)), [_LABELS[one.name] for one in passes], fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("ms, log scale; dots: questions, bar: median, triangle: aim", fontsize=9)
    prompts = found.asking.prompts
    title = f"Time to first token, questions about {prompts.shared_tokens:,} tokens"
    axes.set_title(title, fontsize=11, loc="left")
    _bare(axes)


def _draw_bytes(axes: Any, folded: Sequence[Folded]) -> None:
    height = 0.36
    for row, one in enumerate(folded):
        stored, copies = one.stored_bytes / 1e6, one.case.copies_bytes / 1e6
        for offset, size, colour, label in (
            (-height / 2, copies, _COPIES, "a copy for each rank"),
            (height / 2, stored, _OURS, "stored by kvfold"),
        ):
            axes.barh(row + offset, size, height, color=colour, label=None if row else label)
            axes.annotate(
                f"{size:.2f} MB",
                (size, row + offset),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
    axes.set_yticks(range(len(folded)), [one.case.name for one in folded], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(one.case.copies_bytes for one in folded) / 1e6)
    axes.set_xlabel("MB", fontsize=9)
    axes.set_title(f"Bytes for {PROMPT_TOKENS} tokens at TP2", fontsize=11, loc="left")
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    _bare(axes)


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
