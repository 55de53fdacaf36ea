"""An interpreter that has imported everything: each program runs in a fork of one process.

A command that computes takes two seconds for importing torch, and often less for the rest. `python tests/preloaded.py
SOCKET` listens there; `interpreter(SOCKET)` is the beginning of a command that goes on as one of `python` would, with
`-m MODULE` or `-c PROGRAM`. A program has the arguments, folder, environment and streams of its command.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_IMPORTED = (
    "batchwright.cli.main",
    "batchwright.jobs.job_run",
    "batchwright.inference.engine_inference",
    "batchwright.encoder.encoder",
    "torch",
    "transformers",
    "tokenizers",
)

_ASK = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect(sys.argv[1])
    told = {"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(asked, [json.dumps(told).encode()], [0, 1, 2])
    sys.exit(int(asked.recv(16) or 1))
"""
"""The command, which needs nothing that takes long to import. Its exit status is the program's."""

_LONGEST = 2**20
"""Of a command with its environment, in bytes."""


def interpreter(address: Path) -> list[str]:
    """Return the beginning of a command whose program is run by the process that listens at `address`."""
    return [sys.executable, "-I", "-S", "-c", _ASK, str(address)]


@contextlib.contextmanager
def listening(address: Path) -> Iterator[None]:
    """Have a process that listens at `address` as long as the context lasts."""
    with subprocess.Popen([sys.executable, __file__, str(address)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
            yield
        finally:
            process.terminate()


def _listen(address: str) -> None:
    """Fork for each command that comes; return in the process that is to run one, with its arguments in `sys.argv`."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("listening", flush=True)
        while True:
            asked, _ = listener.accept()
            with asked:
                if os.fork() == 0 and _is_program(asked):
                    return


def _is_program(asked: socket.socket) -> bool:
    """Return True in the process of the program. That of its parent reports the exit status and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, *_ = socket.recv_fds(asked, _LONGEST, 3)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        asked.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    told: dict[str, Any] = json.loads(message)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    sys.argv[:] = told["arguments"]
    return True


def _run(how: str, what: str, *arguments: str) -> None:
    sys.argv[:] = [how, *arguments]
    sys.path.insert(0, "")
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def _main(arguments: Sequence[str]) -> None:
    _listen(*arguments)
    _run(*sys.argv)


if __name__ == "__main__":
    _main(sys.argv[1:])
