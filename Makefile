# make setup | demo | test | test-all | check | clean    for a checkout: everything is in .venv
# make unit | soak                                        tests without ranks; the longest tests
# make peers                                              hpcdl beside other engines: docs/performance.md's tables
# make docs | packaging | release                          the pages as a site; recipes checked; wheel, sdist and SBOM
# make install | uninstall | wheelhouse                    for a centre: docs/site-guide.md
PYTHON ?= python3
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 5

VENV := .venv
RUNTIME := $(VENV)/.hpcdl-runtime
DEVELOPMENT := $(VENV)/.hpcdl-development

.PHONY: setup demo unit test test-all soak check peers docs packaging release clean install uninstall wheelhouse help
.DEFAULT_GOAL := help

help:
	@sed -n '1,5s/^# //p' Makefile

setup: $(RUNTIME)

$(RUNTIME): pyproject.toml scripts/setup
	@scripts/setup '$(PYTHON)' '.[mpich]' '$@'

$(DEVELOPMENT): $(RUNTIME)
	@scripts/setup '$(PYTHON)' '.[mpich,dev]' '$@'

demo: $(RUNTIME)
	@scripts/demo

# Five at a time, of which some wait, above all on the lab's cluster; tests that share something costly stay together
# (tests/conftest.py), the longest come first.
PYTEST := $(VENV)/bin/python -m pytest -n $(PYTEST_WORKERS) --no-loadscope-reorder

unit: $(DEVELOPMENT)
	$(PYTEST) -m "not soak and not mpi and not lab" $(PYTEST_ARGS)

test: $(DEVELOPMENT)
	$(PYTEST) -m "not soak and not long" $(PYTEST_ARGS)

test-all: $(DEVELOPMENT)
	$(PYTEST) -m "not soak" $(PYTEST_ARGS)

soak: $(DEVELOPMENT)
	$(VENV)/bin/python -m pytest -m soak -o faulthandler_timeout=3600 $(PYTEST_ARGS)

check: $(DEVELOPMENT)
	@scripts/check

# Five tries of everything take an hour or two; PEERS_ARGS="--networks lenet --tries 1" prints a short run's tables.
PEERS_ARGS ?= --out docs/performance.md
peers: $(RUNTIME)
	$(VENV)/bin/python -m benchmarks.peers $(PEERS_ARGS)

docs:
	@scripts/docs '$(PYTHON)'

packaging:
	@scripts/check-packaging '$(PYTHON)'

release:
	@scripts/release '$(PYTHON)'

clean:
	@scripts/clean

SETTINGS := PREFIX MODULEDIR MPI MPI_MODULE MPI_LIBRARY WHEELHOUSE REQUIREMENTS SUFFIX FORCE
export $(SETTINGS)

# VERSION counts only on make's own command line: many environments hold a variable of that name.
OWN_VERSION = $(if $(filter command,$(firstword $(origin VERSION))),$(VERSION))
install: export HPCDL_INSTALL = $(OWN_VERSION)
uninstall: export HPCDL_UNINSTALL = $(OWN_VERSION)
# What stands on make's command line: a variable that nothing reads, such as prefix=, would be left out without a word.
install uninstall wheelhouse: export HPCDL_SETTINGS = $(SETTINGS) PYTHON VERSION
install uninstall wheelhouse: export HPCDL_GIVEN = $(foreach name,$(.VARIABLES),\
    $(if $(filter command,$(firstword $(origin $(name)))),$(name)))
install uninstall wheelhouse:
	@scripts/check-python '$(PYTHON)'
	@'$(PYTHON)' -B scripts/installer $@
