"""The environment of one node as each launcher sets it, from its documentation: node 1 of 3 where the launcher numbers nodes.

To add a launcher, add one entry. `expected`: the rank and the number of nodes that a node takes from it; None: it must be refused, and
`says` is part of the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchedNode:
    environ: Mapping[str, str]
    expected: tuple[int, int | None] | None
    says: str = ""


#: What sbatch sets for the script, on the first node of the allocation.
SBATCH = {
    **{"SLURM_JOB_ID": "71", "SLURM_NNODES": "3", "SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "0"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "n[1-3]"},
}
SRUN = {
    **SBATCH,
    **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3"},
    **{"SLURM_NODEID": "1", "SLURM_PROCID": "1", "PMI_RANK": "1", "PMI_SIZE": "3"},
}
#: LSF sets these for the job's script and for each task of blaunch.
LSF = {
    **{"LSB_JOBID": "8842", "LSB_DJOB_NUMPROC": "3", "LSB_HOSTS": "h1 h2 h3"},
    **{"LSB_MCPU_HOSTS": "h1 1 h2 1 h3 1", "LSB_DJOB_HOSTFILE": "/nowhere/8842.hostfile"},
}
TORQUE = {"PBS_JOBID": "9.head", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NUM_NODES": "3", "PBS_NUM_PPN": "8"}
SAGEMAKER = {
    **{"SM_HOSTS": '["algo-1", "algo-2", "algo-3"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"},
    **{"SM_NETWORK_INTERFACE_NAME": "eth0", "SM_MASTER_ADDR": "algo-1", "SM_MASTER_PORT": "7777"},
}
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_WORKER_HOSTS": "w-0.w,w-1.w,w-2.w",
    "VC_WORKER_NUM": "3",
}

LAUNCHED = {
    "slurm_with_srun": LaunchedNode(SRUN, (1, 3)),
    "slurm_without_srun": LaunchedNode(SBATCH, (0, 3)),
    "slurm_several_tasks_a_node": LaunchedNode({**SRUN, "SLURM_LOCALID": "2"}, None, "SLURM_LOCALID 2"),
    "torque_pbsdsh": LaunchedNode({**TORQUE, "PBS_NODENUM": "1", "PBS_VNODENUM": "8"}, (1, 3)),
    "pbs_pro_without_its_file": LaunchedNode(
        {"PBS_JOBID": "9", "PBS_NODENUM": "1", "PBS_TASKNUM": "4", "PBS_NODEFILE": "/nowhere/9"},
        None,
        "PBS_NODENUM=1 sets this node's rank, but the number of nodes is unknown",
    ),
    "lsf_blaunch": LaunchedNode({**LSF, "LSF_PM_TASKID": "2"}, (1, 3)),
    "lsf_without_blaunch": LaunchedNode(LSF, None, "LSF_PM_TASKID is not set"),
    "kubeflow_pytorchjob": LaunchedNode(
        {
            **{"MASTER_ADDR": "j-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "24", "RANK": "1"},
            **{"PET_NNODES": "3", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"},
            **{"PET_MASTER_ADDR": "j-master-0", "PET_MASTER_PORT": "23456"},
        },
        (1, 3),
    ),
    "kubeflow_elastic": LaunchedNode(
        {
            **{"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "8", "PET_MAX_RESTARTS": "3"},
            **{"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "j-worker-0:23456"},
        },
        None,
        "PET_NNODES=2:3: a launcher started several processes, but PET_NODE_RANK is not set",
    ),
    "kubeflow_trainer_v2": LaunchedNode(
        {
            **{
                "PET_NNODES": "3",
                "PET_NPROC_PER_NODE": "8",
                "PET_NODE_RANK": "1",
                "JOB_COMPLETION_INDEX": "1",
            },
            **{"PET_MASTER_ADDR": "t-node-0-0.t", "PET_MASTER_PORT": "29400"},
        },
        (1, 3),
    ),
    "leader_worker_set": LaunchedNode(
        {"LWS_LEADER_ADDRESS": "l-0.l", "LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "1"}, (1, 3)
    ),
    "volcano_one_task": LaunchedNode(VOLCANO, (1, 3)),
    "volcano_two_tasks": LaunchedNode(
        {**VOLCANO, "VC_MASTER_NUM": "1", "VC_MASTER_HOSTS": "m-0.m"},
        None,
        "VC_MASTER_NUM=1 and VC_WORKER_NUM=3: this job has several tasks",
    ),
    "volcano_pytorch_plugin": LaunchedNode(
        {
            **{**VOLCANO, "VC_MASTER_NUM": "1", "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "0"},
            **{"MASTER_ADDR": "m-0.m", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "1"},
        },
        (1, 3),
    ),
    "kubernetes_indexed_job": LaunchedNode(
        {"JOB_COMPLETION_INDEX": "1"}, None, "the number of nodes is unknown; give --num-nodes"
    ),
    "skypilot": LaunchedNode(
        {
            **{"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
            **{"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3", "SKYPILOT_TASK_ID": "sky-1"},
        },
        (1, 3),
    ),
    "dstack": LaunchedNode(
        {
            **{"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "3", "DSTACK_GPUS_PER_NODE": "8"},
            **{"DSTACK_MASTER_NODE_IP": "10.0.0.1", "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"},
        },
        (1, 3),
    ),
    "sagemaker": LaunchedNode(SAGEMAKER, (1, 3)),
    "sagemaker_v3": LaunchedNode({**SAGEMAKER, "SM_HOST_COUNT": "3", "SM_CURRENT_HOST_RANK": "1"}, (1, 3)),
    "open_mpi": LaunchedNode(
        {
            **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            **{"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_NODE_RANK": "0"},
        },
        (1, 3),
    ),
    "open_mpi_under_pbs": LaunchedNode(
        {
            **{**TORQUE, "PBS_NODENUM": "0", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"},
            **{"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        },
        (1, 3),
    ),
    "mpich": LaunchedNode(
        {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, (1, 3)
    ),
    "mpich_several_a_node": LaunchedNode(
        {"PMI_RANK": "1", "PMI_SIZE": "24", "MPI_LOCALNRANKS": "8", "MPI_LOCALRANKID": "1"},
        None,
        "PMI_SIZE=24: a launcher started several processes, but PMI_RANK=1 counts processes here",
    ),
    "torchrun": LaunchedNode(
        {
            **{"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"},
            **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"},
        },
        (1, 3),
    ),
}
