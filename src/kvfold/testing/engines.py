"""Drive real vLLM engines from tests and the demo: in this process, or as a process of their own.

`Engine` is a child process that builds one `vllm.LLM` and then answers one step at a time, so a
test can restart or kill things between steps, and during one. `run_engine` is the short form for a
fixed list of steps. `local_engine` builds a TP1 engine inside this process, where a test can reach
the connector and the cache tensors. All of them work with and without the kvfold connector.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

from kvfold.testing.needs import engine_needs, few_threads
from kvfold.testing.steps import EngineFailed as EngineFailed
from kvfold.testing.steps import Step
from kvfold.testing.steps import counters as counters
from kvfold.testing.steps import do_step as do_step
from kvfold.testing.steps import generate as generate


def kv_transfer_config(connector: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for kvfold with these connector settings."""
    return {
        "kv_connector": "KvfoldConnector",
        "kv_connector_module_path": "kvfold.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(connector),
    }


def engine_env(ranks: int = 1) -> dict[str, str]:
    """Return the environment variables that a small, offline, quiet CPU engine needs.

    Of several `ranks` each gets one core of its own; their threads would otherwise fight for all.
    """
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB for each worker
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if ranks == 1 else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",  # the first logprobs would compile a kernel, for 13 s
    }
    if ranks == 1:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # would pin the test's own threads too
    else:
        cores = sorted(os.sched_getaffinity(0))
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(ranks)
        )
    return env


def llm_arguments(
    model: Path | str,
    *,
    tp: int = 1,
    pp: int = 1,
    engine_args: Mapping[str, Any] | None = None,
    connector: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return keyword arguments for `vllm.LLM`: token ids in and out, float32, no compilation."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "seed": 0,
        "disable_log_stats": False,
        **engine_needs(Path(model), pp),
    }
    if connector is not None:
        arguments["kv_transfer_config"] = kv_transfer_config(connector)
    return {**arguments, **(engine_args or {})}


# ---------------------------------------------------------------- an engine in this process


@contextmanager
def local_engine(
    model: Path | str,
    *,
    engine_args: Mapping[str, Any] | None = None,
    connector: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """Yield a TP1 `vllm.LLM` that runs in this process; several may follow one another.

    The engine's parts: `llm.llm_engine.engine_core.engine_core` is the `EngineCore`, with
    `.scheduler` (`.connector`) and `.model_executor.driver_worker`.
    """
    saved = {name: os.environ.get(name) for name in engine_env()}
    os.environ.update(engine_env())
    llm: Any = None
    try:
        _prepare_process()
        from vllm import LLM

        llm = LLM(**llm_arguments(model, engine_args=engine_args, connector=connector))
        yield llm
    finally:
        _take_down(llm)
        llm = None
        gc.collect()
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _prepare_process() -> None:
    """Make engines in this process quick: what a child gets by its environment, and less to sweep.

    Every engine collects garbage some ten times, and all modules together are a million objects.
    """
    import torch
    import vllm.entrypoints.llm  # noqa: F401

    torch.set_num_threads(1)  # vLLM allows it only before the first engine
    gc.freeze()


def _take_down(llm: Any) -> None:
    """Shut an in-process engine down, also after a failed start, and free its process groups."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    try:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
    finally:
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


# ---------------------------------------------------------------- an engine as a process


class Engine:
    """A child process with one engine. Use as a context manager: leaving it closes the engine.

    stdout and stderr go to `log`. The child leads a process group, so `kill` ends its workers too.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        log: Path,
        tp: int = 1,
        pp: int = 1,
        engine_args: Mapping[str, Any] | None = None,
        connector: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 180,
    ) -> None:
        """Start the process and return when its engine is ready. Raises `EngineFailed`."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = llm_arguments(model, tp=tp, pp=pp, engine_args=engine_args, connector=connector)
        self._answers, theirs = os.pipe()
        self._buffer = b""
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvfold.testing.engine_child", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                start_new_session=True,
                env=os.environ
                | engine_env(tp * pp)
                | few_threads(Path(model))
                | _import_path()
                | dict(env or {}),
            )
        os.close(theirs)
        started = time.monotonic()
        try:
            self._ask(arguments, start_timeout_s)
        except BaseException:
            self.kill()
            raise
        self.start_s = time.monotonic() - started

    @property
    def pid(self) -> int:
        """Process id, and process group id, of the child."""
        return self.process.pid

    def do(self, step: Step, timeout_s: float = 120) -> dict[str, Any]:
        """Carry out `step` (see `do_step`) and return its result. Raises `EngineFailed`."""
        self.send(step)
        return self.answer(timeout_s)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, timeout_s: float = 120, **options: Any
    ) -> dict[str, Any]:
        """Return the result of a "generate" step; `options` are the step's other fields."""
        return self.do({"op": "generate", "prompts": prompts, **options}, timeout_s)

    def send(self, step: Step) -> None:
        """Start a step without waiting for it; `answer` waits."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(step).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise EngineFailed(self._story("the engine is gone")) from error

    def answer(self, timeout_s: float = 120) -> dict[str, Any]:
        """Return the result of the step sent last. Raises `EngineFailed`."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._answers], [], [], 0.2)
            data = os.read(self._answers, 1 << 16) if readable else b""
            self._buffer += data
            # Workers inherit the pipe, so its end says nothing while one of them lives on.
            if not data and (readable or self.process.poll() is not None):
                raise EngineFailed(self._story("the engine died"))
            if time.monotonic() > deadline:
                raise EngineFailed(self._story(f"no answer within {timeout_s} s"))
        line, self._buffer = self._buffer.split(b"\n", 1)
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise EngineFailed(self._story(result["error"]))
        return result

    def close(self, timeout_s: float = 60) -> int:
        """End the engine cleanly and return its exit status; kill it when that takes too long."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            return self.process.wait(timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            return -signal.SIGKILL
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL the engine and its workers, and wait until the engine process is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self.send(message)
        return self.answer(timeout_s)

    def _story(self, what: str) -> str:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        return f"{what}; end of {self.log}:\n{tail}"


def run_engine(
    model: Path | str, steps: Sequence[Step], *, log: Path, timeout_s: float = 120, **how: Any
) -> list[dict[str, Any]]:
    """Start an `Engine` (keywords `how`), carry out `steps`, close it; one result for each step."""
    with Engine(model, log=log, **how) as engine:
        return [engine.do(step, timeout_s) for step in steps]


def _import_path() -> dict[str, str]:
    """Let the child import the kvfold that runs here, installed or not."""
    source = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": source if not rest else f"{source}{os.pathsep}{rest}"}
