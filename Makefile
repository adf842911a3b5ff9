# make demo    ask the demo model a question through a scheduler and a worker, from nothing
# make test    every test that this machine can run (ARGS="tests/core -k blocks" narrows it)
# make check   format, lint, types, import directions and the fast tests, in under two minutes
# make protos  regenerate the code of the .proto files

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: demo test check format protos constraints clean

demo: $(VENV)/.demo
	@$(BIN)/python -m client.demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

# The tests that cost little and break first; what starts services or compiles runs in `make test`.
FAST := tests/protos tests/core/test_scheduler.py tests/core/test_decision_log.py tests/core/test_pressure.py tests/core/test_stories.py \
    tests/cluster/test_slots.py tests/services/test_validation.py tests/services/test_text.py \
    tests/services/test_requests.py tests/services/test_resume.py tests/services/test_security.py \
    tests/services/test_embedded.py tests/sampling/test_noise.py tests/sampling/test_extremes.py \
    tests/client/test_library.py tests/docs/test_containers.py
check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --timeout 60 $(FAST) $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(VENV)/.dev
	$(BIN)/python -m protos.generate

# Pins what is installed now. torch and its own libraries stay out: a machine with a GPU has its own build.
constraints: $(VENV)/.dev
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
	    | grep -v -i -E '^(torch|triton|nvidia|cuda|lockstep)'; } >constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info

# The environment is made in steps with a stamp each, so that a second run needs no network.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Lockstep needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $$(test -e /dev/nvidia0 && $(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV) || \
	    { echo "$(PYTHON) cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@touch $@

# Without a GPU the CPU build is wanted; where pip can see one (pip's own find-links or extra-index-url), this version
# selects it. A machine with a GPU keeps the torch it has, or gets the newest that pyproject.toml allows.
$(VENV)/.torch: $(VENV)/.made
	@test -e /dev/nvidia0 || { echo "installing $(TORCH)"; $(PIP) "$(TORCH)"; } || \
	    { echo "pip could not install $(TORCH); the lines above say why. Nothing else was changed; run it again." >&2; exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing lockstep[demo]"
	@$(PIP) -e ".[demo]" || { echo "pip could not install the project; the lines above say why." >&2; exit 1; }
	@echo "compiling the CPU's loops"; $(BIN)/python -m worker_svc.ops.precompile
	@touch $@

# The kernels' interpreter tests need Triton, which the CPU build of torch does not bring.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing lockstep[dev]"
	@$(PIP) -e ".[dev,openai,otel]" || { echo "pip could not install the project; the lines above say why." >&2; exit 1; }
	@test -e /dev/nvidia0 || test "$$(uname -sm)" != "Linux x86_64" || $(PIP) "triton==3.6.0"
	@echo "compiling the CPU's loops"; $(BIN)/python -m worker_svc.ops.precompile
	@touch $@ $(VENV)/.demo
