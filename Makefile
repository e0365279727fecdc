# make demo   environment, then the main job: a PyTorch GPT-2 trained with ZeRO-3, checked in PyTorch
# make test   environment, then lint, types and the test suite
# make test-bits   tests that compare the bits of different programs, for several kinds of CPU
# make test-gpu-programs   the compiler for GPUs, then what it makes of large steps; needs no GPU
# make docs   the examples of docstrings, then the documentation, built without a warning into
#             docs/_build; its tutorials run
# make docs-serve   the documentation at localhost:8000
# make nightly   a night's work: what `make test` leaves out, planted bugs, long random sequences
# make published   preflight beside published training runs; needs no GPU
# make gpu   on a machine with a GPU: checks and figures, in parts of nine minutes
#
# Needs Python >= 3.11 and make. Variables, as in `make test PYTHON=python3.12 VENV=.venv-3.12`:
PYTHON ?= python3
VENV ?= .venv
# Extras of pyproject.toml; with NVIDIA GPUs and a driver for CUDA 13: EXTRAS=dev,cuda
EXTRAS ?= dev
DEMO_OUT ?= runs/demo
DEMO_STEPS ?= 200
PYTEST_ARGS ?=

BIN := $(VENV)/bin
comma := ,
# Installed again when what is to be installed changes.
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: help install demo test cases test-bits gpu-programs test-gpu-programs published gpu nightly nightly-tests nightly-bits nightly-gpu-programs nightly-ray nightly-gcs nightly-random nightly-operators nightly-models mutants operators models models-venv lint types docs site docs-serve docs-outputs clean

# A test may take twenty times what the longest takes. It is stopped by a signal: pytest's own dump of
# all threads reads frames of a thread that runs, and has taken a worker down.
LIMIT := --timeout 600 --timeout-method signal
# A test that takes its worker down is tried once more, not eight times.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile \
  --no-loadscope-reorder --max-worker-restart 1 $(LIMIT)
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^PYTHON/q' Makefile

# Byte code is made of what is imported, once, and kept: of all that is installed, and of twenty
# thousand files one by one, it takes longer than the installation. (Fewer EXTRAS import less.)
unexport PYTHONDONTWRITEBYTECODE

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fzero needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Say which to use: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv or ensurepip module. On Debian and Ubuntu:" \
	       "apt install python3-venv. Or name another one: make PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes, once"
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq --no-compile torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install -qq --no-compile -e '.[$(EXTRAS)]' -c constraints.txt
	@$(BIN)/python -c 'import fzero, torch_bridge, flax, transformers' 2> /dev/null || true
	@touch $@

# On a CPU eight virtual devices; with GPUs the largest number of them that divides the batch.
demo: install
	@$(BIN)/python -c 'import jax; n = jax.device_count(); \
	  print(8 if jax.default_backend() == "cpu" else max(d for d in (1, 2, 4, 8) if d <= n))' \
	  > $(VENV)/.num-devices
	$(BIN)/fzero train --model hf:examples/gpt2_3m.json --data stdlib --out $(DEMO_OUT) \
	  --steps $(DEMO_STEPS) --batch 16 --seq 128 --lr 1e-3 --zero 3 \
	  --devices $$(cat $(VENV)/.num-devices) --clip 1.0 --eval-every 50 \
	  --eval-sequences 128 --overwrite --verify

# mypy takes one core for half a minute: beside the tests, not before them.
test: lint
	@$(MAKE) --no-print-directory -j2 types cases

cases: install
	$(PYTEST) -m "not nightly and not bits and not docs" $(PYTEST_ARGS)

# Bits of different programs, on the instruction sets of older CPUs and of this one.
BITS := bits and not nightly
ISAS := SSE4_2 $(if $(shell grep -m1 -o avx2 /proc/cpuinfo 2>/dev/null),AVX2) \
  $(if $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null),AVX512)
test-bits: install
	@set -e; for isa in $(ISAS); do echo "--xla_cpu_max_isa=$$isa"; \
	  XLA_FLAGS="$(XLA_FLAGS) --xla_cpu_max_isa=$$isa" $(PYTEST) --dist load -m "$(BITS)" \
	  $(PYTEST_ARGS) $$(grep -rl --include='test_*.py' 'mark\.bits' tests); done

# Programs for GPUs, compiled on any Linux machine and read; `make test` leaves them out. In an
# environment of its own, on top of the other: with jax's CUDA plugin but without a GPU's libraries,
# jax complains whenever it starts.
GPU_VENV := $(VENV)-gpu-programs
GPU_BIN := $(GPU_VENV)/bin
gpu-programs: install
	test -x $(GPU_BIN)/python || $(BIN)/python -m venv --without-pip $(GPU_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($(GPU_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(GPU_BIN)/python -m pip install -qq --no-compile -e '.[preflight]' nvidia-cudnn-cu13 \
	  -c constraints.txt -c constraints-gpu.txt
	@$(GPU_BIN)/python -c 'from fzero.preflight.topology import has_plugin; \
	  assert has_plugin(), "no CUDA plugin: every test would be skipped"'

GPU_CASES := not nightly
test-gpu-programs: gpu-programs
	$(GPU_BIN)/python -m pytest -n 2 --dist loadfile --durations=5 $(LIMIT) -m "$(GPU_CASES)" $(PYTEST_ARGS) tests/gpu_programs

# What preflight says about training runs that others have published: docs/published.md.
published: gpu-programs
	PYTHONPATH=. $(GPU_BIN)/python -m benchmarks.published

# On a machine with a GPU, with jax, torch and transformers as they are installed there: nothing is
# installed. Checks, then figures; call it again for the rest (benchmarks/gpu.py).
GPU_PYTHON ?= python3
GPU_OUT ?= runs/gpu.json
GPU_MINUTES ?= 9
gpu:
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu.py --minutes $(GPU_MINUTES) --json $(GPU_OUT)

# What `make test` and `make test-bits` leave to the night, planted bugs, ten times as many random
# sequences of what can happen to a state, and kills of a process that saves.
# `make -k nightly` goes on after a failure.
nightly: nightly-tests nightly-bits nightly-gpu-programs nightly-ray nightly-gcs nightly-operators nightly-models mutants nightly-random

nightly-tests: install
	$(PYTEST) -m "nightly and not bits" $(PYTEST_ARGS)

nightly-bits: install
	$(MAKE) test-bits BITS="bits and nightly"

nightly-gpu-programs: install
	$(MAKE) test-gpu-programs GPU_CASES=nightly

# The example for Ray Train under Ray, in an environment of its own, on top of the other.
RAY_VENV := $(VENV)-ray
nightly-ray: install
	test -x $(RAY_VENV)/bin/python || $(BIN)/python -m venv --without-pip $(RAY_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($(RAY_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(RAY_VENV)/bin/python -m pip install --quiet 'ray[train]' -c constraints.txt
	$(RAY_VENV)/bin/python -m pytest -m nightly tests/multiprocess/test_ray.py

# Checkpoints in Google's store, of which an emulator runs here; likewise.
GCS_VENV := $(VENV)-gcs
nightly-gcs: install
	test -x $(GCS_VENV)/bin/python || $(BIN)/python -m venv --without-pip $(GCS_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($(GCS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(GCS_VENV)/bin/python -m pip install --quiet gcsfs gcp-storage-emulator -c constraints.txt
	$(GCS_VENV)/bin/python -m pytest -m nightly -k gs tests/test_object_stores.py

nightly-random: install
	FZERO_NIGHTLY=1 $(BIN)/python -m pytest tests/offload/test_state_machine.py tests/test_checkpoint_writer.py \
	  tests/pipeline/test_schedule_*.py

# PyTorch's own databases of operators and modules, each entry beside its conversion (half an hour).
operators: install
	$(BIN)/python benchmarks/operators.py --json benchmarks/results/operators.json \
	  --table docs/operators.md

# No row of the table may have turned worse.
nightly-operators: install
	$(BIN)/python benchmarks/operators.py --json benchmarks/results/operators.json --check

# Architectures of transformers, diffusers, timm, torchvision, torchaudio and PEFT, each beside its
# conversion (an hour). In an environment of its own, on top of the other: transformers computes
# some things otherwise where torchvision is installed. torchaudio's own library is for CUDA, without
# which it does not load, and then nor does transformers; its models take nothing of it.
MODELS_VENV := $(VENV)-models
MODELS_BIN := $(MODELS_VENV)/bin
models-venv: install
	test -x $(MODELS_BIN)/python || $(BIN)/python -m venv --without-pip $(MODELS_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($(MODELS_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(MODELS_BIN)/python -m pip install --quiet --no-deps torchvision torchaudio timm diffusers \
	  -c constraints.txt
	rm -f $$($(MODELS_BIN)/python -c \
	  'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio/lib/*.so

models: models-venv
	PYTHONPATH=. $(MODELS_BIN)/python benchmarks/models.py --table docs/architectures.md

# Nor of this table; MODELS_STEP=8 takes every eighth.
MODELS_STEP ?= 1
nightly-models: models-venv
	PYTHONPATH=. $(MODELS_BIN)/python benchmarks/models.py --check $(MODELS_STEP)

# Bugs planted one at a time, each of which a test must see (tests/mutants).
mutants: install
	$(BIN)/python tests/mutants/run.py

# Examples in docstrings run, and tutorials when they or fzero changed (docs/site.md).
docs: install
	$(PYTEST) --dist load -m docs $(PYTEST_ARGS) tests/test_docstrings.py
	@$(MAKE) --no-print-directory site

site: install
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "docs/_build/index.html"

DOCS_PORT ?= 8000
docs-serve: site
	$(BIN)/python -m http.server --directory docs/_build --bind 127.0.0.1 $(DOCS_PORT)

# The outputs of the tutorial that takes the compiler for GPUs.
docs-outputs: gpu-programs
	JAX_PLATFORMS=cpu $(GPU_BIN)/python docs/_ext/kept.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

clean:
	rm -rf runs build dist docs/_build docs/_made .pytest_cache .mypy_cache .ruff_cache .hypothesis
