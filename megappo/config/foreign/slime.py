"""Flags of train.py in slime and its fork miles, including the flags of Megatron-LM and SGLang."""

from __future__ import annotations

from megappo.config.foreign import common, server_flags
from megappo.config.foreign.answers import KERNELS, LAYERS, LOADS, OWN_FUNCTION, RESUMES, UPDATES, answer

_SHARED = (
    "hf_checkpoint prompt_data lr lr_decay_style actor_num_nodes actor_num_gpus_per_node critic_num_nodes "
    "critic_num_gpus_per_node num_gpus_per_node rollout_batch_size input_key pipeline_model_parallel_size "
    "tensor_model_parallel_size context_parallel_size expert_model_parallel_size rollout_shuffle max_tokens_per_gpu "
    "global_batch_size ref_load use_dynamic_batch_size micro_batch_size n_samples_per_prompt num_rollout num_epoch "
    "rollout_num_gpus_per_engine rollout_num_gpus advantage_estimator rollout_max_response_len rollout_temperature "
    "rollout_max_prompt_len rollout_max_context_len rollout_stop rollout_stop_token_ids label_key "
    "eps_clip eps_clip_high eps_clip_c kl_loss_type kl_loss_coef kl_coef use_kl_loss "
    "rm_type custom_rm_path colocate n_samples_per_eval_prompt eval_prompt_data eval_interval balance_data "
    "save_interval save use_wandb use_tis num_critic_only_steps normalize_advantages lambd "
    "dynamic_sampling_filter_path over_sampling_batch_size partial_rollout recompute_granularity "
    "optimizer_cpu_offload attention_backend "
    "save_debug_rollout_data load_debug_rollout_data debug_train_only num_steps_per_rollout ref_update_interval "
    "clip_grad min_lr lr_warmup_iters lr_warmup_fraction adam_eps use_rollout_logprobs apply_chat_template_kwargs "
    "critic_lr virtual_pipeline_model_parallel_size loss_type use_distributed_optimizer"
)
_NO_DROPOUT = "it is not needed because models are trained without dropout, so that log-probabilities repeat"
_PRECISION = "it is not needed because attention scores and gradient reductions always use float32"
_ARCHITECTURE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels "
    "vocab_size normalization norm_epsilon swiglu disable_bias_linear untie_embeddings_and_output_weights rotary_base "
    "rotary_percent position_embedding_type use_rotary_position_embeddings qk_layernorm num_experts "
    "moe_ffn_hidden_size moe_router_topk moe_layer_freq moe_shared_expert_intermediate_size moe_router_score_function "
    "moe_router_pre_softmax moe_router_load_balancing_type moe_router_enable_expert_bias spec padded_vocab_size"
)

NAMES = {
    **{name: common.NAMES[name] for name in (*_SHARED.split(), server_flags.MEMORY)},
    **answer("", "optimizer", note="the optimizer is AdamW"),
    **answer("actor.optimizer.weight_decay critic.optimizer.weight_decay", "weight_decay"),
    **answer("actor.optimizer.beta1 critic.optimizer.beta1", "adam_beta1"),
    **answer("actor.optimizer.beta2 critic.optimizer.beta2", "adam_beta2"),
    **answer("critic.optimizer.warmup_updates", "critic_lr_warmup_iters", note=UPDATES),
    **answer("critic.start_from critic.path", "critic_load", note=LOADS),
    **answer("", "critic_save", note="a checkpoint of a run contains actor and critic"),
    **answer("actor.layout.sequence_parallel critic.layout.sequence_parallel", "sequence_parallel"),
    **answer("actor.layout.pipeline_layers critic.layout.pipeline_layers", "decoder_last_pipeline_num_layers",
             "decoder_first_pipeline_num_layers", note="a list of the layers of each stage"),
    **answer("", "expert_tensor_parallel_size", note="it is always 1: tensor parallelism does not split experts"),
    **answer("actor.recompute critic.recompute", "recompute_method", "recompute_num_layers",
             note="full recomputes every layer"),
    **answer("actor.offload critic.offload", "offload_train", "offload"),
    **answer("rollout.servers.sleep", "offload_rollout"),
    **answer("", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer",
             note="megappo has no such option; optimizer.on_host places optimizer state in host memory"),
    **answer("", "attention_dropout", "hidden_dropout", note=_NO_DROPOUT),
    **answer("", "attention_softmax_in_fp32", "accumulate_allreduce_grads_in_fp32", note=_PRECISION),
    **answer("", *_ARCHITECTURE.split(), note=LAYERS),
    **answer("", "megatron_to_hf_mode", "model_name",
             note="it is not needed because megappo reads and writes Hugging Face files directly"),
    **answer("", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_dtype",
             "moe_enable_deepep", "qwen_gdn_backend", note=KERNELS),
    **answer("actor.router_aux_loss_coef critic.router_aux_loss_coef", "moe_aux_loss_coeff"),
    **answer("algorithm.router_replay", "use_rollout_routing_replay", "use_routing_replay"),
    **answer("algorithm.correction.cap", "tis_clip"),
    **answer("algorithm.correction.reject_below", "tis_clip_low"),
    **answer("", "get_mismatch_metrics", note="it is not needed because the metrics in mismatch/ are always logged"),
    **answer("algorithm.entropy_coef", "entropy_coef"),
    **answer("algorithm.gamma", "gamma"),
    **answer("critic.value_clip", "value_clip"),
    **answer("algorithm.loss_aggregation", "calculate_per_token_loss", note="token-mean, the default"),
    **answer("", "disable_grpo_std_normalization",
             note="grpo divides by the group's standard deviation, rloo does not"),
    **answer("data.apply_chat_template", "apply_chat_template"),
    **answer("", "eval_top_p", "eval_top_k",
             note="evaluation samples from the whole distribution; data.validation_sets.NAME.temperature scales it"),
    **answer("rollout.top_p", "rollout_top_p"),
    **answer("rollout.top_k", "rollout_top_k", note="0 switches it off"),
    **answer("data.validation_sets.NAME.temperature", "eval_temperature"),
    **answer("evaluation.max_response_tokens", "eval_max_response_len"),
    **answer("evaluation.before_training", "skip_eval_before_train", note="false skips it"),
    **answer("data.validation_sets", "eval_config"),
    **answer("data.validation.prompt_key", "eval_input_key"),
    **answer("data.validation.answer_key", "eval_label_key"),
    **answer("run.seed", "seed", "rollout_seed"),
    **answer("", "load", note=RESUMES),
    **answer("checkpoint.asynchronous", "async_save"),
    **answer("checkpoint.huggingface_every_steps", "save_hf"),
    **answer("reference.path", "ref_ckpt_step", note="a Hugging Face folder; export other checkpoints first"),
    **answer("logging.wandb_project", "wandb_project"),
    **answer("logging.wandb_run.group", "wandb_group"),
    **answer("logging.wandb_run.entity", "wandb_team"),
    **answer("logging.wandb_run.mode", "wandb_mode"),
    **answer("", "wandb_key", note="`wandb login` or the variable WANDB_API_KEY sets the key"),
    **answer("logging.tensorboard", "use_tensorboard"),
    **answer("logging.save_experience", "dump_details", "save_debug_train_data"),
    **answer("", "megatron_config_path", note="set layout and optimizer of actor and critic in the YAML file"),
    **answer("rollout.sync_bucket_bytes", "update_weight_buffer_size"),
    **server_flags.SLIME,
    **answer("rollout.servers.urls", "rollout_external_engine_addrs"),
    **answer("rollout.generation", "custom_generate_function_path", "rollout_function_path",
             note="FILE.py:NAME of your own function"),
    **answer("reward.model_remote reward.judge", "rm_url", note="a reward model or a language model on a server"),
    **answer("reward.batch", "group_rm", note="a function that scores lists"),
    **answer("algorithm.policy_loss", "custom_loss_function_path", note="FILE.py:NAME of your own loss"),
    **answer("algorithm.estimator", "custom_advantage_function_path", note="FILE.py:NAME of your own estimator"),
    **answer("reward.function", "custom_reward_post_process_path", note=OWN_FUNCTION),
    **answer("", "use_fault_tolerance", note="it is not needed because failed servers are restarted automatically"),
    **answer("", "multimodal_keys", note="megappo trains on text only"),
    **answer("", "ci_test", note="it belongs to slime's own tests"),
}  # fmt: skip
"""Answers by the flag, with underscores and without leading dashes."""
