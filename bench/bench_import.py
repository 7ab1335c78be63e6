"""How long `import kvfold.plan` takes beyond starting the interpreter, and what it drags in."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

_HEAVY = ("torch", "numpy", "vllm", "transformers")


def planning_import() -> dict[str, Any]:
    """Median of 5 starts with the import, less the median of 5 without, in turns."""
    bare, full = [], []
    for _ in range(5):
        bare.append(_start_s("pass"))
        full.append(_start_s("import kvfold.plan"))
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, kvfold.plan; print(*[m for m in {_HEAVY!r} if m in sys.modules])",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return {
        "name": "import kvfold.plan",
        "value": (statistics.median(full) - statistics.median(bare)) * 1000,
        "unit": "ms",
        "aim": 100,
        "better": "lower",
        "detail": f"imports {', '.join(loaded) or 'no ' + ', '.join(_HEAVY)}",
    }


def _start_s(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


ROWS = [planning_import]
