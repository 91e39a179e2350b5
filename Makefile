# make run: train once on synthetic images.  make quick: the checks that catch most mistakes.  make test: all of them.
# The environment is made at the first call, by uv where that is installed; one that was not made to its end is made anew. What the
# tests need besides comes with the first call that needs it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(if $(shell command -v uv),uv pip install --python $(BIN)/python,$(BIN)/python -m pip install --progress-bar off)
QUICK := tests/house/test_house.py tests/launch/test_blocks.py tests/common/arguments tests/common/world/test_world.py \
	tests/common/ranks/test_differing.py tests/common/checkpoints/test_checkpoint.py tests/common/run/test_scores.py tests/formats \
	tests/jobs/test_smoke.py

$(VENV)/jobs: requirements.txt tests/constraints.txt
	test -e $@ || test -e $(VENV)/ready || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing torch and what the jobs need into $(VENV): several GB, which takes minutes"
	$(INSTALL) -r requirements.txt -c tests/constraints.txt
	touch $@

$(VENV)/ready: $(VENV)/jobs tests/requirements.txt
	@echo "installing what the tests need into $(VENV)"
	test -e $@ || rm $(VENV)/jobs
	$(INSTALL) -r requirements.txt -r tests/requirements.txt -c tests/constraints.txt
	touch $(VENV)/jobs $@

.PHONY: run quick test rehearsal lint format chaos bench gpu engine mutants
run: $(VENV)/jobs
	$(BIN)/python jobs/train.py --custom_data true --epochs 6 --max_samples 2048 --batch_size 16 --width 16 --lr 0.002 --output_dir output_dir/run

lint: $(VENV)/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright
	$(BIN)/vermin -q --no-tips --violations --target=3.9- common datasets launch jobs

format: $(VENV)/ready
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# Under a minute on two cores.
quick: $(VENV)/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m tests $(QUICK)

# What CI runs, or the tests of some rooms: make test ROOM="common/checkpoints launch"
test: lint
	$(BIN)/python -m tests $(ROOM:%=tests/%)

# What takes long, by hand: all of it, or of the rooms that you have touched: make rehearsal ROOM="common/elastic jobs"
rehearsal: $(VENV)/ready
	$(BIN)/python -m tests -m rehearsal $(ROOM:%=tests/%)

# All of it, or what FAULT names: a program (kill, resumes, store, ray, disk, strangers, elastic, frozen, patience,
# arriving) or a row of the last one. disk and the last one keep their rows between
# calls: make chaos FAULT="rank killed" TRIALS=5 fills one of them.
chosen = $(filter $(1),$(or $(FAULT),$(1)))
chaos: $(VENV)/ready
	$(if $(call chosen,kill),$(BIN)/python -m tests.chaos.kill --runs $(or $(TRIALS),100) --seed 1)
	$(if $(call chosen,resumes),$(BIN)/python -m tests.chaos.resumes)
	$(if $(call chosen,store),$(BIN)/python -m tests.chaos.store --trials $(or $(TRIALS),100) --seed 1)
	$(if $(call chosen,ray),$(BIN)/python -m tests.chaos.ray --trials $(or $(TRIALS),20) --seed 1)
	$(if $(call chosen,disk),$(BIN)/python -m tests.chaos.disk --seed 1)
	$(if $(call chosen,strangers),$(BIN)/python -m tests.chaos.strangers --seed 1)
	$(if $(call chosen,elastic),$(BIN)/python -m tests.chaos.elastic --runs $(or $(TRIALS),200) --seed 1)
	$(if $(call chosen,frozen),$(BIN)/python -m tests.chaos.frozen --trials $(or $(TRIALS),100) --seed 1)
	$(if $(call chosen,patience),$(BIN)/python -m tests.chaos.patience)
	$(if $(call chosen,arriving),$(BIN)/python -m tests.chaos.arriving --trials $(or $(TRIALS),50))
	$(if $(filter-out kill resumes store ray disk strangers elastic frozen patience arriving,$(or $(FAULT),all)),$(BIN)/python -m tests.chaos.faults --trials $(or $(TRIALS),20) $(if $(FAULT),--fault "$(FAULT)"))

# Faults in the code of a room, one at a time: make mutants ROOM=common/storage N=40 SEED=1
mutants: $(VENV)/ready
	$(BIN)/python -m tests.mutants $(ROOM) --number $(or $(N),40) --seed $(or $(SEED),1)

# DATA=FOLDER with imagenet/{train,val}/CLASS/*.JPEG and cifar-10-batches-py adds what needs real images; ONLY="base ddp" measures those.
bench: $(VENV)/ready
	$(BIN)/python -m tests.benchmarks $(if $(DATA),--data $(DATA)) $(if $(ONLY),--only $(ONLY))

# On a machine with a GPU, where it goes on from the rows that are done: make gpu MINUTES=9 ONLY="step kills"
gpu: $(VENV)/ready
	$(BIN)/python -m tests.gpu --out output_dir/gpu --budget $(or $(MINUTES),40) $(if $(ONLY),--only $(ONLY)); code=$$?; \
	$(BIN)/python -m tests.gpu --page output_dir/gpu/rows.jsonl && exit $$code

# Every job and verb on torch 2.1.0, in an environment as ModelArts makes it, for the table of docs/platforms.md.
engine: $(VENV)/ready
	$(BIN)/python -m tests.engine $(if $(ONLY),--only $(ONLY))
