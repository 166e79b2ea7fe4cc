"""Preprocessing that models bring along: torchvision's weights, timm's configuration, Hugging Face's processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from oodometer.data.preprocess import (
    AnyPreprocessing,
    Interpolation,
    Preprocessing,
    VolumePreprocessing,
    read_preprocessing,
)
from oodometer.errors import OodometerError

PILLOW: Mapping[int, Interpolation] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
"""Pillow's numbers, as Hugging Face processors store them."""
PROCESSOR = "preprocessor_config.json"
CONVNEXT_LARGE = 384
Size: TypeAlias = int | tuple[int, int]


def of_model(model: nn.Module) -> AnyPreprocessing | None:
    """The preprocessing a model declares (`model.preprocessing`) or was published with; None if it says nothing."""
    own = getattr(model, "preprocessing", None)
    if isinstance(own, Preprocessing | VolumePreprocessing | Mapping):
        return read_preprocessing(own)
    for name in ("pretrained_cfg", "default_cfg"):
        facts = getattr(model, name, None)
        if isinstance(facts, Mapping) and "mean" in facts:
            return of_timm(facts)
    folder = getattr(getattr(model, "config", None), "_name_or_path", None) or getattr(model, "name_or_path", "")
    file = Path(folder) / PROCESSOR if folder else None
    return of_processor(json.loads(file.read_text(encoding="utf-8"))) if file is not None and file.is_file() else None


def recognise(value: Any) -> AnyPreprocessing:
    """Preprocessing from ours in any form, or from a torchvision weight or transform, or a Hugging Face processor."""
    if hasattr(value, "transforms") and hasattr(value, "meta"):
        value = value.transforms()
    if hasattr(value, "crop_size") and hasattr(value, "resize_size"):
        return of_torchvision(value)
    if hasattr(value, "image_mean") and hasattr(value, "to_dict"):
        return of_processor(value.to_dict())
    if isinstance(value, str | Path) and (Path(value) / PROCESSOR).is_file():
        return of_processor(json.loads((Path(value) / PROCESSOR).read_text(encoding="utf-8")))
    return read_preprocessing(value)


def of_torchvision(transform: Any) -> Preprocessing:
    """torchvision's ImageClassification preset."""
    return Preprocessing(
        resize=_size(transform.resize_size),
        crop=_size(transform.crop_size),
        mode="RGB",
        mean=tuple(map(float, transform.mean)),
        std=tuple(map(float, transform.std)),
        interpolation=_interpolation(getattr(transform.interpolation, "value", transform.interpolation)),
    )


def of_timm(facts: Mapping[str, Any]) -> Preprocessing:
    """timm's evaluation transform: the shorter side is crop / crop_pct, rounded down, the crop from the centre."""
    channels, height, width = facts["input_size"]
    share = float(facts.get("crop_pct") or 1.0)
    squash = facts.get("crop_mode") == "squash"
    whole = (int(height / share), int(width / share))
    square = height == width and not squash
    return Preprocessing(
        resize=whole[0] if square else whole,
        crop=height if height == width else (height, width),
        mode="RGB" if channels == 3 else "L",
        mean=tuple(map(float, facts["mean"])),
        std=tuple(map(float, facts["std"])),
        interpolation=_interpolation(facts.get("interpolation") or "bicubic"),
    )


def of_processor(facts: Mapping[str, Any]) -> Preprocessing:
    """A Hugging Face image processor: resize, crop, rescale and normalise, each only where it says so."""
    # x·f − m over s equals (x/255 − m/(255 f)) over s/(255 f).
    scale = 255 * float(facts.get("rescale_factor", 1 / 255)) if facts.get("do_rescale", True) else 255.0
    normalised = facts.get("do_normalize", True) and facts.get("image_mean") is not None
    mean = facts["image_mean"] if normalised else [0.0]
    std = facts["image_std"] if normalised else [1.0]
    plain = not normalised and scale == 1.0
    resize, crop = _processor_sizes(facts)
    return Preprocessing(
        resize=resize,
        crop=crop,
        mode="RGB",
        mean=() if plain else tuple(float(value) / scale for value in mean),
        std=() if plain else tuple(float(value) / scale for value in std),
        interpolation=PILLOW[int(facts.get("resample", 2))],
        centre="floor",
    )


def _processor_sizes(facts: Mapping[str, Any]) -> tuple[Size | None, Size | None]:
    resize = _processor_size(facts.get("size")) if facts.get("do_resize", True) else None
    crop = _processor_size(facts.get("crop_size")) if facts.get("do_center_crop") else None
    if facts.get("crop_pct") and isinstance(resize, int):
        # ConvNeXt's: small sizes are cropped out of larger ones, large ones are squashed.
        return ((resize, resize), None) if resize >= CONVNEXT_LARGE else (int(resize / facts["crop_pct"]), resize)
    return resize, crop


def _processor_size(size: Any) -> Size | None:
    """224, {"shortest_edge": 224} or {"height": 224, "width": 224}."""
    if isinstance(size, Mapping) and size.get("shortest_edge") and not size.get("longest_edge"):
        return int(size["shortest_edge"])
    if isinstance(size, Mapping) and size.get("height"):
        return int(size["height"]), int(size["width"])
    if isinstance(size, int):
        return size, size
    if size is None:
        return None
    raise OodometerError(f"preprocessing: the image processor's size {size!r} is not known here: pass preprocessing=…")


def _size(value: Any) -> Size:
    sides = tuple(map(int, value)) if isinstance(value, list | tuple) else (int(value),)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _interpolation(name: str) -> Interpolation:
    known = tuple(PILLOW.values())
    if name not in known:
        raise OodometerError(f"preprocessing: unknown interpolation {name!r}; known: {', '.join(known)}")
    return name
