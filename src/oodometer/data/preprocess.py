"""Preprocessing as data: what happens between a decoded image (or volume) and the network, written down and hashed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from oodometer.errors import OodometerError

Pixels: TypeAlias = NDArray[np.float32]
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Backend = Literal["pillow", "torch"]
Mode = Literal["RGB", "L"]
Centre = Literal["round", "floor"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIXTEEN_BIT = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes of Pillow whose values do not end at 255; converting them to 8 bits would clip them silently."""


class Preprocessing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="image"):
    """Resize, crop the centre, scale 0…255 to 0…1, subtract the mean, divide by the standard deviation.

    >>> Preprocessing(resize=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    """

    resize: int | tuple[int, int] | None = None
    """The shorter side, or (height, width)."""
    crop: int | tuple[int, int] | None = None
    """A square, or (height, width), from the centre; smaller images are padded with black."""
    mode: Mode | None = None
    """Colour or grey; by default what the network's first layer takes."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    interpolation: Interpolation = "bilinear"
    centre: Centre = "round"
    """Where a crop starts that is half a pixel off: rounded (torchvision, timm) or one pixel up (Hugging Face)."""
    backend: Backend = "pillow"
    """pillow resizes as PIL does; torch as antialiased tensors are (a few grey levels apart)."""

    def __post_init__(self) -> None:
        for name in ("resize", "crop"):
            value = getattr(self, name)
            sides = value if isinstance(value, tuple) else (1 if value is None else value,)
            if not all(isinstance(side, int) and side > 0 for side in sides) or len(sides) > 2:
                raise OodometerError(f"preprocessing: {name} must be a positive size or (height, width); found {value}")
        if len(self.mean) != len(self.std) or not all(deviation > 0 for deviation in self.std):
            raise OodometerError(
                "preprocessing: mean and std need one number a channel each, std above 0; found "
                f"mean {self.mean} and std {self.std}"
            )
        if self.backend == "torch" and self.interpolation not in ("bilinear", "bicubic"):
            raise OodometerError(
                f"preprocessing: the torch backend interpolates bilinear or bicubic; found {self.interpolation!r}"
            )

    def __call__(self, image: Any) -> Pixels:
        """A PIL image, or 8-bit pixels (height × width, or × channels), as float32 channels × height × width."""
        pixels = self._sized(self._converted(image))
        if self.crop is not None:
            pixels = _cropped(pixels, _pair(self.crop), self.centre)
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        return self._normalised(np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32))

    def _converted(self, image: Any) -> Any:
        """The image in the wanted mode: 8-bit pixels as an array, or a PIL image where it has to be resized."""
        if isinstance(image, np.ndarray):
            channels = 1 if image.ndim == 2 else image.shape[2]
            if channels not in (1, 3, 4):
                return image
            if self.mode is None or (self.mode == "RGB" and channels == 3) or (self.mode == "L" and channels == 1):
                return image
            image = _as_image(image)
        if image.mode in SIXTEEN_BIT:
            raise OodometerError(f"an image of mode {image.mode} (more than 8 bits a channel): convert it to 8 bits")
        return image if self.mode is None or image.mode == self.mode else image.convert(self.mode)

    def _sized(self, image: Any) -> NDArray[np.uint8]:
        array = np.asarray(image) if isinstance(image, np.ndarray) or image.mode in ("L", "RGB") else None
        if array is None:
            array = np.asarray(image.convert("RGB"))
        if self.resize is None:
            return array
        height, width = array.shape[:2]
        target = self.resize if isinstance(self.resize, tuple) else _shorter_side(height, width, self.resize)
        if target == (height, width):
            return array
        if self.backend == "torch":
            return _resized_by_torch(array, target, self.interpolation)
        resampling = import_module("PIL.Image").Resampling[self.interpolation.upper()]
        return np.asarray(_as_image(array).resize((target[1], target[0]), resampling))

    def _normalised(self, pixels: Pixels) -> Pixels:
        pixels /= 255
        if self.mean:
            if len(self.mean) not in (1, len(pixels)):
                raise OodometerError(
                    f"preprocessing: mean and std have {len(self.mean)} channels, the image has {len(pixels)}: "
                    "set mode='RGB' or mode='L'"
                )
            pixels -= np.asarray(self.mean, np.float32)[:, None, None]
            pixels /= np.asarray(self.std, np.float32)[:, None, None]
        return pixels


class VolumePreprocessing(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="volume"
):
    """Clip intensities, take a box around the foreground (voxels above 0), standardise.

    The box and the standardisation are OpenMIBOOD's: the centre of the foreground, padded with zeros to `size`.
    """

    canonical: bool = True
    """Axes turned to right, anterior, superior."""
    window: tuple[float, float] | None = None
    """Intensities are clipped to this range, e.g. (0, 80) HU for a head CT."""
    size: tuple[int, int, int] | None = None
    standardise: bool = True
    """Subtract the volume's mean, divide by its standard deviation."""

    def __post_init__(self) -> None:
        if self.size is not None and (len(self.size) != 3 or min(self.size) < 1):
            raise OodometerError(f"preprocessing: size must be three positive sides; found {self.size}")
        if self.window is not None and not self.window[0] < self.window[1]:
            raise OodometerError(f"preprocessing: window must be (low, high) with low < high; found {self.window}")

    def __call__(self, voxels: NDArray[Any]) -> Pixels:
        """Voxels (three axes) as float32 with a channel axis in front."""
        x = np.asarray(voxels, np.float32)
        if x.ndim != 3:
            raise OodometerError(f"a volume needs three axes; found shape {x.shape}")
        if self.window is not None:
            x = np.clip(x, *self.window)
        if self.size is not None:
            x = _box(x, self.size)
        if self.standardise:
            deviation = float(x.std(dtype=np.float64))
            x = (x - np.float32(x.mean(dtype=np.float64))) / np.float32(deviation or 1.0)
        return np.ascontiguousarray(x[None], dtype=np.float32)


AnyPreprocessing: TypeAlias = Preprocessing | VolumePreprocessing

PRESETS: Mapping[str, AnyPreprocessing] = {
    "imagenet": Preprocessing(resize=256, crop=224, mode="RGB", mean=IMAGENET_MEAN, std=IMAGENET_STD),
    "none": Preprocessing(),
    "openmibood-volume": VolumePreprocessing(size=(128, 128, 128)),
}
"""Preprocessing by name."""


def read_preprocessing(value: Any) -> AnyPreprocessing:
    """Preprocessing from itself, a name, a mapping, or a TOML or JSON file."""
    if isinstance(value, Preprocessing | VolumePreprocessing):
        return value
    if isinstance(value, str) and value in PRESETS:
        return PRESETS[value]
    if isinstance(value, str | Path):
        value = _read_file(Path(value))
    if not isinstance(value, Mapping):
        raise OodometerError(f"preprocessing: a Preprocessing, a mapping, a file or a name is needed; found {value!r}")
    try:
        return msgspec.convert({"kind": "image", **value}, type=Preprocessing | VolumePreprocessing)
    except msgspec.ValidationError as error:
        raise OodometerError(f"preprocessing: {error}") from None


def as_facts(preprocessing: AnyPreprocessing | None) -> dict[str, Any] | None:
    """Plain JSON values that say everything."""
    return None if preprocessing is None else dict(msgspec.to_builtins(preprocessing))


def _read_file(path: Path) -> Any:
    if not path.is_file():
        raise OodometerError(f"preprocessing: {str(path)!r} is neither a file nor one of {', '.join(PRESETS)}")
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except ValueError as error:
        raise OodometerError(f"{path}: {error}") from None


# ---------------------------------------------------------------------------------------------- sizes


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _shorter_side(height: int, width: int, size: int) -> tuple[int, int]:
    """As torchvision's Resize: the longer side is rounded down."""
    if height <= width:
        return size, int(size * width / height)
    return int(size * height / width), size


def _cropped(pixels: NDArray[np.uint8], size: tuple[int, int], centre: Centre) -> NDArray[np.uint8]:
    """As torchvision's CenterCrop (halves are rounded to even) or as Hugging Face's; black where pixels are missing."""
    missing = [max(side - have, 0) for side, have in zip(size, pixels.shape[:2], strict=True)]
    if any(missing):
        before = [gap // 2 if centre == "round" else -(-gap // 2) for gap in missing]
        margins = [(first, gap - first) for first, gap in zip(before, missing, strict=True)]
        pixels = np.pad(pixels, [*margins, (0, 0)][: pixels.ndim])
    spare = [have - side for side, have in zip(size, pixels.shape[:2], strict=True)]
    top, left = (round(gap / 2) if centre == "round" else gap // 2 for gap in spare)
    return pixels[top : top + size[0], left : left + size[1]]


def _as_image(pixels: NDArray[np.uint8]) -> Any:
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim == 3 and pixels.shape[2] not in (3, 4):
        raise OodometerError(f"an image of {pixels.shape[2]} channels cannot be resized or converted: resize it before")
    return import_module("PIL.Image").fromarray(np.ascontiguousarray(pixels))


def _resized_by_torch(pixels: NDArray[np.uint8], size: tuple[int, int], mode: str) -> NDArray[np.uint8]:
    torch = import_module("torch")
    x = torch.from_numpy(np.array(pixels, np.float32)).reshape(*pixels.shape[:2], -1).permute(2, 0, 1)[None]
    y = torch.nn.functional.interpolate(x, size, mode=mode, antialias=True, align_corners=False)
    found: NDArray[np.uint8] = y[0].round().clamp(0, 255).permute(1, 2, 0).numpy().astype(np.uint8)
    return found


def _box(x: NDArray[np.float32], size: tuple[int, int, int]) -> NDArray[np.float32]:
    """The box of this size around the middle of the voxels above 0, zeros where it leaves the volume."""
    inside = np.argwhere(x > 0)
    low, high = (inside.min(axis=0), inside.max(axis=0) + 1) if len(inside) else (np.zeros(3, int), np.array(x.shape))
    found = np.zeros(size, np.float32)
    source, target = [], []
    for first, last, side, have in zip(low.tolist(), high.tolist(), size, x.shape, strict=True):
        start = (first + last) // 2 - side // 2
        source.append(slice(max(start, 0), max(min(start + side, have), 0)))
        target.append(slice(source[-1].start - start, source[-1].stop - start))
    found[tuple(target)] = x[tuple(source)]
    return found
