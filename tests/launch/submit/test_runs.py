"""Submissions run: what a platform would start is started here, with the files and variables that the platform would give."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from common.checkpoints.position import Position
from common.run.observers.console import Console
from launch.submit import main, sagemaker, slurm
from launch.submit import request as requests
from launch.submit.request import Request
from tests.tools import observed
from tests.tools.jobs import PATIENCE, ROOT, TINY, environment, run, run_forked
from tests.tools.submitting import ask, words_of


def submit(*words, folder, check=0):
    """The verb in a process of its own."""
    command = [sys.executable, "-m", "launch", "submit", *map(str, words)]
    env = environment(PYTHONPATH=str(ROOT), HOME=str(folder), TMPDIR=str(folder))
    done = run(command, cwd=folder, env=env)
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_this_machine_runs_the_request_that_would_be_sent(tmp_path):
    """In two processes on two nodes, from a copy of the code, with the environment that was asked for."""
    request = ask(
        "slurm",
        gpus=1,
        pool=None,
        hours=None,
        data_url=None,
        retries=0,
        output_url=str(tmp_path / "out"),
        env=("OMP_NUM_THREADS=1",),
    )
    request = dataclasses.replace(request, arguments=(*TINY[:-1], "2", "--max_steps", "2"))
    remote = slurm.build(request)
    words = words_of(dataclasses.replace(request, platform="local"))
    done = submit(*words, folder=tmp_path)
    options = " ".join([*request.arguments, "--output_dir", request.output_url])
    assert (
        f"srun --kill-on-bad-exit=1 --cpus-per-task=4 --mem=16G {sys.executable} -u {ROOT}/jobs/train_ddp.py {options}"
        in remote
    )  # the same job, the same options
    assert "all nodes have ended, exit codes 0 0" in done.stdout and "epoch=1/2" in done.stdout
    again = shlex.join(["python", "-m", "launch", "submit", *map(str, words[:-2])])
    assert f"[node 0] next: {again}\n" in done.stdout, "what was typed, without --max_steps: the copy of the code is gone"
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text())["epoch"] == 1
    assert not list(tmp_path.glob("anyrank-code-*"))  # the copy is gone


def test_a_local_job_that_fails_gives_its_exit_code(tmp_path):
    words = ["--platform", "local", "jobs/train.py", "--gpus", 0, "--retries", 0, "--", "--epochs", "none"]
    assert "is not a whole number" in submit(*words, folder=tmp_path, check=2).stdout


SRUN = """#!/bin/sh
# srun in one: the task of the only node, with what srun sets
shift
echo "$@" > "$SRUN_SAW"
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NODELIST=localhost
exec "$@"
"""
SCONTROL = '#!/bin/sh\necho "$@" > "$SCONTROL_SAW"\n'


def run_batch(folder, request, restarts=0, cancel=False):
    """The script as SLURM's batch step runs it; (exit code, output, what srun was given, what scontrol was given)."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    srun = SRUN.replace("exec", "kill -TERM $PPID; exec") if cancel else SRUN
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    for name, text in {"srun": srun, "scontrol": SCONTROL, "python": python}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script = folder / "job.sh"
    script.write_text(slurm.build(request))
    told = {
        "SLURM_JOB_ID": "77",
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_JOB_NUM_NODES": "1",
        "PATH": f"{tools}:{os.environ['PATH']}",
        **{"again": "1", "stopped": "1", "code": "1"},  # of the shell that submitted, whose environment sbatch passes on
    }
    saw = {"SRUN_SAW": str(folder / "srun"), "SCONTROL_SAW": str(folder / "scontrol")}
    done = subprocess.run(
        ["bash", script], cwd=folder, env=environment(**told, **saw), capture_output=True, text=True, timeout=PATIENCE
    )
    read = [(folder / name).read_text().strip() if (folder / name).exists() else None for name in ("srun", "scontrol")]
    return done.returncode, done.stdout + done.stderr, *read


@pytest.mark.rehearsal
def test_the_slurm_script_trains(tmp_path):
    options = (*TINY[:-1], "1", "--enable_gpu", "false")
    request = Request(
        "slurm", "jobs/train.py", options, name="run", gpus=1, output_url=str(tmp_path / "a b"), env=("GREETING=it's me",)
    )
    code, output, given, requeued = run_batch(tmp_path, request)
    assert code == 0, output
    assert "rank 0 of 1, platform slurm (srun, one task per node)" in output and "done: " in output and requeued is None
    assert given.endswith(f"--output_dir {tmp_path}/a b") and (tmp_path / "a b" / "metrics.jsonl").exists()


# What the job of a start does | the exit codes of its starts, one after another | whether the script then queues itself again
AGAIN = [
    ("a failure", [3], True),
    ("the last failure that --retries allows", [3, 3, 3], True),
    ("one failure more", [3, 3, 3, 3], False),
    ("a time limit is no failure", [143] * 5, True),
    ("nor does it hide one", [143, 3, 143, 143, 3, 143, 3, 3], False),
    ("a mistake", [2], False),
    ("the end", [143, 0], False),
]


@pytest.mark.parametrize("what, codes, again", AGAIN, ids=[row[0] for row in AGAIN])
def test_slurm_starts_again_what_another_start_can_help(what, codes, again, tmp_path):
    """SLURM counts a start after each of them, also after a preemption; the script counts failures alone."""
    request = exits_with(tmp_path)
    for number, code in enumerate(codes):
        (tmp_path / "code").write_text(str(code))
        found, output, _, requeued = run_batch(tmp_path, request, restarts=number)
        assert found == code, output
        assert requeued == ("requeue 77" if again or number < len(codes) - 1 else None), output
        (tmp_path / "scontrol").unlink(missing_ok=True)
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ([".run-77.failures"] if 3 in codes and again else [])


def exits_with(folder, **changes):
    """A request for a job that ends with the exit code in the file `code`."""
    (folder / "jobs").mkdir()
    (folder / "out").mkdir()
    (folder / "jobs" / "train.py").write_text(f"import sys\nsys.exit(int(open({str(folder / 'code')!r}).read()))\n")
    return Request(
        "slurm", "jobs/train.py", name="run", code_url=str(folder), output_url=str(folder / "out"), **{"gpus": 1, **changes}
    )


@pytest.mark.parametrize("code, cancel, retries", [(3, True, 3), (143, True, 3), (3, False, 0), (143, False, 0)])
def test_slurm_starts_nothing_again_that_was_cancelled_or_may_not_be(code, cancel, retries, tmp_path):
    request = exits_with(tmp_path, retries=retries)
    (tmp_path / "code").write_text(str(code))
    found, output, _, requeued = run_batch(tmp_path, request, cancel=cancel)
    assert (found, requeued) == (code, None), output


def test_slurm_gives_the_cores_and_the_memory_to_the_step_too(tmp_path):
    """srun does not take them over from the batch script; a site's own lines come before the job."""
    lines = ("#SBATCH --account=lab", "export SITE='a b'", "#SBATCH --constraint=fast")
    request = exits_with(tmp_path, cpus=6, memory=20, script_line=lines)
    (tmp_path / "code").write_text("0")
    (tmp_path / "jobs" / "train.py").write_text("import os\nprint('site:', os.environ['SITE'])\n")
    code, output, given, _ = run_batch(tmp_path, request)
    script = slurm.build(request).splitlines()
    assert code == 0 and "site: a b" in output
    assert given.startswith("--cpus-per-task=6 --mem=20G python -u ")
    directives = [number for number, line in enumerate(script) if line.startswith("#SBATCH")]
    assert {script[number] for number in directives} >= {"#SBATCH --cpus-per-task=6", "#SBATCH --mem=20G", lines[0], lines[2]}
    assert directives == list(range(1, len(directives) + 1))  # sbatch reads none after the first command


def test_slurm_makes_a_secret_for_the_nodes_of_each_start(tmp_path):
    request = exits_with(tmp_path, nodes=2)
    (line,) = [line for line in slurm.build(request).splitlines() if "ANYRANK_SECRET" in line]
    assert "ANYRANK_SECRET" not in slurm.build(dataclasses.replace(request, nodes=1))
    shell = ["bash", "-c", f'{line}; printf "%s" "$ANYRANK_SECRET"']
    made = {subprocess.run(shell, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(made) == 2 and all(re.fullmatch("[0-9a-f]{64}", secret) for secret in made)


def test_slurm_runs_the_code_that_is_there_and_leaves_it_as_it_is(tmp_path, monkeypatch):
    request = exits_with(tmp_path)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 77\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(words_of(request)) == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# What the tools of a login node do with a job, in a folder in place of a cluster.
SBATCH = """#!/bin/sh
[ "$1" = --parsable ] || exit 1
cat > "$QUEUE/script"
echo "77;cluster"
"""
SHOW = """#!/bin/sh
[ "$*" = "-o show job 77" ] || { echo "Invalid job id specified" >&2; exit 1; }
line=$(head -n 1 "$QUEUE/states"); sed -i 1d "$QUEUE/states"
echo "step of $line" >> "$QUEUE/log"
[ $line = PENDING ] && reason=Resources || reason=None
echo "JobId=77 JobName=run-7 JobState=$line Reason=$reason StdOut=$QUEUE/log"
"""


def test_a_slurm_job_is_sent_followed_and_stopped(tmp_path, monkeypatch, capsys):
    for name, text in {"sbatch": SBATCH, "scontrol": SHOW, "scancel": '#!/bin/sh\necho "$*" > "$QUEUE/cancelled"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "states").write_text(
        "".join(f"{state}\n" for state in ["PENDING", "RUNNING", "RUNNING", "RUNNING", "COMPLETED"])
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(tmp_path))
    monkeypatch.setattr("launch.submit.command.FOLLOW_SECONDS", 0)
    request = ask("slurm", output_url=str(tmp_path / "runs"))
    assert main(["--follow", "true", *words_of(request)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert (tmp_path / "script").read_text() == slurm.build(request)
    assert printed[:2] == ["submitted 77", "see it at squeue -j 77"]
    assert [line for line in printed if " is " in line] == ["77 is PENDING (Resources)", "77 is RUNNING", "77 is COMPLETED"]
    assert "step of PENDING" in printed and "step of RUNNING" in printed
    assert main(["--platform", "slurm", "--stop", "77"]) == 0
    assert (tmp_path / "cancelled").read_text() == "77\n"


@pytest.mark.parametrize("name", ["PREEMPTED", "DEADLINE", "REVOKED"])
def test_a_slurm_job_that_ends_in_another_way_is_not_followed_for_ever(tmp_path, monkeypatch, name):
    (tmp_path / "scontrol").write_text(SHOW)
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "states").write_text(f"{name}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(tmp_path))
    assert slurm.state(None, ask("slurm"), "77") == (name, 1)


def test_what_sbatch_refuses_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(words_of(ask("slurm", output_url=str(tmp_path)))) == 2
    assert capsys.readouterr().err == "error: sbatch refused: sbatch: error: invalid partition specified: gpu\n"


def header(request):
    """{option: value} of the script, as sbatch reads its lines: with quotes as in a shell."""
    words = [shlex.split(line) for line in slurm.build(request).splitlines() if line.startswith("#SBATCH")]
    return {option[2:]: value for option, _, value in (word.partition("=") for _, word in words)}


def test_where_slurm_writes_the_log(tmp_path, monkeypatch):
    """In the output folder, which has to be there before the job; in the folder of the submission for a bucket."""
    output = tmp_path / "a b" / "50%"
    request = ask("slurm", output_url=str(output))
    assert header(request)["output"] == f"{tmp_path}/a b/50%%/run-7-%j.log"
    assert header(ask("slurm", output_url="s3://bkt/runs"))["output"] == "run-7-%j.log"
    assert header(ask("slurm", output_url=None))["output"] == "run-7-%j.log"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nls -d '{output}' >&2 && echo 77\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(words_of(request)) == 0


def test_slurm_asks_for_cores_and_memory_by_the_gpus_unless_told():
    asked = {
        gpus: (header(ask("slurm", gpus=gpus))["cpus-per-task"], header(ask("slurm", gpus=gpus))["mem"]) for gpus in (0, 1, 8)
    }
    assert asked == {0: ("4", "16G"), 1: ("4", "16G"), 8: ("32", "128G")}
    assert not {"cpus-per-task", "mem"} & header(ask("slurm", cpus=0, memory=0)).keys()
    assert f"srun --kill-on-bad-exit=1 {sys.executable} -u " in slurm.build(ask("slurm", cpus=0, memory=0))
    alone = slurm.build(ask("slurm", cpus=0, memory=0, arguments=("--min-nodes=1",)))
    assert f"srun --kill-on-bad-exit=0 --no-kill {sys.executable} -u " in alone and "#SBATCH --no-kill\n" in alone


def test_slurm_runs_the_python_that_submits_it_unless_a_line_of_the_site_may_choose_another():
    for lines, python in (
        ((), sys.executable),
        (("#SBATCH --account=lab",), sys.executable),
        (("module load python",), "python"),
    ):
        assert f" {python} -u {ROOT}/jobs/train_ddp.py" in slurm.build(ask("slurm", script_line=lines))


def test_a_cluster_without_such_nodes_is_told_what_was_asked_for(tmp_path, monkeypatch, capsys):
    (tmp_path / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: Requested node configuration is not available' >&2\nexit 1\n"
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(words_of(ask("slurm", output_url=str(tmp_path)))) == 2
    said = "each node has to have 32 cores, 128 GiB and 8 GPUs; --cpus 0 --memory 0 leave the first two to the cluster"
    assert said in capsys.readouterr().err


def test_the_slurm_header_says_what_was_asked_for():
    lines = slurm.build(ask("slurm")).splitlines()
    assert header(ask("slurm")) == {
        "job-name": "run-7", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "partition": "gpu", "time": "12:00:00",
        "output": "/data/runs/7/run-7-%j.log", "open-mode": "append", "signal": "USR1@120", "requeue": "",
        "cpus-per-task": "32", "mem": "128G",
    }  # fmt: skip
    assert lines[0] == "#!/bin/bash" and "export NCCL_DEBUG=INFO" in lines


@pytest.mark.parametrize(
    "hours, shown", [(0.1, "0:06:00"), (1.5, "1:30:00"), (1.999, "2:00:00"), (12.0, "12:00:00"), (23.9999, "24:00:00")]
)
def test_a_time_limit_of_slurm_has_60_minutes_in_an_hour(hours, shown):
    assert f"#SBATCH --time={shown}" in slurm.build(ask("slurm", hours=hours)).splitlines()


def test_a_sagemaker_container_becomes_the_job(tmp_path):
    """With the files that SageMaker writes; the job says where it is, and takes the same process as the program before it."""
    base, code = tmp_path / "ml", tmp_path / "ml" / "input" / "data" / "code"
    (base / "input" / "config").mkdir(parents=True)
    (base / "input" / "data" / "training").mkdir(parents=True)
    requests.stage("jobs/train.py", code)
    (code / "requirements.txt").write_text("")
    (code / "jobs" / "train.py").write_text(
        "import json, os, sys\nnames = [n for n in os.environ if n.startswith('SM_')]\n"
        "print(json.dumps([os.getpid(), sys.argv[1:], {n: os.environ[n] for n in names}]))\n"
    )
    request = ask("sagemaker", job="jobs/train.py")
    body = sagemaker.build(request)
    written = {
        "resourceconfig": {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]},
        "hyperparameters": body["HyperParameters"],
    }
    for name, content in written.items():
        (base / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
    entry = [word.replace("/opt/ml", str(base)) for word in body["AlgorithmSpecification"]["ContainerEntrypoint"]]
    started = subprocess.Popen(
        [sys.executable, *entry[1:], *body["AlgorithmSpecification"]["ContainerArguments"]],
        env=environment(SAGEMAKER_BASE_DIR=str(base)),
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, argv, named = json.loads(started.communicate(timeout=PATIENCE)[0])
    assert pid == started.pid  # a signal to the container's first process is one to the job
    assert argv == ["--epochs=2", "--lr=0.1"]
    assert named == {
        "SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_MODEL_DIR": f"{base}/model",
        "SM_OUTPUT_DATA_DIR": f"{base}/output/data", "SM_CHANNEL_TRAINING": f"{base}/input/data/training",
    }  # fmt: skip


# The two filters of Katib's collector for a log (pkg/apis/controller/common/v1beta1 and an earlier version), which take every
# name=value of a line, and compare the names with that of the objective.
KATIB = [r"([\w|-]+)\s*=\s*([+-]?\d*(?:\.\d+)?(?:[Ee][+-]?\d+)?)", r"([\w|-]+)\s*=\s*((?:-?\d+)(?:\.\d+)?)"]


def test_each_name_in_the_log_stands_for_one_number_by_the_rules_of_each_service(tmp_path, capsys):
    """The loss of an epoch is not mixed with that of steps, of which a search would take the smallest."""
    shown, at = observed.observer(Console, tmp_path), Position(samples_seen=1280, total_steps=10, epoch=1)
    shown.log_due(observed.facts(tmp_path), **{**observed.LINE, "lr": 1e-7})
    metrics = {"accuracy": 0.8125, "balanced_accuracy": 0.6875, "top5": 0.875, "loss": 0.75}
    shown.epoch_ended(observed.facts(tmp_path, at), **{**observed.EPOCH, "metrics": metrics})
    lines = capsys.readouterr().out.splitlines()
    expected = {**metrics, "train_loss": 1.25, "lr": 1e-7}
    assert expected.keys() <= sagemaker.METRICS.keys()
    for name, regex in sagemaker.METRICS.items():
        found = [float(match[1]) for line in lines for match in re.finditer(regex, line)]
        assert len(regex) <= 500 and found == [expected[name]] if name in expected else len(found) <= 1, (name, found)
    for rule in KATIB:
        pairs = [pair for line in lines for pair in re.findall(rule, line)]
        assert {name: [float(value) for key, value in pairs if key == name] for name in (*metrics, "train_loss")} == {
            name: [expected[name]] for name in (*metrics, "train_loss")
        }


def test_the_page_has_the_patterns(tmp_path):
    page = (ROOT / "docs" / "platforms.md").read_text()
    assert f"`{sagemaker.METRICS['loss']}`" in page
    for name in (*sagemaker.OF_AN_EPOCH, *sagemaker.OF_A_STEP):
        assert f"`{name}`" in page, name


def test_what_is_uploaded_is_the_job_as_one_file(tmp_path):
    """So modules that another upload has left at the same address are not used."""
    requests.stage("jobs/train_ddp.py", tmp_path / "code")
    files = {str(path.relative_to(tmp_path / "code")) for path in (tmp_path / "code").rglob("*") if path.is_file()}
    assert files == {"jobs/train_ddp.py", "requirements.txt", "pip-requirements.txt", "boot_sagemaker.py"}
    stale = tmp_path / "code" / "common" / "run.py"
    stale.parent.mkdir()
    stale.write_text("raise SystemExit('a module of another state was used')")
    run_forked(
        [tmp_path / "code" / "jobs" / "train_ddp.py", *TINY, "--max_steps", 1, "--output_dir", tmp_path / "out"], tmp_path
    )
    assert list((tmp_path / "out" / "checkpoints").glob("*.pt"))
