"""A model from what a command line can say: a factory, a TorchScript file or a Hugging Face folder."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oodometer.data.preprocess import AnyPreprocessing
from oodometer.errors import OodometerError
from oodometer.models import official
from oodometer.models.weights import load_weights
from oodometer.text import split_parameters

EXTRAS = {"torchvision": "vision", "timm": "vision", "transformers": "hf"}


def build(text: str, weights: str | Path | None = None) -> tuple[nn.Module, AnyPreprocessing | None]:
    """The model of `package.module:factory[:param=value,…]`, of a TorchScript file or of a Hugging Face folder.

    The second value is the preprocessing its weights were published with, where the model itself does not tell.

    >>> build("oodometer.models.zoo:resnet20:classes=100", "weights.safetensors")
    """
    path = Path(text)
    preprocessing = None
    if path.is_dir():
        model = _from_folder(path)
    elif path.is_file():
        model = _from_script(path)
    else:
        model, preprocessing = _from_factory(text)
    return (model if weights is None else load_weights(model, weights)), preprocessing


def _from_folder(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise OodometerError(f"{folder} has no config.json: a Hugging Face folder is written by save_pretrained")
    transformers = _imported("transformers")
    try:
        model = transformers.AutoModelForImageClassification.from_pretrained(
            folder, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise OodometerError(f"{folder}: no image classifier with .safetensors weights ({error})") from None
    return _checked(model, str(folder))


def _from_script(path: Path) -> nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return _checked(torch.jit.load(path, map_location="cpu"), str(path))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise OodometerError(
            f"{path} is no TorchScript file. Weights alone are no model: pass --model package.module:factory "
            f"--weights {path}"
        ) from None


def _from_factory(text: str) -> tuple[nn.Module, AnyPreprocessing | None]:
    module_name, colon, rest = text.partition(":")
    if not colon or not rest:
        raise OodometerError(
            f"model {text!r}: write package.module:factory, e.g. oodometer.models.zoo:resnet20, or the path of a "
            "TorchScript file or a Hugging Face folder"
        )
    name, params = split_parameters(rest, "model")
    with _working_folder():
        module = _imported(module_name)
        factory = getattr(module, name, None)
        if factory is None:
            near = difflib.get_close_matches(name, dir(module), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OodometerError(f"model {text!r}: {module_name} has no {name!r}{hint}")
        try:
            model = factory if isinstance(factory, nn.Module) else factory(**params)
        except OodometerError:
            raise
        except Exception as error:  # of the user's code
            raise OodometerError(f"model {text!r} cannot be made: {type(error).__name__}: {error}") from error
    preprocessing = None
    if module_name.startswith("torchvision.models") and isinstance(params.get("weights"), str):
        preprocessing = official.recognise(module.get_model_weights(name)[params["weights"]])
    return _checked(model, text), preprocessing


def _checked(model: Any, text: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise OodometerError(f"model {text!r} gives {type(model).__name__}; a torch.nn.Module is needed")
    return model


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        extra = EXTRAS.get(missing.partition(".")[0])
        how = f": pip install 'oodometer[{extra}]'" if extra else f" (looked in {Path.cwd()} and in what is installed)"
        raise OodometerError(f"there is no module {missing!r}{how}") from None


@contextmanager
def _working_folder() -> Iterator[None]:
    """Modules beside the user are found, as `python -m` finds them."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
