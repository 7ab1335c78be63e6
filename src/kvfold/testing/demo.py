"""The demo: a real engine on this machine without kvfold, cold, warm from memory and from disk.

Part one asks a small instruct model questions about a long document. Part two runs tiny random
checkpoints at TP2 and looks at every rank's bytes. Stores live in runtime folders of the run's own
and are stopped at the end, whatever happens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import kvfold
from kvfold.errors import KvfoldError
from kvfold.testing import leaks
from kvfold.testing.demo_ask import run_asking
from kvfold.testing.demo_chart import draw
from kvfold.testing.demo_fold import Case, Folded, run_case
from kvfold.testing.demo_judge import Check, aims, check_asking, check_folded
from kvfold.testing.demo_measure import Stores
from kvfold.testing.demo_report import Findings, as_json, print_tables
from kvfold.testing.demo_show import Progress
from kvfold.testing.demo_text import QUESTIONS, document, make_prompts, source_root

_FLOAT32 = 4

# In a process of its own: it takes a gigabyte, and the libraries talk.
_MAKE = """
import json, sys
from kvfold.testing.checkpoints import deepseek_mla, llama
from kvfold.testing.smollm import smollm2
root = sys.argv[1]
made = {"smollm2": smollm2(root)}
if sys.argv[2] == "all":
    made |= {"mla": deepseek_mla(root), "kv1": llama(root, 1), "kv2": llama(root, 2)}
print(json.dumps({name: str(path) for name, path in made.items()}))
"""


@dataclass(frozen=True)
class Options:
    """out: folder for figures and scratch; quick: two questions, and no second part."""

    out: Path
    quick: bool = False


def run_demo(options: Options, console: Console) -> tuple[bool, dict[str, Any]]:
    """Run the demo; return whether every check holds, and all figures as written to demo.json.

    Raises `KvfoldError` if an engine or a store fails altogether; nothing keeps running then.
    """
    progress = Progress(console)
    root, work = source_root(), options.out / "demo"
    leaks.mark_run()
    _stop_stores(work)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    before = leaks.traces(work)

    progress.heading("Models")
    with progress.step("demo model and tiny checkpoints (made once, then kept)"):
        models = _make_models(root / ".cache" / "checkpoints", work, all_of_them=not options.quick)
    tokenizer = _tokenizer(models["smollm2"])
    prompts = make_prompts(
        document(root),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        QUESTIONS[:2] if options.quick else QUESTIONS,
    )
    folded: list[Folded] = []
    try:
        progress.heading(f"Questions about a document of {prompts.shared_tokens} tokens")
        asking = run_asking(models["smollm2"], prompts, work / "ask", progress)
        if not options.quick:
            progress.heading("Two ranks: one copy, and every rank's own bytes")
            folded = [run_case(case, work / case.model.name, progress) for case in _cases(models)]
    finally:
        _stop_stores(work)
        for disk in work.glob("*/disk"):
            shutil.rmtree(disk)
    left = leaks.left_behind(before, work)

    one_copy_bytes = prompts.hit_tokens * _token_bytes(models["smollm2"])
    checks = check_asking(asking, one_copy_bytes)
    checks += [check for one in folded for check in check_folded(one)]
    checks.append(Check("nothing is left behind", not left, "; ".join(left) or "nothing"))
    found = Findings(asking, folded, aims(asking), checks, progress.spent_s)

    figures = as_json(found, tokenizer.decode)
    (options.out / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    draw(found, options.out / "demo.png")
    print_tables(console, found)
    for name in ("demo.json", "demo.png"):
        console.print(f"written: {options.out / name}", highlight=False, soft_wrap=True)
    return found.ok, figures


def _cases(models: Mapping[str, Path]) -> list[Case]:
    return [
        Case("MLA", models["mla"], span=16, folds=True),
        Case("one KV head", models["kv1"], span=128, folds=True),
        Case("two KV heads", models["kv2"], span=128, folds=False),
    ]


def _token_bytes(model: Path) -> int:
    """Bytes of one token in the cache of a Llama at TP1, from its config alone."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(
        config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * _FLOAT32
    )


def _stop_stores(work: Path) -> None:
    """Stop the stores of this run, or those that a killed one left."""
    for runtime in work.glob("*/run"):
        Stores(runtime).stop(drain=False)


def _make_models(root: Path, work: Path, *, all_of_them: bool) -> dict[str, Path]:
    source = str(Path(kvfold.__file__).parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    made = subprocess.run(
        [sys.executable, "-c", _MAKE, str(root), "all" if all_of_them else "one"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
    )
    if made.returncode:
        (work / "models.log").write_text(made.stderr)
        reason = made.stderr.strip().splitlines()[-1:]
        raise KvfoldError(f"no demo model: {' '.join(reason)} (see {work / 'models.log'})")
    found = json.loads(made.stdout.splitlines()[-1])
    return {name: Path(path) for name, path in found.items()}


def _tokenizer(model: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))
