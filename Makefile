# Every target creates .venv if it is missing, and rebuilds changed files. Required are Python 3.11 to
# 3.13 with headers, a C++20 compiler and make; pip installs the rest.
PYTHON ?= python3

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CXX_FILES = $(shell find cgx_ops torch_ops xla_ffi tests benchmarks -name '*.cc' -o -name '*.h' \
  -o -name '*.cu' -o -name '*.cuh')
SOURCES = setup.py pyproject.toml $(shell find cgx_ops/csrc cgx_ops/numpy_ops torch_ops xla_ffi -type f)
# `make demo` builds CUDA only if torch or JAX in .venv uses it; all other targets build it if there
# is an nvcc. Both builds share their object files. CGX_WITH selects other parts.
NVCC := $(shell PATH="$$CUDA_HOME/bin:$$CUDA_PATH/bin:$$PATH:/usr/local/cuda/bin" command -v nvcc)
DEMO_BUILT = build/.installed
BUILT = $(DEMO_BUILT)$(if $(NVCC),-with-cuda) .venv/.ready-for-tests

.PHONY: demo test test-all bench chaos soak lint sanitize fuzz clean

demo: $(DEMO_BUILT)
	$(BIN)/python examples/demo.py

# Run parts in parallel, as many as there are cores, because few tests use two.
PARTS = $(MAKE) --no-print-directory --jobs=$(shell getconf _NPROCESSORS_ONLN) --keep-going \
  --output-sync=target
DAILY = not exhaustive and not slow
SLOW = slow and not exhaustive
CORE = tests/core tests/numpy tests/planner
SLOW_PARTS = slow-torch slow-examples slow-rest slow-jax slow-docs
.PHONY: test-jax test-torch test-core test-rest cpp-tests test-slow $(SLOW_PARTS)
test: $(BUILT)
	@echo "The tests of the core, JAX, torch and the rest run in parallel; each is shown at its end."
	@$(PARTS) test-core test-rest test-jax test-torch

# XLA compiles the tests' programs in a third of the time with these flags. test-all optimizes.
FAST_XLA = --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
  --xla_cpu_use_fusion_emitters=false
test-jax test-torch test-rest: export XLA_FLAGS := $(FAST_XLA)
test-jax test-torch: test-%: $(BUILT)
	$(BIN)/python -m pytest tests/$* -m "$(DAILY)"

test-core: $(BUILT)
	$(BIN)/python -m pytest $(CORE) -m "$(DAILY)"

test-rest: $(BUILT)
	$(BIN)/python -m pytest tests $(addprefix --ignore=,tests/jax tests/torch $(CORE)) -m "$(DAILY)"

# test-rest builds these if they are outdated. Alone, the compiler uses all cores.
cpp-tests: $(BUILT)
	PYTHONPATH=tests:. $(BIN)/python -c "from support import cpp_programs as c; c.build()"

# A sample of each subject, for every change: less than a minute on two idle cores after the build.
FAST_BINDINGS = tests/jax/test_psum.py tests/jax/test_api.py tests/torch/test_eager.py \
  tests/torch/test_coalesced.py tests/torch/test_states.py \
  "tests/torch/test_ddp.py::test_ddp[ddp.steps.equals_the_oracle-3]"
FAST_CORE = "tests/core/test_collectives.py::test_threads[features-baseline-3]" \
  "tests/core/test_collectives.py::test_mpirun[names2-TCP-3]" \
  "tests/core/test_compressors.py::test_against_the_oracle[baseline]" tests/core/test_config.py \
  tests/core/test_consistency.py tests/core/test_outer_loop.py tests/core/test_rules.py \
  tests/docs/test_layering.py tests/docs/test_import_graph.py tests/docs/test_interfaces.py \
  tests/numpy/test_communicator.py tests/numpy/test_feedback.py \
  tests/planner/test_model.py tests/planner/test_plan.py
.PHONY: test-fast fast-bindings fast-core
test-fast: $(BUILT)
	@$(PARTS) fast-bindings fast-core

fast-bindings: export XLA_FLAGS := $(FAST_XLA)
fast-bindings: $(BUILT)
	$(BIN)/python -m pytest $(FAST_BINDINGS) -q -m "$(DAILY)"

fast-core: $(BUILT)
	$(BIN)/python -m pytest $(FAST_CORE) -q -m "$(DAILY)"

# .ci/run has those that fit into its time.
test-slow: $(BUILT)
	@echo "The slow tests of the examples, documents, JAX, torch and the rest run in parallel."
	@$(PARTS) $(SLOW_PARTS)

slow-jax slow-rest: export XLA_FLAGS := $(FAST_XLA)
slow-jax slow-torch: slow-%: $(BUILT)
	$(BIN)/python -m pytest tests/$* -m "$(SLOW)"

# Two parts, because the programs train one after another.
EXAMPLES = tests/docs/test_examples.py
slow-examples: $(BUILT)
	$(BIN)/python -m pytest $(EXAMPLES) -m "$(SLOW)"

slow-docs: $(BUILT)
	$(BIN)/python -m pytest tests/docs --ignore=$(EXAMPLES) -m "$(SLOW)"

slow-rest: $(BUILT)
	$(BIN)/python -m pytest tests $(addprefix --ignore=tests/,docs jax torch) -m "$(SLOW)"

test-all: $(BUILT)
	$(BIN)/python -m pytest tests

# The trainers of docs/guides/trainers.md. Only this target installs their packages into .venv.
.PHONY: test-integrations
test-integrations: $(BUILT)
	$(BIN)/python -c "$$PRINT_REQUIREMENTS" integrations > .venv/integrations.txt
	$(PIP) install -r .venv/integrations.txt -c .venv/requirements.txt
	$(BIN)/python -m pytest tests/integrations

# The benchmarks but the long ones, in about 25 minutes; they write to benchmarks/results/.
bench: $(BUILT)
	$(BIN)/python benchmarks/suite.py

# Inject faults for at most 20 minutes: tests/chaos. SEED, ROUNDS and TRANSPORT repeat some rounds.
chaos soak: export PYTHONPATH := $(CURDIR)/tests$(if $(PYTHONPATH),:$(PYTHONPATH))
chaos: $(BUILT)
	$(BIN)/python -m chaos $(if $(SEED),--seed $(SEED)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
	  $(if $(TRANSPORT),--transport $(TRANSPORT)) $(if $(FAULT),--fault "$(FAULT)")

# Millions of calls that must not leak: tests/soak. SCALE=0.01 is a short run.
soak: $(BUILT)
	$(BIN)/python -m soak $(if $(SCALE),--scale $(SCALE)) $(if $(TRANSPORT),--transport $(TRANSPORT))

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

# The site, in build/docs; a warning is an error. It needs no network.
.PHONY: docs
docs: $(BUILT)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo "The site is in build/docs/index.html."

# The C++ tests under ThreadSanitizer, then under AddressSanitizer and UndefinedBehaviorSanitizer.
SANITIZED = build/sanitize-thread build/sanitize-address,undefined
.PHONY: $(SANITIZED)
sanitize: $(SANITIZED)

$(SANITIZED): build/sanitize-%: .venv/.ready
	$(BIN)/cmake -S cgx_ops/csrc -B $@ -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCGX_MPI_ROOT=$(abspath .venv) -DCGX_BUILD_TESTS=ON -DCGX_SANITIZE=$*
	MAKEFLAGS= $(BIN)/ninja -C $@
	$(BIN)/ctest --test-dir $@ --parallel 2 --output-on-failure --no-tests=error

# The targets of tests/fuzz with libFuzzer, RUNS inputs each, under AddressSanitizer and
# UndefinedBehaviorSanitizer. Inputs that reach new code are saved in build/fuzz/corpus.
CLANG ?= clang++
RUNS ?= 100000
FUZZ_TARGETS = headers engine codec carried offers tcp
fuzz: .venv/.ready
	@command -v $(CLANG) > /dev/null || { \
	  echo "make fuzz needs clang++ with libFuzzer: apt-get install clang libclang-rt-14-dev"; exit 1; }
	$(BIN)/cmake -S cgx_ops/csrc -B build/fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCGX_MPI_ROOT=$(abspath .venv) -DCMAKE_CXX_COMPILER=$(CLANG) -DCGX_FUZZ=ON \
	  -DCGX_SANITIZE=fuzzer-no-link,address,undefined
	MAKEFLAGS= $(BIN)/ninja -C build/fuzz $(FUZZ_TARGETS:%=fuzz_%)
	set -e; for target in $(FUZZ_TARGETS); do mkdir -p build/fuzz/corpus/$$target; \
	  build/fuzz/fuzz_$$target -runs=$(RUNS) -max_len=512 -artifact_prefix=build/fuzz/$$target- \
	    build/fuzz/corpus/$$target tests/fuzz/corpus/$$target; done

# The kernels of aarch64, under QEMU. tests/cpp/test_neon.py lists the requirements.
.PHONY: neon
neon: $(BUILT)
	$(BIN)/python -m pytest tests/cpp/test_neon.py

# With a GPU: build, then the CUDA tests, then the benchmarks, which write the tables of
# docs/explanation/gpu_speed.md. They use the packages of PYTHON, not .venv, and no network.
# gpu-test and gpu-bench build nothing: on another machine, copy cgx_ops/*.so, cgx_ops/_build.json
# and the programs build/cmake/cuda_*_test.
GPU_PARTS ?= 6
GPU_PART_NUMBERS := $(shell seq $(GPU_PARTS))
GPU_PYTEST = $(PYTHON) -m pytest tests/cuda --durations=8
# A variable, because `make --dry-run` runs recipe lines that contain $(MAKE).
RUN_GPU_PARTS = $(MAKE) --no-print-directory --jobs=$(GPU_PARTS) --keep-going \
  --output-sync=target gpu-parts
.PHONY: gpu gpu-build gpu-test gpu-parts gpu-bench
gpu: gpu-build
	$(MAKE) --jobs=1 --keep-going gpu-test gpu-bench

gpu-build:
	@$(PYTHON) benchmarks/gpu_present.py
	CGX_WITH=torch,jax,cuda $(PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH=tests:. $(PYTHON) -c "from support import cpp_programs as c; c.build(*c.cuda_tests())"
	rm -f $(DEMO_BUILT)*  # the build for .venv is outdated now

gpu-test gpu-bench: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-test: export CGX_REQUIRE_GPU := 1
# Parts share the GPU under MPS. A part that is late ends after its current test, with a summary.
gpu-test:
	@$(PYTHON) benchmarks/gpu_present.py
	@echo "$(GPU_PARTS) parts of the tests run in parallel; each is shown at its end."
	@status=0; \
	$(PYTHON) benchmarks/gpu_mps.py $(RUN_GPU_PARTS) || status=1; \
	$(GPU_PYTEST) -m alone || status=1; exit $$status

gpu-parts: $(GPU_PART_NUMBERS:%=gpu-part-%)

gpu-part-%:  # pytest returns 5 if a part is empty, because there are more parts than launches
	$(GPU_PYTEST) -m "gpu and not alone and not exhaustive" --part $*/$(GPU_PARTS) \
	  --session-timeout=240 || [ $$? -eq 5 ]

gpu-bench:
	$(PYTHON) benchmarks/gpu.py $(if $(TINY),--tiny)

# ---- Set-up --------------------------------------------------------------------------------------

# Print the project's requirements and those of the named extras (default: all but `integrations`).
define PRINT_REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
names = sys.argv[1:] or extras.keys() - {"integrations"}
print(*project["dependencies"], *sum(map(extras.get, sorted(names)), []), sep="\n")
endef
export PRINT_REQUIREMENTS

# Install frameworks before the package, which is built for those that it finds. The core needs none
# of them, so it is compiled while pip installs them.
.venv/.ready: pyproject.toml
	@echo "Installing PyTorch and JAX into .venv, compiling the core: 2 minutes on 2 cores, and downloads."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "$$PRINT_REQUIREMENTS" build > .venv/build-requirements.txt
	$(PIP) install -r .venv/build-requirements.txt
	@$(MAKE) --no-print-directory --jobs=2 install-frameworks compile-core
	touch $@

.PHONY: install-frameworks compile-core
install-frameworks:
	$(BIN)/python -c "$$PRINT_REQUIREMENTS" build demo dev > .venv/demo-requirements.txt
	$(PIP) install -r .venv/demo-requirements.txt

# Like setup.py, which then finds the core up to date. With make's MAKEFLAGS, ninja reports that it
# found no job server.
compile-core:
	$(BIN)/cmake -S cgx_ops/csrc -B build/cmake -G Ninja \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCGX_MPI_ROOT=$(abspath .venv)
	MAKEFLAGS= $(BIN)/ninja -C build/cmake $(if $(MAX_JOBS),-j $(MAX_JOBS)) libcgx.so libcgx_mpi.so

.venv/.ready-for-tests: .venv/.ready
	$(BIN)/python -c "$$PRINT_REQUIREMENTS" > .venv/requirements.txt
	$(PIP) install -r .venv/requirements.txt
	touch $@

INSTALL = $(PIP) install --no-build-isolation --no-deps -e . && cat build/summary.txt

$(DEMO_BUILT): .venv/.ready $(SOURCES)
	@echo "Building cgx_ops: about a minute on 2 cores after the core."
	CGX_WITH=$${CGX_WITH-torch,jax} $(INSTALL)
	touch $@

# The demo uses this build, too.
$(DEMO_BUILT)-with-cuda: .venv/.ready $(SOURCES)
	@echo "Building cgx_ops with CUDA: about 4 minutes on 2 cores after the core."
	CGX_WITH=$${CGX_WITH-torch,jax,cuda} $(INSTALL)
	touch $(DEMO_BUILT) $@

# Delete build results; .venv stays.
clean:
	rm -rf build *.egg-info examples/out .pytest_cache .ruff_cache .hypothesis
	rm -f cgx_ops/*.so cgx_ops/_build.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
