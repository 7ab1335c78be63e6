"""`kvfold demo`: what kvfold does, shown on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

kvfold demo

kvfold demo --quick

kvfold demo --json --out /tmp/figures | jq .aims
"""


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Two questions, and nothing at TP2.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as JSON; progress to stderr.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for figures and scratch (default: out/).")
    ] = None,
) -> None:
    """Run a real engine on this CPU without kvfold, cold, warm from memory, and from disk.

    Asks a small model questions about a long document, then runs tiny checkpoints on two ranks and
    compares every rank's bytes. Takes a few minutes; writes demo.json and demo.png. Exit status 1
    if a check fails (hits, answers, bytes); a time that misses its aim is told, no failure.
    """
    from rich.console import Console

    from kvfold.testing.demo import Options, run_demo
    from kvfold.testing.demo_text import source_root

    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 100
    folder = out.absolute() if out is not None else source_root() / "out"
    ok, figures = run_demo(Options(folder, quick), console)
    if as_json:
        print(json.dumps(figures, indent=2))
    if not ok:
        raise typer.Exit(1)
