"""Names of TRL: PPOConfig, GRPOConfig and RLOOConfig, and transformers' TrainingArguments."""

from __future__ import annotations

from megappo.config.foreign import common, server_flags
from megappo.config.foreign.answers import LAUNCHER, MEGATRON, TOKENS, answer

_SHARED = (
    "num_ppo_epochs num_mini_batches response_length stop_token_id missing_eos_penalty sft_model_path "
    "per_device_train_batch_size gradient_accumulation_steps reward_model_path model_name_or_path output_dir kl_coef "
    "kl_estimator cliprange cliprange_value vf_coef whiten_rewards micro_batch_size num_generations eval_steps "
    "max_completion_length max_prompt_length beta epsilon epsilon_high loss_type scale_rewards num_iterations "
    "max_grad_norm lr_scheduler_type save_steps save_total_limit report_to run_name max_steps num_train_epochs "
    "resume_from_checkpoint gradient_checkpointing warmup_steps bf16 lora_r lora_alpha lora_dropout "
    "lora_target_modules attn_implementation torch_dtype mask_truncated_completions importance_sampling_level "
    "reward_funcs vllm_gpu_memory_utilization vllm_tensor_parallel_size sync_ref_model ref_model_sync_steps "
    "chat_template_kwargs chat_template_path eval_on_start deepspeed fsdp adam_epsilon"
)

NAMES = {
    **{name: common.NAMES[name] for name in _SHARED.split()},
    **answer("actor.optimizer.learning_rate critic.optimizer.learning_rate", "learning_rate",
             note="TRL trains actor and critic with one learning rate"),
    **answer("actor.optimizer.weight_decay critic.optimizer.weight_decay", "weight_decay"),
    **answer("actor.optimizer.warmup_ratio critic.optimizer.warmup_ratio", "warmup_ratio"),
    **answer("actor.optimizer.beta1 critic.optimizer.beta1", "adam_beta1"),
    **answer("actor.optimizer.beta2 critic.optimizer.beta2", "adam_beta2"),
    **answer("run.epochs run.steps", "total_episodes",
             note="samples of the whole run: steps times prompts_per_step times samples_per_prompt"),
    **answer("rollout.prompts_per_step", "batch_size", "local_batch_size", note="all ranks together"),
    **answer("actor.minibatch_sequences critic.minibatch_sequences", "mini_batch_size", "local_mini_batch_size",
             note="all ranks together"),
    **answer("actor.microbatch_budget_tokens critic.microbatch_budget_tokens", "per_device_eval_batch_size",
             note=TOKENS),
    **answer("rollout.generate_batch_sequences", "local_rollout_forward_batch_size",
             note="of the embedded engine; forward passes use actor.microbatch_budget_tokens"),
    **answer("run.steps", "num_total_batches"),
    **answer("", "stop_token", note="it is not needed because generation always stops at an end-of-sequence token"),
    **answer("rollout.temperature", "temperature"),
    **answer("rollout.top_p", "top_p"),
    **answer("rollout.top_k", "top_k", note="0 switches it off"),
    **answer("algorithm.gamma", "gamma"),
    **answer("algorithm.lam", "lam"),
    **answer("run.seed", "seed"),
    **answer("data.train.source", "dataset_name", "dataset_config", "dataset_train_split",
             note="datasets:NAME:CONFIG:SPLIT"),
    **answer("data.validation.source", "dataset_test_split", note="datasets:NAME:SPLIT"),
    **answer("", "dataset_num_proc", note="it is not needed because prompts are tokenized when they are used"),
    **answer("evaluation", "eval_strategy", note="evaluation.every_steps; `evaluation=null` switches it off"),
    **answer("logging.sample_texts", "num_sample_generations", "log_completions", "num_completions_to_print",
             note="samples of each step, in samples.jsonl"),
    **answer("", "logging_steps", note="it is not needed because metrics are logged at every step"),
    **answer("", "save_strategy", note="checkpoint.every_steps and checkpoint.every_minutes decide"),
    **answer("", "push_to_hub", note="export the model with `megappo export` and upload the folder"),
    **answer("reward.model_path", "reward_model_name_or_path"),
    **answer("reward.functions.NAME.weight", "reward_weights"),
    **answer("", "world_size", "num_processes", "num_machines", "machine_rank", note=LAUNCHER),
    **answer("", "config_file", "ds3_gather_for_generation", note=MEGATRON),
    **answer("actor.lora", "use_peft", note="{rank: 16, alpha: 32}"),
    **answer("reference.share_actor_base", "model_adapter_name", "ref_adapter_name",
             note="the reference is the actor without adapters"),
    **answer("rollout.servers", "use_vllm", note=f"{{}} starts servers; {server_flags.PROGRAM}"),
    **answer("rollout.servers.placement", "vllm_mode", note="colocated or disaggregated"),
    **answer("rollout.servers.urls", "vllm_server_host", "vllm_server_base_url"),
    **answer("model.dtype", "dtype"),
    **answer("actor.minibatch_sequences", "generation_batch_size", "steps_per_generation",
             note="TRL sets the samples of a generation; megappo uses rollout.prompts_per_step"),
}  # fmt: skip
"""Answers by the field of the configuration class, which is also the flag."""
