"""A real SLURM for the tests: a login node with the controller, and a slurmd on each of several hosts."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.tools.hosts import Hosts
from tests.tools.jobs import ROOT, environment, wait_for
from tests.tools.packages import namespaces, program

# Nothing that needs control groups, which a container may not have. A job that queues itself again waits 5 s and not 2 minutes.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=login(10.77.0.{last})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin={binding}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
OverTimeLimit=UNLIMITED
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerCPU=64
"""
CORES, MEMORY = len(os.sched_getaffinity(0)), 1 << 20  # MiB of each node, as much as a test may want to ask for


class Slurm:
    """node0, node1 and up, with this machine's cores each; `binding` is the plugin that binds tasks to cores, or task/none."""

    def __init__(self, folder, binding="task/none", nodes=2):
        namespaces()
        slurmctld, slurmd, munged = program("slurmctld"), program("slurmd"), program("munged")
        program("sbatch")
        self.folder, self.login = folder, nodes
        named = [f"node{number}" for number in range(nodes)]
        self.hosts = Hosts(nodes + 1, folder, called=[*named, "login"])
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
        }
        try:
            self.configure(binding, named)
            own = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
            munge = self.start(self.login, munged, "--foreground", "--force", f"--socket={folder}/munge.socket", *own)
            wait_for((folder / "munge.socket").exists, munge, "munge's socket")
            self.start(self.login, slurmctld, "-D")
            for number in range(nodes):
                self.start(number, slurmd, "-D")
            self.run("srun", "--immediate=600", f"--nodes={nodes}", "true")  # returns when every node has answered
        except BaseException:
            self.close()
            raise

    def configure(self, binding, named):
        about = CONFIGURATION.format(folder=self.folder, last=self.login + 1, binding=binding)
        nodes = [
            f"NodeName={name} NodeAddr=10.77.0.{number + 1} CPUs={CORES} RealMemory={MEMORY}\n"
            for number, name in enumerate(named)
        ]
        (self.folder / "slurm.conf").write_text("".join([*nodes, about]))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # so that it does not look for the version
        for name in ("state", *(f"spool-{name}" for name in named)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))

    def start(self, number, *words):
        return self.hosts.run(number, *words, env=self.environment)

    def run(self, *words, check=0, folder=None, **own):
        """A command on the login node to its end; what it printed."""
        env = environment(**self.environment)
        del env["OMP_NUM_THREADS"]  # a job is to find its cores itself, unless it is told
        env.update(own)
        words = self.hosts.words(self.login, *words)
        done = subprocess.run(words, cwd=folder or self.folder, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.said()}"
        return done.stdout + done.stderr

    def submit(self, folder, *words, job="jobs/train_ddp.py", check=0):
        """The verb on the login node, with the output in folder/out; the job's number and what was printed."""
        own = ["--platform", "slurm", "--name", "run", "--gpus", "0", "--memory", "4", "--output_url", folder / "out"]
        printed = self.run(sys.executable, "-m", "launch", "submit", *own, job, *words, check=check, folder=folder)
        found = re.search(r"^submitted (\d+)$", printed, re.MULTILINE)
        return found[1] if found else None, printed

    def state(self, job):
        return re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))[1]

    def wait_for(self, condition, what):
        deadline = time.monotonic() + 900
        while not condition():
            assert time.monotonic() < deadline, f"no {what} in time\n{self.said()}"
            time.sleep(0.05)

    def said(self):
        return "\n".join(self.hosts.log(number)[-2000:] for number in range(self.login + 1))

    def close(self):
        self.hosts.close()
