"""A worker process for the tests: does what it is told, a line of JSON at a time.

    python store_child.py SETTINGS_JSON RANK

Answers each line with one line. Lines: {"do": "ask" | "write" | "commit" | "ready" | "drop" |
"churn" | "close" | "ping", ...}.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from typing import Any

import numpy as np
from store_peers import GROUP, SPACE, content, join

from kvfold.store.client import REFUSED, StoreClient
from kvfold.store.settings import StoreSettings


def churn(client: StoreClient, numbers: list[int]) -> None:
    assert client.arena is not None
    for job in range(1000, 1_000_000):
        some = numbers[4 * job % len(numbers) :][:4]
        masks = np.full(len(some), 2, np.uint64)
        offsets = client.ask(job, 0, SPACE, join(some), 2, masks).offsets
        given = np.flatnonzero(offsets < REFUSED).astype(np.uint32)
        for i in given:
            data = content(some[i])
            client.arena[int(offsets[i]) : int(offsets[i]) + len(data)] = data
        client.commit(job, given, True)


def main() -> None:
    ready: dict[int, int] = {}
    some = threading.Event()

    def on_ready(_ticket: int, indices: Any, offsets: Any) -> None:
        ready.update(zip(indices.tolist(), offsets.tolist(), strict=True))
        some.set()

    client = StoreClient.connect(
        StoreSettings.from_json(sys.argv[1]),
        role="worker",
        engine="engine",
        rank=int(sys.argv[2]),
        world=2,
        fingerprint="plan",
        groups=[GROUP],
        on_ready=on_ready,
    )
    print(json.dumps(client.store_pid), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        answer: Any = None
        match told["do"]:
            case "ask":
                numbers = told["numbers"]
                masks = np.full(len(numbers), told["mask"], np.uint64)
                verdicts = client.ask(told["job"], 0, SPACE, join(numbers), told["mask"], masks)
                answer = verdicts.offsets.tolist()
            case "write":
                assert client.arena is not None
                for number, offset in zip(told["numbers"], told["offsets"], strict=True):
                    data = content(number)
                    client.arena[offset : offset + len(data)] = data
            case "commit":
                client.commit(told["job"], np.array(told["indices"], np.uint32), True)
            case "ready":
                some.wait(10)
                answer = sorted(ready.items())
            case "drop":  # the connection, not the process, and without a word
                client._wire._sock.shutdown(socket.SHUT_RDWR)
            case "churn":  # store and store again until killed, after this answer
                print(json.dumps(None), flush=True)
                churn(client, told["numbers"])
            case "close":
                client.close()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
