"""SageMaker's own training toolkit starts the DDP job in containers named algo-1 and algo-2, each with an /opt/ml of its own."""

import json
from pathlib import Path

import pytest

from launch.submit import request as requests
from tests.tools.hosts import Hosts, wait_all
from tests.tools.jobs import assert_same_bits, final_state
from tests.tools.packages import namespaces, python_program
from tests.tools.ranks import TWO

pytestmark = pytest.mark.rehearsal  # a package that has to be fetched first, and root

BASE = Path("/opt/ml")
# As the Python SDK writes them: each value is JSON in a string, and what is true there is True to the job.
OPTIONS = {name.lstrip("-"): json.dumps(value) for name, value in zip(TWO[::2], TWO[1::2])} | {"custom_data": "true"}


@pytest.fixture
def containers(tmp_path):
    """containers(COUNT, NAME=VALUE ...): (exit codes, logs, the folders that are /opt/ml) of a job with these hyperparameters."""
    namespaces()
    train = python_program("train", "sagemaker-training==5.1.4")
    made = []
    BASE.mkdir(parents=True, exist_ok=True)  # where each container has its own; it stays, as another test may be using it

    def run(count, **options):
        names = [f"algo-{number + 1}" for number in range(count)]
        hosts = Hosts(count, tmp_path / "hosts", called=names)
        made.append(hosts)
        folders = [folder / "ml" for folder in hosts.folders]
        for name, folder in zip(names, folders):
            fill(folder, name, names, {**OPTIONS, **options})
        inside = ["sh", "-c", f'mount --bind ml {BASE} && exec "$@"', "sh", train]
        env = {"SAGEMAKER_PROGRAM": "jobs/train_ddp.py", "SAGEMAKER_SUBMIT_DIRECTORY": f"{BASE}/code"}
        codes, _ = wait_all([hosts.run(number, *inside, env=env) for number in range(count)], 900)
        return codes, [hosts.log(number) for number in range(count)], folders

    yield run
    for hosts in made:
        hosts.close()


def fill(folder, name, names, options):
    """What SageMaker puts there before the start."""
    for part in ("input/config", "input/data", "model", "checkpoints", "output/data", "output/tensorboard"):
        (folder / part).mkdir(parents=True)
    group = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.c5.xlarge", "hosts": names}
    told = {
        "hyperparameters": options,
        "inputdataconfig": {},
        "resourceconfig": {
            "current_host": name, "current_instance_type": "ml.c5.xlarge", "current_group_name": "homogeneousCluster",
            "hosts": names, "instance_groups": [group], "network_interface_name": "eth0",
        },
    }  # fmt: skip
    for file, content in told.items():
        (folder / "input" / "config" / f"{file}.json").write_text(json.dumps(content))
    requests.stage("jobs/train_ddp.py", folder / "code")


@pytest.mark.parametrize("count", [1, 2])
def test_the_toolkit_trains(containers, count, two_ranks):
    """What has to outlive the container is where SageMaker keeps it; two hosts give the bits of two processes."""
    codes, logs, folders = containers(count, batch_size=json.dumps(str(16 // count)), sync_bn=json.dumps("false"))
    assert codes == [0] * count, logs
    assert "SM_HOSTS and SM_CURRENT_HOST)" in logs[0] and f"rank 0 of {count}, platform sagemaker" in logs[0]
    assert (folders[0] / "output" / "success").exists() and not (folders[0] / "output" / "failure").exists()
    assert (folders[0] / "model" / "metrics.jsonl").exists() and list((folders[0] / "output" / "tensorboard").iterdir())
    trained = final_state(folders[0], ".")
    assert trained["position"]["samples_seen"] == 128
    if count == 2:
        assert_same_bits(trained["model"], final_state(two_ranks[0])["model"])


def test_a_failure_is_said_in_the_file_that_sagemaker_shows(containers):
    codes, logs, folders = containers(2, epochs=json.dumps("none"))
    assert all(codes), logs
    for folder, log in zip(folders, logs):
        (line,) = (folder / "output" / "failure").read_text().splitlines()
        assert line.startswith("error: ") and "is not a whole number" in line and line in log
