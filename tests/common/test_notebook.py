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


@pytest.fixture
def notebook(tmp_path):
    with contextlib.ExitStack() as stack:
        kernel = KernelManager(transport="ipc", ip=str(tmp_path / "kernel"))
        words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel._kernel_spec = KernelSpec(argv=words, language="python", display_name="Python")
        kernel.start_kernel(cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
        stack.callback(kernel.shutdown_kernel, now=True)
        client = kernel.client()
        client.start_channels()
        stack.callback(client.stop_channels)
        client.wait_for_ready(timeout=60)
        yield Notebook(client)


def state(folder):
    return checkpoint.newest(str(folder / "checkpoints"), print)[0]


def test_a_cell_trains_and_when_run_again_goes_on_or_begins_anew(notebook, tmp_path):
    printed, bars, error = notebook.run(TEXT.replace("epochs=3", 'epochs=3, output_dir="whole"'))
    assert not error and "a new run: 3 epochs of 25 steps" in printed and "epoch 1/3: 100%" in bars

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

    _, _, error = notebook.run(TEXT.replace("epochs=3", "epochs=3, nproc_per_node=2"))
    assert error.startswith("UserError: a notebook trains on one device")
