"""One PPO step on special layouts, compared with a one-process oracle in every number and every updated weight.

Combinations of features are in test_conformance.py.

The steps cover epochs, minibatches, microbatches, KL in reward and in loss, dual clip, value clip, entropy, weight
decay, gradient clipping and temperature. Padding is NaN.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.adapters import adapters_of, merged_weights, put_adapters
from tests.support.harness import run_worker
from tests.support.models import EXPERTS, VOCAB, stored_parameters, write_model
from tests.support.oracle import Sample, Settings, ValueModel, changed_routing, ppo_step
from tests.support.places import ROOT
from tests.support.quick import cases

pytestmark = [pytest.mark.slow, pytest.mark.waits]

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
    "vpp2": [
        "actor.layout.pipeline_parallel=2",
        "actor.layout.virtual_pipeline_chunks=2",
        "critic.layout.pipeline_parallel=2",
        "critic.layout.virtual_pipeline_chunks=2",
    ],
    "tp2-one-microbatch": [
        "actor.layout.tensor_parallel=2",
        "critic.layout.tensor_parallel=2",
        "actor.microbatch_budget_tokens=4096",
        "critic.microbatch_budget_tokens=4096",
    ],
    "pp2-recompute-parts": [
        "actor.layout.pipeline_parallel=2",
        "actor.layout.deallocate_pipeline_outputs=false",
        "critic.layout.tensor_parallel=2",
        *(f"{role}.{x}" for role in ("actor", "critic") for x in PARTS),
    ],
    "cp2": CP2,
    **OFFLOADED,
    "dp2-overlap": [
        "actor.optimizer.overlap_grad_reduce=true",
        "critic.optimizer.overlap_grad_reduce=true",
        "critic.optimizer.distributed=false",
    ],
}
SP2 = TWO_PROCESSES["sp2"]
# Four layers on three stages, and five layers on four chunks.
THREE_PROCESSES = {"pp3-uneven": [f"{role}.layout.pipeline_parallel=3" for role in ("actor", "critic")]}
UNEVEN_CHUNKS = {"vpp2-five": [*TWO_PROCESSES["vpp2"], "critic.layout.pipeline_layers=[1, 1, 2, 1]"]}
FOUR_PROCESSES = {
    "cp4": ["actor.layout.context_parallel=4", "critic.layout.tensor_parallel=2"],
    "vpp2-dp2-overlap": [
        *TWO_PROCESSES["vpp2"],
        "critic.layout.virtual_pipeline_chunks=1",
        *(f"{r}.optimizer.{x}=true" for r in ("actor", "critic") for x in ("distributed", "overlap_grad_reduce")),
    ],
}
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
        *SP2,
        "critic.layout.expert_parallel=2",
        "critic.recompute=full",
        "actor.optimizer.distributed=true",
        *BALANCED,
    ],
}
FOUR_EXPERTS: dict[str, list[str]] = {
    "sp2-ep4-experts": [*SP2, "actor.layout.expert_parallel=4", "critic.layout.expert_parallel=2"],
    "cp2-sp2-ep4-replay-experts": [*CP2, *SP2, "actor.layout.expert_parallel=4", "critic.layout.expert_parallel=2"],
    "cp2-dp2-ep4-balanced-experts": [
        *CP2,
        *EP2,
        "actor.layout.expert_parallel=4",
        "actor.optimizer.distributed=true",
        *BALANCED,
    ],
}
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
    "dppo_kl-dp2": ({"band_low": 1e-4, "band_high": 2e-4, "weight_cap": 1.2}, []),
    "dppo_tv-cp2": ({"band_low": 1e-5, "band_high": 2e-5, "weight_cap": 1.2}, CP2),
    "dppo_tv-mixed": ({"band_low": 1e-5, "band_high": 2e-5}, TWO_PROCESSES["mixed"]),
}
_BAND_SETTINGS = {"band_low": "band.low", "band_high": "band.high", "weight_cap": "band.cap"} | {
    f"gate_{sign}": f"gate.{sign}" for sign in ("positive", "negative")
}
OF_BANDS = {
    name: [
        f"algorithm.policy_loss={name.split('-')[0]}",
        *(f"algorithm.{_BAND_SETTINGS[key]}={value}" for key, value in band.items()),
        *layout,
    ]
    for name, (band, layout) in BUILT_IN.items()
}
# Critics with a frozen part: settings, and patterns for the names of parameters in the oracle.
EXPERTS_OF_ALL = "model.layers.*.mlp.experts.*"
FROZEN: dict[str, tuple[str, list[str]]] = {
    "frozen-sp2": (r"self_attn", ["critic.freeze=attention", *SP2]),
    "frozen-dp2-distributed": (
        r"self_attn|embed_tokens",
        ["critic.freeze=[attention, embeddings]", "critic.recompute=full", *SHARDED, *OFFLOAD],
    ),
    "frozen-pp2": (
        r"embed_tokens|layers\.0\.mlp",
        ["critic.freeze=[embeddings, 'model.layers.0.mlp.*']", *TWO_PROCESSES["pp2"]],
    ),
    "frozen-cp2-ep2-experts": (r"mlp\.experts", [f"critic.freeze=['{EXPERTS_OF_ALL}']", *CP2, *EP2]),
}
# Models with logit caps, norms after layers, and several kinds of layers.
GEMMA = {
    "sp2-recompute-gemma2": [*SP2, *(f"{r}.recompute=full" for r in ("actor", "critic"))],
    "pp2-gemma3_text": TWO_PROCESSES["pp2"],
    "tp2-gemma4_text": TWO_PROCESSES["tp2"],
}
# Estimators without a critic. Advantages are comparisons of the samples of a prompt, or returns.
GROUP = 4
WITHOUT_CRITIC = {
    f"{estimator}-{layout}": [
        f"algorithm.estimator={estimator}",
        "critic=null",
        f"rollout.samples_per_prompt={GROUP}",
        f"rollout.prompts_per_step={SAMPLES // GROUP}",
        *(setting for setting in TWO_PROCESSES[layout] if setting.startswith("actor")),
    ]
    for estimator, layout in (("grpo", "tp2"), ("rloo", "pp2"), ("reinforce_plus_plus", "dp2"))
}
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
        **TWO_PROCESSES,
        **UNEVEN_CHUNKS,
        "pp2-tied": TWO_PROCESSES["pp2"],
        **TWO_EXPERTS,
        **GEMMA,
        **OF_USERS,
        **OF_BANDS,
        **WITHOUT_CRITIC,
        **{name: overrides for name, (_, overrides) in FROZEN.items()},
    },
    3: THREE_PROCESSES,
    4: {**FOUR_PROCESSES, **FOUR_EXPERTS},
    8: EIGHT_PROCESSES,
}
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
    "model": "qwen3",
    "model-tied": "qwen3",
    "model-experts": "qwen3_moe",
    "model-five": "qwen3",
    "model-mixtral": "mixtral",
    "model-glm4_moe": "glm4_moe",
    "model-gpt_oss": "gpt_oss",
    "model-deepseek_v3": "deepseek_v3",
    "model-qwen3_next": "qwen3_next",
    "model-gemma2": "gemma2",
    "model-gemma3_text": "gemma3_text",
    "model-gemma4_text": "gemma4_text",
}


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
            case = {
                "config": str(self.folder(scenario).with_suffix(".yaml")),
                "overrides": [*overrides, *epochs, f"run.directory={self.root / scenario / 'run'}"],
                "samples": spoiled if scenario in NON_FINITE else self.samples_of(scenario),
                "out": str(self.out(scenario)),
            }
            self._results[scenario] = run_worker("ppo_step_worker.py", processes, case)
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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("ppo"))


def oracle(world: World, name: str) -> tuple[dict[str, Any], Any, ValueModel | None]:
    """Compute the same step in one process, with the minibatches of the run."""
    settings = copy.copy(ORACLE)
    if "seq-mean" in name or "gspo" in name:
        settings.aggregation = "seq-mean-token-mean"
    if name in OF_USERS:
        settings.policy_loss = name.split("-")[0]
    if name == "gspo-tp2":
        settings.clip_low = settings.clip_high = GSPO_CLIP
    if name in BUILT_IN:
        settings.policy_loss, settings.band = name.split("-")[0], BUILT_IN[name][0]
        settings.is_bypassed, settings.aggregation = name.startswith("dis"), "token-mean"
    if name in WITHOUT_CRITIC:
        settings.estimator = name.rpartition("-")[0]
    if "balanced" in name:
        settings.actor_balance, settings.critic_balance = BALANCE["actor"], BALANCE["critic"]
    frozen = FROZEN[name][0] if name in FROZEN else None
    minibatches = world.result(name)["minibatches"]
    return oracle_step(world.folder(name), world.samples_of(name), settings, minibatches, frozen=frozen)


def oracle_step(
    folder: Path,
    step_samples: list[dict[str, Any]],
    settings: Settings,
    minibatches: dict[str, list[list[int]]],
    adapters: Path | None = None,
    *,
    frozen: str | None = None,
) -> tuple[dict[str, Any], Any, ValueModel | None]:
    """Compute the step and return the measured numbers, the actor, and the critic (None if the estimator has no
    critic).

    `adapters` is a folder with the trained parameters of actor and critic. `frozen` is a pattern of parameters of the
    critic that are not trained.
    """
    actor, reference, trunk = (
        AutoModelForCausalLM.from_pretrained(
            p, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
        )
        for p in (folder, reference_of(folder), folder)
    )
    if adapters is not None:
        put_adapters(actor, adapters)
        put_adapters(trunk, adapters)
    head = torch.nn.Linear(32, 1)
    drawn = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)) * 0.3
    head.weight.data.copy_(drawn)
    head.bias.data.zero_()
    critic = ValueModel(trunk, head)
    for name, parameter in critic.trunk.named_parameters():
        if frozen is not None and re.search(frozen, name):
            parameter.requires_grad_(False)
    samples = [
        Sample(
            torch.tensor(s["tokens"]),
            s["response"],
            s["score"],
            s.get("engine", ENGINE),
            routing_of(s),
            s.get("group", 0),
            s.get("turn_rewards"),
        )
        for s in step_samples
    ]
    changed = changed_routing(actor, samples) if any(sample.routing is not None for sample in samples) else None
    of_critic = critic if settings.estimator == "gae" else None
    drawn_for = minibatches["actor"], minibatches.get("critic", [])
    measured = ppo_step(actor, reference, of_critic, samples, settings, *drawn_for)
    return {**measured, "changed": changed}, actor, of_critic


def close(mine: torch.Tensor, truth: torch.Tensor, what: str, path: float = 0.0) -> None:
    error = relative_error(mine, truth, path=path)
    assert error < TOLERANCE, f"{what}: relative error {error:.2e}"


def relative_error(mine: torch.Tensor, truth: torch.Tensor, *, path: float = 0.0) -> float:
    """Return the relative error of the whole tensor. `path` is the total length of the updates, which replaces the
    norm if it is larger. A single number, such as a bias that starts at 0, may return close to its start, but the
    rounding error of each step depends on the size of the step."""
    return float((mine.double() - truth.double()).norm() / truth.double().norm().clamp(min=max(path, 1e-6)))


@pytest.mark.parametrize("name", cases(itertools.chain(*WITH_ORACLE.values()), quick=("tp2", "pp2"), exhaustive=LARGE))
def test_step_equals_the_oracle(world: World, name: str) -> None:
    check_step(world.result(name), world.out(name), world.samples_of(name), *oracle(world, name))


def stored_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights by their names in files, including the head of a value model."""
    if not isinstance(model, ValueModel):
        return dict(stored_parameters(model))
    of_trunk = {f"model.{name}": parameter for name, parameter in stored_parameters(model.trunk)}
    return {**of_trunk, **dict(model.head.named_parameters(prefix="head"))}


def check_step(
    result: dict[str, Any],
    out: Path,
    step_samples: list[dict[str, Any]],
    measured: dict[str, Any],
    actor: Any,
    critic: ValueModel | None,
    *,
    base: Path | None = None,
) -> None:
    """Check that every number and every updated weight of the step equals the oracle. `base` is the model without
    adapters."""
    models = {"actor": actor} | ({} if critic is None else {"critic": critic})
    for key in ("old_logprob", "advantages", *(() if critic is None else ("values", "returns"))):
        mine = torch.cat([torch.tensor(result["samples"][str(i)][key]) for i in range(len(step_samples))])
        close(mine, torch.cat(measured[key]), key)
    check_gauges(result["metrics"], measured)
    for role in models:
        updates = measured[role]
        assert result["metrics"][f"{role}/updates"] == len(updates) > 0
        counts = [u.pop("count") for u in updates]
        for metric in updates[0]:
            truth = sum(u[metric] for u in updates) / len(updates)
            if metric in ("clipfrac", "ppo_kl", "entropy"):  # means over tokens instead of updates
                truth = sum(u[metric] * n for u, n in zip(updates, counts, strict=True)) / sum(counts)
            tolerance, least = (LOSS_TOLERANCE, 0.0) if metric == "loss" else (TOLERANCE, 1e-6)
            # The tolerance is the sum over updates, because losses of several updates may cancel.
            within = max(least, tolerance * sum(abs(u[metric]) for u in updates) / len(updates))
            assert result["metrics"][f"{role}/{metric}"] == pytest.approx(truth, rel=0, abs=within), metric
    if measured["changed"] is not None:
        assert measured["changed"] > 0.5
        assert result["metrics"]["mismatch/router_changed"] == pytest.approx(measured["changed"], rel=1e-9)
    for role, model in models.items():
        trained = load_file(out / f"{role}.safetensors")
        weights = stored_weights(model) if base is None else merged_weights(base, model)
        paths = {name: getattr(p, "path", 0.0) for name, p in model.named_parameters()}
        assert base is None or load_file(out / f"{role}-adapters.safetensors").keys() == adapters_of(model).keys()
        for name, tensor in weights.items():
            mapped = name.replace("trunk.", "model.")
            close(trained[mapped], tensor.detach(), f"{role} {mapped}", paths.get(name, 0.0))
        for name, tensor in adapters_of(model).items() if base is not None else ():
            close(load_file(out / f"{role}-adapters.safetensors")[name], tensor, f"{role} {name}")


def check_gauges(metrics: dict[str, float], measured: dict[str, Any]) -> None:
    """Check the metrics of the critic, which compare the values before the first update with the returns of lambda 1,
    and the spread of the advantages before whitening."""
    raw = float(measured["raw_advantages"].double().std(unbiased=False))
    assert metrics["advantage/std_raw"] == pytest.approx(raw, rel=TOLERANCE)
    if "values" not in measured:
        return
    values, returns = (torch.cat(measured[name]).double() for name in ("values", "returns_to_go"))
    unexplained = float((returns - values).var() / returns.var())
    assert metrics["critic/explained_variance"] == pytest.approx(1 - unexplained, abs=TOLERANCE * max(1, unexplained))
    assert metrics["critic/value_mean"] == pytest.approx(float(values.mean()), abs=TOLERANCE)


def test_context_parallel_bfloat16_is_as_accurate_as_one_rank(world: World) -> None:
    """Samples that are split across context ranks have rounding errors similar to those of whole samples."""
    errors = {}
    for name in ROUNDED:
        result, (measured, actor, _) = world.result(name), oracle(world, name)
        errors_of_key = {}
        for key in ("old_logprob", "values", "advantages"):
            mine = torch.cat([torch.tensor(result["samples"][str(i)][key]) for i in range(SAMPLES)])
            errors_of_key[key] = relative_error(mine, torch.cat(measured[key]))
        trained, exact = load_file(world.out(name) / "actor.safetensors"), dict(stored_parameters(actor))
        errors_of_key["weights"] = relative_error(
            *(torch.cat([tensors[key].detach().flatten() for key in exact]) for tensors in (trained, exact))
        )
        errors[name] = errors_of_key
    whole, shared = errors.values()
    assert all(0 < whole[key] < 0.05 and shared[key] < 1.5 * whole[key] for key in whole), errors


@pytest.mark.parametrize("name", ["tp2", "dp2-distributed"])
def test_offload_is_bitwise_exact(world: World, name: str) -> None:
    results = [world.result(scenario) for scenario in (name, f"{name}-offload")]
    metrics = [
        {key: value for key, value in result["metrics"].items() if not key.startswith(("time/", "memory/"))}
        for result in results
    ]
    assert metrics[0] == metrics[1] and results[0]["samples"] == results[1]["samples"]
    for role in ("actor", "critic"):
        files = [world.out(scenario) / f"{role}.safetensors" for scenario in (name, f"{name}-offload")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_main_weights_on_the_host(world: World) -> None:
    """The model has bfloat16 weights. AdamW is fused on device and host and rounds equally."""
    on_device, on_host = (world.out(world.ran(name)) for name in ("one-bfloat16", "one-bfloat16-on-host"))
    for role in ("actor", "critic"):
        assert (on_device / f"{role}.safetensors").read_bytes() == (on_host / f"{role}.safetensors").read_bytes()


def test_readme_names_existing_scenarios() -> None:
    """The table of the README assigns each layout to its tests."""
    text = (ROOT / "megappo/megatron/README.md").read_text()
    table = text.partition("| layout | cases |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([^`]+)`", table))
    assert len(named) > 15 and named <= {name for of_size in SCENARIOS.values() for name in of_size}


def test_clipping_is_active_in_the_scenarios(world: World) -> None:
    """Clip, dual clip and value clip are active in this scenario, so the comparisons with the oracle cover them."""
    metrics = world.result("one")["metrics"]
    assert metrics["actor/clipfrac"] > 0.05
    assert metrics["actor/clipfrac_lower"] > 0
    assert metrics["critic/clipfrac"] > 0.05
    assert metrics["actor/grad_norm"] > ORACLE.clip_grad_norm
    assert metrics["kl/mean"] != 0


def test_performance_settings_reach_megatron(world: World) -> None:
    """The scenarios use the features in their names."""
    built = world.result("dp2-overlap")["built"]
    assert built["actor"] == {"reduces": True, "gathers": True, "modules": ["core_attn"], "frees": True}
    assert built["critic"] == {"reduces": True, "gathers": False, "modules": ["core_attn"], "frees": True}
    built = world.result("pp2-recompute-parts")["built"]
    assert built["actor"] == {"reduces": False, "gathers": False, "modules": ["core_attn", "mlp"], "frees": False}


@pytest.mark.parametrize("name", ["cispo-tp2", "gspo-tp2"])
def test_losses_of_users_are_clipped(world: World, name: str) -> None:
    """Several microbatches contain several samples each, as in the other scenarios."""
    metrics = world.result(name)["metrics"]
    assert 0.05 < metrics["actor/clipfrac"] < 0.95 and metrics["actor/clipfrac_lower"] == 0
    assert ("actor/sequence_ratio" in metrics) == (name == "gspo-tp2")


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parts_of_a_critic_are_unchanged(world: World, name: str) -> None:
    """Frozen weights of the critic are bitwise equal after the updates. All other weights of both roles change."""
    result = world.result(name)
    assert result["metrics"]["critic/updates"] == 2
    start = dict(stored_parameters(AutoModelForCausalLM.from_pretrained(world.folder(name), dtype=torch.float32)))
    trained = {role: load_file(world.out(name) / f"{role}.safetensors") for role in ("actor", "critic")}
    pattern, frozen_tensors = FROZEN[name][0], 0
    for key, tensor in start.items():
        if key not in trained["critic"]:
            continue  # the output layer, which critics do not have
        is_frozen = re.search(pattern, key) is not None
        assert torch.equal(trained["critic"][key], tensor) == is_frozen, key
        assert not torch.equal(trained["actor"][key], tensor), key
        frozen_tensors += is_frozen
    assert frozen_tensors > 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_losses_have_tokens_inside_and_outside_the_band(world: World, name: str) -> None:
    metrics = world.result(name)["metrics"]
    outside = metrics["actor/masked_below"], metrics["actor/masked_above"]
    assert all(share > 0.02 for share in outside) or name == "sapo-pp2", outside
    assert sum(outside) == pytest.approx(metrics["actor/clipfrac"], abs=1e-9) and sum(outside) < 0.95
    assert 0 < metrics["actor/band_position"] < 1 and 0 < metrics["actor/effective_sample_size"] < 1


@pytest.mark.parametrize("name", FIRST_UPDATE)
def test_the_first_update_starts_at_ratio_one(world: World, name: str) -> None:
    """The ratio is exactly one if the update uses the microbatches of scoring, otherwise one within rounding."""
    metrics = world.result(name)["metrics"]
    if name.startswith("same"):
        assert metrics["actor/ratio_max"] == metrics["actor/ratio"] == 1
        assert metrics["actor/ppo_kl"] == metrics["actor/clipfrac"] == 0
    else:
        assert metrics["actor/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert metrics["actor/ratio"] == pytest.approx(1, abs=1e-6)
        assert abs(metrics["actor/ppo_kl"]) < 1e-6


@pytest.mark.parametrize("name", NON_FINITE)
def test_nonfinite_update_does_not_change_the_weights(world: World, name: str) -> None:
    result = world.result(name)
    start = dict(AutoModelForCausalLM.from_pretrained(world.folder(name), dtype=torch.float32).named_parameters())
    trained = load_file(world.out(name) / "actor.safetensors")
    assert all(torch.equal(trained[n], p) for n, p in start.items())
    if name == "nonfinite-stop":
        assert "the critic's loss or gradient is not finite; its weights did not change" in result["stopped"]
        assert "actor/updates" not in result["metrics"]
    else:
        assert result["stopped"] == ""
        # Whitening spreads the infinity to all advantages. The other minibatch of the critic in each epoch is finite.
        for role, refused in (("actor", 4), ("critic", 2)):
            assert result["metrics"][f"{role}/updates"] == 4 - refused
            assert result["metrics"][f"{role}/skipped_updates"] == refused
