"""The report of `kvfold plan` for people: plain text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from kvfold.sizes import format_bytes

WIDTH = 100
_SHOWN_FRAGMENTS = 8


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one layout's report."""
    model, layout = report["model"], report["layout"]
    yield from _wrapped(
        f"{model['name']} ({model['architecture']}): {model['layers']} layers, KV cache "
        f"{model['kv_cache_dtype']}, block size {model['block_size']}"
    )
    yield (
        f"layout: {_axes(layout)}: {layout['ranks']} ranks; "
        f"one block hash: {report['tokens_per_hash']} tokens"
    )
    for group in report["groups"]:
        yield ""
        yield from _group(group)
    yield ""
    yield from _totals(report)
    for tier in report["tiers"]:
        yield from _tier(tier, report["sequence_tokens"])
    notes = [f"note: {text}" for text in report["notes"]]
    for text in notes + [f"warning: {text}" for text in report["warnings"]]:
        yield from _wrapped(text)
    yield ""
    yield report["command"]


def comparison_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of several layouts; the first row is the one the others are compared with."""
    yield ""
    yield (
        f"{'layout':36}{'block':>6}{'B/token':>12}{'with copies':>14}{'times':>7}"
        f"{'replicas':>10}  {'reads 1st':9}"
    )
    for row in rows:
        label = layout_label(row["layout"])
        if "refused" in row:
            yield from _wrapped(f"{label:36}refused: {row['refused']}", " " * 36)
            continue
        times = row["copies_bytes"] / row["unique_bytes"] if row["unique_bytes"] else 1
        yield (
            f"{label:36}{row['block_size']:>6}{_count(row['unique_bytes']):>12}"
            f"{_count(row['copies_bytes']):>14}{times:>7.2f}{row['kv_tp_replicas']:>10}  "
            f"{'yes' if row['reads_base'] else 'no'}"
        )
    yield from _wrapped(
        "block: the block size to use (equal block hashes need block size x dcp equal); "
        "reads 1st: whether it can load what the first layout has stored"
    )
    for row in rows:
        if size := row["base_block_size"]:
            yield from _wrapped(
                f"{layout_label(row['layout'])}: the kernels cannot take a block that gives the "
                f"first layout's hashes; with --block-size {size} for the first they can"
            )


def explanation_lines(layers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield all about each of `layers`."""
    for layer in layers:
        yield f"{layer['name']}: {layer['kind']}, group {layer['group']}, stage {layer['stage']}"
        window = f", window {layer['window']:,} tokens" if layer["window"] else ""
        rows = (
            (
                "block",
                f"{layer['block_size']:,} tokens on one rank, {layer['tokens_per_state']:,} per "
                f"state; {layer['num_kv_heads']} x {layer['head_bytes']:,} B per state "
                f"({layer['dtype']}){window}",
            ),
            (
                "page",
                f"{layer['page_bytes']:,} B ({layer['engine_page_bytes']:,} B as the engine pads "
                f"it), {layer['encoding']}",
            ),
            (
                "slot",
                f"from byte {layer['slot_offset']:,}, {layer['block_bytes']:,} B per block, "
                f"{'by head and token' if layer['canonical'] else 'pages kept whole'}",
            ),
            (
                "declared",
                f"max_tp_shards {layer['max_tp_shards']}, total KV heads "
                f"{layer['total_kv_heads']}, dcp_sharded {str(layer['dcp_sharded']).lower()}, "
                f"tp_replicated {str(layer['tp_replicated']).lower()}",
            ),
            ("placed", layer["reason"]),
        )
        for name, text in rows:
            yield from _wrapped(f"  {name:10}{text}", " " * 12)
        for fragment in layer["fragments"][:_SHOWN_FRAGMENTS]:
            yield (
                f"  fragment  head shard {fragment['head_shard']}, token shard "
                f"{fragment['token_shard']}: ranks {ranks(fragment['owners'])}; first writer "
                f"{fragment['first_writer']}, {fragment['runs_per_chunk']} runs per chunk"
            )
        if (more := len(layer["fragments"]) - _SHOWN_FRAGMENTS) > 0:
            yield f"  ... and {more} more fragments (all with --json)"


def ranks(owners: Sequence[int]) -> str:
    """Return ranks for people.

    >>> ranks([0, 1, 2, 3, 8]), ranks([0, 2, 4, 6, 8, 10, 12, 14])
    ('0-3, 8', '0, 2, 4, 6, 8, 10, ...')
    """
    spans: list[list[int]] = []
    for rank in owners:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return ", ".join(texts if len(texts) <= 6 else [*texts[:6], "..."])


def _group(group: dict[str, Any]) -> Iterator[str]:
    if not group["participating"]:
        yield (
            f"group {group['index']}: {group['layers']} layers of {', '.join(group['outside'])}, "
            "outside prefix caching: kept in position, takes no part"
        )
        return
    yield (
        f"group {group['index']}: {group['tokens_per_block']:,} tokens per block, "
        f"{group['tokens_per_chunk']:,} per chunk; slot {group['slot_bytes']:,} B "
        f"({format_bytes(group['slot_bytes'])})"
    )
    yield (
        f"  {'kind':24}{'layers':>7}{'page B':>13}{'fragments':>11}{'replicas':>10}"
        f"{'B/block':>16}{'B/token':>14}"
    )
    for kind in group["kinds"]:
        per_token = kind["unique_bytes_per_token"]
        name = f"{kind['kind']}{'' if kind['window'] is None else ' ' + str(kind['window'])}"
        yield (
            f"  {name:24}{kind['layers']:>7}{kind['page_bytes']:>13,}{kind['fragments']:>11}"
            f"{kind['replicas']:>10}{kind['unique_bytes_per_block']:>16,}"
            f"{'-' if per_token is None else _count(per_token):>14}"
        )
        owners = ranks(kind["owners_of_first"])
        yield from _wrapped(f"    {kind['reason']}; first fragment on {owners}", "    ")


def _totals(report: dict[str, Any]) -> Iterator[str]:
    token, sequence = report["per_token"], report["per_sequence"]
    unique, copies = token["unique_bytes"], token["copies_bytes"]
    times = f" ({copies / unique:.2f} times)" if unique else ""
    yield f"{'per token':14}unique {_count(unique)} B; every rank's copy {_count(copies)} B{times}"
    yield (
        f"{'':14}one rank {_count(token['rank_bytes'])} B; stored, in whole slots, "
        f"{_count(token['stored_bytes'])} B"
    )
    yield (
        f"{'per sequence':14}windows {_count(sequence['window_bytes'])} B; states "
        f"{sequence['state_bytes']:,} B; stored {sequence['stored_bytes']:,} B"
    )
    yield (
        f"{'replicas':14}kv_tp_replicas {report['kv_tp_replicas']} (as the engine declares: "
        f"{report['engine_kv_tp_replicas']}); replicated_layout "
        f"{str(report['replicated_layout']).lower()}"
    )
    slot, groups = report["engine_slot_bytes"], report["engine_groups"]
    shared = f"; one size for its {groups} groups" if groups > 1 else ""
    yield (
        f"{'engine slot':14}one copy {slot['single']:,} B; {report['layout']['ranks']} copies "
        f"{slot['copies']:,} B{shared}"
    )


def _tier(tier: dict[str, Any], sequence_tokens: int) -> Iterator[str]:
    name = f"{tier['tier']} {format_bytes(tier['bytes'])}"
    yield (
        f"{name:14}{tier['tokens']:,} tokens ({tier['tokens_of_copies']:,} if every rank's copy "
        f"were kept),"
    )
    yield f"{'':14}or {tier['sequences']:,} sequences of {sequence_tokens:,} tokens"


def _axes(layout: dict[str, Any]) -> str:
    return ", ".join(f"{axis} {layout[axis]}" for axis in ("tp", "dcp", "pcp", "pp"))


def layout_label(layout: dict[str, Any]) -> str:
    """Return a layout's settings that are not the default."""
    parts = [f"tp={layout['tp']}"]
    parts += [f"{axis}={layout[axis]}" for axis in ("dcp", "pcp", "pp") if layout[axis] != 1]
    if layout["kv_cache_dtype"] != "auto":
        parts.append(layout["kv_cache_dtype"])
    if layout["blocks_per_chunk"] != 1:
        parts.append(f"x{layout['blocks_per_chunk']}")
    return " ".join(parts)


def _count(value: float) -> str:
    """Return a number of bytes with thousands separators; fractions keep two digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False)
