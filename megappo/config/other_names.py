"""Names of settings in verl, slime, OpenRLHF, NeMo-RL and TRL, for the hint at an unknown key."""

from __future__ import annotations

from typing import NamedTuple

Key = tuple[str, ...]
ROLE = "ROLE"
"""In a key below: the actor or the critic, whichever the user's own key names."""


class Counterpart(NamedTuple):
    """Our settings for a name of another trainer's."""

    keys: tuple[str, ...]
    """Dotted keys; several where one of theirs is two of ours, or where two trainers mean different things."""
    note: str = ""
    """Difference between the two, such as the unit; without keys: why there is no such setting."""


_PROMPTS = "verl counts prompts there, this counts samples: multiply by rollout.samples_per_prompt"
_TOKENS = "microbatches are packed by tokens, not by samples"
_PER_GROUP = "this counts the tokens of a context parallel group: multiply by context_parallel"
_UPDATES = "it counts optimizer updates, not steps"
_BOTH = "set both"
_FOLLOWS = "it follows from minibatch_sequences, microbatch_budget_tokens and the layout"
_ALWAYS = "microbatches are always packed by tokens"
_OWN_LOSS = "actor and critic have losses and optimizers of their own; set critic.optimizer.learning_rate"
_LAUNCHER = "the launcher says how many ranks there are: torchrun --nproc-per-node, or sbatch --nodes"
_LOSS_TYPE = "TRL and ms-swift mean both by it: the loss, and how token losses become one number"
_OWN_FUNCTION = "FILE.py:NAME of a function that takes prompt, response, answer and metadata"
_RESUMES = "a run goes on from its own directory by itself; weights of another one are actor.start_from's"
_MEGATRON = "Megatron-Core trains in any case; actor.layout and critic.layout say how"
_DEALT = "samples are dealt out to ranks by their tokens in any case"
_COLOCATED = "the reference stands on the actor's ranks, and the critic where critic.layout says"
_PARTS = "a ratio below 1 - clip_low, or above 1 + clip_high, has no slope; set both"


def _same(keys: str, note: str, *names: str) -> dict[str, Counterpart]:
    return dict.fromkeys(names, Counterpart(tuple(keys.split()), note))


COUNTERPARTS: dict[str, Counterpart] = {
    # steps and batches
    **_same("run.steps", "", "total_training_steps", "num_rollout", "max_steps", "max_num_steps", "num_steps"),
    **_same("run.epochs", "", "total_epochs", "num_train_epochs", "num_epoch", "num_episodes"),
    **_same("ROLE.epochs", "", "ppo_epochs", "num_ppo_epochs", "num_iterations", "max_epochs"),
    **_same("rollout.prompts_per_step", "", "rollout_batch_size", "num_prompts_per_step", "batch_size"),
    "train_batch_size": Counterpart(
        ("rollout.prompts_per_step", "ROLE.minibatch_sequences"),
        "verl means the prompts of a step, OpenRLHF the samples of an update",
    ),
    **_same("ROLE.minibatch_sequences", _PROMPTS, "ppo_mini_batch_size", "mini_batch_size"),
    **_same("ROLE.minibatches", "", "num_mini_batches", "num_minibatches", "num_steps_per_rollout"),
    **_same("ROLE.minibatch_sequences", "samples of an update", "global_batch_size", "train_global_batch_size"),
    **_same(
        "ROLE.microbatch_budget_tokens", _TOKENS, "micro_batch_size", "micro_train_batch_size", "ppo_micro_batch_size",
        "train_micro_batch_size", "ppo_micro_batch_size_per_gpu", "per_device_train_batch_size",
    ),
    **_same("ROLE.microbatch_budget_tokens", _PER_GROUP, "max_tokens_per_gpu", "ppo_max_token_len_per_gpu"),
    **_same("", _FOLLOWS, "gradient_accumulation_steps"),
    **_same("", _ALWAYS, "use_dynamic_bsz", "use_dynamic_batch_size", "packing_samples"),
    **_same("", _LAUNCHER, "nnodes", "num_nodes", "n_gpus_per_node", "num_gpus_per_node", "gpus_per_node",
            "actor_num_nodes", "actor_num_gpus_per_node", "critic_num_nodes", "critic_num_gpus_per_node"),
    **_same("ROLE.microbatch_budget_tokens", "for forward passes, too", "log_prob_micro_batch_size_per_gpu",
            "log_prob_micro_batch_size", "log_prob_max_token_len_per_gpu", "micro_rollout_batch_size"),
    **_same("", _DEALT, "balance_batch", "balance_data"),
    # rollout
    **_same(
        "rollout.samples_per_prompt", "", "n", "n_samples_per_prompt", "num_generations", "num_generations_per_prompt",
        "n_resp_per_prompt", "group_size",
    ),
    **_same(
        "rollout.max_response_tokens", "", "max_new_tokens", "max_response_length", "rollout_max_response_len",
        "generate_max_len", "max_completion_length", "response_length",
    ),
    **_same(
        "data.max_prompt_tokens", "", "max_prompt_length", "prompt_max_len", "rollout_max_prompt_len", "max_prompt_len",
    ),
    **_same("rollout.stop", "", "stop_strings", "stop_sequences", "rollout_stop"),
    **_same("rollout.stop_token_ids", "", "stop_token", "rollout_stop_token_ids"),
    **_same("rollout.max_total_tokens", "", "rollout_max_context_len", "max_total_sequence_length", "max_model_len"),
    **_same("rollout.min_response_tokens", "", "min_new_tokens", "min_tokens", "generate_min_len", "min_length"),
    **_same("rollout.sglang.memory_fraction", "", "gpu_memory_utilization", "vllm_gpu_memory_utilization",
            "mem_fraction_static", "sglang_mem_fraction_static"),
    **_same("rollout.sglang.tensor_parallel", "", "vllm_tensor_parallel_size", "rollout_num_gpus_per_engine", "gen_tp"),
    **_same("rollout.save_to", "", "save_debug_rollout_data", "rollout_data_dir"),
    **_same("rollout.load_from", "", "load_debug_rollout_data", "debug_train_only"),
    **_same("rollout.dynamic_sampling", "", "filter_groups", "dynamic_filtering", "dynamic_sampling_filter_path"),
    **_same("rollout.temperature", "", "rollout_temperature", "sampling_temperature"),
    **_same("rollout.engine", "", "rollout.name", "rollout_backend", "generation_backend"),
    **_same("", "servers take requests at any time; rollout.ahead says how far they run ahead", "rollout.mode"),
    **_same("rollout.ahead", "2 or more", "partial_rollout", "async_train", "fully_async", "async_queue_size"),
    **_same("rollout.max_lag", "", "staleness_threshold", "max_staleness", "max_trajectory_age_steps"),
    **_same("rollout.dynamic_sampling.max_rounds", "further rounds replace prompts whose samples agree",
            "over_sampling_batch_size", "max_num_gen_batches"),
    **_same("rollout.sglang.tensor_parallel", "", "rollout.tensor_model_parallel_size", "rollout.tensor_parallel_size"),
    **_same("rollout.sglang.engines", "each of tensor_parallel GPUs", "vllm_num_engines", "rollout_num_gpus"),
    **_same("rollout.sglang.placement", "", "colocate", "colocate_all_models", "hybrid_engine"),
    **_same("rollout.sglang.sleep", "", "vllm_enable_sleep", "free_cache_engine"),
    **_same("rollout.sglang.arguments", "disable-cuda-graph: true", "enforce_eager"),
    **_same("rollout.environment", "", "multi_turn", "multi_turn.enable"),
    **_same("rollout.environment.name", "FILE.py:NAME of a class of your own", "agent_func_path", "tool_config_path"),
    # data and rewards
    **_same("data.train.source", "", "train_files", "prompt_data", "train_data"),
    **_same("data.validation.source", "", "val_files", "eval_prompt_data", "eval_data"),
    **_same("data.train.prompt_key", "", "input_key"),
    **_same("data.train.answer_key", "", "label_key"),
    **_same("data.train.limit", "", "max_samples", "train_max_samples"),
    **_same("data.validation.limit", "", "val_max_samples"),
    **_same("data.validation_sets.NAME.samples", "", "n_samples_per_eval_prompt", "val_kwargs.n"),
    **_same("", "an environment gets the messages of its prompt in any case", "return_raw_chat"),
    **_same("data.overlong_prompts", "", "filter_overlong_prompts", "truncation"),
    **_same("data.shuffle", "", "rollout_shuffle"),
    **_same("data.chat_template", "", "custom_chat_template", "chat_template_path", "input_template"),
    **_same("data.chat_template_options", "", "chat_template_kwargs", "apply_chat_template_kwargs"),
    **_same("reward.function", "", "custom_reward_function", "custom_rm_path", "rm_type", "reward_funcs"),
    **_same("reward.function", _OWN_FUNCTION, "custom_reward_function.path", "custom_reward_function.name",
            "reward_manager", "compute_score"),
    **_same("reward.options", "", "reward_kwargs"),
    **_same("reward.function reward.model_remote", "a function of yours, or the model of a server", "remote_rm_url"),
    **_same("reward.model_path", "", "reward_pretrain", "reward_model_path"),
    **_same("reward.normalize", "by all scores so far", "normalize_reward", "use_score_scaling", "use_score_norm"),
    **_same("reward.clip", "two bounds", "score_clip", "reward_clip_range"),
    **_same("reward.functions.NAME.data_sources", "the column is `data_source`, as in verl's files", "reward_fn_key"),
    **_same("reward.overlong.buffer_tokens", "", "overlong_buffer_len", "overlong_buffer"),
    **_same("reward.overlong.penalty", "", "overlong_penalty_factor"),
    # algorithm
    **_same("algorithm.estimator", "", "adv_estimator", "advantage_estimator"),
    **_same("algorithm.estimator", "gae with a critic, as by default", "ppo"),
    **_same("algorithm.clip_high rollout.dynamic_sampling reward.overlong algorithm.loss_aggregation",
            "DAPO is these four together, as in configs/qwen3_8b_2node_dapo_math.yaml", "dapo"),
    **_same("algorithm.lam", "", "lambd", "gae_lambda"),
    **_same("algorithm.discount_at", "", "gae_timestep_unit"),
    **_same("algorithm.kl_in_reward.coef", "", "kl_coef", "init_kl_coef"),
    **_same("algorithm.kl_in_reward.kind", "", "kl_penalty", "kl_estimator"),
    **_same("algorithm.kl_in_reward.target", "", "kl_target"),
    **_same("algorithm.kl_in_reward.horizon", "", "kl_horizon"),
    **_same("algorithm.kl_in_reward", "", "use_kl_in_reward", "kl_ctrl"),
    **_same("algorithm.kl_in_loss", "", "use_kl_loss"),
    **_same("algorithm.kl_in_loss.coef", "", "kl_loss_coef", "reference_policy_kl_penalty", "beta"),
    **_same("algorithm.kl_in_loss.kind", "", "kl_loss_type", "use_kl_estimator_k3"),
    **_same("algorithm.correction", "", "use_tis", "rollout_is", "enable_vllm_is_correction",
            "vllm_importance_sampling_correction", "use_importance_sampling_correction"),
    **_same("algorithm.correction.cap", "", "tis_imp_ratio_cap", "rollout_is_threshold", "vllm_importance_sampling_cap",
            "truncated_importance_sampling_ratio"),
    **_same("", "grpo divides by the group's standard deviation, rloo does not", "norm_adv_by_std_in_grpo",
            "scale_rewards", "grpo_std_normalization"),
    **_same("", "there is no loss on other texts; algorithm.positive_nll_coef is one on good responses", "ptx_coef"),
    **_same("algorithm.clip_low algorithm.clip_high", _PARTS, "eps_clip", "cliprange", "clip_ratio", "epsilon"),
    **_same("algorithm.clip_low", "", "clip_ratio_low", "ratio_clip_min", "epsilon_low"),
    **_same("algorithm.clip_high", "", "clip_ratio_high", "ratio_clip_max", "epsilon_high", "eps_clip_high"),
    **_same("algorithm.dual_clip", "", "clip_ratio_c", "ratio_clip_c", "eps_clip_c", "dual_clip_ratio"),
    **_same("algorithm.entropy_coef", "", "entropy_coeff", "ent_coef", "entropy_loss_coef"),
    **_same("algorithm.loss_aggregation", "", "loss_agg_mode", "token_level_loss"),
    **_same("algorithm.policy_loss algorithm.loss_aggregation", _LOSS_TYPE, "loss_type"),
    **_same("algorithm.policy_loss", "", "loss_mode", "policy_loss_type", "loss_fn", "loss_fn_type"),
    **_same("algorithm.policy_loss", "ratios of sequences are policy_loss: gspo", "importance_sampling_level",
            "sequence_level_importance_ratios"),
    **_same("algorithm.policy_loss", "set it to sapo", "use_sapo_loss"),
    **_same("algorithm.policy_loss", "set it to dis, with old_logprob: bypass", "sao"),
    **_same("algorithm.gate.positive", "", "tau_pos", "sapo_tau_pos", "sapo_temperature_pos"),
    **_same("algorithm.gate.negative", "", "tau_neg", "sapo_tau_neg", "sapo_temperature_neg"),
    **_same("algorithm.band.low", "", "dppo_mask_low", "delta_low", "mask_ratio_low"),
    **_same("algorithm.band.high", "", "dppo_mask_high", "delta_high", "mask_ratio_high"),
    **_same("algorithm.band.low algorithm.band.high", _BOTH, "dppo_delta"),
    **_same("algorithm.band.cap", "", "dppo_is_cap"),
    **_same("algorithm.whiten_advantages", "", "normalize_advantages", "whiten_rewards"),
    **_same("algorithm.mask_truncated", "", "mask_truncated_completions", "overlong_filtering"),
    # roles
    **_same("critic.value_clip", "", "cliprange_value", "clip_range_value", "eps_clip_value"),
    **_same(
        "critic.warmup_steps", "in these steps only the critic learns", "critic_warmup", "num_critic_only_steps",
        "freezing_actor_steps",
    ),
    **_same("critic.freeze", "", "freeze_attention", "freeze_param_patterns"),
    **_same("", _OWN_LOSS, "vf_coef"),
    **_same("critic.path", "", "critic_pretrain", "critic_model_path"),
    **_same("model.path", "", "pretrain", "hf_checkpoint", "model_name_or_path", "model_name", "sft_model_path"),
    **_same("reference.refresh_every_steps", "", "ref_model_sync_steps", "ref_update_interval", "sync_ref_model"),
    **_same("reference.path", "", "ref_load", "ref_model_path", "reference_model_path"),
    "ref": Counterpart(("reference",)),
    "ref_model": Counterpart(("reference",)),
    "actor_rollout_ref": Counterpart(("actor", "rollout", "reference"), "verl's section is three of ours"),
    "trainer": Counterpart(("run", "checkpoint", "evaluation", "logging"), "verl's section is four of ours"),
    **_same("", _MEGATRON, "strategy", "fsdp", "fsdp2", "fsdp_config", "deepspeed"),
    **_same("", _COLOCATED, "colocate_actor_ref", "colocate_critic_reward"),
    **_same("model.accelerations", "", "flash_attn", "attn_implementation", "attention_backend"),
    **_same("model.dtype", "", "bf16", "fp16", "torch_dtype", "precision"),
    **_same("ROLE.lora.rank", "", "lora_rank", "lora_r"),
    **_same("ROLE.lora.alpha", "", "lora_alpha"),
    **_same("ROLE.lora.dropout", "", "lora_dropout"),
    **_same("ROLE.lora.targets", "", "target_modules", "lora_target_modules", "lora_target"),
    "actor_learning_rate": Counterpart(("actor.optimizer.learning_rate",)),
    "critic_learning_rate": Counterpart(("critic.optimizer.learning_rate",)),
    **_same("ROLE.optimizer.learning_rate", "", "lr"),
    **_same("ROLE.optimizer.min_learning_rate", "", "min_lr"),
    **_same("ROLE.optimizer.schedule", "", "lr_scheduler_type", "lr_decay_style", "lr_scheduler"),
    **_same("ROLE.optimizer.warmup_updates", _UPDATES, "lr_warmup_steps", "lr_warmup_iters", "optimizer.warmup_steps"),
    **_same("ROLE.optimizer.warmup_ratio", "", "lr_warmup_ratio", "lr_warmup_steps_ratio", "lr_warmup_fraction"),
    **_same("ROLE.optimizer.decay_ratio", "", "lr_wsd_decay_iters", "wsd_decay_ratio"),
    **_same("ROLE.optimizer.clip_grad_norm", "", "max_grad_norm", "grad_clip", "clip_grad", "max_norm"),
    **_same("ROLE.optimizer.eps", "", "adam_epsilon", "adam_eps"),
    **_same("ROLE.optimizer.beta1 ROLE.optimizer.beta2", _BOTH, "betas", "adam_betas"),
    **_same("ROLE.optimizer.distributed", "", "zero_stage", "use_distributed_optimizer"),
    **_same("ROLE.optimizer.on_host", "", "adam_offload", "optimizer_cpu_offload"),
    **_same("ROLE.recompute", "", "gradient_checkpointing", "enable_gradient_checkpointing", "recompute_granularity"),
    **_same("ROLE.offload", "", "param_offload", "offload_policy", "deepspeed_enable_sleep"),
    **_same("ROLE.offload.optimizer", "", "optimizer_offload"),
    **_same("ROLE.offload.gradients", "", "grad_offload"),
    **_same("ROLE.layout.tensor_parallel", "", "tensor_model_parallel_size", "tensor_parallel_size", "tp", "tp_size"),
    **_same("ROLE.layout.pipeline_parallel", "", "pipeline_model_parallel_size", "pipeline_parallel_size", "pp"),
    **_same("ROLE.layout.context_parallel", "", "context_parallel_size", "cp", "ulysses_sequence_parallel_size"),
    **_same("ROLE.layout.expert_parallel", "", "expert_model_parallel_size", "expert_parallel_size", "ep", "ep_size"),
    **_same("ROLE.layout.virtual_pipeline_chunks", "", "virtual_pipeline_model_parallel_size", "vpp"),
    **_same("model.path", "a hub name takes it behind an @: OWNER/NAME@REVISION", "revision", "model_revision"),
    # files
    **_same(
        "checkpoint.every_steps", "", "save_freq", "save_steps", "save_interval", "save_period", "ckpt_interval",
    ),
    **_same("checkpoint.huggingface_every_steps", "", "save_hf_interval", "hf_save_freq", "save_hf_ckpt"),
    **_same("run.max_hours", "", "max_time", "timeout_hours", "checkpoint_must_save_by", "exit_duration_in_mins"),
    **_same("", _RESUMES, "resume_mode", "resume_from_path", "resume_from_checkpoint", "auto_resume"),
    **_same("", "`megappo eval` evaluates without training", "val_only", "eval_only"),
    **_same("evaluation.before_training", "", "val_before_train", "val_at_start", "eval_on_start"),
    **_same("checkpoint.keep_last", "", "max_ckpt_num", "save_total_limit", "max_actor_ckpt_to_keep", "keep_top_k"),
    **_same("evaluation.every_steps", "", "test_freq", "eval_steps", "eval_interval", "val_period", "eval_freq"),
    **_same("run.directory", "", "default_local_dir", "output_dir", "save_path", "ckpt_path", "save"),
    **_same("run.name", "", "experiment_name", "run_name", "exp_name"),
    **_same("logging.wandb_project", "", "project_name", "use_wandb", "wandb"),
    **_same("logging.tensorboard logging.wandb_project logging.loggers", "", "logger", "report_to", "log_with"),
}  # fmt: skip
"""Counterparts by the other trainer's name; by section and name where another section has a setting of that name."""


def counterpart(section: Key, name: str) -> Counterpart | None:
    """Our settings for a name that stands in `section`, of the role that the section is of; None for no known name."""
    found = COUNTERPARTS.get(f"{section[-1]}.{name.lower()}") if section else None
    found = found or COUNTERPARTS.get(name.lower())
    if found is None:
        return None
    roles = ("critic",) if "critic" in section else ("actor",) if "actor" in section else ("actor", "critic")
    keys = [key.replace(ROLE, role, 1) for key in found.keys for role in (roles if ROLE in key else ("",))]
    return Counterpart(tuple(keys), found.note)
