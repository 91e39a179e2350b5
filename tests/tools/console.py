"""ModelArts' console, played: what it does between Submit and the log, on hosts that have no Internet.

It copies the code and the input into the container's folders, installs the packages' file, starts the boot file as uid 1000 on
every node, with the variables and arguments of the manual, and copies the output back. The container is that of an engine or
that of an image.
"""

import shutil
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from tests import engine
from tests.tools.hosts import Hosts, wait_all
from tests.tools.jobs import PATIENCE

USER = 1000
HOME = "/home/ma-user"
CODE, INPUT, OUTPUT = (f"{HOME}/modelarts/{name}" for name in ("user-job-dir/code", "inputs/data_url_0", "outputs/train_url_0"))
PYTHON = f"{HOME}/anaconda3/envs/PyTorch/bin/python"
WORKERS = ("modelarts-job-7-worker-0.modelarts-job-7", "modelarts-job-7-worker-1.modelarts-job-7")
LEFT_OUT = "tqdm"  # a package that our own environment, as an image, is made to lack, and the platform's index has


class Container(NamedTuple):
    python: Path  # the interpreter
    packages: list[str]  # what lies in its site-packages


def of_engine() -> Container:
    """pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64: torch 2.1.0 and what it needs, and nothing else."""
    return Container(engine.made().resolve(), engine.own())


def of_image() -> Container:
    """An image of one's own, with today's torch; without a package that its makers have forgotten."""
    packages = Path(sysconfig.get_path("purelib")).iterdir()
    return Container(Path(sys.executable).resolve(), [str(path) for path in packages if not path.name.startswith(LEFT_OUT)])


# Of a node: $1 the code, $2 the data, $3 the output in OBS, $4 the platform's index of packages, $5 and $6 the container's
# interpreter and a list of its packages; then the command.
START = f"""
code=$1 data=$2 obs=$3 index=$4 interpreter=$5 packages=$6; shift 6
mount -t tmpfs tmpfs /home
mkdir -p {CODE} {INPUT} {OUTPUT} {HOME}/modelarts/log
cp -r "$code/." {CODE}; cp -r "$data/." {INPUT}; cp -r "$obs/." {OUTPUT}
"$interpreter" -m venv --without-pip {HOME}/anaconda3/envs/PyTorch
while read -r package; do ln -s "$package" {HOME}/anaconda3/envs/PyTorch/lib/python3.*/site-packages/; done < "$packages"
chown -R -h {USER}:100 {HOME}; chmod -R a-w {CODE}; chmod -R a-w {INPUT}
{sys.executable} -m http.server --bind 127.0.0.1 --directory "$index" 8888 2> /dev/null & server=$!
cd {HOME}/modelarts/user-job-dir
# An interpreter that lies in root's home can be read by everybody there, as an image's can; nothing more can be written.
as_user="setpriv --reuid {USER} --regid 100 --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search"
for file in pip-requirements.txt requirements.txt; do
    [ ! -e {CODE}/$file ] || $as_user {PYTHON} -m pip install --disable-pip-version-check --no-cache-dir --no-input --index-url http://127.0.0.1:8888/simple -r {CODE}/$file
done
find {CODE} | sort > /tmp/before.$$
code=0; $as_user "$@" || code=$?
kill $server
find {CODE} | sort | diff /tmp/before.$$ - || code=99
rm /tmp/before.$$
cp -r {OUTPUT}/. "$obs"
exit $code
"""


def index_of_packages(folder: Path) -> Path:
    """An index that has only the package which the engine lacks: a wheel of the installed files."""
    found = metadata.distribution(LEFT_OUT)
    wheel = folder / "simple" / LEFT_OUT / f"{LEFT_OUT}-{found.version}-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in found.files or ():
            if (
                file.suffix != ".pyc"
                and ".." not in file.parts
                and file.name not in ("INSTALLER", "REQUESTED", "direct_url.json")
            ):
                archive.write(str(file.locate()), str(file))
    return folder


class Console:
    """Create a job, and see how it ends: `play` gives the exit codes and the logs of all nodes."""

    def __init__(self, folder: Path, data: Path, container: Container, nodes: int = 2):
        self.obs = folder / "obs"
        self.obs.mkdir(parents=True)
        self._data, self._index = data, index_of_packages(folder / "index")
        self._python, self._packages = container.python, folder / "packages"
        self._packages.write_text("".join(f"{path}\n" for path in container.packages))
        self.hosts = Hosts(nodes, folder, called=WORKERS[:nodes])

    def play(self, code: Path, boot: str, image: bool = False, starts: int = 1, **hyperparameters: str):
        nodes = len(self.hosts.names)
        master = f"tcp://{WORKERS[0]}:6666"
        ends = []
        for node in range(nodes):
            values = [f"--{name}={value}" for name, value in hyperparameters.items()]
            folders = {"data_url": INPUT, "train_url": OUTPUT}
            places = [] if image else [f"--{name}={folder}" for name, folder in folders.items()]
            injected = [] if image else ["--init_method", master, "--rank", node, "--world_size", nodes]
            given = {**self._variables(node, nodes, starts), **(folders if image else {})}
            words = [
                "env",
                "-i",
                *(f"{name}={value}" for name, value in given.items()),
                PYTHON,
                f"{CODE}/{boot}",
                *places,
                *values,
            ]
            node_obs = self.obs if node == 0 else self.obs.parent / f"unused{node}"
            node_obs.mkdir(exist_ok=True)
            script = ["unshare", "-m", "sh", "-ec", START, "sh", code, self._data, node_obs, self._index]
            script += [self._python, self._packages]
            ends.append(self.hosts.run(node, *script, *words, *injected))
        codes, _ = wait_all(ends, PATIENCE)
        return codes, [self.hosts.log(node) for node in range(nodes)]

    def _variables(self, node, nodes, starts):
        """What the manual lists, and what a login gives: nothing of this process's own."""
        return {
            "PATH": f"{Path(PYTHON).parent}:/usr/bin:/bin", "LANG": "en_US.UTF-8", "HOME": HOME, "USER": "ma-user",
            "MA_HOME": HOME, "MA_JOB_DIR": f"{HOME}/modelarts/user-job-dir", "MA_MOUNT_PATH": f"{HOME}/modelarts",
            "MA_LOG_DIR": f"{HOME}/modelarts/log", "WORKSPACE": f"{HOME}/modelarts", "MA_NUM_HOSTS": nodes, "MA_NUM_GPUS": 0,
            "VC_WORKER_NUM": nodes, "VC_TASK_INDEX": node, "VC_WORKER_HOSTS": ",".join(WORKERS[:nodes]), "MA_TASK_NAME": "worker",
            "MA_CURRENT_IP": f"10.77.0.{node + 1}", "MA_CURRENT_INSTANCE_NAME": WORKERS[node].split(".")[0],
            "MA_VJ_NAME": "modelarts-job-7", "MA_SCHEDULE_CNT": starts, "MA_DETECT_TRAIN_INJECT_CODE": 1,
            "MA_PIP_URL": "http://127.0.0.1:8888/simple", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "^mlx5_bond_0",
            "NCCL_DEBUG": "INFO", "S3_ENDPOINT": "obs.example.com", "S3_USE_HTTPS": 1, "S3_VERIFY_SSL": 0,
            "OMP_NUM_THREADS": 1,
        }  # fmt: skip

    def close(self):
        self.hosts.close()
        shutil.rmtree(self.obs.parent / "index")
