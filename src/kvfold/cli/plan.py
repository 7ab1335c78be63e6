"""`kvfold plan`: what a model's KV cache costs on a layout, and how it would be stored."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from kvfold.cli import plan_text
from kvfold.cli.plan_report import Layout, comparison, explanation, planned, report
from kvfold.errors import ConfigError
from kvfold.models import load

EXAMPLES = """
Examples:

kvfold plan llama-3.1-70b --tp 8 --host 500GiB --disk 4TiB

kvfold plan glm-5.3 --tp 8 --kv-cache-dtype fp8_ds_mla --explain 6

kvfold plan deepseek-v3 --tp 8 --compare dcp=2 --compare tp=16,pp=2

kvfold plan ~/models/my-model --tp 4 --json | jq .per_token
"""
_KEYS = ("tp", "dcp", "pcp", "pp", "block-size", "kv-cache-dtype", "blocks-per-chunk")


def plan(
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
    dp: Annotated[int, typer.Option(help="Data-parallel replicas; each is an engine.")] = 1,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per block on one rank (default: the model's).")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="As the engine's option, such as fp8 or fp8_ds_mla.")
    ] = "auto",
    blocks_per_chunk: Annotated[
        int, typer.Option(help="Blocks per chunk, the unit that is stored.")
    ] = 1,
    host: Annotated[str, typer.Option(help='Host memory of the store, such as "500GiB".')] = "0",
    disk: Annotated[str, typer.Option(help='Disk of the store, such as "4TiB".')] = "0",
    sequence_tokens: Annotated[
        int, typer.Option(help="Length of the sequences that the tiers' figures count.")
    ] = 32_768,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="LAYER", help="All about one layer: its number or name.")
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYOUT", help="Another layout, such as tp=4,dcp=2; may be repeated."),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw bytes by layer kind and capacity by layout."),
    ] = None,
) -> None:
    """Show how each layer is placed and folded, what a token costs, and what the tiers hold.

    Needs no engine, no GPU and no weights: a config.json is enough.
    """
    layout = Layout(tp, dcp, pcp, pp, block_size, kv_cache_dtype, blocks_per_chunk, dp)
    if dp < 1:
        raise ConfigError("dp", dp, "a whole number of at least 1")
    if sequence_tokens < 1:
        raise ConfigError("--sequence-tokens", sequence_tokens, "a whole number of at least 1")
    others = [_layout(layout, text) for text in compare or ()]
    config = load(model)
    found = planned(config, layout)
    if explain is not None:
        layers = explanation(found, explain)
        _tell(layers, plan_text.explanation_lines(layers), as_json)
        return
    told: dict[str, Any] = report(found, {"host": host, "disk": disk}, sequence_tokens)
    lines = list(plan_text.report_lines(told))
    rows = [comparison(found, config, other) for other in (layout, *others)]
    if plot is not None:
        from kvfold.cli.plan_plot import save

        save(plot, told, rows)
    if others:
        told["comparison"] = rows
        lines += plan_text.comparison_lines(rows)
    _tell(told, lines, as_json)


def _tell(data: Any, lines: Any, as_json: bool) -> None:
    print(json.dumps(data, indent=2) if as_json else "\n".join(lines))


def _layout(base: Layout, text: str) -> Layout:
    """Return `base` with the settings in `text` changed; its block size is not kept."""
    changes: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        name = key.replace("-", "_")
        if key not in _KEYS or name in changes or not value:
            known = ", ".join(f"{k}=" for k in _KEYS)
            raise ConfigError(
                "--compare", text, f"settings such as tp=4,dcp=2 (each once: {known})"
            )
        if name == "kv_cache_dtype":
            changes[name] = value
        elif not value.isdecimal() or len(value) > 7:
            raise ConfigError(f"--compare {key}", value, "a whole number")
        else:
            changes[name] = int(value)
    assert changes.keys() <= asdict(base).keys()
    return replace(base, **({"block_size": None} | changes))
