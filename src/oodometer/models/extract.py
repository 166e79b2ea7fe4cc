"""Run a network over data once, into a bank: the model is untouched, rows stream to disk, a stop loses nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from oodometer.bank import Bank
from oodometer.models import columns as registry
from oodometer.models import layers as layer_names
from oodometer.models.job import Job, Progress, Running, Settings, chosen_device
from oodometer.models.shards import extract_shard


def extract(
    model: nn.Module,
    data: Any,
    *,
    out: str | Path | None = None,
    columns: Sequence[str | registry.Column] = ("features", "logits", "labels"),
    layers: str | Iterable[str] | None = "auto",
    head: str | Literal[False] | None = None,
    preprocessing: Any = "auto",
    device: str = "auto",
    dtype: str = "float32",
    amp: str | None = None,
    batch_size: int | str = "auto",
    num_workers: int | str = "auto",
    shard: str | None = None,
    ood: bool = False,
    overwrite: bool = False,
    progress: bool | Progress | None = None,
) -> Bank:
    """Logits, penultimate features, labels and intermediate layers of every row, from one forward pass a row.

    >>> bank = oodometer.extract(model, "cifar10_test.npz", out="banks/cifar10")

    `model` is a classifier, eager or TorchScript. Its code is not touched; its device, modes, tensors, gradients and
    hooks are afterwards what they were before, also after an error.

    `data` is a folder, an image list, a .npz, .npy, IDX or NIfTI file, arrays x or (x, y), a map-style data set, or
    what `oodometer.data.sources.open_source` made of one of them.

    `out` is the bank's folder: the same call goes on where a stopped one was, and opens a complete bank. Without it
    the bank stays in memory.

    `columns` are "features", "logits", "labels" and the producers of `oodometer.models.columns`; `layers` are "auto"
    (a transformer's blocks, or the last map at each resolution), names such as "layer1" or "layer1:mean+var" (mean,
    mean+var, token, none), or None. `head` is the last linear layer: found and verified, or named, or False.

    `preprocessing` is a `Preprocessing`, a mapping, a TOML or JSON file, a preset's name, or a description by
    torchvision or Hugging Face; "auto" takes what the model declares or was published with. `amp` runs the network in
    "bfloat16" or "float16"; columns are stored in `dtype` all the same.

    `shard="2/4"` extracts the second of four parts; the last part to finish joins them. Labels have to be classes of
    the model unless `ood=True`.
    """
    settings = Settings(
        columns=tuple(columns),
        layers=layer_names.parse(layers),
        head=head,
        dtype=dtype,
        amp=amp,
        ood=ood,
    )
    running = Running(chosen_device(device, model), batch_size, num_workers, overwrite, progress)
    job = Job.plan(model, data, settings, preprocessing)
    folder = None if out is None else Path(out)
    if shard is not None:
        return extract_shard(job, running, folder, shard)
    return job.run(running, folder, range(len(job.source)))
