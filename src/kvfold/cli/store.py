"""`kvfold store`: run, ask, drain and stop the store of this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.errors import ConfigError, StoreError, StoreGone
from kvfold.sizes import parse_bytes

if TYPE_CHECKING:
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
    metrics_port: Annotated[
        int, typer.Option(help="Serve Prometheus metrics on this port; 0: do not.")
    ] = 0,
    metrics_host: Annotated[
        str, typer.Option(help="The address to serve metrics on; all of the machine: 0.0.0.0.")
    ] = "127.0.0.1",
    runtime_dir: RuntimeDir = None,
) -> None:
    """Run a store in the foreground until it is stopped.

    Engines whose settings name the same sizes, folder and name use it instead of starting one.
    The metrics port is no part of that: an engine that finds this store uses it as it is. Metrics
    are plain HTTP that everybody who reaches the address may read.
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
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    )
    run_here(settings, lambda folder: print(f"the store listens in {folder}", flush=True))


_STATUS_EXAMPLES = """
Examples:

kvfold store status --json | jq .disk.corrupt_chunks

kvfold store status --prometheus > /var/lib/node_exporter/kvfold.prom
"""


@app.command(epilog=_STATUS_EXAMPLES)
def status(
    name: Name = None,
    folder: Folder = None,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics in Prometheus' text form.")
    ] = False,
) -> None:
    """Show what the store holds, has done, and who uses it."""
    if as_json and prometheus:
        raise ConfigError("--prometheus", True, "one of --json and --prometheus")
    with _Tool(name, folder, runtime_dir) as tool:
        report = tool.client.status()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    if prometheus:
        from kvfold.store.metrics import exposition

        print(exposition(report), end="")
        return
    from rich.console import Console

    from kvfold.cli.store_text import tables

    Console(width=min(_WIDTH, Console().width)).print(*tables(report, tool.folder), sep="\n")


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
