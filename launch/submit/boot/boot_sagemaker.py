"""The first program in a SageMaker container: it installs packages,
sets SageMaker's variables and execs the job.

    python boot_sagemaker.py jobs/train_ddp.py

It is uploaded with the job and imports nothing of it, because the job's packages are not installed when it
starts.
"""

import contextlib
import json
import os
import subprocess
import sys
from typing import Any, NoReturn


def environment(base: str, hosts: dict[str, Any], environ: dict[str, str]) -> dict[str, str]:
    """Return `environ` and SageMaker's variables for hosts, output folders and data channels;
    a variable already set stays."""
    variables = {
        "SM_HOSTS": json.dumps(hosts["hosts"]),
        "SM_CURRENT_HOST": hosts["current_host"],
        "SM_MODEL_DIR": f"{base}/model",
        "SM_OUTPUT_DATA_DIR": f"{base}/output/data",
    }
    data = f"{base}/input/data"
    channels = sorted(os.listdir(data)) if os.path.isdir(data) else []
    for channel in channels:
        if channel != "code" and os.path.isdir(f"{data}/{channel}"):
            variables[f"SM_CHANNEL_{channel.upper()}"] = f"{data}/{channel}"
    return {**variables, **environ}


def fail(reason: str, path: str) -> NoReturn:
    """Print one error line, write it to `path`, the file that SageMaker shows after a failure,
    and exit with 1."""
    line = f"error: {reason}"
    print(line, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(line + "\n")
    sys.exit(1)


def main() -> None:
    """Install the packages, set the variables, and replace this process by the job."""
    code = os.path.dirname(os.path.abspath(__file__))
    base = os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")
    config = {}
    for name in ("resourceconfig", "hyperparameters"):
        with open(f"{base}/input/config/{name}.json") as file:
            config[name] = json.load(file)
    requirements = os.path.join(code, "requirements.txt")
    exit_code = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-r", requirements]).returncode
    if exit_code:
        fail(
            f"pip install -r {requirements} ended with {exit_code}, see its lines above: give the job a "
            "network that reaches a package index, or an image that has these packages",
            f"{base}/output/failure",
        )
    options = [f"--{name}={value}" for name, value in config["hyperparameters"].items()]
    os.environ.update(environment(base, config["resourceconfig"], dict(os.environ)))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-u", os.path.join(code, sys.argv[1]), *options])


if __name__ == "__main__":
    main()
