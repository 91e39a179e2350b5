"""`launch local`: the programs that play a platform start at once."""

import re
import shlex
import subprocess
import sys

import pytest

from launch import local
from tests.tools.jobs import ROOT, TINY, environment, run

# Runs the verb as `python -m launch` does, and fails when it has loaded one of the heavy packages.
SCRIPT = """
import runpy, sys
try:
    runpy.run_module("launch", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert ended.code == 0, ended.code
heavy = {"torch", "numpy", "boto3", "ray", "tqdm"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("nodes", [None, 2], ids=["help", "two nodes"])
def test_it_never_waits_for_torch(tmp_path, nodes):
    (tmp_path / "nothing.py").write_text("import sys\nprint(sys.argv[1:3])\n")
    words = ["--nodes", str(nodes), str(tmp_path / "nothing.py"), "--", "--a", "b"] if nodes else ["--help"]
    script = [sys.executable, "-c", SCRIPT, "local", *words]
    done = subprocess.run(script, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("['--a', 'b']") == (nodes or 0) and ("exit codes 0 0" in done.stdout) == bool(nodes)


@pytest.mark.parametrize(
    ("shown", "nodes", "expected"),
    [("4,5,6,7", 2, ["4,5", "6,7"]), ("0,-1,1", 1, ["0,-1,1"]), ("0", 2, ["", ""]), ("", 2, ["", ""])],
    ids=["shared out", "one node, as it is", "too few", "hidden"],
)
def test_the_nodes_share_the_gpus_of_the_machine(tmp_path, shown, nodes, expected):
    (tmp_path / "job.py").write_text("import os\nprint('gpus:', os.environ['CUDA_VISIBLE_DEVICES'])\n")
    script = [sys.executable, "-m", "launch", "local", "--nodes", str(nodes), str(tmp_path / "job.py")]
    env = environment(CUDA_VISIBLE_DEVICES=shown)
    printed = run(script, cwd=ROOT, env=env).stdout
    lines = sorted(line for line in printed.splitlines() if "gpus:" in line)
    assert lines == [f"[node {node}] gpus: {gpus}" for node, gpus in enumerate(expected)]
    assert ("1 GPU for 2 nodes: all of them train on the CPU" in printed) == (shown == "0")


def test_no_connection_is_given_the_port_of_node_0_before_it_listens():
    first_of_linux = 32768  # unless somebody has changed net.ipv4.ip_local_port_range
    assert max(local.port_of_node_0() for _ in range(50)) < first_of_linux


def test_the_job_says_how_all_nodes_go_on(tmp_path):
    def launched(words):
        done = run(words, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    env = environment(PYTHONPATH=str(ROOT))
    job = [str(ROOT / "jobs" / "train_ddp.py"), "--", *map(str, TINY), "--output_dir", "out"]
    first = launched(
        [sys.executable, "-m", "launch", "local", "--nodes", "2", "--platform", "pai-dlc", *job, "--max_steps", "1"]
    )
    (line,) = re.findall(r"^\[node 0\] next: (.*)$", first, re.MULTILINE)
    assert line == shlex.join(["python", "-m", "launch", "local", "--nodes", "2", "--platform", "pai-dlc", *job])
    second = launched([sys.executable, *shlex.split(line)[1:]])
    assert "rank 0 of 2" in second and "going on from out/checkpoints" in second and "exit codes 0 0" in second


def test_a_restart_is_announced_only_where_one_comes(tmp_path, capsys):
    (tmp_path / "job.py").write_text("raise SystemExit(3)\n")
    assert local.main(["--restarts", "1", str(tmp_path / "job.py")]) == 3
    assert capsys.readouterr().out.splitlines() == [
        "all nodes have ended, exit codes 3",
        "restart 1 of 1, as the platform would",
        "all nodes have ended, exit codes 3",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "argument --nodes: '0' is not a whole number at least 1"),
        (["--nodes", "-1"], "argument --nodes: '-1' is not a whole number at least 1"),
        (["--procs", "0"], "argument --procs: '0' is not a whole number at least 1"),
        (["--restarts", "-2"], "argument --restarts: '-2' is not a whole number at least 0"),
        (["--kill", "0@99999999999999999"], "--kill/--lose: '0@99999999999999999' does not have the form NODE@SECONDS"),
        (["--kill", "-1@3"], "NODE@SECONDS"),
        (["--nodes", "2", "--kill", "2@3"], "--kill names node 2: --nodes 2 has nodes 0 to 1"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        local.main([*words, str(ROOT / "jobs" / "train.py")])
    assert ended.value.code == 2 and said in capsys.readouterr().err


WAITS = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
COMES_BACK = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"


@pytest.mark.parametrize(
    "lost, back, codes",
    [
        ([(1, 0.1)], [(1, 0.3)], [0, 0]),  # node 0 waits for node 1 to come back
        ([(1, 0.1), (0, 0.2)], [], [-9, -9]),
    ],
)
def test_a_node_that_is_lost_is_started_again_while_the_others_run_on(tmp_path, lost, back, codes):
    file, starts = tmp_path / "back", []

    def start(node):
        starts.append(node)
        program = COMES_BACK if starts.count(1) == 2 else WAITS
        return [subprocess.Popen([sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE, start_new_session=True)]

    assert local._run_nodes(2, lost, back, start) == codes
    assert starts == [0, 1, *(node for node, _ in back)]


def test_a_node_that_was_lost_does_not_make_a_run_fail_that_went_on_without_it():
    """Node 0 ends once node 1 has."""
    lost = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.PIPE, start_new_session=True
    )
    until = f"import os, time\nwhile os.path.exists('/proc/{lost.pid}/exe'): time.sleep(0.01)"
    goes_on = subprocess.Popen([sys.executable, "-c", until], stdout=subprocess.PIPE, start_new_session=True)
    assert local._run_nodes(2, [(1, 0.1)], [], lambda node: [lost if node else goes_on]) == [0, 0]
