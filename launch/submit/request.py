"""Code that all platforms share: the request, the mistakes in it, the code that is uploaded,
the job's command.

A Request is data. Each platform's module turns it into the platform's own request (`build`, without side
effects) and sends that (`send`). The options are defined here once, with the platforms that know them and the
platforms that need them.
"""

import dataclasses
import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, Optional, Union

from common.address import is_address
from common.arguments import typed
from common.errors import one_line
from common.secrets import BUCKETS
from common.storage.bucket import ADDRESS
from launch import bundle
from launch.options import missing_job

ROOT = Path(__file__).resolve().parent.parent.parent

CLUSTERS = ("kubernetes", "kubeflow", "volcano")
CLOUDS = ("modelarts", "pai-dlc", "sagemaker")
CONTAINERS = (*CLOUDS, *CLUSTERS)  # where the job runs in a container
REMOTE = (*CONTAINERS, "slurm")
# where cores and memory can be requested; elsewhere the type of machine decides
SIZED = ("pai-dlc", *CLUSTERS, "slurm")
# {platform: the only store that it reads itself}
BUCKET = {"modelarts": "obs", "pai-dlc": "oss", "sagemaker": "s3"}
BOUNDS = {
    "nodes": (1, 1000), "gpus": (0, 16), "cpus": (0, 1024), "memory": (0, 16384), "retries": (0, 30),
    "hours": (0.1, 24 * 28),
}  # fmt: skip
# For each GPU, and for a machine without one.
CPUS = 4  # cores
MEMORY = 16  # GiB


def option(
    help: str,
    default: object = None,
    used_by: tuple[str, ...] = REMOTE,
    needed_by: tuple[str, ...] = (),
    kind: Callable[[str], object] = str,
) -> Any:
    """Return a field of Request that is also an option.

    `used_by`, `needed_by`: platforms; `kind` converts its text.
    """
    metadata = {"help": help, "used_by": used_by, "needed_by": needed_by, "kind": kind}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a platform is asked to run. A field made by option() is an option of launch submit."""

    platform: str
    job: str  # jobs/NAME.py
    arguments: tuple[str, ...] = ()  # the words after --, for the job
    name: Optional[str] = option("name of the submitted job; unset: made of the file's name and the time")
    nodes: int = option("how many machines", 1, kind=int)
    gpus: int = option(
        "GPUs or NPUs of each machine, 0 for none; with --platform local the processes", 1, kind=int
    )
    accelerator: str = option("gpu, or npu for Ascend flavors", "gpu", used_by=("modelarts",))
    cpus: Optional[int] = option(
        "cores of each machine; slurm and clusters, unset: 4 for each GPU, 0: what they give",
        used_by=SIZED,
        kind=int,
    )
    memory: Optional[int] = option(
        "GiB of each machine; slurm and clusters, unset: 16 for each GPU, 0: what they give",
        used_by=SIZED,
        kind=int,
    )
    data_url: Optional[str] = option("where the data are")
    output_url: Optional[str] = option(
        "where checkpoints and results go; a job with the same address goes on from them",
        needed_by=CONTAINERS,
    )
    code_url: Optional[str] = option(
        "where the code is uploaded to, or on a cluster the folder that has it", needed_by=CONTAINERS
    )
    image: Optional[str] = option(
        "container image", used_by=CONTAINERS, needed_by=("pai-dlc", "sagemaker", *CLUSTERS)
    )
    engine: Optional[str] = option(
        "name of one of the platform's images, with torch 2.1 or later", used_by=("modelarts",)
    )
    flavor: Optional[str] = option("type of machine", used_by=CLOUDS, needed_by=("modelarts", "sagemaker"))
    pool: Optional[str] = option(
        "dedicated pool, quota, queue or partition", used_by=("modelarts", "pai-dlc", "volcano", "slurm")
    )
    region: Optional[str] = option("region of the platform, such as cn-north-4", used_by=CONTAINERS)
    endpoint: Optional[str] = option(
        "address of the service, instead of the region's", used_by=("modelarts", "pai-dlc")
    )
    workspace: Optional[str] = option(
        "id of the workspace", used_by=("modelarts", "pai-dlc"), needed_by=("pai-dlc",)
    )
    role: Optional[str] = option(
        "ARN of the role that the job runs as", used_by=("sagemaker",), needed_by=("sagemaker",)
    )
    namespace: str = option("namespace of the cluster", "default", used_by=CLUSTERS)
    runtime: Optional[str] = option(
        "a ClusterTrainingRuntime: makes a TrainJob instead of a PyTorchJob", used_by=("kubeflow",)
    )
    volumes: tuple[str, ...] = option(
        "claim:/FOLDER, mounted in every pod; may be given again", (), used_by=CLUSTERS
    )
    queue: Optional[str] = option(
        "a LocalQueue of Kueue that starts the job", used_by=("kubernetes", "kubeflow")
    )
    patch: Optional[str] = option(
        "a YAML file that changes the pods, and labels and annotations of the job", used_by=CLUSTERS
    )
    secret: Optional[str] = option("a Secret whose keys become environment variables", used_by=CLUSTERS)
    script_line: tuple[str, ...] = option(
        (
            "a line that your site's scripts need, such as '#SBATCH --account=lab' or 'module load "
            "python'; may be given again"
        ),
        (),
        used_by=("slurm",),
    )
    log_url: Optional[str] = option("where the platform keeps the log", used_by=("modelarts",))
    hours: Optional[float] = option("stop the job after so many hours", kind=float)
    retries: int = option("how often a failed job is started again", 3, kind=int)
    spot: bool = option("on cheaper machines that may be taken away", False, used_by=CLOUDS)
    env: tuple[str, ...] = option("NAME=VALUE for the job, no credential; may be given again", ())

    @property
    def environment(self) -> dict[str, str]:
        return {name: value for name, _, value in (pair.partition("=") for pair in self.env)}

    @property
    def workers(self) -> dict[str, str]:
        """The variable with the number of processes to start on each machine; empty for --gpus 0,
        so that the job decides."""
        return {"NPROC_PER_NODE": str(self.gpus)} if self.gpus else {}

    @property
    def cores(self) -> int:
        """Cores of each machine; 0: what the platform gives."""
        return CPUS * max(1, self.gpus) if self.cpus is None else self.cpus

    @property
    def gibibytes(self) -> int:
        """Memory of each machine; 0: what the platform gives."""
        return MEMORY * max(1, self.gpus) if self.memory is None else self.memory

    @property
    def seconds(self) -> Optional[int]:
        """Time limit of the job in seconds; None if it has none."""
        return round(self.hours * 3600) if self.hours else None

    @property
    def pairs(self) -> list[tuple[str, Optional[str]]]:
        """The job's options as (name without leading dashes, value);
        a name or another word without a value has None."""
        return [(name.lstrip("-"), value) for name, value in _pairs(self.arguments)]

    @property
    def is_elastic(self) -> bool:
        """Whether the job has --min_nodes: then it goes on without a lost node,
        and the platform must not end it."""
        return any(name.replace("-", "_") == "min_nodes" for name, _ in self.pairs)

    @property
    def upload_url(self) -> Optional[str]:
        """Address to which the code is uploaded; None if the job runs from a folder, or on this machine."""
        return self.code_url if self.platform != "local" and is_address(self.code_url) else None

    @property
    def options(self) -> list[str]:
        """The job's options as --NAME VALUE, or as --NAME=VALUE if the value begins with a hyphen."""
        words = []
        for name, value in self.pairs:
            if value and value.startswith("-"):
                words.append(f"--{name}={value}")
            else:
                words += [f"--{name}", value or ""]
        return words


# --- Mistakes -----------------------------------------------------------------------------------------------

# what every platform allows, with room for the suffix of a pod's name
NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,52}[a-z0-9])?")
# Arguments and environment variables that the platforms themselves set.
PLATFORM_ARGUMENTS = {"init_method", "rank", "world_size", "local_rank"}
PLATFORM_VARIABLES = re.compile(
    r"(?:RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(?:PET|MA|VC|SM|SLURM)_.*)"
)
SUBMIT_OPTIONS = {
    "data_url": "--data_url", "data_source": "--data_url", "output_dir": "--output_url",
    "train_url": "--output_url", "result_dir": "--output_url",
}  # fmt: skip


def mistakes(request: Request) -> list[str]:
    """Return a line for each mistake in the request; the platform's own module has further checks."""
    checks = (_options, _forms, _addresses, _nested, _arguments, _variables)
    return [line for check in checks for line in check(request)]


def _options(request: Request) -> Iterator[str]:
    """Yield a line for each option that the platform needs and lacks, or that it does not know."""
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        metadata = field.metadata
        if not metadata or request.platform == "local":  # it accepts the options of every other platform
            continue
        if request.platform in metadata["needed_by"] and value is None:
            yield f"{request.platform} needs --{field.name}: {metadata['help']}"
        if request.platform not in metadata["used_by"] and value != field.default:
            yield (
                f"--{field.name} is for {', '.join(metadata['used_by'])}, not for {request.platform}: leave "
                "it out"
            )


def _forms(request: Request) -> Iterator[str]:
    """Yield a line for each value that is malformed or out of bounds, and for a job that is not in jobs/."""
    if not NAME.fullmatch(request.name or ""):
        yield (
            f"--name is {request.name!r}: give a lower-case letter, then at most 53 lower-case letters, "
            "digits and hyphens"
        )
    for name, (lowest, highest) in BOUNDS.items():
        value = getattr(request, name)
        if value is not None and not lowest <= value <= highest:
            yield f"--{name} is {value:g}: give {lowest:g} to {highest:g}"
    if not re.fullmatch(r"jobs/[^/]+\.py", request.job):
        yield f"{request.job} is not a job of this repository: give a file of {ROOT / 'jobs'} as jobs/NAME.py"
    elif message := missing_job(request.job, ROOT):
        yield message
    for volume in request.volumes:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*:/[^:]*", volume):
            yield (
                f"--volumes {volume}: give claim:/FOLDER, a PersistentVolumeClaim (a-z, 0-9 and -) and "
                "where to mount it"
            )


def _addresses(request: Request) -> Iterator[str]:
    """Yield a line for each folder or address that the platform cannot use."""
    scheme = BUCKET.get(request.platform)
    for name in ("data_url", "output_url", "code_url", "log_url"):
        value = getattr(request, name)
        if value is None:
            continue
        if scheme and not re.fullmatch(rf"{scheme}://[A-Za-z0-9][A-Za-z0-9._-]+/[^?#\s]*[^/?#\s]/?", value):
            yield f"--{name} is {value}: {request.platform} reads and writes {scheme}://BUCKET/FOLDER"
        elif is_address(value) and not value.startswith(BUCKETS):
            yield f"--{name} is {value}: give a folder or s3://, obs://, oss://"
        elif is_address(value) and not ADDRESS.fullmatch(value):
            yield (
                f"--{name} is {value}: the name of a bucket has 3 to 255 letters, digits, dots, hyphens and "
                "underscores"
            )
        elif not is_address(value) and request.platform in CLUSTERS and not value.startswith("/"):
            yield f"--{name} is {value}: give a folder of the pods that begins with /"


def _nested(request: Request) -> Iterator[str]:
    """Yield a line for each folder of a bucket inside another, as it would be copied twice.

    A whole bucket is not looked at.
    """
    names = ("code_url", "data_url", "output_url", "log_url")
    values = {name: str(getattr(request, name)) for name in names}
    values = {
        name: value for name, value in values.items() if (match := ADDRESS.fullmatch(value)) and match[3]
    }
    for inner_name, outer_name in itertools.permutations(values, 2):
        inner, outer = (values[name].rstrip("/") + "/" for name in (inner_name, outer_name))
        if inner.startswith(outer) and (inner != outer or inner_name < outer_name):
            overlap = f"--{inner_name} {values[inner_name]} lies in --{outer_name} {values[outer_name]}"
            yield f"{overlap}: give each a folder of its own"


def _arguments(request: Request) -> Iterator[str]:
    """Yield a line for each of the job's options that is unknown, given twice, or set by the platform."""
    seen = set()
    job_options: list[str] = []
    if not missing_job(request.job, ROOT):
        try:
            job_options = bundle.option_names(ROOT / request.job)
        except SyntaxError as error:
            yield f"{request.job} is no Python: {one_line(error)}"
    pairs = list(_pairs(request.arguments))
    ignored = {
        *typed.PLATFORM_OPTIONS,
        *(
            typed.normal_name(word)
            for name, names in pairs
            if name == "--ignore"
            for word in (names or "").split(",")
        ),
    }
    for name, value in pairs:
        normal_name = typed.normal_name(name)
        if value is None:
            yield (
                f"the job's option {name!r} does not have the form --NAME VALUE, the only one that every "
                "console takes"
            )
        elif normal_name in PLATFORM_ARGUMENTS:
            yield f"{name} is set by the platform: leave it out"
        elif normal_name in SUBMIT_OPTIONS:
            submit_option = SUBMIT_OPTIONS[normal_name]
            yield (
                f"{name} is among the job's options: give {submit_option} before the --, because the "
                "platform needs it"
            )
        elif normal_name in seen:
            yield f"{name} is given twice"
        elif job_options and normal_name not in {*job_options, *ignored}:
            nearest = typed.nearest(name, job_options)
            advice = (
                f"did you mean --{nearest}?"
                if nearest
                else f"leave it out, or let it pass with --ignore {normal_name}"
            )
            yield f"{name} is no option of {request.job}: {advice}"
        seen.add(normal_name)


def _variables(request: Request) -> Iterator[str]:
    """Yield a line for each --env that is malformed, or that the platform sets itself."""
    for pair in request.env:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"--env {name[:40]}: give NAME=VALUE"
        elif PLATFORM_VARIABLES.fullmatch(name):
            yield f"--env {name} is set by the platform: leave it out"
        elif not value.replace("\t", " ").isprintable():
            yield f"--env {name}: the value has a character that cannot be printed"


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Optional[str]]]:
    """Yield (--name, value) in order; the value is None if it is missing.

    A word that is not a --name is yielded with None.
    """
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not re.match(r"--[A-Za-z]", word):
            yield word, None
        elif equals:
            yield name, value
        elif words and not words[0].startswith("--"):
            yield name, words.pop(0)
        else:
            yield name, None


# --- The job's command and code -----------------------------------------------------------------------------


def folder_options(data: Optional[str], output: Optional[str]) -> list[str]:
    """Return the job's options for its data and its output folder, of those that are given."""
    words = []
    if data:
        words += ["--data_url", data]
    if output:
        words += ["--output_dir", output]
    return words


def command(
    request: Request,
    code: str,
    data: Optional[str] = None,
    output: Optional[str] = None,
    python: str = "python",
) -> list[str]:
    """Return the job's command, with the code in the folder `code`; without a shell,
    so that a stop signal reaches the job."""
    return [python, "-u", f"{code}/{request.job}", *request.options, *folder_options(data, output)]


def without_none(**fields: Any) -> dict[str, Any]:
    """Return the arguments as a dictionary, without those that are None."""
    return {name: value for name, value in fields.items() if value is not None}


def stage(job: str, folder: Union[str, Path], arguments: Sequence[str] = ()) -> None:
    """Write the files to upload into `folder`: the job bundled with its modules, the requirements,
    SageMaker's boot file.

    The job is one file because an earlier upload to the same address may have left other versions of the
    modules there.
    """
    target = Path(folder, job)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(bundle.bundle(ROOT / job), encoding="utf-8")
    needed = []
    if any(word.split("=")[-1].startswith(BUCKETS) for word in arguments):
        needed.append(bundle.requirements.OF_ADDRESSES)
    packages = bundle.requirements.text(job, needed)
    for name in bundle.requirements.NAMES:
        Path(folder, name).write_text(packages)
    shutil.copy(Path(__file__).with_name("boot") / "boot_sagemaker.py", folder)
