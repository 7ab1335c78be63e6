"""The process behind `kvfold.testing.engines.Engine`: steps on stdin, answers on a pipe.

Both ways one JSON object a line. The first line holds the arguments of `vllm.LLM`; every other
line is a step. The end of stdin ends the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

from kvfold.testing.engines import do_step

# vLLM's workers wait for one another by yielding in a loop. With as many waiters as cores, some
# kernels then keep every other process (a store, say) from running for seconds. A short sleep waits
# as well. Workers run this too: they import the main module when they are spawned.
os.sched_yield = lambda: time.sleep(5e-5)


def main(answers_fd: int) -> int:
    """Serve until stdin ends. Returns the exit status."""
    # Workers must not read steps, and what they inherit must not keep stdin's other end waiting.
    steps = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.set_inheritable(answers_fd, False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def answer(result: dict[str, Any]) -> None:
        data = json.dumps(result).encode() + b"\n"
        while data:
            data = data[os.write(answers_fd, data) :]

    try:
        from vllm import LLM

        llm = LLM(**json.loads(steps.readline()))
    except BaseException as error:
        traceback.print_exc()
        answer({"error": f"start failed: {type(error).__name__}: {error}"})
        return 1
    answer({"ready": True})
    for line in steps:
        try:
            answer(do_step(llm, json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    llm.llm_engine.engine_core.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
