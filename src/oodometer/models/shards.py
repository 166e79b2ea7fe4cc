"""Several machines or GPUs: each extracts a part of the rows, the last one to finish joins the parts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from oodometer.bank import Bank
from oodometer.errors import OodometerError
from oodometer.models.job import Job, Running
from oodometer.models.store import NAMES, finished


def extract_shard(job: Job, running: Running, out: Path | None, shard: str) -> Bank:
    """The bank of one part, or the joined bank once all parts are there."""
    place, parts = _parse(shard)
    if out is None:
        raise OodometerError("shard needs out=…: the parts meet there")
    rows = len(job.source)
    if parts > rows:
        raise OodometerError(f"shard {shard}: {rows} rows cannot be dealt to {parts} parts")
    if not running.overwrite:
        complete = finished(out, job.key) if out.exists() else None
        if complete is not None:
            return complete
    part = job.run(running, _folder(out, place, parts), _rows(rows, running.rows(job.shape), place, parts))
    folders = [_folder(out, one, parts) for one in range(1, parts + 1)]
    if not all((folder / "bank.json").exists() for folder in folders):
        return part
    return _joined(job, out, folders, overwrite=running.overwrite)


def _parse(shard: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", str(shard))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise OodometerError(f"shard must be written i/n with 1 ≤ i ≤ n, e.g. 2/4; found {shard!r}")
    return int(match[1]), int(match[2])


def _folder(out: Path, place: int, parts: int) -> Path:
    return out.with_name(f"{out.name}.shard-{place}-of-{parts}")


def _rows(rows: int, batch: int, place: int, parts: int) -> range:
    """Whole batches, so that every batch is the one a single run would have had; single rows if batches are few."""
    unit = batch if rows >= parts * batch else 1
    units = -(-rows // unit)
    return range(min(rows, units * (place - 1) // parts * unit), min(rows, units * place // parts * unit))


def _joined(job: Job, out: Path, folders: list[Path], *, overwrite: bool) -> Bank:
    try:
        bank = Bank.concat([Bank.open(folder) for folder in folders])
        names = job.names(range(len(job.source)))
        bank.save(out, overwrite=overwrite)
        if names is not None:
            (out / NAMES).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        for folder in folders:
            shutil.rmtree(folder)
    except (OodometerError, OSError):
        # Two parts that finish at once both join; the one that comes second finds its work done.
        if not (out / "bank.json").exists():
            raise
    return Bank.open(out, verify=False)
