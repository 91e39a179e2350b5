"""The rules that find the place of a process, one for each platform and launcher, and the order in which they are tried.

A rule returns None if it does not recognise its platform. RANK and WORLD_SIZE count nodes on some platforms and processes on
others (the level). Launchers that certainly start one process per worker therefore come first. Platforms that start a job once
per node follow, most of them recognised by a variable that no other platform sets.
"""

import dataclasses
import re
import zlib
from typing import Optional

from common.errors import UserError, one_line
from common.world.world import Given, World, node, process, require_equal

MODELARTS_PORT = 6666  # the port in the manual's examples; ModelArts' own images are given none


# --- Launchers: one process per worker ---------------------------------------------------------------------------------


def torchrun(given: Given) -> Optional[World]:
    """Return the place by torchrun's RANK, WORLD_SIZE and LOCAL_RANK, which count processes; None if one of them is missing."""
    if not given.has("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        return None
    rank = given.number("RANK")
    size = given.number("WORLD_SIZE")
    local_rank = given.number("LOCAL_RANK")
    node_rank = given.number("GROUP_RANK", "NODE_RANK")
    if given.has("LOCAL_WORLD_SIZE"):
        local_size = given.number("LOCAL_WORLD_SIZE")
    elif node_rank:  # as many as on each of the nodes before
        local_size = (rank - local_rank) // node_rank
    else:
        local_size = given.gpus if given.gpus and size % given.gpus == 0 else local_rank + 1
    require_equal("--local_rank", given.args.local_rank, "LOCAL_RANK", local_rank)
    if given.args.world_size not in (None, size):  # a console has appended --world_size and --rank, which count nodes
        require_equal("--world_size", given.args.world_size, "WORLD_SIZE / LOCAL_WORLD_SIZE", size // max(1, local_size))
        require_equal("--rank", given.args.rank, "the node's rank", node_rank)
    platform = "torchrun" if given.has("TORCHELASTIC_RUN_ID") else "azureml" if given.has("AZUREML_RUN_ID") else "launcher"
    rule = "RANK, WORLD_SIZE and LOCAL_RANK count processes" + (late_node_advice(given) if platform == "torchrun" else "")
    return process(platform, rule, rank, size, local_rank, local_size, node_rank, given.env.get("MASTER_ADDR"))


def late_node_advice(given: Given) -> str:
    """Return advice if torchrun is elastic and its agents share a store, as no node can then join later (torch 2.15), or ""."""
    told = re.search(r"--nnodes[= ](\S+)", given.launcher)
    low, _, high = (told[1] if told else given.env.get("PET_NNODES", "")).partition(":")
    fixed = high in ("", low) or given.env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    return "" if fixed else "; to take in a node later, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"


def openmpi(given: Given) -> Optional[World]:
    """Return the place under mpirun, or None. OMPI_COMM_WORLD_NODE_RANK is not the node's number, so the number is computed."""
    rank = given.number("OMPI_COMM_WORLD_RANK")
    size = given.number("OMPI_COMM_WORLD_SIZE")
    if size < 1:
        return None
    local_rank = given.number("OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = max(1, given.number("OMPI_COMM_WORLD_LOCAL_SIZE"))
    names = ("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")
    master = next((given.env[name] for name in names if given.has(name)), None)
    if master is None and given.has("SM_HOSTS"):
        master = given.json("SM_HOSTS")[0]
    if master is None and size > local_size:
        raise UserError("Open MPI gives no master address: set MASTER_ADDR, e.g. mpirun -x MASTER_ADDR=FIRST_HOST")
    master = master.rsplit(":", 1)[0] if master else None
    return process("openmpi", "OMPI_COMM_WORLD_SIZE", rank, size, local_rank, local_size, rank // local_size, master)


def slurm(given: Given) -> Optional[World]:
    """Return the place in SLURM, or None. A batch script without srun, which sets SLURM_STEP_NUM_TASKS, is one process."""
    if not given.has("SLURM_JOB_ID") or given.args.init_method or given.args.world_size:
        return None
    promised = given.number("SLURM_GPUS_ON_NODE")
    tasks = given.number("SLURM_STEP_NUM_TASKS")
    if not tasks:
        nodes = given.number("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
        advice = f"; {nodes} nodes were allocated: start the job with srun to use them" if nodes > 1 else ""
        return node(given, "slurm", f"a SLURM batch script runs one process{advice}", 0, 1, promised=promised)
    nodes = given.number("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES") or 1
    node_rank = given.number("SLURM_NODEID")
    hosts = given.env.get("SLURM_STEP_NODELIST") or given.env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    master = given.env.get("MASTER_ADDR") or first_slurm_host(hosts)
    port = given.number("MASTER_PORT") or 20000 + given.number("SLURM_JOB_ID") % 12000  # as jobs may share a node
    if tasks == nodes:
        return node(given, "slurm", "srun, one task per node", node_rank, nodes, master, port, promised)
    local_size = slurm_tasks_on(given.env.get("SLURM_STEP_TASKS_PER_NODE", ""), node_rank) or max(1, tasks // nodes)
    rank = given.number("SLURM_PROCID")
    local_rank = given.number("SLURM_LOCALID")
    return process("slurm", "srun, one task per process", rank, tasks, local_rank, local_size, node_rank, master, port)


def ascend(given: Given) -> Optional[World]:
    """Return the place by the rank table of ModelArts' Ascend engine, which starts a process for each card; None without it."""
    if not given.has("RANK_TABLE_FILE", "RANK_ID"):
        return None
    from common.world import ranktable

    servers = ranktable.read(given.env[ranktable.VARIABLE])
    size = sum(len(server.cards) for server in servers)
    rank = given.number("RANK_ID")
    node_rank = next((number for number, server in enumerate(servers) if rank in server.cards), None)
    if given.has("RANK_SIZE"):
        require_equal("RANK_SIZE", given.number("RANK_SIZE"), "the number of cards in the rank table", size)
    if node_rank is None:
        raise UserError(f"RANK_ID is {rank}, which is not in the rank table: it has ranks 0 to {size - 1}; start the job again")
    mine = servers[node_rank].cards
    first = servers[0].host
    if given.has("ASCEND_DEVICE_ID"):
        require_equal(
            "ASCEND_DEVICE_ID", given.number("ASCEND_DEVICE_ID"), "the card of this rank in the rank table", mine[rank]
        )
    master = first or given.env.get("VC_WORKER_HOSTS", "").split(",")[0] or given.env.get("MASTER_ADDR")
    if len(servers) > 1 and not master:
        raise UserError("the rank table has no host_ip: set MASTER_ADDR to the first node's address, alike on every node")
    job = given.env.get("MA_VJ_NAME", "")
    port = given.number("MASTER_PORT") or 20000 + zlib.crc32(job.encode()) % 12000  # as jobs may share a node
    local_rank = list(mine).index(rank)
    world = process(
        "ascend", "RANK_TABLE_FILE and RANK_ID count cards", rank, size, local_rank, len(mine), node_rank, master, port
    )
    return dataclasses.replace(world, num_nodes=len(servers), gpus_promised=len(mine))


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: node01 for node[01-03,07],gpu5."""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodelist)
    if not first:
        raise UserError(f"SLURM_JOB_NODELIST is {nodelist[:80]!r}: the name of a host was expected at its beginning")
    return first[1] + (first[2] or "")


def slurm_tasks_on(tasks_per_node: str, node_rank: int) -> Optional[int]:
    """Return the number of tasks on a node, or None if it is not stated; "2(x3),1": two on nodes 0 to 2, one on node 3."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    return counts[node_rank] if node_rank < len(counts) else None


# --- Platforms: one process per node, which starts the workers ----------------------------------------------------------


def modelarts_arguments(given: Given) -> Optional[World]:
    """Return the place by --init_method, --rank and --world_size, which ModelArts' images append; None if all are missing."""
    args = given.args
    if args.init_method is None and args.rank is None and args.world_size is None:
        return None
    nodes = args.world_size or given.number("MA_NUM_HOSTS", "VC_WORKER_NUM") or 1
    if args.world_size and given.args.nproc_per_node != 1:
        for name in ("MA_NUM_HOSTS", "VC_WORKER_NUM"):
            if given.has(name):
                require_equal("--world_size", args.world_size, name, given.number(name))
    rank = args.rank
    if rank is None:
        if nodes > 1 and not given.has("VC_TASK_INDEX"):
            raise UserError(f"--world_size {nodes} without --rank: give each node its number, 0 to {nodes - 1}")
        rank = given.number("VC_TASK_INDEX") if nodes > 1 else 0
    _agree_with_the_environment(given, rank, nodes)
    master, port = init_method(given)
    if nodes > 1 and master is None:
        raise UserError(f"--world_size {nodes} without --init_method: give every node tcp://HOST:PORT of node 0")
    rule = "--init_method, --rank and --world_size count nodes"
    return node(given, "modelarts", rule, rank, nodes, master, port, given.number("MA_NUM_GPUS"))


def _agree_with_the_environment(given: Given, rank: int, nodes: int) -> None:
    """Raise UserError if WORLD_SIZE, in nodes or processes, contradicts the arguments, or RANK does while it counts nodes."""
    if not given.has("RANK", "WORLD_SIZE"):
        return
    size = given.number("WORLD_SIZE")
    if size not in (nodes * (given.number("NPROC_PER_NODE") or given.gpus), nodes * (given.args.nproc_per_node or 1)):
        require_equal("--world_size", nodes, "WORLD_SIZE", size)
    if size == nodes:
        require_equal("--rank", rank, "RANK", given.number("RANK"))


def init_method(given: Given) -> tuple[Optional[str], int]:
    """Return (host, port) of --init_method, else of MASTER_ADDR and MASTER_PORT; None and 0 for what is not set."""
    url = given.args.init_method
    if url in (None, "env://"):
        return given.env.get("MASTER_ADDR"), given.number("MASTER_PORT")
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})/?", url)
    if not match or not 0 < int(match.group(2)) < 65536:
        shown = one_line(url)[:200]
        raise UserError(f"--init_method is {shown!r}; give it the form tcp://HOST:PORT, with an IPv6 address in brackets")
    return match.group(1).strip("[]"), int(match.group(2))


def modelarts_environment(given: Given) -> Optional[World]:
    """Return the place by MA_NUM_HOSTS and VC_TASK_INDEX, which ModelArts' own images have; None without the first."""
    nodes = given.number("MA_NUM_HOSTS")
    if not nodes:
        return None
    rank = given.number("RANK_AFTER_ACC", "VC_TASK_INDEX") if nodes > 1 else 0  # meaningless on one node
    master = given.env.get("VC_WORKER_HOSTS", "").split(",")[0] or given.env.get("MASTER_ADDR")
    port = given.number("MASTER_PORT") or MODELARTS_PORT
    return node(given, "modelarts", "MA_NUM_HOSTS and VC_TASK_INDEX", rank, nodes, master, port, given.number("MA_NUM_GPUS"))


def kubeflow(given: Given) -> Optional[World]:
    """Return the place of a Kubeflow pod by PET_NNODES and PET_NODE_RANK or RANK, which count pods; None without PET_NNODES."""
    if not given.has("PET_NNODES"):
        return None
    low, _, high = given.env["PET_NNODES"].partition(":")
    if not low.isdigit() or high not in ("", low):
        raise UserError(
            f"PET_NNODES is {given.env['PET_NNODES'][:80]!r}, an elastic job: start it with torchrun, which settles the number"
        )
    rank = given.number("PET_NODE_RANK", "RANK")
    if given.has("RANK"):
        require_equal("RANK", given.number("RANK"), "PET_NODE_RANK", rank)
    workers = given.env.get("PET_NPROC_PER_NODE", "")
    if workers.isdigit():
        given.env.setdefault("NPROC_PER_NODE", workers)
    master = given.env.get("PET_MASTER_ADDR")
    port = given.number("PET_MASTER_PORT")
    return node(given, "kubeflow", "PET_NNODES and PET_NODE_RANK", rank, int(low), master, port)


def volcengine(given: Given) -> Optional[World]:
    """Return the place by Volcengine's MLP_WORKER_NUM and MLP_ROLE_INDEX; None without the first."""
    nodes = given.number("MLP_WORKER_NUM")
    rank = given.number("MLP_ROLE_INDEX")
    if not nodes:
        return None
    master = given.env.get("MLP_WORKER_0_HOST")
    port = given.number("MLP_WORKER_0_PORT")
    promised = given.number("MLP_WORKER_GPU")
    return node(given, "volcengine", "MLP_WORKER_NUM and MLP_ROLE_INDEX", rank, nodes, master, port, promised)


def sagemaker(given: Given) -> Optional[World]:
    """Return the place of a SageMaker host, or None. Its rank is its position in SM_HOSTS, else SM_CURRENT_HOST_RANK."""
    first = None
    if given.has("SM_HOSTS"):
        hosts = given.json("SM_HOSTS")
        current = given.env.get("SM_CURRENT_HOST")
        if current not in hosts:
            raise UserError(f"SM_CURRENT_HOST is {current!r}, which is not in SM_HOSTS {hosts}")
        rank = hosts.index(current)
        nodes = len(hosts)
        first = hosts[0]
    elif given.has("SM_HOST_COUNT"):
        rank = given.number("SM_CURRENT_HOST_RANK")
        nodes = given.number("SM_HOST_COUNT")
    else:
        return None
    master = given.env.get("SM_MASTER_ADDR") or first or given.env.get("MASTER_ADDR")
    port = given.number("SM_MASTER_PORT", "MASTER_PORT") or 7777
    return node(given, "sagemaker", "SM_HOSTS and SM_CURRENT_HOST", rank, nodes, master, port, given.number("SM_NUM_GPUS"))


def vertex(given: Given) -> Optional[World]:
    """Return the place by Vertex AI's CLUSTER_SPEC, or None. Its workerpool0 holds the first node, workerpool1 the others."""
    if not given.has("CLUSTER_SPEC"):
        return None
    spec = given.json("CLUSTER_SPEC")
    cluster = spec.get("cluster", {})
    task = spec.get("task", {})
    primary = cluster.get("workerpool0", [])
    workers = cluster.get("workerpool1", [])
    if task.get("type") not in (None, "workerpool0", "workerpool1"):
        raise UserError(f"CLUSTER_SPEC says that this replica is {task['type']!r}: run the job in workerpool0 and workerpool1")
    rank = int(task.get("index", 0)) + (len(primary) if task.get("type") == "workerpool1" else 0)
    if given.has("RANK"):
        require_equal("RANK", given.number("RANK"), "CLUSTER_SPEC's node", rank)
    host, _, port = primary[0].rpartition(":") if primary else (None, None, 0)
    master = given.env.get("MASTER_ADDR") or host
    port = given.number("MASTER_PORT") or int(port)
    return node(given, "vertex", "CLUSTER_SPEC", rank, max(1, len(primary) + len(workers)), master, port)


def bare_rank(given: Given) -> Optional[World]:
    """Return the place by RANK and WORLD_SIZE, which count nodes on PAI-DLC, Baidu AIHC and Volcano; None if one is missing."""
    if not given.has("RANK", "WORLD_SIZE"):
        return None
    marks = {"AIHC_JOB_NAME": "baidu-aihc", "NPROC_PER_NODE": "pai-dlc", "VC_TASK_INDEX": "volcano"}
    platform = next((name for mark, name in marks.items() if given.has(mark)), "rank-per-node")
    rule = "RANK and WORLD_SIZE without LOCAL_RANK count nodes"
    return node(given, platform, rule, given.number("RANK"), given.number("WORLD_SIZE"), given.env.get("MASTER_ADDR"))


def kubernetes(given: Given) -> Optional[World]:
    """Return the place of an indexed Job's pod by JOB_COMPLETION_INDEX and WORLD_SIZE, which counts pods; None without both."""
    if not given.has("JOB_COMPLETION_INDEX", "WORLD_SIZE"):  # the index alone may number jobs that have nothing in common
        return None
    rule = "JOB_COMPLETION_INDEX and WORLD_SIZE count pods"
    rank = given.number("JOB_COMPLETION_INDEX")
    nodes = given.number("WORLD_SIZE")
    return node(given, "kubernetes", rule, rank, nodes, given.env.get("MASTER_ADDR"), given.number("MASTER_PORT"))


def volcano(given: Given) -> Optional[World]:
    """Return the place of a Volcano pod, or None. VC_TASK_INDEX counts within one task; with several, the host name decides."""
    tasks = {name: value.split(",") for name, value in given.env.items() if re.fullmatch(r"VC_\w+_HOSTS", name)}
    if not tasks or not given.has("VC_TASK_INDEX"):
        return None
    order = sorted(tasks, key=lambda name: (name != "VC_MASTER_HOSTS", name))
    hosts = [host for name in order for host in tasks[name]]
    if len(tasks) == 1:
        rank = given.number("VC_TASK_INDEX")
    else:
        labels = [host.split(".")[0] for host in hosts]
        mine = given.hostname.split(".")[0]
        if mine not in labels:
            raise UserError(f"this host, {mine}, is in none of {', '.join(order)}: VC_TASK_INDEX counts within one task only")
        rank = labels.index(mine)
    return node(given, "volcano", f"VC_TASK_INDEX and {', '.join(order)}", rank, len(hosts), hosts[0])


def plain(given: Given) -> World:
    return node(given, "plain", "no platform was recognised", 0, 1)


RULES = [
    torchrun, openmpi, slurm, ascend,
    modelarts_arguments, modelarts_environment, kubeflow, volcengine, sagemaker, vertex, bare_rank, kubernetes, volcano, plain,
]  # fmt: skip
