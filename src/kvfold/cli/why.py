"""`kvfold why`: what a request found in the store, and why not more."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.errors import ConfigError, StoreError, StoreGone

EXAMPLES = """
Examples:

kvfold why chatcmpl-8a51f0

kvfold why --last 20

kvfold why --json 8a51f0 | jq '.record.misses[0].elsewhere'
"""

Report = dict[str, Any]


def why(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST_ID",
            help="A request's id in the engine, or a part of it that no other request has.",
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", min=1, max=4096, help="List the latest requests.")
    ] = None,
    store_name: Annotated[
        str | None, typer.Option("--store-name", help="Ask this store only; else all that run.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="The runtime folder of the store to ask.")
    ] = None,
    runtime_dir: Annotated[
        str | None,
        typer.Option("--runtime-dir", help="Where runtime folders are, if not the usual place."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Tell what a request found, which chunk it missed first, and why.

    Engines tell their store how each request went; the store keeps the latest 4,096. Where the same
    tokens are stored under another identity, the first field that differs is named. Exit status 1
    if no request, or more than one, has that id.
    """
    if (request is None) == (last is None):
        raise ConfigError("REQUEST_ID", request, "a request's id, or --last N instead")
    asked = _ask(
        store_name, folder, runtime_dir, lambda client: client.why(request or "", last=last or 0)
    )
    if request is None:
        _list(asked, last or 0, as_json)
        return
    found = [(where, report) for where, report in asked if report["matches"]]
    if not found:
        raise StoreError(_unknown(request, [report for _, report in asked]))
    if len(found) > 1 or found[0][1]["record"] is None:
        matching = sum(report["matching"] for _, report in found)
        _list(found, matching, as_json)
        raise StoreError(f"{matching} requests fit {request!r}: give more of the id")
    where, report = found[0]
    if as_json:
        print(json.dumps({"folder": str(where), **report}, indent=2))
    else:
        from kvfold.cli.why_text import lines

        print("\n".join(lines(report["record"])))
        for other in report["matches"][1:]:
            print(f"  engine {other['engine']} told of a request of that name too")


def _ask(
    name: str | None,
    folder: Path | None,
    runtime_dir: str | None,
    question: Callable[[Any], Report],
) -> list[tuple[Path, Report]]:
    """What each store that runs answers. Raises `StoreGone` if there is none."""
    from kvfold.store.client import StoreClient
    from kvfold.store.launch import running_stores
    from kvfold.store.settings import runtime_base

    folders = running_stores(name, runtime_dir) if folder is None else [folder]
    asked: list[tuple[Path, Report]] = []
    failed: StoreError | None = None
    for where in folders:
        try:
            client = StoreClient.connect_tool(where)
        except StoreError as error:
            failed = error
            continue
        try:
            asked.append((where, question(client)))
        except StoreGone as error:
            failed = error
        finally:
            client.close()
    if failed is not None and not asked:
        raise failed
    if not asked:
        what = "no store" if name is None else f"no store named {name!r}"
        raise StoreGone(f"{what} runs in {runtime_base(runtime_dir)} for this user")
    return asked


def _unknown(request: str, reports: list[Report]) -> str:
    kept = sum(report["kept"] for report in reports)
    if not kept:
        return f"no engine has told of any request yet, so not of {request!r} either"
    since_s = min(r["since_s"] for r in reports if r["since_s"] is not None)
    since = datetime.fromtimestamp(since_s).isoformat(" ", "seconds")
    return (
        f"no request with {request!r} in its id is known; {kept} are kept, since {since} "
        "(kvfold why --last 20 lists the latest)"
    )


def _list(asked: list[tuple[Path, Report]], count: int, as_json: bool) -> None:
    """Print matches of all stores, newest first."""
    rows = [{"folder": str(where), **match} for where, r in asked for match in r["matches"]]
    rows.sort(key=lambda row: -row["told_s"])
    rows = rows[:count]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print("no engine has told of any request yet")
        return
    from rich.console import Console
    from rich.table import Table

    from kvfold.cli.why_text import hit, plain, short

    table = Table("request", "told", "tokens", "from the store", "outcome", "why not more")
    table.columns[0].overflow = "fold"
    for row in rows:
        told = datetime.fromtimestamp(row["told_s"]).isoformat(" ", "seconds")
        miss = row["miss"]
        reason = row["reason"] if miss is None else f"{miss['group_name']}: {miss['reason']}"
        tokens, loaded = hit(row)
        table.add_row(
            plain(row["request"]), told, tokens, loaded, short(row["outcome"]), short(reason or "")
        )
    console = Console(markup=False)
    console.width = min(120, console.width) if console.is_terminal else 120
    console.print(table)
