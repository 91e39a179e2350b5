"""A rank that has died never hangs the rest, and nodes that do not fit together say so."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.jobs import (
    PATIENCE,
    ROOT,
    Popen,
    assert_same_bits,
    command,
    environment,
    final_state,
    run_job,
    saved,
    start,
    wait_for,
)
from tests.tools.objectstore import free_port
from tests.tools.ranks import TWO, check_ledger, children, workers_of


def test_a_worker_that_dies_is_started_again_from_the_last_checkpoint(two_ranks, tmp_path):
    options = [*TWO, "--nproc_per_node", 2, "--save_steps", 1, "--max_restarts", 1]
    process = start(tmp_path, *options, "--resume", "never", "--overwrite", "true", job="train_ddp")
    wait_for(saved(tmp_path, 32), process, "a few steps")
    os.kill(workers_of(children(process))[1], signal.SIGKILL)
    assert process.wait(PATIENCE) == 0
    assert "restart 1 of 1 from the last checkpoint" in (tmp_path / "log").read_text()
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")


def test_a_users_mistake_is_one_line_however_many_ranks(tmp_path):
    done = run_job("train_ddp", tmp_path, *TWO, "--nproc_per_node", 2, "--batch_size", 64, check=2)
    assert len(done.stderr.splitlines()) == 1 and "fewer than one global batch of 128" in done.stderr, done.stderr


# --- Nodes that do not fit together ------------------------------------------------------------------------------------


def node(folder, port, rank, world_size, *options, env=None, script=None):
    words = [
        *TWO,
        "--init_method",
        f"tcp://127.0.0.1:{port}",
        "--rank",
        rank,
        "--world_size",
        world_size,
        "--join_seconds",
        30,
        *options,
    ]
    own = folder / f"node{rank}-{len(list(folder.iterdir()))}"
    own.mkdir()
    words = [sys.executable, script or str(ROOT / "jobs" / "train_ddp.py"), *map(str, words), "--output_dir", str(own / "out")]
    return Popen(words, cwd=own, env=environment(**(env or {})), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def listening(port):
    return any(f":{port:04X} " in line and " 0A " in line for line in Path("/proc/net/tcp6").read_text().splitlines())


def outcome(process):
    text, _ = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in text, text
    return process.returncode, text.splitlines()[-1]


def test_a_node_that_never_comes_is_named(tmp_path):
    port = free_port()
    first = node(tmp_path, port, 0, 3, "--join_seconds", 8)
    wait_for(lambda: listening(port), first, "listening for the others")
    for process in (first, node(tmp_path, port, 2, 3, "--join_seconds", 8)):
        code, line = outcome(process)
        assert code == 2 and "node 1 (rank 1) did not come within 8 s" in line


def test_a_stop_while_waiting_for_the_other_nodes_ends_at_once(tmp_path):
    port = free_port()
    process = node(tmp_path, port, 0, 2)
    wait_for(lambda: listening(port), process, "listening for the others")
    process.terminate()
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert f"node 0: the nodes have no common secret, so anybody who reaches port {port} can join" in text  # new


def test_two_nodes_with_the_same_rank_are_both_named(tmp_path):
    port = free_port()
    nodes = [node(tmp_path, port, rank, 3) for rank in (0, 1, 1)]
    for process in nodes:
        code, line = outcome(process)
        assert code == 2 and re.search(r"duplicate rank: host \S+ and host \S+ both say they are node 1", line), line


def test_a_port_that_another_program_has_stops_every_node(tmp_path):
    port = free_port()
    with socket.create_server(("", port)):
        nodes = [node(tmp_path, port, rank, 2) for rank in (0, 1)]
        (code0, line0), (code1, line1) = (outcome(process) for process in nodes)
    assert code0 == 2 and f"port {port} on this node is taken by another program" in line0
    assert code1 == 2 and "answers but is not node 0 of this job" in line1


@pytest.mark.rehearsal
def test_a_second_job_on_the_same_port_is_sent_away_and_the_first_goes_on(tmp_path):
    port = free_port()
    first = node(tmp_path, port, 0, 2, env={"MA_VJ_NAME": "mine"})
    intruder = node(tmp_path, port, 1, 2, env={"MA_VJ_NAME": "yours"})
    code, line = outcome(intruder)
    assert code == 2 and "this port belongs to another job, 'mine'" in line
    second = node(tmp_path, port, 1, 2, env={"MA_VJ_NAME": "mine"})
    assert [outcome(process)[0] for process in (first, second)] == [0, 0]


@pytest.mark.parametrize("what", ["arguments", "code"])
def test_a_node_that_runs_something_else_is_named(tmp_path, what):
    port = free_port()
    script, options = None, []
    if what == "arguments":
        options = ["--lr", "0.3"]
    else:
        (tmp_path / "other" / "jobs").mkdir(parents=True)
        for name in ("common", "datasets"):
            (tmp_path / "other" / name).symlink_to(ROOT / name)
        script = tmp_path / "other" / "jobs" / "train_ddp.py"
        script.write_text((ROOT / "jobs" / "train_ddp.py").read_text() + "\n# stale upload\n")
    nodes = [node(tmp_path, port, 0, 2), node(tmp_path, port, 1, 2, *options, script=script and str(script))]
    for process in nodes:
        code, line = outcome(process)
        expected = (
            r"arguments differs: lr=0.1 on node 0 .*, lr=0.3 on node 1"
            if what == "arguments"
            else r"code differs: \w+ on node 0 .* on node 1"
        )
        assert code == 2 and re.search(expected, line), line


@pytest.mark.rehearsal
def test_under_torchrun_the_ranks_themselves_compare(tmp_path):
    """One node's torchrun got another learning rate."""
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc_per_node",
        "1",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(free_port()),
    ]
    nodes = []
    for rank in range(2):
        script = command("train_ddp", *TWO, "--lr", 0.1 + 0.1 * rank, "--output_dir", tmp_path / str(rank))[1:]
        nodes.append(
            Popen(
                [*words, "--node_rank", str(rank), *script],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in nodes:
        text, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode and "arguments differs: lr=0.1 on rank 0" in text and "lr=0.2 on rank 1" in text, text
