"""How the demo tells what it found: tables for people, JSON for programs."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvfold.sizes import format_bytes
from kvfold.testing.demo_ask import Asking, Pass
from kvfold.testing.demo_fold import PROMPT_TOKENS, Folded
from kvfold.testing.demo_judge import Aim, Check
from kvfold.testing.demo_text import SPAN

WIDTH = 100

# Two blanks between columns and no lines, so that 80 columns will do.
_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "pad_edge": False,
    "show_edge": False,
}


@dataclass(frozen=True)
class Findings:
    """Everything one run of the demo found."""

    asking: Asking
    folded: Sequence[Folded]
    aims: Sequence[Aim]
    checks: Sequence[Check]
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)


def print_tables(console: Console, found: Findings) -> None:
    """Print what was found, at most 100 columns wide."""
    width = min(WIDTH, console.width)
    console.print()
    console.print(_ttft_table(found), width=width)
    if found.folded:
        console.print()
        console.print(_fold_table(found.folded), width=width)
    console.print()
    for aim in found.aims:
        word, style = ("met", "green") if aim.met else ("missed", "yellow")
        line = f"aim {aim.name}: {1e3 * aim.value_s:,.0f} ms, at most {1e3 * aim.aim_s:,.0f} ms"
        console.print(Text(f"{line} ({aim.how}): ").append(word, style), width=width)
    bad = [check for check in found.checks if not check.ok]
    for check in bad:
        console.print(Text("failed ", "red").append(f"{check.name}: {check.detail}"), width=width)
    told = f"{len(found.checks) - len(bad)} of {len(found.checks)} checks hold"
    console.print(Text(f"{told}; {found.wall_s:.0f} s", "red" if bad else "green"), width=width)


def _ttft_table(found: Findings) -> Table:
    asking = found.asking
    table = Table(
        title=f"A document of {asking.prompts.shared_tokens} tokens (blocks of {SPAN}), "
        f"{len(asking.prompts.questions)} questions",
        title_justify="left",
        **_STYLE,
    )
    table.add_column("condition")
    for name in ("first token", "aim", "computed", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    table.add_column("answers")
    aims = {aim.name: aim for aim in found.aims}
    for one in asking.passes:
        if not one.asked:
            continue
        aim = aims.get(one.name)
        hits = _hits(one)
        table.add_row(
            one.title,
            f"{1e3 * one.ttft_s:,.0f} ms",
            "" if aim is None else f"≤ {1e3 * aim.aim_s:,.0f} ms",
            str(round(statistics.median(a.computed_tokens for a in one.asked))),
            str(sum(hits.values())),
            " + ".join(tier for tier, count in hits.items() if count) or "-",
            "" if one is asking.cold else _agreement(len(one.differences(asking.cold)), one),
        )
    return table


def _hits(one: Pass) -> dict[str, int]:
    """Median tokens per question by tier."""
    return {
        tier: round(statistics.median(asked.hit_tokens[tier] for asked in one.asked))
        for tier in one.asked[0].hit_tokens
    }


def _agreement(differing: int, one: Pass) -> str:
    return "equal" if not differing else f"{differing} of {len(one.asked)} differ"


def _fold_table(folded: Sequence[Folded]) -> Table:
    table = Table(
        title=f"TP2, a prompt of {PROMPT_TOKENS} tokens, engine and store restarted",
        title_justify="left",
        **_STYLE,
    )
    table.add_column("checkpoint")
    table.add_column("loaded", justify="right", no_wrap=True)
    table.add_column("tier")
    for name in ("stored", "", "TP copies"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("answers", "ranks", "after load"):
        table.add_column(name)
    for one in folded:
        same, distinct = one.bytes.same_on_ranks, one.bytes.distinct_on_ranks
        table.add_row(
            one.case.name,
            f"{one.loaded_tokens} of {PROMPT_TOKENS}",
            " + ".join(tier for tier, count in one.loaded_from.items() if count) or "-",
            format_bytes(one.stored_bytes),
            f"1/{one.case.copies_bytes / one.stored_bytes:.3g}" if one.stored_bytes else "-",
            format_bytes(one.case.copies_bytes),
            "equal" if one.answer is None else f"differ at {one.answer.position}",
            "equal" if same else "differ" if distinct else "mixed",
            "as stored" if one.bytes.kept else "wrong",
        )
    return table


# ---------------------------------------------------------------- for programs


def as_json(found: Findings, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Return every figure, aim and check."""
    asking = found.asking
    return {
        "ok": found.ok,
        "wall_s": round(found.wall_s, 1),
        "machine": machine(),
        "document_tokens": asking.prompts.shared_tokens,
        "span_tokens": SPAN,
        "hit_tokens": asking.prompts.hit_tokens,
        "passes": [_pass_json(one, asking, decode) for one in asking.passes if one.asked],
        "stored": {
            "host_bytes": asking.stored["host"]["payload_bytes"],
            "disk_bytes": asking.stored["disk"]["payload_bytes"],
            "disk_chunks": asking.stored["disk"]["chunks"],
            "disk_direct": asking.stored["disk"]["direct"],
            "read_limit_bytes_per_s": [round(rate) for rate in asking.read_limits],
        },
        "folding": [_folded_json(one) for one in found.folded],
        "aims": [{**asdict(aim), "met": aim.met} for aim in found.aims],
        "checks": [asdict(check) for check in found.checks],
    }


def _pass_json(one: Pass, asking: Asking, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    return {
        "name": one.name,
        "title": one.title,
        "median_ttft_s": one.ttft_s,
        "differences": [asdict(each) for each in one.differences(asking.cold)],
        "questions": [
            {
                "question": asking.prompts.questions[asked.question],
                "ttft_s": asked.ttft_s,
                "prompt_tokens": asked.prompt_tokens,
                "computed_tokens": asked.computed_tokens,
                "hit_tokens": dict(asked.hit_tokens),
                "external_hit_tokens": asked.external_hit_tokens,
                "answer": decode(asked.output["tokens"]),
                "answer_tokens": asked.output["tokens"],
            }
            for asked in one.asked
        ],
    }


def _folded_json(one: Folded) -> dict[str, Any]:
    return {
        "checkpoint": one.case.name,
        "span_tokens": one.case.span,
        "loaded_tokens": one.loaded_tokens,
        "computed_tokens": PROMPT_TOKENS - one.loaded_tokens,
        "loaded_from": one.loaded_from,
        "stored_bytes": one.stored_bytes,
        "stored_chunks": one.stored_chunks,
        "disk_bytes": one.disk_bytes,
        "tp_copies_bytes": one.case.copies_bytes,
        "answer": None if one.answer is None else asdict(one.answer),
        "bytes": asdict(one.bytes),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "processor": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
