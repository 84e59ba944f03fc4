"""The command line and environment of the local vLLM server. Pure: all inputs are parameters.

The CPU-specific values were measured; the comments give the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.engine.answer_format import NO_CHOICE, Parsers
from fsbarrier.engine.model import ModelFolder, sees, within_positions
from fsbarrier.engine.span import Meeting
from fsbarrier.network.this_host import VARIABLES, interface_of
from fsbarrier.processes.supervisor import with_this_package
from fsbarrier.settings.engine_checks import MAX_RANK
from fsbarrier.settings.sections import ServerSettings
from fsbarrier.store.reading import MIB

HOST = "127.0.0.1"
# The largest ranks of adapters that vLLM can be started for.
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_RANK)
# The policy's served name, constant across policy versions unless each has its adapters.
SERVED_NAME = "policy"
# How many versions' adapters a server has: the newest, and the one before, which running requests may name.
MOST_ADAPTERS = 2
# On a CPU, use one more thread per this many parameters.
PARAMETERS_PER_THREAD = 10_000_000
# KV cache on a CPU: minimum size, number of full-length sequences, and maximum share of memory (1/N).
CPU_CACHE_MIN = 64 * MIB
CPU_CACHE_SEQUENCES = 16
CPU_CACHE_SHARE = 8

# Variables that may be set for other programs and would confuse vLLM. Kubernetes sets VLLM_PORT to a URL for a service named
# vllm; an empty VLLM_CPU_KVCACHE_SPACE makes the start fail.
_FOREIGN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("VLLM_PORT", "VLLM_CPU_KVCACHE_SPACE"),
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version's adapters in a folder, and the name under which the server serves them. Each version has a name of its own, since the
    server caches by names."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The start parameters of one server."""

    python: str
    model: ModelFolder
    settings: ServerSettings
    # The socket it listens on. The sockets between its processes are in the same folder.
    socket: str
    seed: int
    accelerated: bool
    sleeps: bool
    # The machine's memory; 0: unknown.
    memory_bytes: int = 0
    # Maximum number of compute threads on a CPU.
    threads: int = 1
    served_name: str = SERVED_NAME
    # vLLM's own parsers that the server needs.
    parsers: Parsers = NO_CHOICE
    # The rank of adapters that the server loads beside the model; 0: none.
    adapter_rank: int = 0
    # Where the server meets its parts on other nodes; None: it has none.
    meeting: Meeting | None = None

    @property
    def group(self) -> str:
        """The prefix of its settings' names."""
        return "engine" if self.served_name == SERVED_NAME else f"engines.{self.served_name}"


def max_model_len(plan: ServerPlan) -> int:
    """The maximum sequence length: as configured, limited by the model."""
    return within_positions(plan.settings.max_model_len, plan.model.max_positions)


def cpu_cache_bytes(plan: ServerPlan) -> int:
    """The default KV cache on a CPU: enough for some full sequences, limited to a small part of the memory."""
    wanted = CPU_CACHE_SEQUENCES * max_model_len(plan) * plan.model.cache_bytes_per_token
    limit = plan.memory_bytes // CPU_CACHE_SHARE if plan.memory_bytes else wanted
    return max(CPU_CACHE_MIN, min(wanted, limit))


def cpu_threads(plan: ServerPlan) -> int:
    """Compute threads on a CPU. Threads that a small model cannot use only spin: with two threads on two cores the demo
    model was 2 to 8 times slower than with one."""
    return min(plan.threads, useful_threads(plan.model) or plan.threads)


def useful_threads(model: ModelFolder) -> int:
    """The number of threads a model can use; 0: unknown."""
    return max(1, model.parameters // PARAMETERS_PER_THREAD) if model.parameters else 0


def argv(plan: ServerPlan) -> list[str]:
    """The server's command line. It does not contain the key, because other users can see a process's arguments."""
    settings = plan.settings
    automatic = "bfloat16" if plan.accelerated else "float32"
    dtype = automatic if settings.dtype == "auto" else settings.dtype
    words = [
        *(plan.python, "-m", "fsbarrier.workers.vllm_server"),
        *("--model", str(plan.model.path), "--served-model-name", plan.served_name),
        # In a private folder, so that other users can neither impersonate the server nor connect to it.
        *("--uds", plan.socket),
        *("--middleware", "fsbarrier.workers.vllm_server.KeyGuard"),
        *("--dtype", dtype, "--max-model-len", str(max_model_len(plan))),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        # A different seed at each start: with vLLM's default seed all nodes would sample with the same noise.
        *("--seed", str(plan.seed)),
        # Ignore the model's generation_config.json, which would override the run's sampling settings.
        *("--generation-config", "vllm"),
        # Log-probabilities of the sampled distribution, after temperature, as the trainer expects.
        *("--logprobs-mode", "processed_logprobs"),
        *("--disable-uvicorn-access-log", "--disable-fastapi-docs", "--no-log-error-stack"),
        # Tokens in, tokens out, with images, and with the policy version of each token.
        "--enable-scale-out",
    ]
    if plan.parsers.tools:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", plan.parsers.tools]
    if plan.parsers.reasoning:
        words += ["--reasoning-parser", plan.parsers.reasoning]
    if sees(plan.model.config):
        # Reserve no memory for videos.
        words += ["--limit-mm-per-prompt", '{"video": 0}']
    if plan.meeting is not None:
        words += ["--nnodes", str(plan.meeting.nodes), "--node-rank", str(plan.meeting.place)]
        words += ["--master-addr", plan.meeting.address, "--master-port", str(plan.meeting.port)]
        # Use no Ray. Only the head has an API server.
        words += ["--distributed-executor-backend", "mp", *(["--headless"] if plan.meeting.place else [])]
    if plan.adapter_rank:
        largest = next(rank for rank in ADAPTER_RANKS if rank >= plan.adapter_rank)
        words += ["--enable-lora", "--max-loras", str(MOST_ADAPTERS), "--max-lora-rank", str(largest)]
    if plan.sleeps:
        words += ["--enable-sleep-mode"]
    if plan.accelerated:
        words += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    else:
        words += ["--enforce-eager"]
        if settings.tensor_parallel_size == 1:
            words += ["--distributed-executor-backend", "uni"]
        words += ["--kv-cache-memory-bytes", str(cpu_cache_bytes(plan))]
    return [*words, *settings.extra_args]


def environment(plan: ServerPlan, environ: Mapping[str, str], api_key: str) -> dict[str, str]:
    """The server's environment: the daemon's without variables meant for other programs, plus variables that vLLM reads."""
    env = with_this_package({name: value for name, value in environ.items() if name not in _FOREIGN})
    # The server is on this machine and must never be reached through a proxy.
    env["NO_PROXY"] = env["no_proxy"] = ",".join(
        dict.fromkeys(host for host in (env.get("NO_PROXY"), HOST, "localhost") if host)
    )
    env |= {
        "VLLM_API_KEY": api_key,
        # Enables reload_weights and sleep. These endpoints are protected by the private socket and KeyGuard.
        "VLLM_SERVER_DEV_MODE": "1",
        # Keep the communication between its processes on this machine.
        "VLLM_HOST_IP": HOST,
        "VLLM_RPC_BASE_PATH": str(Path(plan.socket).parent),
        # A private temporary folder: files there could be readable by other users, and torch loads compiled code from a predictable path.
        "TMPDIR": str(Path(plan.socket).parent),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if plan.adapter_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if plan.meeting is None:
        # Override the interface that the host's other programs use, because the server may have only a loopback.
        env |= dict.fromkeys(VARIABLES, "lo")
    else:
        env["VLLM_HOST_IP"] = plan.meeting.own_address
        # Otherwise gloo would use the address to which the host's own name resolves.
        if interface := interface_of(plan.meeting.own_address):
            env = dict.fromkeys(VARIABLES, interface) | env
    if not plan.accelerated:
        # Otherwise every server on a machine would bind its threads to the same cores.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Sampling compiles a log-probability function even with --enforce-eager: it costs seconds in the first request, and
        # fails without a C++ compiler.
        env["TORCHDYNAMO_DISABLE"] = "1"
        env.setdefault("OMP_NUM_THREADS", str(cpu_threads(plan)))
        env.setdefault("VLLM_PLUGINS", "")
        if plan.settings.tensor_parallel_size == 1:
            # Run the engine core in the server process: starts in 17 s instead of 25 s on two cores.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return env
