"""What starting costs, counted in modules (a clock would measure the machine)."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "pandas", "matplotlib", "sklearn", "scipy", "rich", "tyro", "jinja2", "joblib", "PIL"}


def loaded(code: str) -> set[str]:
    """Modules of a fresh interpreter after this code, by their full names."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines())


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize(
    "code",
    [
        "import oodometer",
        "import oodometer; oodometer.__version__; dir(oodometer)",
        "from oodometer.cli import main; main(['--help'])",
        "from oodometer.cli import main; main(['--version'])",
    ],
)
def test_starting_loads_nothing_heavy(code):
    modules = loaded(code)
    assert not packages(modules) & HEAVY
    assert "numpy" not in modules
    assert len(modules - loaded("")) < 80


def test_metrics_load_numpy_alone():
    modules = loaded("from oodometer import metrics; metrics.ranking([0, 1], [1, 2]); metrics.delong([0, 1], [1, 2])")
    assert "numpy" in modules
    assert not packages(modules) & HEAVY


@pytest.mark.parametrize("name", ["metrics", "list", "doctor", "score"])
def test_help_of_a_command_loads_neither_pandas_nor_torch(name):
    modules = loaded(f"from oodometer.cli import main; main(['{name}', '--help'])")
    assert not packages(modules) & {"torch", "pandas", "matplotlib", "sklearn", "scipy"}
