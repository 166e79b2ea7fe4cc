"""One extraction: what determines its content, and the loop over batches."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oodometer import __version__
from oodometer.arrays import to_numpy
from oodometer.bank import Bank, Head
from oodometer.data.preprocess import AnyPreprocessing, Preprocessing, VolumePreprocessing, as_facts
from oodometer.data.sources import LABELS, Source, open_source
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.models import columns as registry
from oodometer.models import heads, hooks, official
from oodometer.models.layers import Wanted
from oodometer.models.loading import Batch, batches, worker_count
from oodometer.models.network import Network, Output, discover, input_dtype
from oodometer.models.scripted import Scripted
from oodometer.models.store import Store, finished
from oodometer.models.weights import constants, weights_digest

Progress = Callable[[str, float], None]
DTYPES = ("float32", "float16", "float64")
AMP = ("bfloat16", "float16")
CPU_BYTES, ACCELERATOR_BYTES = 32 << 20, 256 << 20
"""Network input of one automatic batch."""
MOST_ROWS = 512
USUAL_SHAPE = (3, 224, 224)


@dataclass(frozen=True)
class Settings:
    """What determines the content of a bank, besides the model, the data and the preprocessing."""

    columns: tuple[str | registry.Column, ...]
    layers: tuple[Wanted, ...] | None
    head: str | Literal[False] | None
    dtype: str
    amp: str | None
    ood: bool

    def __post_init__(self) -> None:
        for name, value, known in (("dtype", self.dtype, DTYPES), ("amp", self.amp, (*AMP, None))):
            if value not in known:
                raise OodometerError(f"{name} must be one of {', '.join(map(repr, known))}; found {value!r}")


@dataclass(frozen=True)
class Running:
    """How the work is done; none of it changes what is computed but for rounding."""

    device: torch.device
    batch_size: int | str = "auto"
    num_workers: int | str = "auto"
    overwrite: bool = False
    progress: bool | Progress | None = None

    def __post_init__(self) -> None:
        size = self.batch_size
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise OodometerError(f"batch_size must be 'auto' or at least 1; found {size!r}")

    def rows(self, shape: tuple[int, ...]) -> int:
        """Rows of one batch: as given, or as many as fit a fixed amount of input (the same on every machine)."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        budget = CPU_BYTES if self.device.type == "cpu" else ACCELERATOR_BYTES
        fitting = max(1, budget // (4 * int(np.prod(shape, dtype=np.int64))))
        return int(min(MOST_ROWS, 1 << (fitting.bit_length() - 1)))


@dataclass(frozen=True)
class Job:
    """A model, its data, and everything that determines the bank."""

    model: nn.Module
    source: Source
    preprocessing: AnyPreprocessing | None
    settings: Settings
    shared: tuple[str, ...]
    producers: tuple[registry.Column, ...]
    key: Mapping[str, Any]

    @classmethod
    def plan(cls, model: nn.Module, data: Any, settings: Settings, preprocessing: Any) -> Job:
        """Check everything that can be checked before the first image is read."""
        if not isinstance(model, nn.Module):
            raise OodometerError(f"model must be a torch.nn.Module; found {type(model).__name__}")
        model = hooks.unwrapped(model)
        source = open_source(data)
        shared, producers = registry.producers(settings.columns)
        chosen = _preprocessing(preprocessing, model, source)
        extraction = {
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "weights": weights_digest(model),
            "preprocessing": as_facts(chosen),
            "dtype": settings.dtype,
            "amp": settings.amp,
            "head": settings.head,
            "layers": "auto" if settings.layers is None else [[one.module, one.pooling] for one in settings.layers],
            "columns": [*shared, *map(registry.describe, producers)],
        }
        # As JSON will give it back.
        key = json.loads(json.dumps({"extraction": extraction, "data": source.identity()}, default=str))
        return cls(model, source, chosen, settings, shared, producers, key)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row of network input, as far as it is known before the first is read."""
        if isinstance(self.preprocessing, VolumePreprocessing):
            return self.preprocessing.size or (128, 128, 128)
        if isinstance(self.preprocessing, Preprocessing):
            side = self.preprocessing.crop or self.preprocessing.resize
            if side is not None:
                return (3, *(side if isinstance(side, tuple) else (side, side)))
        return self.source.shape or USUAL_SHAPE

    def run(self, running: Running, folder: Path | None, rows: range) -> Bank:
        """Extract these rows into a folder or into memory, or go on with it, or open what is complete."""
        if folder is not None and not running.overwrite:
            complete = finished(folder, self.key)
            if complete is not None:
                return complete
        store = Store.open(folder, self.key, len(rows), overwrite=running.overwrite)
        store.facts.setdefault("batch_size", running.rows(self.shape))
        size = running.batch_size if isinstance(running.batch_size, int) else int(store.facts["batch_size"])
        workers = worker_count(running.num_workers, self.source)
        started = time.perf_counter()
        try:
            with hooks.untouched(self.model, running.device) as model, _bar(running.progress) as report:
                passes = _Passes(self, model, running, rows, store)
                loaded = batches(
                    self.source,
                    self.preprocessing,
                    rows[store.done :],
                    size,
                    workers=workers,
                    pin=running.device.type == "cuda",
                )
                for batch in loaded:
                    store.write(batch.start - rows.start, passes.columns(batch))
                    report("extracting", store.done / len(rows))
                head = passes.head()
        except OodometerError as error:
            raise OodometerError(f"{error}{_kept(store)}") from error.__cause__
        finally:
            store.save()
        log = {"seconds": time.perf_counter() - started, "device": str(running.device), "batch_size": size}
        return store.finish(head, self.provenance(store), self.names(rows), {**log, **_versions()})

    def provenance(self, store: Store) -> dict[str, Any]:
        """What the bank remembers of its making; part of its fingerprint."""
        return {**self.key, "network": store.facts["network"]}

    def where(self, row: int) -> str:
        """What an error calls a row."""
        name = self.source.name(row)
        return name if name.startswith("row ") else f"row {row} ({name})"

    def names(self, rows: range) -> list[str] | None:
        """File names of the rows, if they come from files."""
        paths = getattr(getattr(self.source, "source", self.source), "paths", None)
        return None if paths is None else [paths[row] for row in rows]


# ---------------------------------------------------------------------------------------------- passes


@dataclass
class _Passes:
    """The network over one batch after the other, in smaller pieces where memory does not suffice."""

    job: Job
    model: nn.Module
    running: Running
    rows: range
    store: Store
    piece: int = 1 << 30
    network: Network | None = field(default=None, init=False)
    _labels_known: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.model, torch.jit.ScriptModule):
            self.model = Scripted(self.model)
        facts = self.store.facts.get("network")
        if facts is not None:
            found = None if facts["head"] is None else heads.Found(facts["head"], facts["input"], facts["returns"])
            wanted = tuple(Wanted(name, pooling) for name, pooling in facts["layers"])
            self.network = Network(self.model, found, facts["place"], wanted)
        self.dtype = input_dtype(self.model)

    def head(self) -> Head | None:
        """The weights of the head that was found."""
        assert self.network is not None, "there is at least one batch"
        if self.network.head is None:
            return None
        weight, bias = heads.weights(self.network.head)
        return Head(to_numpy(weight.float()), to_numpy(bias.float()))

    def columns(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """All columns of a batch."""
        parts: list[dict[str, NDArray[Any]]] = []
        start = 0
        while start < len(batch.inputs):
            piece = batch.inputs[start : start + self.piece]
            part = self._fitting(piece, batch, start)
            if part is None:
                self._reduce(len(piece), batch.start + start)
                continue
            parts.append(part)
            start += len(piece)
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return found | (dict(batch.labels) if "labels" in self.job.shared else {})

    def _fitting(self, piece: Tensor, batch: Batch, start: int) -> dict[str, NDArray[Any]] | None:
        """The columns of a piece; None if it does not fit into memory."""
        try:
            return self._piece(piece, batch, batch.start + start)
        except OodometerError:
            raise
        except Exception as error:
            if _is_out_of_memory(error):
                return None
            name = self.job.source.name(batch.start + start)
            last = batch.start + start + len(piece) - 1
            reason = f"{type(error).__name__}: {error}"
            raise OodometerError(
                f"the network failed on rows {batch.start + start} to {last} (the first is {name}), input of shape "
                f"{tuple(piece.shape)}: {reason}"
            ) from error

    def _reduce(self, rows: int, row: int) -> None:
        """Half as many rows at a time from now on."""
        if self.running.device.type == "cuda":
            torch.cuda.empty_cache()
        if isinstance(self.running.batch_size, int) and rows > 1:
            raise OodometerError(
                f"{rows} rows at a time (from row {row}) do not fit into the memory of {self.running.device}: pass a "
                "smaller batch_size, or batch_size='auto'"
            )
        if rows == 1:
            raise OodometerError(
                f"even one row ({self.job.where(row)}) does not fit into the memory of "
                f"{self.running.device}: use a smaller crop, fewer layers, amp='bfloat16' or another device"
            )
        self.piece = rows // 2

    def _piece(self, piece: Tensor, batch: Batch, row: int) -> dict[str, NDArray[Any]]:
        gradients = any(one.gradients for one in self.job.producers)
        # Integer input (tokens, raw pixels of a network that scales them itself) stays as it is.
        dtype = self.dtype if piece.is_floating_point() else None
        inputs = piece.to(self.running.device, dtype, non_blocking=True).requires_grad_(gradients)
        with torch.set_grad_enabled(gradients), self._precision():
            if self.network is None:
                self.network, output = self._discovered(inputs)
            else:
                output = self.network(inputs)
            if "logits" not in self.job.shared:
                self._check_finite("logits", output.logits.detach(), row)
            self._check_labels(batch, output.logits.shape[1])
            found = self._shared(output) | self._produced(inputs, output)
        return {name: self._stored(name, x, len(piece), row) for name, x in found.items()}

    def _discovered(self, inputs: Tensor) -> tuple[Network, Output]:
        wanted = self.job.settings.layers
        if isinstance(self.model, Scripted) and wanted is None:
            wanted = ()  # hooks see none of a script's layers
        network, output = discover(self.model, inputs, self.job.settings.head, wanted)
        found = network.found
        self.store.facts["network"] = {
            "head": found and found.name,
            "input": found and found.reduction,
            "returns": found and found.readout,
            "place": network.place,
            "layers": [[one.module, one.pooling] for one in network.wanted],
        }
        return network, output

    def _precision(self) -> Any:
        amp = self.job.settings.amp
        dtype = torch.bfloat16 if amp == "bfloat16" else torch.float16
        return torch.autocast(self.running.device.type, dtype=dtype, enabled=amp is not None)

    def _shared(self, output: Output) -> dict[str, Tensor]:
        found = {"features": output.features, "logits": output.logits}
        named = {name: x for name, x in found.items() if name in self.job.shared and x is not None}
        return {**named, **output.layers}

    def _produced(self, inputs: Tensor, output: Output) -> dict[str, Tensor]:
        assert self.network is not None, "found in the first pass"
        run = registry.Pass(self.network, inputs, output.logits, output.features, output.layers, self.job.preprocessing)
        found = {}
        for one in self.job.producers:
            with torch.set_grad_enabled(one.gradients):
                found[one.name] = one(run)
        return found

    def _stored(self, name: str, x: Tensor, rows: int, row: int) -> NDArray[Any]:
        """The column as it is stored: one finite entry a row."""
        if len(x) != rows:
            raise OodometerError(f"column {name!r}: {rows} rows went in, {len(x)} came out")
        x = x.detach()
        if x.is_floating_point():
            x = self._check_finite(name, x, row)
        return np.ascontiguousarray(to_numpy(x))

    def _check_finite(self, name: str, x: Tensor, row: int) -> Tensor:
        """The column in its stored precision; an error names the first row that is not finite in it."""
        kept = x.to(getattr(torch, self.job.settings.dtype))
        good = torch.isfinite(kept.reshape(len(x), -1)).all(dim=1)
        if bool(good.all()):
            return kept
        place = int((~good).nonzero()[0, 0])
        bad, overflow = row + place, bool(torch.isfinite(x[place]).all())
        what = f"is too large for {self.job.settings.dtype}" if overflow else "is NaN or infinite"
        how = "store float32" if overflow else "look at this input and at the network's weights"
        if not overflow and self.job.settings.amp is not None:
            how = f"run without amp={self.job.settings.amp!r}"
        raise OodometerError(f"column {name!r} {what} in {self.job.where(bad)}: {how}")

    def _check_labels(self, batch: Batch, classes: int) -> None:
        """Labels of in-distribution rows are classes of the network; lists of outliers say −1 throughout."""
        known = self.job.source.labels.get(LABELS)
        if self.job.settings.ood or LABELS not in self.job.shared or (known is not None and self._labels_known):
            return
        self._labels_known = True
        first = self.rows.start if known is not None else batch.start
        labels = known[self.rows.start : self.rows.stop] if known is not None else batch.labels.get(LABELS)
        if labels is None or bool((labels < 0).all()):
            return
        wrong = np.flatnonzero((labels < 0) | (labels >= classes))
        if len(wrong):
            row = first + int(wrong[0])
            raise OodometerError(
                f"{self.job.where(row)} has label {int(labels[wrong[0]])}, but the network has "
                f"{classes} classes (0 … {classes - 1}): check the class count of network and data; if the data are "
                "out of distribution, say so with ood=True (--ood)"
            )


# ---------------------------------------------------------------------------------------------- helpers


def chosen_device(name: str, model: Any) -> torch.device:
    """The named device; by default the accelerator the model is on, or one that is there, or the CPU."""
    if name == "auto":
        parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        if parameter is not None and parameter.device.type != "cpu":
            return torch.device(parameter.device)
        frozen = next(constants(model), None) if parameter is None and isinstance(model, nn.Module) else None
        if frozen is not None:
            return frozen[1].device  # a frozen script stays where it was frozen
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise OodometerError(f"device {name!r}: {reason}. `oodometer doctor` shows what there is") from None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _preprocessing(value: Any, model: nn.Module, source: Source) -> AnyPreprocessing | None:
    """What is declared, what the model brings along, or (with a warning) pixels scaled to 0…1."""
    if source.kind == "tensor":
        if value not in ("auto", "none", None):
            raise OodometerError("preprocessing is declared, but the data are floating-point network input already")
        return None
    if source.kind == "dataset" and value in ("auto", None):
        return None
    chosen = official.of_model(model) if value == "auto" else official.recognise("none" if value is None else value)
    volume = source.kind == "volume"
    if chosen is None:
        chosen = VolumePreprocessing() if volume else Preprocessing()
        usual = "volumes are standardised, not cropped" if volume else "pixels are scaled to 0…1 and nothing else"
        warnings.warn(
            f"no preprocessing is declared: {usual}. Pass preprocessing=… (--preprocess), e.g. 'imagenet'",
            OodometerWarning,
            stacklevel=4,
        )
    if volume != isinstance(chosen, VolumePreprocessing) and source.kind != "dataset":
        wanted = "VolumePreprocessing" if volume else "Preprocessing"
        raise OodometerError(f"preprocessing: {source.kind}s need {wanted}; found {type(chosen).__name__}")
    if isinstance(chosen, Preprocessing) and chosen.mode is None:
        return msgspec.structs.replace(chosen, mode=_mode(model))
    return chosen


def _mode(model: nn.Module) -> Literal["RGB", "L"]:
    """Grey where the first convolution takes one channel."""
    convolutions = (m.in_channels for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d))
    return "L" if next(convolutions, 3) == 1 else "RGB"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        phrase in text for phrase in ("out of memory", "can't allocate memory", "not enough memory")
    )


def _kept(store: Store) -> str:
    if store.folder is None or not store.done:
        return ""
    return f". {store.done:,} of {store.rows:,} rows are kept in {store.folder}; the same call goes on from there"


def _versions() -> dict[str, str]:
    return {"oodometer": __version__, "torch": str(torch.__version__), "numpy": np.__version__}


@contextmanager
def _bar(progress: bool | Progress | None) -> Iterator[Progress]:
    """The caller's function, or a bar on a terminal (always with True, never with False)."""
    if callable(progress):
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    shown = progress or (progress is None and console.is_terminal)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("loading", total=1.0)

        def report(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        yield report
