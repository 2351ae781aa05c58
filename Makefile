# Two commands matter on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# A file of versions to install (CI: constraints.txt); empty for the newest ones.
CONSTRAINTS ?=

# In how many processes the tests run, each with a broker and a Spark session of its own (3 GB); most of them wait for those.
JOBS ?= 4

# What `make fuzz`, `make simulate` and the campaigns take.
COUNT ?= 100000
SEED ?= 1
SEEDS ?= 100000
FIRST ?= 1
KILLS ?= 200
STOPS ?= 50
SCHEDULES ?= 100000
TABLES ?= 2000
ROUNDS ?= 30

.PHONY: alerts archive constraints coverage docs growth help setup demo test test-all test-fast test-campaign campaign campaign-schedules campaign-due fuzz mutations readers simulate simulate-faults bench check screens proto reference wheel clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(VENV)/ready ## the environment in .venv with everything, and a Java runtime where one may be installed

$(VENV)/ready: pyproject.toml constraints.txt wheel_init.py tools/install_java.sh
	sh tools/install_java.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (2.2 GB, some minutes)"
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]'
	touch $@
	@echo "done; next: make demo, or . $(BIN)/activate"

demo: setup ## broker, live producers, pipeline, table, verdict
	$(BIN)/ledgerlake demo

test: setup archive ## every promise: pure tests, Spark, and live against the embedded broker, in JOBS processes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-all: setup archive ## all tests in their long versions
	LEDGERLAKE_CAMPAIGN=long $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m ""

archive: setup ## what makes the starts of the tests' many Spark sessions a third shorter, once (180 MB in the cache)
	$(BIN)/python -m tests.live.archive_classes

test-fast: setup ## the tests that need neither Spark nor a broker
	$(BIN)/python -m pytest -m "not spark and not live and not long"

coverage: setup ## the share of each room's lines and branches that the fast tests reach, against a floor
	$(BIN)/python -m pytest -m "not spark and not live and not long" --cov=ledgerlake --cov-branch --cov-report=
	$(BIN)/python tools/coverage_by_room.py

test-campaign: setup ## the long versions of the kill campaign and of the random comparisons alone
	LEDGERLAKE_CAMPAIGN=long $(BIN)/python -m pytest -m "slow or long"

campaign: setup ## kills and stops of the pipeline on a broker that trims, judged by an oracle: make campaign KILLS=20 STOPS=5
	$(BIN)/python -m tests.live.campaign --kills $(KILLS) --stops $(STOPS)

campaign-schedules: setup ## schedules of two clients over kills of the pipeline, judged by an oracle: make campaign-schedules SCHEDULES=10000 SEED=2
	$(BIN)/python -m tests.live.schedules_campaign --schedules $(SCHEDULES) --seed $(SEED)

campaign-due: setup ## very many delayed messages due together over kills behind the table's commit: make campaign-due ROUNDS=30 SEED=1
	$(BIN)/python -m tests.live.due_campaign --rounds $(ROUNDS) --seed $(SEED)

fuzz: setup ## mutated input for every parser and kernel: COUNT= inputs of SEED=
	$(BIN)/python -m tests.fuzz --count $(COUNT) --seed $(SEED)

growth: setup ## how the work of each function grows with the lists that it meets
	$(BIN)/python -m tests.growth

mutations: setup ## ten promises broken in one line each; the fast tests have to find them
	$(BIN)/python -m tests.mutations

readers: setup ## random tables, whose rows all readers have to see alike: make readers TABLES=200 SEED=2
	$(BIN)/python -m tests.readers --tables $(TABLES) --seed $(SEED)

simulate: setup ## histories of the whole pipeline in a simulated world: make simulate SEEDS=1000 FIRST=1
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST)

simulate-faults: setup ## the first seeds that find the known faults, put back one at a time
	$(BIN)/python -m tests.simulation --seeds 2000 --faults

bench: setup ## side by side with pulsar-client, in one run
	$(BIN)/python -m bench.limits
	$(BIN)/python -m bench.throughput
	$(BIN)/python -m bench.unbatched
	$(BIN)/python -m bench.large
	$(BIN)/python -m bench.one_partition
	$(BIN)/python -m bench.delay
	$(BIN)/python -m bench.schedules
	$(BIN)/python -m bench.topics
	$(BIN)/python -m bench.topics --peer 10000
	$(BIN)/python -m bench.latency
	$(BIN)/python -m bench.quiet
	$(BIN)/python -m bench.growth
	$(BIN)/python -m bench.commits
	$(BIN)/python -m bench.upkeep 10000
	$(BIN)/python -m bench.records
	$(BIN)/python -m bench.latest
	$(BIN)/python -m bench.verify
	$(BIN)/python -m bench.plot

screens: setup ## pictures of the status page and of the live screen, from live pipelines, for docs/; needs Debian's chromium, npm and tmux
	npm install --prefix tools/screens --no-package-lock --no-audit --no-fund --silent
	$(BIN)/python -m bench.screens

check: setup ## style, types, walls between rooms, generated code, duplicates of truth
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	sh tools/check_walls.sh $(BIN)
	sh tools/make_proto.sh $(BIN) --check

alerts: ## check the alerts of deploy/ by promtool (Debian's package prometheus)
	promtool check rules deploy/alerts.yaml
	promtool test rules deploy/alerts_test.yaml

constraints: ## the versions that are installed now become those that CI installs
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable; } > constraints.new && mv constraints.new constraints.txt

reference: setup ## the pages of the reference anew, from the code
	$(BIN)/python -m tools.reference

docs: setup ## the documentation as a site in site/, with its prose, links and anchors checked
	$(BIN)/python -m tools.prose
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

proto: setup ## write the generated protocol code anew
	sh tools/make_proto.sh $(BIN)

wheel: setup ## build dist/*.whl
	$(BIN)/python -m build --wheel --outdir dist .

clean: ## remove what was built
	rm -rf $(VENV) dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
