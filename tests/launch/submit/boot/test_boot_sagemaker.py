"""The first program in a SageMaker container, where it cannot go on; what it starts is in ../test_runs.py."""

import subprocess
import sys

from tests.tools.jobs import PATIENCE, ROOT, environment


def test_packages_that_cannot_be_installed_on_sagemaker_are_its_failure(tmp_path):
    """The folder beside the boot program has no requirements.txt, which is a mistake for pip."""
    (tmp_path / "input" / "config").mkdir(parents=True)
    (tmp_path / "output").mkdir()
    for name in ("resourceconfig", "hyperparameters"):
        (tmp_path / "input" / "config" / f"{name}.json").write_text("{}")
    script = [sys.executable, ROOT / "launch" / "submit" / "boot" / "boot_sagemaker.py", "jobs/train_ddp.py"]
    env = environment(SAGEMAKER_BASE_DIR=str(tmp_path))
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=PATIENCE)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr and last.startswith("error: pip install -r ")
    assert (tmp_path / "output" / "failure").read_text() == last + "\n"
