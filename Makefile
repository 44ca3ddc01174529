# Everything from an empty clone: `make demo` shows what it does, `make test` proves it. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-fast test-exhaustive test-transformers check format bench test-gpu bench-gpu clean

demo: $(READY)
	$(BIN)/python -m tilewise demo

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --timeout 300 -m "not exhaustive" --durations 10

test-fast: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --timeout 300 -m "not slow and not exhaustive"

# Compiles every shipped configuration of the GPU backends for every architecture, without a GPU.
test-exhaustive: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --timeout 900 -m exhaustive

# The integration with another release of transformers (VERSION=5.20.2; the newest 5.x unless given), which lies in
# build/ and leaves .venv alone. Of the pins, those stay that no release of transformers moves.
NEWEST := >=5.17,<6
test-transformers: $(READY)
	rm -rf build/transformers
	mkdir -p build/transformers
	grep -vE "^(transformers|tokenizers|huggingface_hub|hf-xet|safetensors)==" constraints.txt > build/transformers/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target build/transformers/site --constraint build/transformers/constraints.txt "transformers$(if $(VERSION),==$(VERSION),$(NEWEST))"
	PYTHONPATH=build/transformers/site $(BIN)/python -c "import transformers; print('transformers', transformers.__version__)"
	PYTHONPATH=build/transformers/site $(BIN)/python -m pytest -q -n 2 --timeout 300 tests/integrations/test_transformers.py tests/integrations/test_transformers_batching.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m tilewise bench --device cpu --plots docs/images $(ARGS)

# On a machine with a GPU: the python3 that is there, with its torch and Triton; nothing is installed.
test-gpu:
	PYTHONPATH=src python3 -m pytest -q tests/backends/test_conformance.py tests/gpu --device cuda --backend hopper --backend triton $(ARGS)

# Figures and, where matplotlib is there, plots under bench/results. ARGS="--only decode --output FILE" for a part of it.
bench-gpu:
	PYTHONPATH=src python3 -m tilewise.bench --device cuda --plots bench/results $(ARGS)

# constraints.txt pins the development set; torch comes first because only the exact pin finds a CPU build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,gpu,transformers]"
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
