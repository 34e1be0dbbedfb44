"""Arguments and environment variables of SGLang that a configuration must not set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megappo.config.sections.engine import ServerSettings

OWNED: dict[str, tuple[str, ...]] = {
    "model.path": ("model-path", "model"),
    "model.dtype": ("dtype",),
    "model.trust_remote_code": ("trust-remote-code",),
    "rollout.servers.tensor_parallel": ("tensor-parallel-size", "tp-size", "tp"),
    "rollout.servers.expert_parallel": ("expert-parallel-size", "ep-size", "ep"),
    "rollout.servers.data_parallel_attention": (
        "data-parallel-size", "dp-size", "dp", "attention-data-parallel-size", "attn-dp-size", "enable-dp-attention",
        "enable-dp-lm-head",
    ),
    "rollout.servers.nodes": ("nnodes", "node-rank", "dist-init-addr", "nccl-init-addr"),
    "rollout.servers.first_device": ("base-gpu-id", "gpu-id-step"),
    "rollout.servers.memory_fraction": ("mem-fraction-static",),
    "rollout.servers.max_total_tokens": ("max-total-tokens",),
    "rollout.servers.host": ("host",),
    "rollout.servers.deterministic": ("enable-deterministic-inference",),
    "rollout.servers.sleep": ("enable-memory-saver",),
    "algorithm.router_replay": ("enable-return-routed-experts",),
    "run.seed": ("random-seed",),
    "runtime.device": ("device",),
}  # fmt: skip
"""Options of SGLang's command line that follow from a setting (key), with the abbreviations of argparse."""
REFUSED: dict[tuple[str, ...], str] = {
    ("pipeline-parallel-size", "pp-size", "pp"): "and a server in pipeline stages cannot be sent the actor's weights",
    ("attention-context-parallel-size", "attn-cp-size", "enable-prefill-cp"):
        "and a server with context parallelism has never been compared with the trainer",
    ("load-format", "custom-weight-loader"): "but a run sends its servers the actor's weights",
    ("quantization",): "but the actor's weights are sent unchanged and compared",
    ("enable-lora", "lora-paths"): "but a run sends its servers merged weights",
    ("moe-a2a-backend", "enable-eplb", "init-expert-location", "ep-num-redundant-experts"):
        "but the location of experts must be known to compare their weights",
    ("enable-watermark", "watermark-config"): "and a watermark changes the distribution that tokens are sampled from",
    ("speculative-accept-threshold-single", "speculative-accept-threshold-acc"):
        "and a threshold accepts drafts that the model would not have sampled",
    ("dllm-algorithm", "dllm-algorithm-config"): "and a diffusion model has no log-probability of each token",
    ("allow-auto-truncate",): "which shortens prompts and responses without an error",
    ("context-length",): "which follows from the model, and a shorter one cuts responses without an error",
    ("json-model-override-args", "skip-tokenizer-init", "skip-server-warmup", "extra-metric-labels", "port", "api-key",
     "admin-api-key", "config", "disaggregation-mode"): "which a run decides for its own servers",
}  # fmt: skip
"""Options that are not supported on servers of a run, and the reason."""
_DOORS = ("host", "port", "api-key", "admin-api-key", "config", "model-path", "model", "extra-metric-labels")
"""Options that the run sets for a judge's server. The user may set all other options."""
OWNED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "rollout.servers.first_device",
    "OMP_NUM_THREADS": "rollout.servers.threads",
    "SGLANG_HEALTH_CHECK_TIMEOUT": "rollout.servers.health_timeout_seconds",
}
"""Variables that follow from a setting (value)."""
_REFUSED_VARIABLES = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probabilities would differ from those of the sampling distribution",
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "responses would be shorter than rollout.max_response_tokens without a warning",
    "SGLANG_SIMULATE_ACC_LEN": "drafts would be accepted that the model would not have sampled",
    "TRITON_INTERPRET": "kernels would be interpreted",
} | dict.fromkeys(
    ("PYTHONPATH", "TMPDIR", "SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
     "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE",
     "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "SYNC_TOKEN_IDS_ACROSS_TP", "RANK",
     "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "a run decides it for its own servers",
)  # fmt: skip


def option(name: str) -> str:
    """Format an argument's name as on SGLang's command line. `pp_size` and `--pp-size` become `pp-size`."""
    return name.strip().lstrip("-").replace("_", "-")


def own_word_rules(arguments: Iterable[str], where: str) -> Iterator[str]:
    """Check arguments of a judge's server. The arguments must not change the files of the server, and
    must not make the server accessible to other users."""
    for argument in sorted(arguments):
        if option(argument) in _DOORS:
            yield f"{where} has {argument}, which a run decides for its own servers; remove it"


def word_rules(servers: ServerSettings) -> Iterator[str]:
    """Check that SGLang's arguments and variables do not contradict the settings."""
    settings = {name: key for key, names in OWNED.items() for name in names}
    reasons = {name: reason for names, reason in REFUSED.items() for name in names}
    for argument in sorted(servers.arguments):
        name = option(argument)
        if name in settings:
            key = settings[name]
            yield f"rollout.servers.arguments has {argument}, which follows from {key}; remove it, and set that"
        elif name in reasons:
            yield f"rollout.servers.arguments has {argument}, {reasons[name]}; remove it"
    for name in sorted(servers.environment):
        if not name.isidentifier() or not name.isascii():
            yield f"rollout.servers.environment has '{name}', which is no name of a variable; correct the name"
        elif name in OWNED_VARIABLES:
            key = OWNED_VARIABLES[name]
            yield f"rollout.servers.environment has {name}, which follows from {key}; remove it, and set that"
        elif name in _REFUSED_VARIABLES:
            yield f"rollout.servers.environment has {name}, but {_REFUSED_VARIABLES[name]}; remove it"
    if servers.urls and servers.environment:
        yield "rollout.servers.environment is for servers of the run, but urls name external servers; remove it"
