"""One run from start to end: two epochs, a checkpoint, a second start that has nothing to do."""

from tests.tools.jobs import TINY, final_state, run_job


def test_a_run_from_start_to_end(tmp_path):
    done = run_job("train", tmp_path, *TINY)
    assert "done: best accuracy" in done.stdout and final_state(tmp_path)["position"]["epoch"] == 2
    assert "nothing to do: the run has done 2 epochs" in run_job("train", tmp_path, *TINY).stdout
