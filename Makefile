# Everything here works on a fresh Debian machine with Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup test lint demo bench clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torch,dev]"
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: $(STAMP)
	$(BIN)/oodometer demo

bench: .venv-bench/.installed
	.venv-bench/bin/python -m bench

# Peers live apart, so that none of them can move what the tests run on.
.venv-bench/.installed: pyproject.toml constraints.txt bench/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torch]" -r bench/requirements.txt
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps pytorch-ood==0.4.0
	touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-core build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
