"""Run the benchmarks and compare each figure with its aim.

    python bench/run.py [NAME ...]     # for example: import disk; default: all

Each module bench_NAME.py beside this file has `ROWS`, a list of functions; each measures something
and returns one figure, or several, as dicts: name, value, unit, aim (or None), better ("higher" or
"lower") and detail. A missed aim is reported, it is no failure. Writes out/bench.json and .png.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from adapters import rows
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out"


def main() -> int:
    """Return 1 if a benchmark could not run, else 0."""
    known = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description="Measure kvfold and compare with its aims.")
    parser.add_argument("names", nargs="*", help=f"which of: {', '.join(known)} (default: all)")
    names = parser.parse_args().names or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known)}")

    console = Console()
    figures: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in names:
        for row in rows(importlib.import_module(f"bench_{name}")):
            label = f"{name}: {row.__name__.replace('_', ' ')}"
            start = time.monotonic()
            with console.status(label):
                try:
                    measured = row()
                except Exception:
                    console.print(f"[red]failed[/] {label}")
                    console.print(traceback.format_exc(), markup=False)
                    failed.append(label)
                    continue
            figures += measured if isinstance(measured, list) else [measured]
            console.print(f"[dim]{time.monotonic() - start:6.1f} s[/]  {label}")

    console.print(table(figures))
    OUT.mkdir(exist_ok=True)
    report = {"machine": machine(), "failed": failed, "figures": figures}
    (OUT / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written: {OUT / 'bench.json'}")
    if any(score(figure) is not None for figure in figures):
        chart(figures, OUT / "bench.png")
        console.print(f"written: {OUT / 'bench.png'}")
    for label in failed:
        console.print(f"[red]could not run[/] {label}")
    return 1 if failed else 0


def score(figure: dict[str, Any]) -> float | None:
    """How far the figure goes beyond its aim: 1 meets it, more is better; None without an aim."""
    value, aim = figure["value"], figure.get("aim")
    if aim is None:
        return None
    if figure["better"] == "higher":
        return float(value / aim)
    return float(aim / value) if value > 0 else float("inf")


def table(figures: list[dict[str, Any]]) -> Table:
    """Every figure beside its aim."""
    shown = Table(title="kvfold benchmarks")
    for column, justify in [
        ("figure", "left"),
        ("value", "right"),
        ("aim", "right"),
        ("", "left"),
        ("detail", "left"),
    ]:
        shown.add_column(column, justify=justify)  # type: ignore[arg-type]
    for figure in figures:
        reached = score(figure)
        verdict = "" if reached is None else "[green]met[/]" if reached >= 1 else "[red]missed[/]"
        sign = "≥" if figure["better"] == "higher" else "≤"
        aim = "" if reached is None else f"{sign} {number(figure['aim'])} {figure['unit']}"
        value = f"{number(figure['value'])} {figure['unit']}"
        shown.add_row(figure["name"], value, aim, verdict, str(figure.get("detail", "")))
    return shown


def number(value: float) -> str:
    """Three significant digits, without exponents."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def chart(figures: list[dict[str, Any]], path: Path) -> None:
    """Draw how far each figure with an aim goes beyond it, on a log scale around 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scored = [(figure, min(score(figure) or 1e-3, 1e3)) for figure in figures if figure.get("aim")]
    drawn, axes = pyplot.subplots(figsize=(9, 1.2 + 0.4 * len(scored)), layout="constrained")
    colours = ["#2a7f62" if reached >= 1 else "#b5473c" for _, reached in scored]
    rows = range(len(scored))
    # Bars start at the aim, so their direction says met or missed.
    axes.barh(rows, [reached - 1 for _, reached in scored], left=1, color=colours)
    axes.set_xscale("log")
    ends = [reached for _, reached in scored]
    axes.set_xlim(min(0.5, *ends) / 1.5, max(2.0, *ends) * 4)
    for row, (figure, reached) in enumerate(scored):
        text = f"{number(figure['value'])} {figure['unit']}"
        axes.text(max(reached, 1) * 1.08, row, text, va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(rows, [figure["name"] for figure, _ in scored], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times as good as its aim (1 = met)")
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "processor": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
