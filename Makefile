# Every target sets itself up: a virtual environment in .venv with the pinned versions.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-portable check clean

# Trains on the source of Python's standard library, which is already on the machine.
demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/melodi prepare --out runs/demo/store
	$(BIN)/melodi train --preset laptop-melodi --data runs/demo/store --out runs/demo/run
	$(BIN)/melodi eval runs/demo/run
	$(BIN)/melodi generate --run runs/demo/run --prompt "def read(self" --max-tokens 120 --repetition-penalty 1.2 --seed 2
	$(BIN)/melodi report runs/demo/run

# One worker a core, each with one thread: threads of several processes get in each other's way.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# The same with the arithmetic of other processors: another last bit must change no verdict.
test-portable: .venv/installed
	for other in ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2; do \
		env OMP_NUM_THREADS=1 $$other $(BIN)/python -m pytest -n auto --dist worksteal || exit 1; \
	done

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis
