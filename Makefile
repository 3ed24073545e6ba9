# make quickstart [TEXT=file-or-folder] [RESUME=1]   train, validate and sample a small model
# make test                                          what CI runs
# make lint

VENV ?= .venv
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
RUN_FOLDER ?= runs
BIN := $(VENV)/bin

# pip would say so too, but only behind the download of torch.
define CHECK_PYTHON
import sys
if not (3, 11, 4) <= sys.version_info < (3, 13):
    sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}: take 3.11.4 or later, or 3.12, by PYTHON=...")
endef
export CHECK_PYTHON

.PHONY: quickstart test lint

quickstart: $(VENV)/installed
	PATH="$(abspath $(BIN)):$$PATH" ./quickstart.sh "$(RUN_FOLDER)" "$(TEXT)" "$(RESUME)"

test: $(VENV)/installed lint
	$(BIN)/pip check
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile -m "not slow and not gpu and not browser"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# torch first: the other packages would bring another build of it.
$(VENV)/installed: pyproject.toml constraints-py311.txt
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@echo "Installing the tested set of packages into $(VENV): about two minutes, in silence"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints-py311.txt "$(TORCH)"
	$(BIN)/pip install -q -c constraints-py311.txt -e ".[dev]"
	touch $@
