# The commands of the README. Everything but `gpu` runs in .venv, which the first target makes.
PY ?= python3
# Installed only where $(PY) has no torch; add pip options for another build of it.
TORCH ?= torch==2.13.0
# auto (where there is nvcc), on or off
CUDA ?= auto
WERROR ?= OFF
# processes that share the tests, a file at a time; each takes two cores now and then
JOBS ?= 2

override PY := $(shell $(PY) -c 'import sys; print(sys.executable)')
export PATH := $(CURDIR)/.venv/bin:$(PATH)
INSTALLED := .venv/installed
SOURCES := $(wildcard csrc/*.* csrc/*/*.*)
INSTALL := -m pip install --disable-pip-version-check --quiet

# A torch that $(PY) already has is shared, not downloaded again.
define venv
test -x $(1)/bin/python || $(PY) -m venv $$($(PY) -c 'import importlib.util as u; \
	print("--system-site-packages" if u.find_spec("torch") else "")') $(1)
$(1)/bin/python -c 'import torch' 2>/dev/null || $(1)/bin/python $(INSTALL) $(TORCH)
endef

.PHONY: help build demo test bench lint wheel gpu clean

help:
	@echo "make demo    score the bundled chats with two tiny models, into demo-out/"
	@echo "make test    the tests, on the CPU"
	@echo "make bench   every op timed against plain torch"
	@echo "make lint    ruff, clang-format, pyright"
	@echo "make wheel   build, repair and check a wheel, in wheelhouse/"
	@echo "make gpu     build for CUDA with the torch of PY=python3, GPU tests, sanitizer, benchmarks"
	@echo "make build   make .venv, or compile again after a change in csrc/"
	@echo "make clean   remove what the other targets made"

build: $(INSTALLED)

$(INSTALLED): pyproject.toml CMakeLists.txt $(wildcard cmake/* setup_helpers/*.py) $(SOURCES)
	$(call venv,.venv)
	python $(INSTALL) scikit-build-core pybind11 cmake ninja
	python $(INSTALL) --no-build-isolation --editable '.[dev]' \
		--config-settings=cmake.define.FUSEDRL_CUDA=$(CUDA) \
		--config-settings=cmake.define.FUSEDRL_WERROR=$(WERROR)
	touch $@

demo: $(INSTALLED)
	fusedrl demo --out demo-out

test: $(INSTALLED)
	pytest -m "not gpu" --numprocesses $(JOBS) --no-loadscope-reorder

bench: $(INSTALLED)
	fusedrl bench

lint: $(INSTALLED)
	ruff check
	ruff format --check
	clang-format --dry-run -Werror $(SOURCES)
	pyright

# The wheel is built from the sdist, and tried in an environment that never saw the sources.
wheel: $(INSTALLED)
	rm -rf dist wheelhouse build/wheel-check
	python -m build --no-isolation --outdir dist
	auditwheel repair --wheel-dir wheelhouse \
		--exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcuda*' dist/*.whl
	$(call venv,build/wheel-check)
	build/wheel-check/bin/python $(INSTALL) "$$(echo wheelhouse/*.whl)[score]"
	cd build/wheel-check && bin/fusedrl check

# No environment and no network: a copy of the package in build/gpu, by and for what $(PY) has (a CUDA
# build of torch, scikit-build-core, pybind11, cmake, pytest, rich and matplotlib; torchrl, Liger and
# cut-cross-entropy take part in the benchmarks where they are installed). GPU="--step bench" does less.
gpu:
	$(PY) benchmarks/gpu.py $(GPU)

clean:
	rm -rf .venv build dist wheelhouse demo-out bench-out
