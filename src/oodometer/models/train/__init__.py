"""Trainers of networks: published recipes over one loop, on CPU, CUDA and MPS, resumable to the byte."""

from __future__ import annotations

from oodometer.models.train.reading import held_out, read_images
from oodometer.models.train.recipes import RECIPES, Recipe, create
from oodometer.models.train.trained import Architecture, Trained, fit, opened

__all__ = ["RECIPES", "Architecture", "Recipe", "Trained", "create", "fit", "held_out", "opened", "read_images"]
