# Each target works first, alone, from a bare clone with Python 3.11 or later.
#
#   make replay      the main job on the embedded model, under two minutes on two cores
#   make test        the tests
#   make lint        ruff check and format check
#
# PIP_ARGS reaches pip: on Linux, name an index of CPU wheels of torch there for a small install.

PYTHON ?= python3
PIP_ARGS ?=
# A process for each core, which hands tests to one that has none left.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist worksteal
REPLAY_ARGS ?= --runs 2 --limit 6 --cap 64
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: replay test lint clean

replay: $(STAMP)
	$(BIN)/lumotree replay corpora/first.jsonl --arms all $(REPLAY_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
