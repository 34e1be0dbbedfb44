"""One PPO run in megappo and in TRL's experimental `PPOTrainer`: the code of the processes of each side.

The configuration is translated to TRL's settings: model, prompts in the order of megappo's cursor, rewards, epochs,
minibatches, learning rates, clipping, the KL term and GAE. Settings without an equivalent in TRL are refused. TRL
runs both models in one process. Its stop token ends generation, and all later tokens are padding.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.lengths import Forcing, Profile
from benchmarks.sides import Turns

if TYPE_CHECKING:
    from torch import Tensor

    from megappo.config import Config
    from megappo.data import TrainingPrompts

_ESTIMATORS = {"kl": "k1", "low_var_kl": "k3"}


@dataclass(frozen=True)
class Run:
    """Settings of both sides."""

    path: str
    overrides: tuple[str, ...]
    directory: str
    profile: Profile
    precision: str
    """Precision of TRL. `mixed`: float32 parameters under bfloat16 autocast; `bfloat16` or `float32`: dtype of all
    tensors."""
    threads: int
    """Total threads of all processes of a side."""
    seed: int
    trl_microbatch: int = 0
    """Sequences per microbatch of TRL."""

    def read(self) -> Config:
        """Load the configuration. Raises ConfigError."""
        from benchmarks.step import configuration

        overrides = [*self.overrides, f"run.seed={self.seed}", f"rollout.max_response_tokens={self.profile.longest}"]
        return configuration(self.path, overrides, self.directory)


def check(config: Config) -> None:
    """Raise ConfigError for settings without an equivalent in TRL's PPO."""
    from megappo.config import ConfigError

    algorithm, kl = config.algorithm, config.algorithm.kl_in_reward
    conditions = {
        "critic": config.critic is not None,
        "reference": config.reference is not None,
        "algorithm.estimator: gae": algorithm.estimator == "gae",
        "algorithm.policy_loss: clip": algorithm.policy_loss == "clip",
        "algorithm.dual_clip: null": algorithm.dual_clip is None,
        "algorithm.clip_low equal to clip_high": algorithm.clip_low == algorithm.clip_high,
        "algorithm.entropy_coef: 0": algorithm.entropy_coef == 0,
        "one number as algorithm.lam": algorithm.lam.is_one,
        "algorithm.loss_aggregation: token-mean": algorithm.loss_aggregation == "token-mean",
        "algorithm.whiten_advantages: true": algorithm.whiten_advantages,
        "algorithm.kl_in_reward with kind kl or low_var_kl, fixed": kl is not None
        and kl.kind in _ESTIMATORS
        and kl.controller == "fixed",
        "algorithm.kl_in_loss: null": algorithm.kl_in_loss is None,
        "one number of epochs and minibatches for actor and critic": config.critic is not None
        and config.actor.epochs == config.critic.epochs
        and config.actor.minibatch_sequences == config.critic.minibatch_sequences,
        "no clipping of gradients and constant learning rates": all(
            role.optimizer.clip_grad_norm == 0 and role.optimizer.schedule == "constant"
            for role in config.trained.values()
        ),
    }
    missing = [condition for condition, is_met in conditions.items() if not is_met]
    if missing:
        raise ConfigError(f"TRL's PPO does not support this configuration; set {'; '.join(missing)}")


def megappo_side(turns: Turns, run: Run) -> None:
    """Run steps of megappo on request."""
    from benchmarks.step import next_step, running

    config = run.read()
    ranks = int(os.environ["WORLD_SIZE"])
    with running(config) as trainer:
        forcing = _forcing(trainer.parts.stop_token_ids, trainer.parts.tokenizer)
        with nullcontext() if run.profile.shape == "natural" else forcing.applied():
            turns.ready()
            for step in itertools.count(1):
                turns.wait()
                lengths = run.profile.of_step(config.rollout.batch_sequences, step) or []
                share = [-(-len(lengths) * rank // ranks) for rank in range(ranks + 1)]
                forcing.begin(lengths[share[trainer.parts.runtime.rank] : share[trainer.parts.runtime.rank + 1]])
                metrics = next_step(trainer)
                turns.done(
                    {
                        "reward": metrics["reward/mean"],
                        "response_tokens": metrics["response/length"],
                        **{name: value for name, value in metrics.items() if name.startswith("time/")},
                    }
                    if trainer.parts.runtime.is_main
                    else {}
                )


def _forcing(stop_token_ids: tuple[int, ...], tokenizer: Any) -> Forcing:
    """Return a Forcing that ends sequences with the first stop token. Other stop tokens and the padding token are
    never sampled."""
    return Forcing(stop_token_ids[0], sorted({*stop_token_ids, padding_token(tokenizer, stop_token_ids)}))


def padding_token(tokenizer: Any, stop_token_ids: tuple[int, ...]) -> int:
    """Return a padding token for TRL, which treats every occurrence as padding.

    The token is a special token that neither ends a response nor occurs in a chat. Raises ValueError if the
    tokenizer has no such token.
    """
    chat = {tokenizer.bos_token_id, tokenizer.eos_token_id, *stop_token_ids}
    if tokenizer.chat_template:
        messages = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        chat |= set(tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"])
    free = sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - chat)
    if not free:
        raise ValueError("the tokenizer has no special token for padding; add one to the tokenizer")
    return int(free[-1])


def trl_side(turns: Turns, run: Run) -> None:
    """Run steps of TRL on request."""
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}
    # transformers 5 passes `bf16` only to the accelerator of its own Trainer. `accelerate launch` sets this variable.
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if run.precision == "mixed" else "no"
    import torch
    from transformers import TrainerCallback

    from megappo.config.role_models import load_tokenizer, role_folder
    from megappo.data import read_prompts, training_cursor
    from megappo.models.model_files import resolve_stop_token_ids

    config = run.read()
    torch.set_num_threads(run.threads)
    tokenizer = load_tokenizer(config)
    stop = resolve_stop_token_ids(role_folder(config, "actor"), tokenizer, config.rollout.stop_token_ids)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding_token(tokenizer, stop))
    tokenizer.padding_side = "left"
    prompts = read_prompts(config.data, tokenizer)
    cursor = training_cursor(prompts, config.data, config.run.seed)
    forcing = _forcing(stop, tokenizer)
    judge = _Judge(config, prompts, tokenizer)
    trainer = _trl_trainer(config, run, tokenizer, stop[0], judge)
    trainer.dataloader = _Batches(config, prompts, cursor, tokenizer)

    class Alternate(TrainerCallback):
        """Callback that starts a step on request."""

        def __init__(self) -> None:
            self.step = 0

        def begin(self) -> None:
            turns.wait()
            self.step += 1
            forcing.begin(run.profile.of_step(config.rollout.batch_sequences, self.step) or [])

        def on_train_begin(self, *_args: Any, **_more: Any) -> None:
            turns.ready()
            self.begin()

        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            turns.done({"reward": judge.reward, "response_tokens": judge.response_tokens})
            self.begin()

    trainer.add_callback(Alternate())
    with nullcontext() if run.profile.shape == "natural" else forcing.applied():
        trainer.train()


class _Batches:
    """Prompts of each step, padded on the left."""

    def __init__(self, config: Config, prompts: TrainingPrompts, cursor: Any, tokenizer: Any) -> None:
        self._settings, self._prompts, self._cursor, self._tokenizer = config.rollout, prompts, cursor, tokenizer

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            taken = [self._prompts[i] for i in self._cursor.take(self._settings.prompts_per_step)]
            ids = [list(prompt.token_ids) for prompt in taken for _ in range(self._settings.samples_per_prompt)]
            yield self._tokenizer.pad({"input_ids": ids}, return_tensors="pt")


class _Judge:
    """Adapter from megappo's reward function to TRL's reward model. `score(backbone(...).hidden_states[-1])` is the
    reward at every position."""

    base_model_prefix = "backbone"

    def __init__(self, config: Config, prompts: TrainingPrompts, tokenizer: Any) -> None:
        from megappo.rewards.registry import argument_names, resolve

        self._settings, self._tokenizer = config.reward, tokenizer
        self._function = resolve(config.reward)
        self._wants_raw = "raw_response" in argument_names(self._function, batch=False)
        self._prompts = {prompts[i].token_ids: prompts[i] for i in range(len(prompts))}
        self._lengths = sorted({len(ids) for ids in self._prompts}, reverse=True)
        self.reward = self.response_tokens = 0.0

    def backbone(self, *, input_ids: Tensor, attention_mask: Tensor, **_more: Any) -> Any:
        """Return the rewards of whole samples as (B, T, 1)."""
        import torch
        from transformers.modeling_outputs import BaseModelOutput

        rows = zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)
        samples = [[token for token, seen in zip(*row, strict=True) if seen] for row in rows]
        judged = [self._judge(ids) for ids in samples]
        rewards_B = torch.tensor([reward for reward, _ in judged])
        self.reward = float(rewards_B.mean())
        self.response_tokens = sum(n for _, n in judged) / len(judged)
        return BaseModelOutput(hidden_states=(rewards_B[:, None, None].expand(*input_ids.shape, 1),))

    def _judge(self, ids: list[int]) -> tuple[float, int]:
        """Return the reward of one sample without padding, and the number of its response tokens."""
        from megappo.models.tokens import decoded

        length = next(n for n in self._lengths if tuple(ids[:n]) in self._prompts)
        prompt, response = self._prompts[tuple(ids[:length])], ids[length:]
        text = decoded(self._tokenizer, response, skip_special_tokens=True)
        inputs = {"prompt": prompt.text, "response": text, "answer": prompt.answer, "metadata": dict(prompt.metadata)}
        if self._wants_raw:
            inputs["raw_response"] = decoded(self._tokenizer, response)
        return float(self._function(**inputs, **self._settings.options)), len(response)

    def score(self, hidden: Tensor) -> Tensor:
        """Return the reward, which `backbone` has computed."""
        return hidden

    def modules(self) -> tuple[()]:
        """Return no modules, because the adapter has no dropout to disable."""
        return ()

    def to(self, _device: Any) -> _Judge:
        """Do nothing, because the reward is not on a device."""
        return self


def trl_settings(config: Config, run: Run, stop: int) -> dict[str, str | float | bool | None]:
    """Return the fields of TRL's PPOConfig, which does not check types. `stop`: token that ends a response."""
    algorithm, critic, kl = config.algorithm, config.critic, config.algorithm.kl_in_reward
    assert critic is not None and kl is not None
    batch = config.rollout.batch_sequences
    return {
        "output_dir": str(config.run.path), "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "use_cpu": True, "seed": run.seed, "total_episodes": batch * 10**6,
        "per_device_train_batch_size": run.trl_microbatch, "gradient_accumulation_steps": batch // run.trl_microbatch,
        "num_mini_batches": len(config.actor.minibatch_sizes(batch)), "num_ppo_epochs": config.actor.epochs,
        "local_rollout_forward_batch_size": config.rollout.generate_batch_sequences, "num_sample_generations": 0,
        "response_length": run.profile.longest, "stop_token_id": stop, "temperature": config.rollout.temperature,
        "kl_coef": kl.coef, "kl_estimator": _ESTIMATORS[kl.kind], "cliprange": algorithm.clip_high,
        "cliprange_value": critic.value_clip if critic.value_clip is not None else 1e9, "gamma": algorithm.gamma,
        "lam": algorithm.lam.critic, "bf16": run.precision == "mixed", "gradient_checkpointing": False,
    }  # fmt: skip


def _trl_trainer(config: Config, run: Run, tokenizer: Any, stop: int, judge: _Judge) -> Any:
    """Build TRL's trainer with the settings of the configuration."""
    import torch

    ppo: Any = import_module("trl.experimental.ppo")
    batch = config.rollout.batch_sequences
    settings = ppo.PPOConfig(**trl_settings(config, run, stop))
    models = _trl_models(config, run)
    of_roles = {"actor": models["model"], "critic": models["value_model"]}
    groups = [
        {"params": of_roles[name].parameters(), "lr": r.optimizer.learning_rate} for name, r in config.trained.items()
    ]
    own = config.actor.optimizer
    optimizer = torch.optim.AdamW(
        groups, betas=(own.beta1, own.beta2), eps=own.eps, weight_decay=own.weight_decay, fused=True
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _update: 1.0)
    trainer = ppo.PPOTrainer(
        args=settings, processing_class=tokenizer, reward_model=judge, **models,
        train_dataset=[{"input_ids": [stop]}] * batch, optimizers=(optimizer, constant),
    )  # fmt: skip
    # One update per minibatch. By default TRL accumulates the microbatches of a whole step.
    trainer.accelerator.gradient_accumulation_steps = config.actor.minibatch_sizes(batch)[0] // run.trl_microbatch
    return trainer


def _trl_models(config: Config, run: Run) -> dict[str, Any]:
    """Load policy, reference and value model with the configuration's weights. The value head is initialised like
    the critic's head."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from megappo.config.role_models import role_folder

    dtype = torch.bfloat16 if run.precision == "bfloat16" else torch.float32
    assert config.critic is not None

    def load(kind: Any, role: str, **more: Any) -> Any:
        torch.manual_seed(run.seed)  # equal random weights for policy and reference
        folder = role_folder(config, role)
        if config.model.init == "random":
            return kind.from_config(AutoConfig.from_pretrained(folder, **more), dtype=dtype)
        return kind.from_pretrained(folder, dtype=dtype, **more)

    value = load(AutoModelForSequenceClassification, "critic", num_labels=1)
    torch.nn.init.normal_(value.score.weight, std=config.critic.value_head_std)
    policy, reference = (load(AutoModelForCausalLM, role) for role in ("actor", "reference"))
    return {"model": policy, "ref_model": reference, "value_model": value}
