"""Runs steps in forked children of a process that has imported everything, and kills them when asked.

A step's own work takes a fraction of a second, its imports several; so a kill at a random moment of a fresh process
would nearly always hit the imports. Requests and answers are JSON, one a line, on stdin and stdout.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE_OPERATIONS = ("replace", "rename", "link", "unlink", "remove", "fsync", "mkdir", "rmdir")


def warm_up() -> None:
    """Import and use once all that the steps use."""
    import torch

    from hvpflow.curvature.quadratic import make_engine
    from hvpflow.models.config import LlamaConfig
    from hvpflow.models.llama import Llama

    torch.set_num_threads(1)
    model = Llama(LlamaConfig(vocab_size=300, layers=1, width=16, heads=2, ffn_width=24, context_length=16))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    engine = make_engine(model, (tokens, tokens))
    engine(tokens, tokens, {name: torch.zeros(4, *value.shape) for name, value in model.named_parameters()})
    torch.optim.AdamW(model.parameters()).step()


class FileOperations:
    """Counts moments around the operations that change names of files, and kills this process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.count, self.kill_at = 0, kill_at
        for name in FILE_OPERATIONS:
            setattr(os, name, self._watched(getattr(os, name)))
        write_bytes = pathlib.Path.write_bytes

        def half_written(path: Path, data: bytes) -> int:
            if self.kill_at == self.count + 1:
                write_bytes(path, data[: len(data) // 2])
            self.moment()
            return write_bytes(path, data)

        pathlib.Path.write_bytes = half_written  # type: ignore[method-assign]

    def moment(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _watched(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.moment()
            result = operation(*arguments, **options)
            self.moment()
            return result

        return watched


def child(request: dict[str, Any], report: int) -> int:
    os.setsid()
    os.chdir(request["directory"])
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    operations = FileOperations(request.get("kill_at"))
    if request.get("save_seconds") is not None:
        save_often(request["save_seconds"])
    from hvpflow import cli
    from hvpflow.pipeline import steps

    main = {"steps": steps.main, "cli": cli.main}[request["program"]]
    try:
        status = main(request["words"])
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    os.write(report, json.dumps(operations.count).encode())
    return status


def save_often(seconds: float) -> None:
    """Save progress far more often than in earnest, so that there is some at every moment of so short a work."""
    from hvpflow.measure import measurement
    from hvpflow.training import loop

    loop._SAVE_SECONDS = seconds
    assert measurement.measure_shard.__kwdefaults__ is not None
    measurement.measure_shard.__kwdefaults__["save_seconds"] = seconds


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(request: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = child(request, writing)
        finally:
            os._exit(status)
    os.close(writing)
    # Counted in the child's processor time, so that a busy machine spreads the kills no differently.
    kill_after, ended = request.get("kill_after"), 0
    while kill_after is not None and not ended and cpu_seconds(pid) < kill_after:
        time.sleep(0.001)
        ended, status, usage = os.wait4(pid, os.WNOHANG)
    if not ended:
        if kill_after is not None:
            time.sleep(request["extra"])
            os.killpg(pid, request["signal"])
        _, status, usage = os.wait4(pid, 0)
    with os.fdopen(reading, "rb") as handle:
        counted = handle.read()
    return {
        "status": os.waitstatus_to_exitcode(status),
        "cpu": usage.ru_utime + usage.ru_stime,
        "operations": json.loads(counted) if counted else None,
    }


if __name__ == "__main__":
    warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
