"""`python -m kvfold.store`: the store's process, as `kvfold.store.launch` starts it.

With `--detach` it starts itself anew and ends, so that the store is nobody's child: engines that
end their child processes do not end it. Settings come as JSON on standard input.
"""

from __future__ import annotations

import argparse
import os
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvfold.store")
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--lock-fd", type=int, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    options = parser.parse_args()
    if options.detach:
        again = [sys.executable, "-P", "-m", "kvfold.store"]
        again += [argument for argument in sys.argv[1:] if argument != "--detach"]
        os.posix_spawn(sys.executable, again, os.environ)
        return 0
    from kvfold.store.process import run_started

    return run_started(options.folder, options.lock_fd, options.ready_fd, sys.stdin.read())


if __name__ == "__main__":
    sys.exit(main())
