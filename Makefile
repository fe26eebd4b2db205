# make quickstart   train a small model by policy gradients and watch it learn   (ARGS="--algorithm rloo" passes options)
# make test         run the tests, in minutes                                    (ARGS="-k sampler" passes options)
# make test-all     run them all, what guards against rare regressions too, as CI does
# make test-parity  compare the models with transformers, live; installs PyTorch into a virtual environment of its own
# make lint         ruff
# Each makes its virtual environment first, with nothing but python3 (3.11 or newer), venv and pip.

PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PARITY := $(VENV)-parity

.PHONY: quickstart test test-all test-parity lint constraints clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.installed-core
	$(BIN)/python experiments/quickstart.py --resume $(ARGS)

test: TIER := -m "not exhaustive"
test-all: TIER :=
test test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TIER) $(ARGS)

test-parity: $(PARITY)/.installed
	$(PARITY)/bin/python -m pytest tests/parity $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/.installed-core: $(INPUTS) | $(BIN)/python
	@echo "Installing jaxpg into $(VENV) (once, about a minute)"
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-core
	@echo "Installing the test tools into $(VENV) (once)"
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

# From the package index PyTorch for Linux brings gigabytes of CUDA, in other versions than JAX wants: hence no pins of
# those. Where pip is shown a CPU build of the pinned version, by PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL, it prefers that.
$(PARITY)/.installed: $(INPUTS) | $(PARITY)/bin/python
	@echo "Installing jaxpg and PyTorch into $(PARITY) (once)"
	@grep -v '^nvidia-' constraints.txt > $(PARITY)/constraints.txt
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check -c $(PARITY)/constraints.txt \
	    -e '.[test,parity]'
	@touch $@

$(BIN)/python $(PARITY)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"PYTHON=$(PYTHON) is Python {v[0]}.{v[1]}: jaxpg needs 3.11 or newer, try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(patsubst %/bin/python,%,$@)

# Needs uv. Remakes the pins for every Python and platform at once; jax 0.12 needs Python 3.12. PyTorch is held at a
# version with a CPU build where CI runs, and its CUDA packages are left out, so that JAX's are its newest.
constraints:
	@echo "jax>=0.12 ; python_full_version >= '3.12'" > .constraints-floor.txt
	@echo "torch==2.13.0" >> .constraints-floor.txt
	@{ printf "%s ; python_version < '3'\n" cuda-bindings cuda-toolkit nvidia-cusparselt-cu13 triton; \
	   printf "%s ; sys_platform == 'linux'\n" nvidia-cudnn-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13; \
	 } > .constraints-overrides.txt
	uv pip compile --universal --no-emit-index-url --no-annotate --no-header --python-version 3.11 --all-extras \
	    -c .constraints-floor.txt --overrides .constraints-overrides.txt pyproject.toml -o .constraints-new.txt --quiet
	@{ echo "# Pins for Python 3.11 and 3.12+. Remade by: make constraints"; cat .constraints-new.txt; } > constraints.txt
	@rm .constraints-floor.txt .constraints-overrides.txt .constraints-new.txt

clean:
	rm -rf .venv .venv-* runs
