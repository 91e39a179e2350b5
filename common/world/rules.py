"""The rules that find the place of a process, one for each platform and launcher,
and the order in which they are tried.

A rule returns None if it does not recognise its platform. RANK and WORLD_SIZE count nodes on some platforms
and processes on others (the level). Launchers that certainly start one process per worker therefore come
first. Platforms that start a job once per node follow, most of them recognised by a variable that no other
platform sets.
"""

import dataclasses
import re
import zlib
from typing import Optional

from common.errors import UserError, one_line
from common.world.world import LaunchContext, World, node, process, require_equal

MODELARTS_PORT = 6666  # the port in the manual's examples; ModelArts' own images are given none


# --- Launchers: one process per worker ----------------------------------------------------------------------


def torchrun(context: LaunchContext) -> Optional[World]:
    """Return the place by torchrun's RANK, WORLD_SIZE and LOCAL_RANK, which count processes;
    None if one of them is missing."""
    if not context.has("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        return None
    rank = context.number("RANK")
    size = context.number("WORLD_SIZE")
    local_rank = context.number("LOCAL_RANK")
    node_rank = context.number("GROUP_RANK", "NODE_RANK")
    if context.has("LOCAL_WORLD_SIZE"):
        local_size = context.number("LOCAL_WORLD_SIZE")
    elif node_rank:  # as many as on each of the nodes before
        local_size = (rank - local_rank) // node_rank
    else:
        local_size = context.gpus if context.gpus and size % context.gpus == 0 else local_rank + 1
    require_equal("--local_rank", context.args.local_rank, "LOCAL_RANK", local_rank)
    if context.args.world_size not in (None, size):
        # a console has appended --world_size and --rank, which count nodes
        require_equal(
            "--world_size",
            context.args.world_size,
            "WORLD_SIZE / LOCAL_WORLD_SIZE",
            size // max(1, local_size),
        )
        require_equal("--rank", context.args.rank, "the node's rank", node_rank)
    rule = "RANK, WORLD_SIZE and LOCAL_RANK count processes"
    if context.has("TORCHELASTIC_RUN_ID"):
        platform = "torchrun"
        rule += late_node_advice(context)
    elif context.has("AZUREML_RUN_ID"):
        platform = "azureml"
    else:
        platform = "launcher"
    return process(
        platform, rule, rank, size, local_rank, local_size, node_rank, context.env.get("MASTER_ADDR")
    )


def late_node_advice(context: LaunchContext) -> str:
    """Return advice if torchrun is elastic and its agents share a store,
    as no node can then join later (torch 2.15), or ""."""
    option = re.search(r"--nnodes[= ](\S+)", context.launcher)
    nodes = option[1] if option else context.env.get("PET_NNODES", "")
    low, _, high = nodes.partition(":")
    if high in ("", low) or context.env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return ""
    return "; to take in a node later, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"


def openmpi(context: LaunchContext) -> Optional[World]:
    """Return the place under mpirun, or None.

    OMPI_COMM_WORLD_NODE_RANK is not the node's number, so the number is computed.
    """
    rank = context.number("OMPI_COMM_WORLD_RANK")
    size = context.number("OMPI_COMM_WORLD_SIZE")
    if size < 1:
        return None
    local_rank = context.number("OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = max(1, context.number("OMPI_COMM_WORLD_LOCAL_SIZE"))
    names = ("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")
    master = next((context.env[name] for name in names if context.has(name)), None)
    if master is None and context.has("SM_HOSTS"):
        master = context.json("SM_HOSTS")[0]
    if master is None and size > local_size:
        raise UserError(
            "Open MPI gives no master address: set MASTER_ADDR, e.g. mpirun -x MASTER_ADDR=FIRST_HOST"
        )
    master = master.rsplit(":", 1)[0] if master else None
    return process(
        "openmpi", "OMPI_COMM_WORLD_SIZE", rank, size, local_rank, local_size, rank // local_size, master
    )


def slurm(context: LaunchContext) -> Optional[World]:
    """Return the place in SLURM, or None.

    A batch script without srun, which sets SLURM_STEP_NUM_TASKS, is one process.
    """
    if not context.has("SLURM_JOB_ID") or context.args.init_method or context.args.world_size:
        return None
    promised = context.number("SLURM_GPUS_ON_NODE")
    tasks = context.number("SLURM_STEP_NUM_TASKS")
    if not tasks:
        nodes = context.number("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
        advice = f"; {nodes} nodes were allocated: start the job with srun to use them" if nodes > 1 else ""
        return node(
            context, "slurm", f"a SLURM batch script runs one process{advice}", 0, 1, promised=promised
        )
    nodes = context.number("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES") or 1
    node_rank = context.number("SLURM_NODEID")
    hosts = context.env.get("SLURM_STEP_NODELIST") or context.env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    master = context.env.get("MASTER_ADDR") or first_slurm_host(hosts)
    # as jobs may share a node
    port = context.number("MASTER_PORT") or 20000 + context.number("SLURM_JOB_ID") % 12000
    if tasks == nodes:
        return node(context, "slurm", "srun, one task per node", node_rank, nodes, master, port, promised)
    local_size = slurm_tasks_on(context.env.get("SLURM_STEP_TASKS_PER_NODE", ""), node_rank) or max(
        1, tasks // nodes
    )
    rank = context.number("SLURM_PROCID")
    local_rank = context.number("SLURM_LOCALID")
    world = process(
        "slurm", "srun, one task per process", rank, tasks, local_rank, local_size, node_rank, master, port
    )
    return dataclasses.replace(world, gpus_promised=promised)


def ascend(context: LaunchContext) -> Optional[World]:
    """Return the place by the rank table of ModelArts' Ascend engine, which starts a process for each card;
    None without it."""
    if not context.has("RANK_TABLE_FILE", "RANK_ID"):
        return None
    from common.world import ranktable

    servers = ranktable.read(context.env[ranktable.VARIABLE])
    size = sum(len(server.cards) for server in servers)
    rank = context.number("RANK_ID")
    node_rank = next((number for number, server in enumerate(servers) if rank in server.cards), None)
    if context.has("RANK_SIZE"):
        require_equal("RANK_SIZE", context.number("RANK_SIZE"), "the number of cards in the rank table", size)
    if node_rank is None:
        raise UserError(
            f"RANK_ID is {rank}, which is not in the rank table: it has ranks 0 to {size - 1}; start "
            "the job again"
        )
    cards = servers[node_rank].cards
    first_host = servers[0].host
    if context.has("ASCEND_DEVICE_ID"):
        require_equal(
            "ASCEND_DEVICE_ID",
            context.number("ASCEND_DEVICE_ID"),
            "the card of this rank in the rank table",
            cards[rank],
        )
    master = (
        first_host or context.env.get("VC_WORKER_HOSTS", "").split(",")[0] or context.env.get("MASTER_ADDR")
    )
    if len(servers) > 1 and not master:
        raise UserError(
            "the rank table has no host_ip: set MASTER_ADDR to the first node's address, alike on every node"
        )
    job = context.env.get("MA_VJ_NAME", "")
    # as jobs may share a node
    port = context.number("MASTER_PORT") or 20000 + zlib.crc32(job.encode()) % 12000
    local_rank = list(cards).index(rank)
    world = process(
        "ascend",
        "RANK_TABLE_FILE and RANK_ID count cards",
        rank,
        size,
        local_rank,
        len(cards),
        node_rank,
        master,
        port,
    )
    return dataclasses.replace(world, num_nodes=len(servers), gpus_promised=len(cards))


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: node01 for node[01-03,07],gpu5."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodelist)
    if not match:
        raise UserError(
            f"SLURM_JOB_NODELIST is {nodelist[:80]!r}: the name of a host was expected at its beginning"
        )
    return match[1] + (match[2] or "")


def slurm_tasks_on(tasks_per_node: str, node_rank: int) -> Optional[int]:
    """Return the number of tasks on a node, or None if it is not stated; "2(x3),1": two on nodes 0 to 2,
    one on node 3."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    return counts[node_rank] if node_rank < len(counts) else None


# --- Platforms: one process per node, which starts the workers ----------------------------------------------


def modelarts_arguments(context: LaunchContext) -> Optional[World]:
    """Return the place by --init_method, --rank and --world_size, which ModelArts' images append;
    None if all are missing."""
    args = context.args
    if args.init_method is None and args.rank is None and args.world_size is None:
        return None
    nodes = args.world_size or context.number("MA_NUM_HOSTS", "VC_WORKER_NUM") or 1
    if args.world_size and context.args.nproc_per_node != 1:
        for name in ("MA_NUM_HOSTS", "VC_WORKER_NUM"):
            if context.has(name):
                require_equal("--world_size", args.world_size, name, context.number(name))
    rank = args.rank
    if rank is None:
        if nodes > 1 and not context.has("VC_TASK_INDEX"):
            raise UserError(
                f"--world_size {nodes} without --rank: give each node its number, 0 to {nodes - 1}"
            )
        rank = context.number("VC_TASK_INDEX") if nodes > 1 else 0
    _agree_with_the_environment(context, rank, nodes)
    master, port = init_method(context)
    if nodes > 1 and master is None:
        raise UserError(
            f"--world_size {nodes} without --init_method: give every node tcp://HOST:PORT of node 0"
        )
    rule = "--init_method, --rank and --world_size count nodes"
    return node(context, "modelarts", rule, rank, nodes, master, port, context.number("MA_NUM_GPUS"))


def _agree_with_the_environment(context: LaunchContext, rank: int, nodes: int) -> None:
    """Raise UserError if WORLD_SIZE, in nodes or processes, contradicts the arguments,
    or RANK does while it counts nodes."""
    if not context.has("RANK", "WORLD_SIZE"):
        return
    size = context.number("WORLD_SIZE")
    if size not in (
        nodes * (context.number("NPROC_PER_NODE") or context.gpus),
        nodes * (context.args.nproc_per_node or 1),
    ):
        require_equal("--world_size", nodes, "WORLD_SIZE", size)
    if size == nodes:
        require_equal("--rank", rank, "RANK", context.number("RANK"))


def init_method(context: LaunchContext) -> tuple[Optional[str], int]:
    """Return (host, port) of --init_method, else of MASTER_ADDR and MASTER_PORT;
    None and 0 for what is not set."""
    url = context.args.init_method
    if url in (None, "env://"):
        return context.env.get("MASTER_ADDR"), context.number("MASTER_PORT")
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})/?", url)
    if not match or not 0 < int(match.group(2)) < 65536:
        shown = one_line(url)[:200]
        raise UserError(
            f"--init_method is {shown!r}; give it the form tcp://HOST:PORT, with an IPv6 address in brackets"
        )
    return match.group(1).strip("[]"), int(match.group(2))


def modelarts_environment(context: LaunchContext) -> Optional[World]:
    """Return the place by MA_NUM_HOSTS and VC_TASK_INDEX, which ModelArts' own images have;
    None without the first."""
    nodes = context.number("MA_NUM_HOSTS")
    if not nodes:
        return None
    rank = context.number("RANK_AFTER_ACC", "VC_TASK_INDEX") if nodes > 1 else 0  # meaningless on one node
    master = context.env.get("VC_WORKER_HOSTS", "").split(",")[0] or context.env.get("MASTER_ADDR")
    port = context.number("MASTER_PORT") or MODELARTS_PORT
    return node(
        context,
        "modelarts",
        "MA_NUM_HOSTS and VC_TASK_INDEX",
        rank,
        nodes,
        master,
        port,
        context.number("MA_NUM_GPUS"),
    )


def kubeflow(context: LaunchContext) -> Optional[World]:
    """Return the place of a Kubeflow pod by PET_NNODES and PET_NODE_RANK or RANK, which count pods;
    None without PET_NNODES."""
    if not context.has("PET_NNODES"):
        return None
    low, _, high = context.env["PET_NNODES"].partition(":")
    if not low.isdigit() or high not in ("", low):
        raise UserError(
            f"PET_NNODES is {context.env['PET_NNODES'][:80]!r}, an elastic job: start it with torchrun, "
            "which settles the number"
        )
    rank = context.number("PET_NODE_RANK", "RANK")
    if context.has("RANK"):
        require_equal("RANK", context.number("RANK"), "PET_NODE_RANK", rank)
    workers = context.env.get("PET_NPROC_PER_NODE", "")
    if workers.isdigit():
        context.env.setdefault("NPROC_PER_NODE", workers)
    master = context.env.get("PET_MASTER_ADDR")
    port = context.number("PET_MASTER_PORT")
    return node(context, "kubeflow", "PET_NNODES and PET_NODE_RANK", rank, int(low), master, port)


def volcengine(context: LaunchContext) -> Optional[World]:
    """Return the place by Volcengine's MLP_WORKER_NUM and MLP_ROLE_INDEX; None without the first."""
    nodes = context.number("MLP_WORKER_NUM")
    rank = context.number("MLP_ROLE_INDEX")
    if not nodes:
        return None
    master = context.env.get("MLP_WORKER_0_HOST")
    port = context.number("MLP_WORKER_0_PORT")
    promised = context.number("MLP_WORKER_GPU")
    return node(
        context, "volcengine", "MLP_WORKER_NUM and MLP_ROLE_INDEX", rank, nodes, master, port, promised
    )


def sagemaker(context: LaunchContext) -> Optional[World]:
    """Return the place of a SageMaker host, or None.

    Its rank is its position in SM_HOSTS, else SM_CURRENT_HOST_RANK.
    """
    first_host = None
    if context.has("SM_HOSTS"):
        hosts = context.json("SM_HOSTS")
        current = context.env.get("SM_CURRENT_HOST")
        if current not in hosts:
            raise UserError(f"SM_CURRENT_HOST is {current!r}, which is not in SM_HOSTS {hosts}")
        rank = hosts.index(current)
        nodes = len(hosts)
        first_host = hosts[0]
    elif context.has("SM_HOST_COUNT"):
        rank = context.number("SM_CURRENT_HOST_RANK")
        nodes = context.number("SM_HOST_COUNT")
    else:
        return None
    master = context.env.get("SM_MASTER_ADDR") or first_host or context.env.get("MASTER_ADDR")
    port = context.number("SM_MASTER_PORT", "MASTER_PORT") or 7777
    return node(
        context,
        "sagemaker",
        "SM_HOSTS and SM_CURRENT_HOST",
        rank,
        nodes,
        master,
        port,
        context.number("SM_NUM_GPUS"),
    )


def vertex(context: LaunchContext) -> Optional[World]:
    """Return the place by Vertex AI's CLUSTER_SPEC, or None.

    Its workerpool0 holds the first node, workerpool1 the others.
    """
    if not context.has("CLUSTER_SPEC"):
        return None
    spec = context.json("CLUSTER_SPEC")
    cluster = spec.get("cluster", {})
    task = spec.get("task", {})
    primary = cluster.get("workerpool0", [])
    workers = cluster.get("workerpool1", [])
    if task.get("type") not in (None, "workerpool0", "workerpool1"):
        raise UserError(
            f"CLUSTER_SPEC says that this replica is {task['type']!r}: run the job in workerpool0 and "
            "workerpool1"
        )
    rank = int(task.get("index", 0)) + (len(primary) if task.get("type") == "workerpool1" else 0)
    if context.has("RANK"):
        require_equal("RANK", context.number("RANK"), "CLUSTER_SPEC's node", rank)
    host, _, port = primary[0].rpartition(":") if primary else (None, None, 0)
    master = context.env.get("MASTER_ADDR") or host
    port = context.number("MASTER_PORT") or int(port)
    return node(context, "vertex", "CLUSTER_SPEC", rank, max(1, len(primary) + len(workers)), master, port)


def bare_rank(context: LaunchContext) -> Optional[World]:
    """Return the place by RANK and WORLD_SIZE, which count nodes on PAI-DLC, Baidu AIHC and Volcano;
    None if one is missing."""
    if not context.has("RANK", "WORLD_SIZE"):
        return None
    marks = {"AIHC_JOB_NAME": "baidu-aihc", "NPROC_PER_NODE": "pai-dlc", "VC_TASK_INDEX": "volcano"}
    platform = next((name for mark, name in marks.items() if context.has(mark)), "rank-per-node")
    rule = "RANK and WORLD_SIZE without LOCAL_RANK count nodes"
    return node(
        context,
        platform,
        rule,
        context.number("RANK"),
        context.number("WORLD_SIZE"),
        context.env.get("MASTER_ADDR"),
    )


def kubernetes(context: LaunchContext) -> Optional[World]:
    """Return the place of an indexed Job's pod by JOB_COMPLETION_INDEX and WORLD_SIZE, which counts pods;
    None without both."""
    if not context.has("JOB_COMPLETION_INDEX", "WORLD_SIZE"):
        # the index alone may number jobs that have nothing in common
        return None
    rule = "JOB_COMPLETION_INDEX and WORLD_SIZE count pods"
    rank = context.number("JOB_COMPLETION_INDEX")
    nodes = context.number("WORLD_SIZE")
    return node(
        context,
        "kubernetes",
        rule,
        rank,
        nodes,
        context.env.get("MASTER_ADDR"),
        context.number("MASTER_PORT"),
    )


def volcano(context: LaunchContext) -> Optional[World]:
    """Return the place of a Volcano pod, or None.

    VC_TASK_INDEX counts within one task; with several, the host name decides.
    """
    tasks = {
        name: value.split(",") for name, value in context.env.items() if re.fullmatch(r"VC_\w+_HOSTS", name)
    }
    if not tasks or not context.has("VC_TASK_INDEX"):
        return None
    order = sorted(tasks, key=lambda name: (name != "VC_MASTER_HOSTS", name))
    hosts = [host for name in order for host in tasks[name]]
    if len(tasks) == 1:
        rank = context.number("VC_TASK_INDEX")
    else:
        labels = [host.split(".")[0] for host in hosts]
        label = context.hostname.split(".")[0]
        if label not in labels:
            raise UserError(
                f"this host, {label}, is in none of {', '.join(order)}: VC_TASK_INDEX counts within one "
                "task only"
            )
        rank = labels.index(label)
    return node(context, "volcano", f"VC_TASK_INDEX and {', '.join(order)}", rank, len(hosts), hosts[0])


def plain(context: LaunchContext) -> World:
    """Return the place of the only process, where no other rule has recognised a platform."""
    return node(context, "plain", "no platform was recognised", 0, 1)


RULES = [
    torchrun, openmpi, slurm, ascend, modelarts_arguments, modelarts_environment, kubeflow, volcengine,
    sagemaker, vertex, bare_rank, kubernetes, volcano, plain,
]  # fmt: skip
