"""A real engine under chaos: every request must succeed, with the answer of one without kvfold.

    python -m kvfold.testing.chaos --minutes 30 --seed 1 --model gemma3

Conversations with shared prefixes run on a pool of few blocks, while requests are aborted, caches
are reset, the store is killed and stopped and its disk breaks. A run is made of stretches of at
most `STRETCH_S`: each starts an engine on what the last one left on disk, and ends with checks: the
engine and the store hold nothing any more, loads brought bytes that were stored, and an engine
without kvfold gives the same answers. `Report.problems` lists what was wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfold.testing import checkpoints, leaks
from kvfold.testing.chaos_check import Bytes, Errors, tracebacks
from kvfold.testing.chaos_engine import Request, Stuck, figures
from kvfold.testing.chaos_faults import Faults
from kvfold.testing.chaos_oracle import judge
from kvfold.testing.chaos_report import Report
from kvfold.testing.chaos_stretch import Stretch
from kvfold.testing.chaos_talk import Talks, deck, operations
from kvfold.testing.engines import local_engine

STRETCH_S = 60.0
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"block_size": 32, "num_gpu_blocks_override": 56},
    "gemma3": {"block_size": 32, "num_gpu_blocks_override": 110},
    "granite4": {"num_gpu_blocks_override": 60},
}
"""Engine arguments: pools so small that decoding requests preempt one another."""
ENGINE = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512}
ORACLE = {"max_model_len": 1024, "max_num_seqs": 64}
CONNECTOR: dict[str, Any] = {
    "host": "6MiB",
    "disk": "256MiB",
    "private": True,
    "lookup_wait_ms": 200,
    "load_deadline_s": 1.5,
    "store_deadline_s": 1.0,
}


class Run:
    """A whole run: engines with kvfold one after another, and an oracle after each.

    `root` has the checkpoints, `runtime` the store's sockets, `scratch` its disk.
    """

    def __init__(self, model: str, seed: int, *, root: Path, runtime: Path, scratch: Path) -> None:
        build = getattr(checkpoints, model)
        self._checkpoint = build(root, 2) if model == "llama" else build(root)
        self._args = {**ENGINE, **MODELS[model]}
        self._runtime, self._disk = runtime, scratch / "disk"
        self._bytes = Bytes(scratch / "digests")
        self._talks, self._steps = Talks(), operations(seed)
        self._least = len(deck(seed, 0))
        self.report = Report(model, seed)

    def run(self, minutes: float, tell: Callable[[str], None] = lambda text: None) -> Report:
        """Run for so long, starts and checks not counted, but at least one deck of operations."""
        left_s = 60 * minutes
        while (left_s > 0 or self.report.operations < self._least) and not self.report.problems:
            requests, spent_s = self._stretch(min(STRETCH_S, left_s))
            left_s -= spent_s
            self._judge(requests)
            tell(f"{max(0.0, left_s):.0f} s left\n{self.report.text()}")
        return self.report

    def _stretch(self, length_s: float) -> tuple[list[Request], float]:
        """One engine's operations and checks: its requests, and how long the operations took."""
        report, errors = self.report, Errors()
        connector = CONNECTOR | {
            "runtime_dir": str(self._runtime),
            "disk_path": str(self._disk),
            "digest_dir": str(self._bytes.folder),
        }
        faults = Faults(self._runtime, self._disk)
        logger = logging.getLogger("vllm.kvfold")
        logger.addHandler(errors)
        report.engines += 1
        try:
            with local_engine(self._checkpoint, engine_args=self._args, connector=connector) as llm:
                before, begun_s = figures(llm), time.monotonic()
                stretch = Stretch(llm, report, self._talks, faults)

                def goes_on() -> bool:
                    late = time.monotonic() - begun_s > length_s
                    return not late or report.operations < self._least

                try:
                    stretch.run(self._steps, goes_on)
                    spent_s = time.monotonic() - begun_s
                    stretch.check_end(self._runtime)
                except Stuck as error:
                    spent_s = time.monotonic() - begun_s
                    report.problems.append(str(error))
                report.count(before, figures(llm))
        finally:
            faults.heal()
            logger.removeHandler(errors)
        report.faults += faults.injected
        report.problems += errors.lines + tracebacks(self._runtime)
        chunks, wrong = self._bytes.compare()
        report.loaded += chunks
        report.problems += wrong
        return stretch.requests, spent_s

    def _judge(self, requests: list[Request]) -> None:
        args = {name: self._args[name] for name in ("block_size",) if name in self._args} | ORACLE
        with local_engine(self._checkpoint, engine_args=args) as oracle:
            verdict = judge(oracle, requests)
        self.report.judged += verdict
        self.report.problems += [f"wrong answer: {text}" for text in verdict.mismatches]


def main() -> int:
    """The command; its status is 0 if nothing was wrong and everything happened."""
    parser = argparse.ArgumentParser(prog="python -m kvfold.testing.chaos")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--model", choices=sorted(MODELS), default="llama")
    parser.add_argument("--checkpoints", type=Path, default=Path(".cache/checkpoints"))
    given = parser.parse_args()
    leaks.mark_run()
    scratch = Path(tempfile.mkdtemp(prefix="kvfold-chaos-"))
    runtime = Path(tempfile.mkdtemp(prefix="kvf"))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    before = leaks.traces(runtime)
    print(f"seed {given.seed}, files in {scratch}", flush=True)
    run = Run(
        given.model,
        given.seed,
        root=given.checkpoints.absolute(),
        runtime=runtime,
        scratch=scratch,
    )
    report = run.run(given.minutes, lambda text: print(text, flush=True))
    left = leaks.left_behind(before, runtime)
    leaks.kill_all()
    missing = [name for name, n in report.happened().items() if n == 0]
    for line in [f"left behind: {trace}" for trace in left] + [f"never: {n}" for n in missing]:
        print("PROBLEM", line)
    if report.problems or left or missing:
        return 1
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(runtime, ignore_errors=True)
    print("all answers are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
