"""`kvfold selftest`: real bytes of a model and layout, stored, dropped, loaded and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.errors import ConfigError
from kvfold.mesh import Mesh
from kvfold.models import Config, Model, build, load
from kvfold.plan import PlanOptions, plan
from kvfold.sizes import format_bytes
from kvfold.spec import GroupSpec

if TYPE_CHECKING:
    from kvfold.testing.cluster_check import Report

EXAMPLES = """
Examples:

kvfold selftest deepseek-v3.2-exp --tp 8 --dcp 4

kvfold selftest llama-3.1-70b --tp 8 --read-tp 4 --read-pp 2 --read-layout BLHNC

kvfold selftest deepseek-v2-lite --tp 2 --processes

kvfold selftest deepseek-v2-lite --tp 2 --break 3  # must fail

kvfold selftest ~/models/my-model --tp 4 --json | jq .problems
"""
SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class _Asked:
    """The two meshes and block sizes of one run; `read` is None if there is no second layout."""

    config: Config
    kv_cache_dtype: str
    written: Mesh
    read: Mesh | None
    block_sizes: dict[Mesh, int]

    def model(self, mesh: Mesh) -> Model:
        return build(self.config, mesh, self.kv_cache_dtype, self.block_sizes[mesh])

    def groups(self, mesh: Mesh) -> Sequence[GroupSpec]:
        return self.model(mesh).groups


def selftest(
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json, a folder with one, or the name of a model that ships with kvfold "
            "(an unknown name lists them)."
        ),
    ],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    dcp: Annotated[int, typer.Option(help="Decode-context-parallel size; divides tp.")] = 1,
    pcp: Annotated[int, typer.Option(help="Prefill-context-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per block on one rank (default: the model's).")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="As the engine's option, such as fp8 or fp8_ds_mla.")
    ] = "auto",
    blocks_per_chunk: Annotated[
        int, typer.Option(help="Blocks per chunk, the unit that is stored.")
    ] = 1,
    blocks: Annotated[
        int | None, typer.Option(help="Blocks of every group (default: those of two chunks).")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="The engine's page layout: LBHNC, LBNHC, BLHNC or BLNHC.")
    ] = "LBHNC",
    read_tp: Annotated[int | None, typer.Option(help="Also read with this TP size.")] = None,
    read_dcp: Annotated[int | None, typer.Option(help="Also read with this DCP size.")] = None,
    read_pcp: Annotated[int | None, typer.Option(help="Also read with this PCP size.")] = None,
    read_pp: Annotated[int | None, typer.Option(help="Also read with so many stages.")] = None,
    read_layout: Annotated[
        str | None, typer.Option(help="Also read into pages of this layout.")
    ] = None,
    break_layer: Annotated[
        str | None,
        typer.Option(
            "--break",
            metavar="LAYER",
            help="Fill this layer (number or name) differently on every rank, as if its "
            "max_tp_shards were wrong: the self-test must then fail.",
        ),
    ] = None,
    in_memory: Annotated[
        bool,
        typer.Option(
            "--in-memory", help="Keep chunks in plain memory: no store process, more than 64 ranks."
        ),
    ] = False,
    processes: Annotated[
        bool,
        typer.Option("--processes", help="Make every rank a process of its own; up to 64 ranks."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Other bytes for another seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Store, drop and load real bytes of a model's layout, and compare every byte.

    All ranks live in this process (--processes: each in its own), with pages of the true shapes; a
    store process of its own keeps the chunks. The --read options (each defaults to the written
    value) load what was stored into a second layout too. Needs no engine, no GPU and no weights.
    Exit status 1 if a byte differs.
    """
    from kvfold.testing.cluster_check import Layout, check

    if processes and in_memory:
        raise ConfigError("--processes", True, "no --in-memory: processes share a store's memory")
    written = Mesh(tp, dcp, pcp, pp)
    again = (read_tp, read_dcp, read_pcp, read_pp)
    read = None
    if read_layout is not None or any(size is not None for size in again):
        chosen = zip(again, (tp, dcp, pcp, pp), strict=True)
        read = Mesh(*(size if new is None else new for new, size in chosen))
    options = PlanOptions(blocks_per_chunk)
    count = 2 * blocks_per_chunk if blocks is None else blocks
    asked = _ask(load(model), kv_cache_dtype, block_size, written, read)
    unlike = [] if break_layer is None else [_folded(asked, options, break_layer)]
    _check_memory(asked, options, count)
    found = check(
        asked.groups,
        Layout(written, layout),
        None if read is None else Layout(read, read_layout or layout),
        options=options,
        blocks=count,
        seed=seed,
        unlike=unlike,
        process=not in_memory,
        rank_processes=processes,
    )
    problems = found.problems()
    if found.reading is not None and not unlike and not found.reading.loaded.chunks:
        problems.append(f"nothing of this model can be read at {found.reading.layout}")
    if as_json:
        told = {"model": model, "ok": not problems, "problems": problems, **asdict(found)}
        print(json.dumps(told, indent=2))
    else:
        ranks = "rank processes" if processes else "ranks"
        title = f"{asked.config.name} at {found.layout}: {written.world_size} {ranks}, "
        title += f"{count} blocks of every group, {blocks_per_chunk} per chunk"
        notes = asked.model(written).notes
        print("\n".join([title, *(f"note: {note}" for note in notes), *_lines(found, problems)]))
    if problems:
        raise typer.Exit(1)


def _ask(
    config: Config, dtype: str, block_size: int | None, written: Mesh, read: Mesh | None
) -> _Asked:
    """Settle both block sizes: `block_size x dcp` is the same, because block hashes must be."""
    first = build(config, written, dtype, block_size).block_size
    sizes = {written: first}
    if read is not None and read != written:
        second, rest = divmod(first * written.dcp, read.dcp)
        if rest or second < 1:
            raise ConfigError(
                "--read-dcp",
                read.dcp,
                f"a divisor of {first * written.dcp}, the tokens that a block of dcp={written.dcp} "
                "spans: both layouts need the same block hashes",
            )
        sizes[read] = second
        if (made := build(config, read, dtype, second).block_size) != second:
            raise ConfigError(
                "--block-size",
                first,
                f"a size whose pages fit at both layouts: reading needs {made} tokens per block "
                f"at dcp={read.dcp}, not {second}",
            )
    return _Asked(config, dtype, written, read, sizes)


def _folded(asked: _Asked, options: PlanOptions, wanted: str) -> str:
    """Return the name of a layer, given by name or number, that several ranks hold."""
    planned = plan(asked.groups(asked.written), asked.written, options)
    layers = [layer for group in planned.groups for layer in group.layers]
    parts = [
        layer
        for layer in layers
        if layer.spec.name == wanted
        or (wanted.isdecimal() and wanted in layer.spec.name.split("."))
    ]
    if not parts:
        some = ", ".join(layer.spec.name for layer in layers[:3])
        raise ConfigError("--break", wanted, f"the number or name of a layer, such as {some}")
    for layer in parts:
        if layer.placement.fragments[0].replicas > 1:
            return layer.spec.name
    raise ConfigError(
        "--break",
        wanted,
        f"a layer that is folded; {parts[0].spec.name} is {parts[0].placement.reason}",
    )


def _check_memory(asked: _Asked, options: PlanOptions, blocks: int) -> None:
    """Refuse what this machine cannot hold, before it starts to swap."""
    needed_bytes = 0
    for mesh in {asked.written, asked.read or asked.written}:
        planned = plan(asked.groups(mesh), mesh, options)
        for group in planned.groups:
            pages = sum(layer.spec.engine_page_bytes for layer in group.layers)
            needed_bytes += pages * mesh.stage_size * (blocks + 2)
            needed_bytes += group.slot_bytes * max(1, blocks // options.blocks_per_chunk)
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    free_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    if needed_bytes > free_bytes:
        raise ConfigError(
            "--blocks",
            blocks,
            f"fewer, or a smaller mesh: this takes {format_bytes(needed_bytes)} of memory, "
            f"{format_bytes(free_bytes)} are available",
        )


def _lines(found: Report, problems: Sequence[str]) -> Iterator[str]:
    yield (
        f"{'group':<6}{'kind':<19}{'layers':>6}{'pages':>9}{'stored':>11}{'TP copies':>11}"
        "  placement"
    )
    for row in found.rows:
        yield (
            f"{row.group:<6}{row.kind:<19}{row.layers:>6}{row.pages:>9,}"
            f"{format_bytes(row.planned_bytes):>11}{format_bytes(row.copies_bytes):>11}"
            f"  {_short(row.reason)}"
        )
    stored, loaded = found.stored, found.loaded
    if stored.nbytes:
        yield (
            f"stored {format_bytes(stored.nbytes)} in {stored.chunks} chunks; all ranks hold "
            f"{format_bytes(found.copies_bytes)}, {found.copies_bytes / stored.nbytes:.1f} times "
            "as much"
        )
    if loaded.nbytes:
        yield f"loaded {format_bytes(loaded.nbytes)} back, {_verdict(found.differences)}"
    reading = found.reading
    if reading is not None:
        if reading.loaded.nbytes:
            yield (
                f"read {format_bytes(reading.loaded.nbytes)} at {reading.layout}, "
                f"{_verdict(reading.differences)}"
            )
        for number, field in reading.apart.items():
            yield f"group {number} belongs to its layout, not read at {reading.layout}: {field}"
    rates = [
        f"{what} {format_bytes(done.nbytes / done.copy_s)}/s"
        for what, done in (("store", stored), ("load", loaded))
        if done.nbytes and done.copy_s
    ]
    if rates:
        yield f"copies on one core: {', '.join(rates)}"
    yield from (f"FAILED: {problem}" for problem in problems[:SHOWN_PROBLEMS])
    if len(problems) > SHOWN_PROBLEMS:
        yield f"FAILED: and {len(problems) - SHOWN_PROBLEMS} more"
    if not problems:
        yield "ok"


def _short(reason: str) -> str:
    """Return a placement's reason in what is left of 100 columns."""
    head, _, why = reason.partition(" (")
    why = why.partition(")")[0]
    text = head.partition(":" if head.startswith("not") else ";")[0]
    return f"{text} ({why})"[:36] if why and len(text) + len(why) <= 33 else text[:36]


def _verdict(differences: Sequence[Any]) -> str:
    return f"{len(differences)} pages DIFFER" if differences else "every byte in its place"
