"""Layouts, settings and models of the PPO steps that tests compare with the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.support.harness import run_worker
from tests.support.models import EXPERTS, VOCAB, write_model
from tests.support.oracle import Settings

SAMPLES, LAYERS = 12, 4
NO_EXPERT = 255
ENGINE = -1.0
"""Log-probability of every token in the engine, unless a sample defines another value."""
TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5
ORACLE = Settings(
    temperature=0.8,
    gamma=0.98,
    lam=0.9,
    kl_reward_coef=0.05,
    kl_loss_coef=0.1,
    clip_low=0.1,
    clip_high=0.15,
    dual_clip=1.5,
    value_clip=0.05,
    entropy_coef=0.02,
    aggregation="token-mean",
    clip_grad_norm=0.5,
    actor_lr=2e-3,
    critic_lr=3e-3,
    weight_decay=0.1,
    # With the usual 1e-8, the first step of Adam is the sign of the gradient, even if the gradient is only rounding
    # noise.
    adam_eps=1e-3,
)
PARTS = ["recompute=selective", "recompute_modules=[core_attn, mlp]"]
CP2 = ["actor.layout.context_parallel=2", "critic.layout.context_parallel=2"]
OFFLOAD = [f"{role}.offload=true" for role in ("actor", "critic", "reference")]
SHARDED = [f"{role}.optimizer.distributed=true" for role in ("actor", "critic")]
# Optimizers partly on the host, completely on the host, and with delayed all-gathers of Megatron.
TP2 = [f"{r}.layout.{x}" for r in ("actor", "critic") for x in ("tensor_parallel=2", "sequence_parallel=false")]
OFFLOADED = {
    "tp2-offload": [*TP2, *OFFLOAD],
    "dp2-distributed": SHARDED,
    "dp2-distributed-offload": [*SHARDED, *OFFLOAD],
}
TWO_PROCESSES: dict[str, list[str]] = {
    "tp2": TP2,
    "pp2": ["actor.layout.pipeline_parallel=2", "critic.layout.pipeline_parallel=2"],
    "dp2": ["actor.optimizer.distributed=false", "critic.optimizer.distributed=false"],
    "mixed": ["actor.layout.tensor_parallel=2", "critic.layout.pipeline_parallel=2"],
    "apart": ["actor.layout.ranks=1", "critic.layout.first_rank=1"],
    "critic-on-one": ["critic.layout.ranks=1"],
    "sp2": ["actor.layout.tensor_parallel=2", "critic.layout.tensor_parallel=2"],
    "vpp2": ["actor.layout.pipeline_parallel=2", "actor.layout.virtual_pipeline_chunks=2",
        "critic.layout.pipeline_parallel=2", "critic.layout.virtual_pipeline_chunks=2"],
    "tp2-one-microbatch": ["actor.layout.tensor_parallel=2", "critic.layout.tensor_parallel=2",
        "actor.microbatch_budget_tokens=4096", "critic.microbatch_budget_tokens=4096"],
    "pp2-recompute-parts": ["actor.layout.pipeline_parallel=2", "actor.layout.deallocate_pipeline_outputs=false",
        "critic.layout.tensor_parallel=2", *(f"{role}.{x}" for role in ("actor", "critic") for x in PARTS)],
    "cp2": CP2,
    **OFFLOADED,
    "dp2-overlap": ["actor.optimizer.overlap_grad_reduce=true", "critic.optimizer.overlap_grad_reduce=true",
        "critic.optimizer.distributed=false"],
}  # fmt: skip
SP2 = TWO_PROCESSES["sp2"]
# Four layers on three stages, and five layers on four chunks.
THREE_PROCESSES = {"pp3-uneven": [f"{role}.layout.pipeline_parallel=3" for role in ("actor", "critic")]}
UNEVEN_CHUNKS = {"vpp2-five": [*TWO_PROCESSES["vpp2"], "critic.layout.pipeline_layers=[1, 1, 2, 1]"]}
FOUR_PROCESSES = {
    "cp4": ["actor.layout.context_parallel=4", "critic.layout.tensor_parallel=2"],
    "vpp2-dp2-overlap": [*TWO_PROCESSES["vpp2"], "critic.layout.virtual_pipeline_chunks=1",
        *(f"{r}.optimizer.{x}=true" for r in ("actor", "critic") for x in ("distributed", "overlap_grad_reduce"))],
}  # fmt: skip
# Models with experts. Expert parallel ranks are inside a tensor parallel group, or span context ranks or data
# replicas. In "replay", samples contain routing for the actor that differs from the choice of its routers.
EP2 = ["actor.layout.expert_parallel=2", "critic.layout.expert_parallel=2"]
BALANCE = {"actor": 0.05, "critic": 0.02}
BALANCED = [f"{role}.router_aux_loss_coef={weight}" for role, weight in BALANCE.items()]
TWO_EXPERTS: dict[str, list[str]] = {
    "ep2-experts": EP2,
    "ep2-mixtral": EP2,
    "sp2-ep2-balanced-glm4_moe": [*SP2, *EP2, *BALANCED],
    "sp2-ep2-balanced-gpt_oss": [*SP2, *EP2, *BALANCED, "critic.recompute=selective"],
    "sp2-ep2-balanced-deepseek_v3": [*SP2, *EP2, *BALANCED],
    "sp2-ep2-balanced-qwen3_next": [*SP2, *EP2, *BALANCED],
    "sp2-balanced-experts": [
        *SP2, "critic.layout.expert_parallel=2", "critic.recompute=full", "actor.optimizer.distributed=true", *BALANCED,
    ],
}  # fmt: skip
FOUR_EXPERTS: dict[str, list[str]] = {
    "sp2-ep4-experts": [*SP2, "actor.layout.expert_parallel=4", "critic.layout.expert_parallel=2"],
    "cp2-sp2-ep4-replay-experts": [*CP2, *SP2, "actor.layout.expert_parallel=4", "critic.layout.expert_parallel=2"],
    "cp2-dp2-ep4-balanced-experts": [
        *CP2, *EP2, "actor.layout.expert_parallel=4", "actor.optimizer.distributed=true", *BALANCED,
    ],
}  # fmt: skip
EIGHT_PROCESSES = {
    "tp2-pp2-cp2": [*CP2, *TWO_PROCESSES["tp2"], *TWO_PROCESSES["pp2"], "actor.optimizer.distributed=true"]
}
# Policy losses outside megappo. The clip range of GSPO is narrow enough that some ratios are clipped.
CISPO = [
    "algorithm.policy_loss=configs/examples/05_own_loss/cispo.py:cispo",
    f"algorithm.policy_loss_options={{high: {ORACLE.clip_high}}}",
]
GSPO_CLIP = 0.01
GSPO = [
    "algorithm.policy_loss=configs/examples/06_sequence_loss/gspo.py:gspo",
    f"algorithm.policy_loss_options={{low: {GSPO_CLIP}, high: {GSPO_CLIP}}}",
    "algorithm.loss_aggregation=seq-mean-token-mean",
]
# Built-in policy losses on different layouts. The other losses differ only in the formula. The
# log-probability of the engine is close to the policy, so tokens are on both sides of the band.
ENGINES_OWN = -5.2
BUILT_IN: dict[str, tuple[dict[str, float], list[str]]] = {
    "dis-tp2": ({"band_low": 0.3, "band_high": 0.5}, ["algorithm.old_logprob=bypass", *TWO_PROCESSES["tp2"]]),
    "gspo-cp2": ({"band_low": GSPO_CLIP, "band_high": GSPO_CLIP}, CP2),
    "sapo-pp2": ({"gate_positive": 4.0, "gate_negative": 8.0}, TWO_PROCESSES["pp2"]),
    "dppo_kl-dp2": ({"band_low": 1e-4, "band_high": 2e-4, "band_cap": 1.2}, []),
    "dppo_tv-cp2": ({"band_low": 1e-5, "band_high": 2e-5, "band_cap": 1.2}, CP2),
    "dppo_tv-mixed": ({"band_low": 1e-5, "band_high": 2e-5}, TWO_PROCESSES["mixed"]),
}
OF_BANDS = {
    name: [f"algorithm.policy_loss={name.split('-')[0]}",
        *(f"algorithm.{key.replace('_', '.', 1)}={value}" for key, value in band.items()), *layout]
    for name, (band, layout) in BUILT_IN.items()
}  # fmt: skip
# Critics with a frozen part: settings, and patterns for the names of parameters in the oracle.
EXPERTS_OF_ALL = "model.layers.*.mlp.experts.*"
FROZEN: dict[str, tuple[str, list[str]]] = {
    "frozen-sp2": (r"self_attn", ["critic.freeze=attention", *SP2]),
    "frozen-dp2-distributed": (r"self_attn|embed_tokens",
        ["critic.freeze=[attention, embeddings]", "critic.recompute=full", *SHARDED, *OFFLOAD]),
    "frozen-pp2": (r"embed_tokens|layers\.0\.mlp",
        ["critic.freeze=[embeddings, 'model.layers.0.mlp.*']", *TWO_PROCESSES["pp2"]]),
    "frozen-cp2-ep2-experts": (r"mlp\.experts", [f"critic.freeze=['{EXPERTS_OF_ALL}']", *CP2, *EP2]),
}  # fmt: skip
# Models with logit caps, norms after layers, and several kinds of layers.
GEMMA = {
    "sp2-recompute-gemma2": [*SP2, *(f"{r}.recompute=full" for r in ("actor", "critic"))],
    "pp2-gemma3_text": TWO_PROCESSES["pp2"],
    "tp2-gemma4_text": TWO_PROCESSES["tp2"],
}
# Estimators without a critic. Advantages are comparisons of the samples of a prompt, or returns.
GROUP = 4
WITHOUT_CRITIC = {
    f"{estimator}-{layout}": [f"algorithm.estimator={estimator}", "critic=null", f"rollout.samples_per_prompt={GROUP}",
        f"rollout.prompts_per_step={SAMPLES // GROUP}",
        *(setting for setting in TWO_PROCESSES[layout] if setting.startswith("actor"))]
    for estimator, layout in (("grpo", "tp2"), ("rloo", "pp2"), ("reinforce_plus_plus", "dp2"))
}  # fmt: skip
OF_USERS = {f"{name}-tp2": [*loss, *TWO_PROCESSES["tp2"]] for name, loss in (("cispo", CISPO), ("gspo", GSPO))}
ONE_PROCESS: dict[str, list[str]] = {"one": [], "one-tied": [], "one-experts": []}
# The first update of a step. With several updates, the learning rate is near zero.
FIRST_UPDATE = {
    "same-packs-tp2": [*TWO_PROCESSES["tp2"], "actor.epochs=1", "actor.minibatch_sequences=12"],
    "same-packs-pp2": [*TWO_PROCESSES["pp2"], "actor.epochs=1", "actor.minibatch_sequences=12"],
    "other-packs-tp2": [*TWO_PROCESSES["tp2"], "actor.epochs=1", "actor.optimizer.learning_rate=1e-30"],
    "other-packs-dp2": ["actor.epochs=1", "actor.optimizer.learning_rate=1e-30"],
}
# The score of one sample is infinite, so every loss is infinite.
NON_FINITE = {
    "nonfinite-skip": [*TWO_PROCESSES["mixed"], "algorithm.on_nonfinite=skip"],
    "nonfinite-stop": TWO_PROCESSES["mixed"],
}
TWICE = ("one", "tp2", "tp2-offload", "pp2", "dppo_kl-dp2", *NON_FINITE)
"""Scenarios with two epochs."""
ONCE = [f"{role}.epochs=1" for role in ("actor", "critic")]
"""One epoch with two updates of each role; the second update is off-policy."""
# Errors of bfloat16 rounding exceed the differences between layouts by far.
ON_HOST_ROUNDED = ["model.dtype=bfloat16", *(f"{r}.optimizer.on_host=0.5" for r in ("actor", "critic")), *OFFLOAD]
ROUNDED = {"one-bfloat16": ["model.dtype=bfloat16"], "cp2-bfloat16": [*CP2, "model.dtype=bfloat16"]}
WITH_ORACLE = {
    1: ONE_PROCESS,
    2: {
        **TWO_PROCESSES, **UNEVEN_CHUNKS, "pp2-tied": TWO_PROCESSES["pp2"], **TWO_EXPERTS, **GEMMA, **OF_USERS,
        **OF_BANDS, **WITHOUT_CRITIC, **{name: overrides for name, (_, overrides) in FROZEN.items()},
    },
    3: THREE_PROCESSES,
    4: {**FOUR_PROCESSES, **FOUR_EXPERTS},
    8: EIGHT_PROCESSES,
}  # fmt: skip
SCENARIOS = {
    **WITH_ORACLE,
    2: {**WITH_ORACLE[2], **FIRST_UPDATE, **NON_FINITE, **ROUNDED, "one-bfloat16-on-host": ON_HOST_ROUNDED},
}
LARGE = (
    "cispo-tp2", "gspo-tp2",
    "cp2-sp2-ep4-replay-experts", "cp2-dp2-ep4-balanced-experts", "sp2-ep2-balanced-qwen3_next",
    "sp2-ep2-balanced-gpt_oss", "sp2-ep2-balanced-glm4_moe", "cp4", "sp2-balanced-experts",
    "one-tied", "pp2-tied", "sp2", "cp2", "vpp2", "vpp2-dp2-overlap",
    "tp2-pp2-cp2", "sp2-ep4-experts", "ep2-experts", "dp2-distributed-offload", "dp2-overlap", "tp2-offload",
    "gspo-cp2", "pp2-recompute-parts",
)  # fmt: skip
"""Scenarios whose axes and features are also covered by other steps, here and in test_conformance.py."""
# The end of the name of a scenario selects the model.
MODELS = {
    "model": "qwen3", "model-tied": "qwen3", "model-experts": "qwen3_moe", "model-five": "qwen3",
    "model-mixtral": "mixtral", "model-glm4_moe": "glm4_moe", "model-gpt_oss": "gpt_oss",
    "model-deepseek_v3": "deepseek_v3", "model-qwen3_next": "qwen3_next", "model-gemma2": "gemma2",
    "model-gemma3_text": "gemma3_text", "model-gemma4_text": "gemma4_text",
}  # fmt: skip


def base_config(folder: Path) -> dict[str, Any]:
    """Return the settings that correspond to ORACLE."""
    o = ORACLE
    role = {"epochs": 2, "minibatch_sequences": 6, "microbatch_budget_tokens": 40}
    optimizer = {"weight_decay": o.weight_decay, "clip_grad_norm": o.clip_grad_norm, "eps": o.adam_eps}
    return {
        "run": {"name": "oracle", "steps": 10, "seed": 5},
        "model": {"path": str(folder), "dtype": "float32", "tokenizer": "configs/models/tiny_arithmetic"},
        "actor": {**role, "optimizer": {**optimizer, "learning_rate": o.actor_lr}},
        "critic": {
            **role, "optimizer": {**optimizer, "learning_rate": o.critic_lr}, "value_clip": o.value_clip,
            "value_head_std": 0.3,
        },
        "reference": {"path": str(reference_of(folder))},
        "data": {
            "train": {"source": "megappo.data.arithmetic:sums", "options": {"max_operand": 3}},
            "apply_chat_template": False, "max_prompt_tokens": 12,
        },
        "rollout": {
            "engine": "transformers", "prompts_per_step": SAMPLES, "max_response_tokens": 20,
            "temperature": o.temperature,
        },
        "reward": {"function": "exact"},
        "algorithm": {
            "gamma": o.gamma, "lam": o.lam, "clip_low": o.clip_low, "clip_high": o.clip_high, "dual_clip": o.dual_clip,
            "entropy_coef": o.entropy_coef, "kl_in_reward": {"kind": "kl", "coef": o.kl_reward_coef},
            "kl_in_loss": {"kind": "low_var_kl", "coef": o.kl_loss_coef}, "mismatch_stop_nats": 1e6,
        },
        "logging": {"tensorboard": False, "console": "quiet"},
    }  # fmt: skip


def random_samples() -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(7)
    samples = []
    for _ in range(SAMPLES):
        prompt, response = (int(torch.randint(low, high, (), generator=g)) for low, high in ((2, 12), (1, 20)))
        # The padding token 0 is excluded, because transformers keeps its embedding at zero and without gradient.
        tokens = torch.randint(1, VOCAB, (prompt + response,), generator=g).tolist()
        samples.append({"tokens": tokens, "response": response, "score": float(torch.randn((), generator=g))})
    return samples


def with_routing(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples with random experts for each token in each layer. Routing is missing for every seventh token
    in layer 1, where the expert indices are invalid, and for other tokens in all layers, where both indices are
    equal."""
    g = torch.Generator().manual_seed(9)
    routed = []
    for sample in samples:
        tokens = len(sample["tokens"]) - 1
        routing = torch.rand(tokens, LAYERS, EXPERTS["num_experts"], generator=g).topk(EXPERTS["num_experts_per_tok"])
        chosen = routing.indices
        chosen[::7, 1], chosen[3::7] = NO_EXPERT, 5
        routed.append({**sample, "routing": chosen.tolist()})
    return routed


def routing_of(sample: dict[str, Any]) -> torch.Tensor | None:
    """Return the routing of a sample in the format of the oracle, with -1 for missing routing."""
    if "routing" not in sample:
        return None
    routing = torch.tensor(sample["routing"])
    return torch.where(routing[..., :1] == routing[..., 1:], -1, routing)


def run_step(folder: Path, ranks: int, samples: Any, overrides: Sequence[str], out: Path) -> dict[str, Any]:
    """Run a step with the model of a folder, and return its results."""
    overrides = [*overrides, f"run.directory={out.with_name('run')}"]
    case = {"config": str(folder.with_suffix(".yaml")), "overrides": overrides, "samples": samples, "out": str(out)}
    return run_worker("ppo_step_worker.py", ranks, case)


class World:
    """Models, configurations, and scenarios that run at their first use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.samples = random_samples()
        self._results: dict[str, dict[str, Any]] = {}

    def folder(self, scenario: str) -> Path:
        """Return the model of a scenario. Its configuration and its reference are in the same folder."""
        name = next(name for name in reversed(MODELS) if scenario.endswith(name.removeprefix("model")))
        folder = self.root / name
        if not folder.exists():
            family = MODELS[name]
            changes = {
                "tie_word_embeddings": name == "model-tied",
                "num_hidden_layers": 5 if name == "model-five" else 4,
            }
            # The reference is close to the actor, because the KL estimator is clamped for tokens that differ by more
            # than three nats.
            write_model(reference_of(folder), family, 11, noise=0.02, **changes)
            folder.with_suffix(".yaml").write_text(yaml.safe_dump(base_config(folder)))
            write_model(folder, family, 11, **changes)
        return folder

    def result(self, scenario: str) -> dict[str, Any]:
        """Return metrics, numbers of samples, and minibatches of the step. `out(scenario)` contains its weights."""
        if scenario not in self._results:
            processes, overrides = next(
                (n, scenarios[scenario]) for n, scenarios in SCENARIOS.items() if scenario in scenarios
            )
            epochs = (
                ()
                if scenario in TWICE
                else [setting for setting in ONCE if "critic=null" not in overrides or "act" in setting]
            )
            spoiled = [{**self.samples[0], "score": math.inf}, *self.samples[1:]]
            samples = spoiled if scenario in NON_FINITE else self.samples_of(scenario)
            own = (*overrides, *epochs)
            self._results[scenario] = run_step(self.folder(scenario), processes, samples, own, self.out(scenario))
        return self._results[scenario]

    def samples_of(self, scenario: str) -> list[dict[str, Any]]:
        """Return the samples of the step."""
        if scenario == "dis-tp2":
            return [{**sample, "engine": ENGINES_OWN} for sample in self.samples]
        if scenario in WITHOUT_CRITIC:
            return [{**sample, "group": i // GROUP} for i, sample in enumerate(self.samples)]
        return with_routing(self.samples) if "replay" in scenario else self.samples

    def ran(self, scenario: str) -> str:
        """Run the scenario and return its name."""
        self.result(scenario)
        return scenario

    def out(self, scenario: str) -> Path:
        """Return the folder of the weights after the step: actor.safetensors and critic.safetensors."""
        return self.root / scenario / "out"


def reference_of(folder: Path) -> Path:
    return folder.with_name(folder.name + "-ref")
