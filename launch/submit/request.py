"""What all platforms share: the request itself, the mistakes it can hold, the code that is uploaded, the job's command.

A submission is data. Each platform's file turns a Request into its own (`build`, a pure function) and another function of it
sends that. What is asked for stands here once, with the platforms that know it and those that cannot do without.
"""

import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import Any

from common.errors import UserError, one_line
from common.world.folders import is_address
from launch import bundle
from launch.options import missing_job

ROOT = Path(__file__).resolve().parent.parent.parent

CLUSTERS = ("kubeflow", "volcano")
CLOUDS = ("modelarts", "pai-dlc", "sagemaker")
REMOTE = (*CLOUDS, *CLUSTERS, "slurm")
BUCKET = {"modelarts": "obs", "pai-dlc": "oss", "sagemaker": "s3"}  # the only store that each of them reads by itself


def option(help: str, default: Any = None, used_by: tuple = REMOTE, needed_by: tuple = (), kind: type = str) -> Any:
    about = {"help": help, "used_by": used_by, "needed_by": needed_by, "kind": kind}
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True)
class Request:
    platform: str
    job: str  # jobs/NAME.py
    arguments: tuple = ()  # the job's own
    name: str = option("the job's name; unset: made of the job's and the time")
    nodes: int = option("machines", 1, kind=int)
    gpus: int = option("GPUs of each, 0 for none; locally the processes", 1, kind=int)
    data_url: str = option("where the data are; the job finds them in a folder")
    output_url: str = option(
        "where checkpoints and results go; the same address goes on from the last", needed_by=("modelarts", "sagemaker")
    )
    code_url: str = option("where this code is put, or on a cluster the folder that has it", needed_by=(*CLOUDS, *CLUSTERS))
    image: str = option("container image", used_by=(*CLOUDS, *CLUSTERS), needed_by=("pai-dlc", "sagemaker", *CLUSTERS))
    engine: str = option("the name of one of the platform's own images, with torch 2.6 or later", used_by=("modelarts",))
    flavor: str = option("kind of machine", used_by=CLOUDS, needed_by=("modelarts", "sagemaker"))
    pool: str = option("dedicated pool, quota, queue or partition", used_by=("modelarts", "pai-dlc", "volcano", "slurm"))
    region: str = option("such as cn-north-4", used_by=(*CLOUDS, *CLUSTERS))
    endpoint: str = option("address of the service, in place of the region's", used_by=("modelarts", "pai-dlc"))
    workspace: str = option("id of the workspace", used_by=("modelarts", "pai-dlc"), needed_by=("pai-dlc",))
    role: str = option("ARN of the role that the job runs as", used_by=("sagemaker",), needed_by=("sagemaker",))
    namespace: str = option("of the cluster", "default", used_by=CLUSTERS)
    runtime: str = option("a ClusterTrainingRuntime: makes a TrainJob and no PyTorchJob", used_by=("kubeflow",))
    volumes: tuple = option("CLAIM:/FOLDER, mounted in every pod; may be given again", (), used_by=CLUSTERS)
    secret: str = option("a Secret whose keys become environment variables", used_by=CLUSTERS)
    log_url: str = option("where the platform keeps the log", used_by=("modelarts",))
    hours: float = option("stop after so many", kind=float)
    retries: int = option("start again so often after a failure", 3, kind=int)
    spot: bool = option("on machines that may be taken away", False, used_by=CLOUDS)
    env: tuple = option("NAME=VALUE for the job, no credential; may be given again", ())

    @property
    def environment(self):
        return dict(pair.partition("=")[::2] for pair in self.env)

    @property
    def pairs(self):
        """The job's options as (name, value), whichever form they were given in."""
        return [(name.lstrip("-"), value) for name, value in _pairs(self.arguments)]


# --- Mistakes --------------------------------------------------------------------------------------------------------

NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,52}[a-z0-9])?")  # what every platform takes, with room for a pod's number
CREDENTIAL = re.compile(r"secret|token|password|passwd|access_?key|credential|api_?key|(?:^|_)(?:ak|sk)$", re.IGNORECASE)
# What the platform itself says to a job, as arguments and in its environment.
ITS_ARGUMENTS = {"init_method", "rank", "world_size", "local_rank"}
ITS_VARIABLES = re.compile(r"(?:RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(?:PET|MA|VC|SM|SLURM)_.*)")
BOUNDS = {"nodes": (1, 1000), "gpus": (0, 16), "retries": (0, 30), "hours": (0.1, 24 * 28)}
PLACES = {"data_url": "--data_url", "output_dir": "--output_url", "train_url": "--output_url"}


def mistakes(request):
    """One line for each thing that is wrong, whatever the platform; what only one of them refuses is in its own file."""
    return [*_options(request), *_forms(request), *_addresses(request), *_arguments(request), *_variables(request)]


def _options(request):
    for field in dataclasses.fields(request):
        value, about = getattr(request, field.name), field.metadata
        if not about or request.platform == "local":  # which takes whatever the others take
            continue
        if request.platform in about["needed_by"] and value is None:
            yield f"{request.platform} needs --{field.name}: {about['help']}"
        if request.platform not in about["used_by"] and value != field.default:
            yield f"--{field.name} means nothing to {request.platform}, but to {', '.join(about['used_by'])}: leave it out"


def _forms(request):
    if not NAME.fullmatch(request.name or ""):
        yield f"--name is {request.name!r}: a small letter, then at most 53 small letters, digits and hyphens"
    for name, (least, most) in BOUNDS.items():
        value = getattr(request, name)
        if value is not None and not least <= value <= most:
            yield f"--{name} is {value:g}: give {least:g} to {most:g}"
    if not re.fullmatch(r"jobs/[^/]+\.py", request.job):
        yield f"{request.job} is no job of this folder: give a file of {ROOT / 'jobs'} as jobs/NAME.py"
    elif wrong := missing_job(request.job, ROOT):
        yield wrong
    for volume in request.volumes:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*:/[^:]*", volume):
            yield f"--volumes {volume}: give CLAIM:/FOLDER, the name of a PersistentVolumeClaim and where to mount it"


def _addresses(request):
    scheme = BUCKET.get(request.platform)
    for name in ("data_url", "output_url", "code_url", "log_url"):
        value = getattr(request, name)
        if value is None:
            continue
        if scheme and not re.fullmatch(rf"{scheme}://[A-Za-z0-9][A-Za-z0-9._-]+/[^?#\s]*[^/?#\s]/?", value):
            yield f"--{name} is {value}: {request.platform} reads and writes {scheme}://BUCKET/FOLDER"
        elif is_address(value) and not value.startswith(("s3://", "obs://", "oss://")):
            yield f"--{name} is {value}: give a folder or s3://, obs://, oss://"
        elif not is_address(value) and request.platform in CLUSTERS and not value.startswith("/"):
            yield f"--{name} is {value}: give the folder as the pods see it, from its /"


def _arguments(request):
    seen = set()
    for name, value in _pairs(request.arguments):
        plain = name.lstrip("-").replace("-", "_")
        if value is None:
            yield f"the job's option {name!r} has not the form --NAME VALUE, the only one that every console knows"
        elif plain in ITS_ARGUMENTS:
            yield f"{name} is for the platform to give: leave it out"
        elif plain in PLACES:
            yield f"{name} stands behind the --: give {PLACES[plain]} before it, which the platform has to know"
        elif plain in seen:
            yield f"{name} is given twice"
        elif CREDENTIAL.search(plain):
            yield f"{name} looks like a credential, which a request would show: leave it out"
        seen.add(plain)


def _variables(request):
    for pair in request.env:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"--env {name[:40]}: give NAME=VALUE"
        elif CREDENTIAL.search(name):
            yield f"--env {name} looks like a credential, which a request would show: give the job a role, or --secret"
        elif ITS_VARIABLES.fullmatch(name):
            yield f"--env {name} is for the platform to set: leave it out"
        elif not value.isprintable():
            yield f"--env {name}: its value has a character that cannot be printed"


def _pairs(arguments):
    """(--name, value) in order; a value is None where there is none, and so is that of a word without a name."""
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not re.match(r"--[A-Za-z]", word):
            yield word, None
        elif equals:
            yield name, value
        else:
            yield name, words.pop(0) if words and not words[0].startswith("--") else None


# --- The job's command and code ----------------------------------------------------------------------------------------


def places(data, output):
    """The options by which a job is told where it reads and writes."""
    return [*(["--data_url", data] if data else []), *(["--output_dir", output] if output else [])]


def command(request, code, data=None, output=None):
    """The job's command where the code lies in the folder `code`; no shell, so that a stop signal reaches the job itself."""
    options = [word for name, value in request.pairs for word in (f"--{name}", value)]
    return ["python", "-u", f"{code}/{request.job}", *options, *places(data, output)]


def stage(job, folder):
    """Write what is uploaded into `folder`: the job and its modules in one file, requirements.txt, SageMaker's boot file.

    One file, because another upload to the same address may have left modules of another state there.
    """
    target = Path(folder, job)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(bundle.bundle(ROOT / job), encoding="utf-8")
    for path in (ROOT / "requirements.txt", Path(__file__).with_name("boot_sagemaker.py")):
        shutil.copyfile(path, os.path.join(folder, path.name))


# --- What a platform answers -------------------------------------------------------------------------------------------


def credentials_in(environ, names, files):
    """Whether the standard places have a credential: one of these variables, or one of these files of the home folder."""
    return any(environ.get(name) for name in names) or any(os.path.exists(os.path.expanduser(file)) for file in files)


def missing(package, extra):
    return UserError(f"{package} is not installed: pip install .[{extra}]")


def describe(error, environ):
    """What a platform said, in one line and without any secret of this environment (some answers quote the request)."""
    names = ("status_code", "status", "error_code", "code", "error_msg", "message", "body")  # each SDK has its own of these
    words = [getattr(error, name, None) for name in names]
    text = " ".join(dict.fromkeys(str(word) for word in words if word)) or str(error)
    for name, value in environ.items():
        if CREDENTIAL.search(name) and len(value) >= 4:
            text = text.replace(value, "***")
    return one_line(f"{type(error).__name__}: {text}")[:600]
