"""BibTeX of what a study used: its detectors, metrics, tests and data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from oodometer import detectors
from oodometer.errors import OodometerError
from oodometer.report.layout import Layout

if TYPE_CHECKING:
    from oodometer.results import Results

METRIC_KEYS = {
    "auroc": ("hanley1982meaning",),
    "aupr_ood": ("davis2006relationship",),
    "aupr_id": ("davis2006relationship",),
    "ap_ood": ("davis2006relationship",),
    "ap_id": ("davis2006relationship",),
    "aupr_harmonic": ("gutbrod2025openmibood",),
    "fpr95_ood": ("liang2018odin",),
    "fpr95_id": ("liang2018odin",),
    "detection_error": ("liang2018odin",),
    "tpr5": ("urrea2025dcvrood",),
    "acc90": ("urrea2025dcvrood",),
    "autc": ("humblotrenaux2023beyond",),
    "aufpr": ("humblotrenaux2023beyond",),
    "aufnr": ("humblotrenaux2023beyond",),
    "fpr@95tnr": ("humblotrenaux2023beyond",),
    "fnr@95tnr": ("humblotrenaux2023beyond",),
    "aurc": ("geifman2019bias", "jaeger2023call"),
    "augrc": ("traub2024overcoming",),
}
STATISTICS_KEYS = (
    *("friedman1937use", "iman1980approximations", "conover1999practical", "holm1979simple"),
    *("bron1973algorithm", "nadeau2003inference"),
)
DATA_KEYS = {
    "fashion": "xiao2017fashion",
    "kmnist": "clanuwat2018kmnist",
    "emnist": "cohen2017emnist",
    "letters": "cohen2017emnist",
    "mnist": "lecun1998gradient",
    "usps": "hull1994database",
    "omniglot": "lake2015omniglot",
    "chars74k": "campos2009chars74k",
    "digits": "alpaydin1998digits",
    "cifar": "krizhevsky2009learning",
    "svhn": "netzer2011svhn",
    "texture": "cimpoi2014textures",
    "dtd": "cimpoi2014textures",
    "places": "zhou2018places",
    "tinyimagenet": "le2015tiny",
    "imageneto": "hendrycks2021natural",
    "openimage": "wang2022vim",
    "imagenet": "russakovsky2015imagenet",
    "lsun": "yu2015lsun",
    "isun": "xu2015isun",
    "inaturalist": "vanhorn2018inaturalist",
    "ninco": "bitterwolf2023ninco",
    "ssb": "vaze2022ssb",
    "midog": "gutbrod2025openmibood",
    "phakir": "gutbrod2025openmibood",
    "oasis": "gutbrod2025openmibood",
}
"""The paper behind a data set, by what its name contains; the first match counts."""


@lru_cache(maxsize=1)
def references() -> dict[str, str]:
    """Every BibTeX entry of the package, by its key."""
    text = files("oodometer.report").joinpath("references.bib").read_text(encoding="utf-8")
    return {entry[1]: entry[0].strip() for entry in re.finditer(r"^@\w+\{([^,]+),\n(?:.*\n)*?\}$", text, re.M)}


def of(results: Results) -> str:
    """The entries a paper on this study cites, in the order detectors, metrics, statistics, data."""
    return bibtex(keys(Layout.of(results)))


def keys(layout: Layout) -> list[str]:
    """The keys of everything a study used."""
    cards = [key for name, _ in layout.origins.values() if (key := detector_key(name))]
    metrics = [key for metric in layout.metrics for key in METRIC_KEYS.get(metric.partition(":")[0], ())]
    exposure = ["hendrycks2019oe"] if set(layout.exposures) - {"without"} else []
    data = [key for name in (*layout.ids, *layout.sets) if (key := data_key(name))]
    return list(dict.fromkeys([*cards, *exposure, *metrics, *STATISTICS_KEYS, *data]))


def detector_key(name: str) -> str:
    """The key of a detector's card; empty for one that is not installed here or cites nothing."""
    try:
        return detectors.get(name).card.cite
    except OodometerError:
        return ""


def data_key(name: str) -> str:
    """The key of a data set, as far as its name tells."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((key for part, key in DATA_KEYS.items() if part in plain), "")


def bibtex(wanted: Iterable[str]) -> str:
    """Entries by key; a key without an entry becomes a comment that says so."""
    known = references()
    return "\n\n".join(known.get(key, f"% {key}: no entry known") for key in wanted) + "\n"


def short(key: str) -> str:
    """Title and year of an entry, without TeX."""
    entry = references().get(key, "")
    title, year = (re.search(rf"^\s*{name}\s*= \{{(.*)\}},$", entry, re.M) for name in ("title", "year"))
    if title is None or year is None:
        return key
    return f"{re.sub(r'[{}]', '', title[1]).replace(chr(92) + '&', '&')} ({year[1]})"
