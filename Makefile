# An interpreter given as PYTHON is used with what it has. Otherwise .venv is made and filled: with
# the versions of constraints/cuda.txt where there is an NVIDIA GPU, of constraints/cpu.txt elsewhere.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help verify test gate baseline sanitize mutation fuzz findings kernels lint docs format bench power clean

MINUTES ?= 10
# Portable kernels in small tiles, Hopper's in both passes, and more programs than calls often have.
SANITIZED = (fp16-16x16 or bf16-16x16 or fp32-default or default-d128 or default-one_pass or \
  two_head_dims or 1-128) and not apart

ifeq ($(strip $(PYTHON)),)
python := .venv/bin/python
versions := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
environment := .venv/installed-$(versions)
else
python := $(PYTHON)
environment :=
endif

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'Without a GPU, kernels run in the Triton interpreter on the CPU. The environment is .venv,'
	@echo 'made when it is needed; PYTHON=python3 make ... uses an existing one as it is.'

verify: $(environment) ## verify the kernels: tests/conformance
	$(python) -m pytest tests/conformance -n auto

test: $(environment) ## run all tests
	$(python) -m pytest -n auto

BASELINE ?= baselines/local.json

gate: $(environment) ## compare with BASELINE=FILE: errors, kernels, speed, coverage
	$(python) -m pytest -n auto --fa-baseline=$(BASELINE)

baseline: $(environment) ## write BASELINE=FILE
	$(python) -m pytest -n auto --fa-baseline=$(BASELINE) --fa-update-baseline

sanitize: $(environment) ## sanitizers of NVIDIA and Triton over a short run; needs a GPU
	@command -v compute-sanitizer >/dev/null || { \
	  echo 'make sanitize needs compute-sanitizer, of the CUDA toolkit, on PATH' >&2; exit 1; }
	$(python) -m tests.sanitizers
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 7 \
	  $(python) -m pytest tests/conformance/test_memory.py tests/conformance/test_range.py \
	  tests/unit/fa_kernels/hopper/test_hopper.py -p no:xdist --hypothesis-profile=dev --problem-timeout=300 \
	  -k '$(SANITIZED)'

mutation: $(environment) ## see that faults are found; SEED=0: which are drawn; FULL=1: all
	$(python) -m tests.mutation $(if $(FULL),--full) $(if $(SEED),--seed '$(SEED)')

fuzz: $(environment) ## new problems for MINUTES=10; KERNEL=file.py:name, MASK=file.py:Name
	$(python) -m pytest tests/conformance -n auto --fa-minutes='$(MINUTES)' \
	  $(if $(KERNEL),--fa-kernel='$(KERNEL)') $(if $(MASK),--fa-mask='$(MASK)')

findings: $(environment) ## what every kernel here holds: results/, FINDINGS.md; KERNELS='flex ours'
	$(python) -m benchmarks.findings $(KERNELS)

kernels: $(environment) ## kernels of other repositories: build/kernels; KERNELS_FROM=folder
	$(python) -m tests.kernels $(if $(KERNELS_FROM),--from '$(KERNELS_FROM)')

lint: $(environment) ## ruff check, ruff format --check, mypy, prose
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(python) -m tests.prose

docs: $(environment) ## build the documentation, build/docs/html/index.html; warnings are errors
	$(python) -m sphinx -b html -W -n --keep-going -q docs build/docs/html

format: $(environment) ## format and fix what ruff can
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

bench: $(environment) ## speed beside cuDNN, FlexAttention, SDPA and a copy; needs a GPU
	$(python) -m benchmarks.speed
	$(python) -m benchmarks.cases decoding

power: $(environment) ## detection limits of the checks: build/power.json; WRITE=1: to results/
	$(python) -m benchmarks.power $(if $(QUICK),--quick) $(if $(WRITE),--write)

clean: ## remove .venv, caches and build leftovers
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build fa_verify.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define make_environment
@for base in python3 python3.13 python3.12 python3.11; do \
  if $$base -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
    echo "$$base -m venv .venv"; exec $$base -m venv .venv; \
  fi; \
done; echo 'make: no Python 3.11 or later found as python3 or python3.1x' >&2; exit 1
@rm -f .venv/installed-*
endef

install = .venv/bin/python -m pip install --disable-pip-version-check -c $(1) -e '.[test,dev,docs]'

.venv/installed-cpu: constraints/cpu.txt constraints/cuda.txt pyproject.toml
	$(make_environment)
	@echo 'installing the versions of constraints/cpu.txt into .venv'
	@$(call install,constraints/cpu.txt) 2>.venv/install-cpu.log || { \
	  echo 'constraints/cpu.txt cannot be installed from here (.venv/install-cpu.log says why):' \
	    'installing constraints/cuda.txt instead, a download of gigabytes'; \
	  $(call install,constraints/cuda.txt); }
	@touch $@

.venv/installed-cuda: constraints/cuda.txt pyproject.toml
	$(make_environment)
	@echo 'installing the versions of constraints/cuda.txt into .venv, a download of gigabytes'
	@$(call install,constraints/cuda.txt)
	@touch $@
