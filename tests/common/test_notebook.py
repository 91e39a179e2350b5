"""start() in the cells of a notebook, in a kernel of Jupyter's."""

import contextlib
import os
import sys

import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from common.checkpoints import checkpoint
from tests.tools.jobs import ROOT, assert_same_bits
from tests.tools.plain_scripts import as_a_job

TEXT = as_a_job("vectors")
STEP = "        run.step(loss)\n"


class Notebook:
    def __init__(self, client):
        self._client = client

    def run(self, cell):
        """(what the cell has printed, its bars, its error)"""
        shown = {"stdout": "", "stderr": "", "error": ""}

        def take(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                shown[content["name"]] += content["text"]
            elif message["msg_type"] == "error":
                shown["error"] = f"{content['ename']}: {content['evalue']}"

        self._client.execute_interactive(cell, output_hook=take, timeout=120)
        return shown["stdout"], shown["stderr"], shown["error"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One for all tests: a start takes seven seconds."""
    with contextlib.ExitStack() as stack:
        kernel = KernelManager(transport="ipc", ip=str(tmp_path_factory.mktemp("kernel") / "kernel"))
        words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel._kernel_spec = KernelSpec(argv=words, language="python", display_name="Python")
        kernel.start_kernel(env={**os.environ, "PYTHONPATH": str(ROOT)})
        stack.callback(kernel.shutdown_kernel, now=True)
        client = kernel.client()
        client.start_channels()
        stack.callback(client.stop_channels)
        client.wait_for_ready(timeout=60)
        yield Notebook(client)


@pytest.fixture
def notebook(kernel, tmp_path):
    kernel.run(f"%reset -f\nimport os\nos.chdir({str(tmp_path)!r})\nos.environ.pop('JPY_SESSION_NAME', None)")
    return kernel


def state(folder):
    return checkpoint.newest(str(folder / "checkpoints"), print)[0]


def test_a_cell_trains_and_when_run_again_goes_on_or_begins_anew(notebook, tmp_path):
    printed, bars, error = notebook.run(TEXT.replace("epochs=3", 'epochs=3, output_dir="whole"'))
    assert not error and "a new run: 3 epochs of 25 steps" in printed and "epoch 1/3 |" in bars

    stopped = TEXT.replace(
        STEP, STEP + "        run.total_steps == 40 and __import__('os').kill(__import__('os').getpid(), 2)\n"
    )
    printed, _, error = notebook.run(stopped)
    assert error == "SystemExit: 130" and "stopped by SIGINT; saved after step 40" in printed
    assert "next: run the cell again" in printed

    printed, _, error = notebook.run(TEXT.replace(STEP, STEP + "        run.total_steps == 60 and 1 / 0\n"))
    assert error == "ZeroDivisionError: division by zero" and "going on from" in printed and "step 40" in printed

    printed, _, error = notebook.run(TEXT)
    assert not error and "going on from" in printed and "done: " in printed
    assert_same_bits(state(tmp_path / "output_dir" / "notebook"), state(tmp_path / "whole"))

    printed, _, error = notebook.run(TEXT.replace("epochs=3", 'epochs=1, resume="never", overwrite=True'))
    assert not error and "a new run: 1 epoch of 25 steps" in printed, printed

    for option in ("nproc_per_node=2", "doctor=True", "find_max_batch=True"):
        _, _, error = notebook.run(TEXT.replace("epochs=3", f"epochs=3, {option}"))
        assert error.startswith("UserError: a notebook trains on one device, without --nproc_per_node"), option


def steps_saved(folder):
    return sorted(int(path.stem) // 20 for path in (folder / "output_dir" / "notebook" / "checkpoints").glob("*.pt"))


def test_what_a_cell_leaves_undone_is_done_at_its_end_and_signals_are_given_back(notebook, tmp_path):
    """The run is made in one cell, and its loop has another; an epoch that is left by an error waits for nobody."""
    made, _, loop = TEXT.partition("for epoch in run.epochs():")
    loop = f"for epoch in run.epochs():{loop}"
    _, _, error = notebook.run(made)
    assert not error
    end = loop.splitlines()[-1]
    assert end.startswith("    run.end_epoch(")
    _, _, error = notebook.run(f"{loop}\n    break\n")
    assert not error and steps_saved(tmp_path) == [25]
    _, _, error = notebook.run(f"{loop}\n    1 / 0\n")
    assert error.startswith("ZeroDivisionError") and steps_saved(tmp_path) == [25]
    _, _, error = notebook.run(made)
    assert not error and steps_saved(tmp_path) == [25]

    stopped = loop.replace(
        STEP, STEP + "        run.total_steps == 40 and __import__('os').kill(__import__('os').getpid(), 2)\n"
    )
    printed, _, error = notebook.run(stopped)
    assert error == "SystemExit: 130" and "stopped by SIGINT; saved after step 40" in printed
    printed, _, error = notebook.run("import signal\nprint(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)")
    assert printed.strip() == "True"
    printed, _, error = notebook.run(TEXT)
    assert not error and "step 40" in printed and "done: " in printed


def test_a_notebook_is_named_as_its_server_says_and_a_folder_that_was_deleted_is_no_matter(notebook, tmp_path):
    notebook.run("import os, shutil\nos.environ['JPY_SESSION_NAME'] = '/home/me/Study of vectors.ipynb'")
    printed, _, error = notebook.run(TEXT.replace(STEP, STEP + "        run.total_steps == 30 and 1 / 0\n"))
    assert error.startswith("ZeroDivisionError") and "results in output_dir/Study of vectors" in printed
    printed, _, error = notebook.run(f"shutil.rmtree('output_dir')\n{TEXT}")
    assert not error and "a new run: " in printed and "done: " in printed
    printed, _, error = notebook.run(
        TEXT.replace("epochs=3", f"epochs=3, output_dir={str(tmp_path / 'output_dir' / 'Study of vectors')!r}")
    )
    assert not error and "nothing to do" in printed
