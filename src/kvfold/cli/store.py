"""`kvfold store`: run, ask, drain and stop the store of this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.errors import ConfigError, StoreError, StoreGone
from kvfold.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvfold.store.client import StoreClient

_WIDTH = 100

app = typer.Typer(
    no_args_is_help=True,
    help="The store of this machine: host memory and disk behind all engines.",
)

Name = Annotated[str | None, typer.Option("--name", help="The store's name (store_name).")]
RuntimeDir = Annotated[
    str | None,
    typer.Option("--runtime-dir", help="Where runtime folders are, if not the usual place."),
]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="The runtime folder of one store, if several run."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command(
    epilog="Example: kvfold store run --host 32GiB --disk 500GiB --disk-path /var/cache/kvfold"
)
def run(
    host: Annotated[str, typer.Option(help='Host memory for chunks, such as "32GiB".')],
    disk: Annotated[str, typer.Option(help="Quota of the disk tier; 0: none.")] = "0",
    disk_path: Annotated[str | None, typer.Option(help="Folder of the disk tier.")] = None,
    name: Annotated[str, typer.Option(help="The store's name (store_name).")] = "default",
    disk_threads: Annotated[int, typer.Option(help="Threads that read and write the disk.")] = 2,
    linger_s: Annotated[
        float, typer.Option(help="End after so many seconds without engines; 0 means never.")
    ] = 0.0,
    runtime_dir: RuntimeDir = None,
) -> None:
    """Run a store in the foreground until it is stopped.

    Engines whose settings name the same sizes, folder and name use it instead of starting one.
    SIGTERM and Ctrl-C write what is not on disk yet, for 30 s at most, and end it.
    """
    from kvfold.store.process import run_here
    from kvfold.store.settings import StoreSettings

    settings = StoreSettings(
        host_bytes=parse_bytes("--host", host),
        disk_path=disk_path,
        disk_bytes=parse_bytes("--disk", disk),
        store_name=name,
        runtime_dir=runtime_dir,
        disk_threads=disk_threads,
        linger_s=linger_s or float("inf"),
    )
    run_here(settings, lambda folder: print(f"the store listens in {folder}", flush=True))


@app.command(epilog="Example: kvfold store status --json | jq .disk.corrupt_chunks")
def status(
    name: Name = None,
    folder: Folder = None,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what the store holds, has done, and who uses it."""
    with _Tool(name, folder, runtime_dir) as tool:
        report = tool.client.status()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    from rich.console import Console

    Console(width=min(_WIDTH, Console().width)).print(*_tables(report, tool.folder), sep="\n")


@app.command(epilog="Example: kvfold store flush --timeout-s 600 && systemctl reboot")
def flush(
    name: Name = None,
    folder: Folder = None,
    runtime_dir: RuntimeDir = None,
    timeout_s: Annotated[float, typer.Option(help="How long to wait.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Write every chunk that is in host memory only to disk, and wait until it is durable.

    Exit status 1 if chunks remain that could not be written.
    """
    with _Tool(name, folder, runtime_dir) as tool:
        has_disk = tool.client.status()["disk"] is not None
        report = tool.client.flush(timeout_s)
    _tell_drained(report, as_json)
    if has_disk and report["host_only_chunks"]:
        raise StoreError(
            f"{report['host_only_chunks']} chunks are in host memory only: the disk refuses writes "
            f"(see {tool.folder / 'store.log'})"
        )
    if not report["synced"]:
        raise StoreError(f"the disk could not be synced (see {tool.folder / 'store.log'})")


@app.command(epilog="Example: kvfold store stop --name default")
def stop(
    name: Name = None,
    folder: Folder = None,
    runtime_dir: RuntimeDir = None,
    drain: Annotated[
        bool, typer.Option("--drain/--no-drain", help="Write what is not on disk yet first.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """End the store. Engines go on without it: they miss, and try to find a store again."""
    with _Tool(name, folder, runtime_dir) as tool:
        report = tool.client.stop(drain)
        _tell_drained(report, as_json)
        _wait_for_end(tool.client)


class _Tool:
    """A connection to the one store that the options name."""

    def __init__(self, name: str | None, folder: Path | None, runtime_dir: str | None) -> None:
        from kvfold.store.client import StoreClient
        from kvfold.store.launch import running_stores
        from kvfold.store.settings import runtime_base

        if folder is None:
            folders = running_stores(name, runtime_dir)
            if not folders:
                what = "no store" if name is None else f"no store named {name!r}"
                raise StoreGone(f"{what} runs in {runtime_base(runtime_dir)} for this user")
            if len(folders) > 1:
                listed = "\n".join(f"  --folder {found}" for found in folders)
                raise ConfigError("--folder", None, f"one of the stores that run:\n{listed}")
            folder = folders[0]
        self.folder = folder
        self.client = StoreClient.connect_tool(folder)

    def __enter__(self) -> _Tool:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def _wait_for_end(client: StoreClient, timeout_s: float = 30.0) -> None:
    until_s = time.monotonic() + timeout_s
    while client.alive and time.monotonic() < until_s:
        time.sleep(0.02)


def _tell_drained(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
    else:
        print(
            f"{report['written_chunks']} chunks written to disk, "
            f"{report['host_only_chunks']} in host memory only"
        )


def _tables(report: dict[str, Any], folder: Path) -> list[Table]:
    from rich.table import Table

    tables = [_tiers(report, folder), _work(report)]
    engines = [client for client in report["clients"] if client["role"] != "tool"]
    if engines:
        clients = Table("engine", "role", "rank", "process", title="Clients", title_justify="left")
        for client in engines:
            row = (client["engine"], client["role"], client["rank"], client["pid"])
            clients.add_row(*map(str, row))
        tables.append(clients)
    return tables


def _tiers(report: dict[str, Any], folder: Path) -> Table:
    from rich.table import Table

    state = "stopping" if report["stopping"] else "scanning" if report["scanning"] else "running"
    title = f"Store in {folder}\nprocess {report['pid']}, {state}, up {report['uptime_s']:.0f} s"
    table = Table("", "host", "disk", title=title, title_justify="left")
    host, disk = report["host"], report["disk"] or {}

    def row(label: str, host_text: str, disk_text: str) -> None:
        table.add_row(label, host_text, disk_text if disk else "-")

    def size(tier: dict[str, Any], total: str) -> str:
        used = tier.get("used_bytes", 0)
        return f"{format_bytes(used)} of {format_bytes(tier.get(total, 0))}"

    def counted(tier: dict[str, Any], what: str) -> str:
        chunks, size_bytes = tier.get(f"{what}chunks", 0), tier.get(f"{what}bytes", 0)
        return f"{chunks} ({format_bytes(size_bytes)})"

    row("used", size(host, "total_bytes"), size(disk, "quota_bytes"))
    row(
        "chunks",
        f"{host['chunks']} ({format_bytes(host['payload_bytes'])})",
        f"{disk.get('chunks', 0)} ({format_bytes(disk.get('payload_bytes', 0))})",
    )
    row("stored", counted(host, "stored_"), counted(disk, "stored_"))
    loaded = {"chunks": report["announced_chunks"], "bytes": report["announced_bytes"]}
    row("loaded", counted(loaded, ""), counted(disk, "loaded_"))
    row("evicted", str(host["evicted_chunks"]), str(disk.get("evicted_chunks", 0)))
    row("waiting", f"{host['pinned_chunks']} pinned", f"{disk.get('queued_writes', 0)} to write")
    troubles = {
        "skipped": "skipped_chunks",
        "corrupt": "corrupt_chunks",
        "failed writes": "failed_writes",
        "failed reads": "failed_reads",
    }
    for label, field in troubles.items():
        row(label, "-", str(disk.get(field, 0)))
    if disk.get("paused"):
        row("writing", "-", "paused: the disk refuses writes")
    return table


def _work(report: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("tickets", "jobs", "lookups", "trouble", title="Work", title_justify="left")
    trouble = {
        "audit conflicts": report["audit_conflicts"],
        "quarantined slots": report["quarantined_slots"],
        "malformed messages": report["malformed_messages"],
    }
    table.add_row(
        f"{report['tickets_open']} open, {report['tickets_queued']} queued, "
        f"{report['tickets_failed']} failed",
        f"{report['jobs_open']} open",
        f"{report['lookups']} ({report['looked_up_keys']} keys)",
        ", ".join(f"{count} {what}" for what, count in trouble.items() if count) or "none",
    )
    return table
