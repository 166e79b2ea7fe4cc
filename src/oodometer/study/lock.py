"""One run a folder: a lock that the operating system releases when its holder ends, however it ends."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from oodometer.errors import OodometerError

NAME = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; an error that names the holder if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    with path.open("a+", encoding="utf-8") as stream:
        if not _taken(stream):
            stream.seek(0)
            raise OodometerError(
                f"{folder} is being written by another run ({_holder(stream.read())}): wait for it, or choose another "
                "folder with --out"
            )
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        stream.flush()
        yield


def _taken(stream: IO[str]) -> bool:
    try:
        if os.name == "nt":
            msvcrt: Any = import_module("msvcrt")
            # Bytes far behind the text, which stays readable for others.
            stream.seek(1 << 20)
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl: Any = import_module("fcntl")
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _holder(text: str) -> str:
    try:
        facts = json.loads(text)
        return f"process {facts['pid']} on {facts['host']}"
    except (ValueError, KeyError, TypeError):
        return "its process is not known"
