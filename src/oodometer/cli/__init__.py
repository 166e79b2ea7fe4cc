"""The `oodometer` command: finds the subcommand, turns errors into one message and an exit code."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from oodometer import __version__
from oodometer.errors import OodometerError

_SUMMARIES = {
    "demo": "a complete small study on real digits, in seconds",
    "init": "write a study file to start from",
    "extract": "run a network over images once, into a bank",
    "train": "train a small classifier to extract from",
    "list": "every detector with its needs, parameters and search grid",
    "score": "fit detectors on a training bank and score test banks",
    "metrics": "AUROC, FPR@95, AUPR … of a table of scores",
    "split": "folds of in- and out-of-distribution rows",
    "run": "a whole study: folds × detectors × parameters, resumable",
    "compare": "what changed between two runs, and whether it matters",
    "fidelity": "how well a protocol's ranking tells the true one",
    "report": "a run as a page to decide from, or a table for a paper",
    "guard": "a fitted detector with its threshold, for production",
    "doctor": "versions, threads, GPU, extras, and a check of your banks",
}
COMMANDS = {name: about for name, about in _SUMMARIES.items() if find_spec(f"oodometer.cli.{name}")}
"""Each is the module of its name, imported only when called: `oodometer --help` loads nothing heavy."""

OK, FAILED, MISUSE, INTERRUPTED = 0, 1, 2, 130
_INPUT_ERRORS = (OodometerError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0: done, 1: some work failed, 2: wrong usage or input, 130: interrupted."""
    given = sys.argv[1:] if argv is None else argv
    debug = "--debug" in given
    # No call of list here: once `oodometer list` has run, the name is that of its module.
    arguments = [argument for argument in given if argument != "--debug"]
    _replace_unprintable()
    with warnings.catch_warnings():
        warnings.showwarning = _Warnings().show
        with _Debugging(debug):
            return _guarded(arguments, debug)


def _guarded(arguments: list[str], debug: bool) -> int:
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Nothing may be flushed to it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        _complain("interrupted; nothing half-written was left behind")
        return INTERRUPTED
    except SystemExit as done:  # the argument parser has said why
        return done.code if isinstance(done.code, int) else FAILED
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _explain(error)


def _explain(error: Exception) -> int:
    if isinstance(error, OodometerError):
        _complain(str(error))
    elif isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        _complain(f"{place}{error.strerror or error}")
    elif isinstance(error, MemoryError):
        _complain("out of memory: score fewer rows at a time, or fewer columns (float32 needs half of float64)")
    else:
        _complain(f"unexpected {type(error).__name__}: {error}; run again with --debug for the details to report")
    return MISUSE if isinstance(error, _INPUT_ERRORS) else FAILED


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_help(), file=sys.stderr)
        return MISUSE
    command, *rest = arguments
    if command == "help" and rest:
        command, rest = rest[0], [*rest[1:], "--help"]
    if command in ("-h", "--help", "help"):
        print(_help())
        return OK
    if command in ("-V", "--version"):
        print(f"oodometer {__version__}")
        return OK
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OodometerError(f"unknown command {command!r}; {hint}commands: {', '.join(COMMANDS)}")
    code: int = import_module(f"oodometer.cli.{command}").main(rest)
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return f"""usage: oodometer COMMAND [OPTIONS]

Measure how well a classifier knows what it does not know.

commands:
{commands}

options:
  -h, --help     this page; `oodometer COMMAND --help` explains a command
  -V, --version  the version
  --debug        show the traceback of an error (any command)

example:
  oodometer score --train train.npz --id test.npz --ood svhn.npz \\
      --detector msp knn vim --out scores
  oodometer metrics scores/scores.csv

exit codes: 0 done, 1 some work failed, 2 wrong usage or input, 130 interrupted"""


def _complain(message: str) -> None:
    print(f"oodometer: {message}", file=sys.stderr)


class _Warnings:
    """Prints each text once, however many detectors it comes from."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def show(self, message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in self._said:
            self._said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)


def _replace_unprintable() -> None:
    """A terminal without ≥ or × shows a question mark instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if "utf" not in (getattr(stream, "encoding", None) or "utf").lower() and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


class _Debugging:
    """Sends the package's debug log to stderr while a command runs with --debug."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._logger = logging.getLogger("oodometer")
        self._handler = logging.StreamHandler()
        self._level = self._logger.level

    def __enter__(self) -> None:
        if self._wanted:
            self._logger.addHandler(self._handler)
            self._logger.setLevel(logging.DEBUG)

    def __exit__(self, *_: object) -> None:
        if self._wanted:
            self._logger.removeHandler(self._handler)
            self._logger.setLevel(self._level)
