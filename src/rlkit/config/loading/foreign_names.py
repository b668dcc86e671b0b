"""Settings of other trainers by their names there, so that an unknown field is answered with the field of rlkit."""

from __future__ import annotations

_FIELDS = {
    "model": "model_name model_name_or_path model_path model.path",
    "name": "run_name experiment_name wandb_name output_dir log_path",
    "steps": "n_steps num_steps max_steps total_steps total_training_steps n_batches num_batches num_train_steps",
    "epochs": "num_epochs num_train_epochs n_epochs total_epochs",
    "load_checkpoint": "load_checkpoint_path init_from_checkpoint",
    "batch.groups": "batch_size groups_per_batch train_batch_size per_device_train_batch_size rollout_batch_size "
    "generation_batch_size",
    "batch.group_size": "num_generations n_samples_per_prompt rollouts_per_example num_samples_per_prompt rollout_n "
    "rollout.n",
    "batch.substeps": "num_substeps num_iterations ppo_mini_batch_size mini_batch_size num_minibatches "
    "steps_per_generation",
    "optimizer.learning_rate": "lr learning_rate",
    "optimizer.grad_clip_norm": "max_grad_norm grad_clip",
    "optimizer.schedule": "lr_scheduler_type lr_schedule",
    "optimizer.warmup_steps": "num_warmup_steps lr_warmup_steps warmup_ratio lr_warmup_steps_ratio",
    "sampling.max_tokens": "max_tokens max_completion_length max_new_tokens max_response_length max_tokens_per_turn",
    "lora.rank": "lora_rank lora_r",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.beta1": "adam_beta1 beta_1",
    "optimizer.beta2": "adam_beta2 beta_2",
    "chat.renderer": "renderer_name",
    "checkpoint.ttl_days": "ttl_seconds",
    "schedule.mode": "async_config stream_minibatch_config groups_per_minibatch",
    "kl_penalty.coefficient": "beta kl_penalty_coef kl_coef kl_loss_coef init_kl_coef use_kl_loss use_kl_in_reward "
    "kl_beta",
    "kl_penalty.reference": "kl_reference_config ref_model",
    "loss.name": "loss_fn loss_type loss_name importance_sampling_level",
    "loss.clip_low": "clip_ratio_low eps_clip_low epsilon_low",
    "loss.clip_high": "epsilon epsilon_high eps_clip cliprange clip_ratio clip_ratio_high eps_clip_high",
    "batch.replace_uninformative": "dynamic_sampling filter_groups remove_constant_reward_groups",
    "sampling.stop": "stop_sequences stop_strings",
    "teacher.model": "teacher_model teacher_model_name_or_path",
    "envs": "reward_funcs reward_function train_dataset train_files dataset_builder dataset "
    "custom_reward_function.path custom_reward_function.name",
    "advantage": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo",
    "schedule.max_staleness": "max_steps_off_policy max_off_policy_steps max_async_level async_level",
    "checkpoint.every": "save_every save_steps save_freq rolling_save_every",
    "eval.envs": "val_files eval_dataset",
    "seed": "data.seed",
    "rollouts.workers": "num_workers",
    "kl_penalty.discount": "kl_discount_factor",
    "eval.every": "eval_every eval_steps test_freq eval_interval",
    "service.base_url": "base_url api_base",
    "track.wandb.project": "wandb_project project_name report_to logger",
}
"""Names in TRL, verl, SkyRL, prime-rl and tinker-cookbook, by the field of rlkit with this meaning."""

UNITS = {
    "batch.groups": "tasks, with batch.group_size rollouts each",
    "optimizer.warmup_steps": "optimiser steps",
    "checkpoint.ttl_days": "days",
    "loss.clip_low": "from 0: 1 − epsilon",
    "loss.clip_high": "from 0: 1 + epsilon",
}
"""Units of fields that other trainers count otherwise."""

FOREIGN_NAMES = {name: field for field, names in _FIELDS.items() for name in names.split()}
"""Field of rlkit by the name elsewhere."""

_ANSWERS = {
    "A step has one gradient, that of its whole batch: set batch.groups": "gradient_accumulation_steps",
    "Each step is logged; leave the field out": "logging_steps",
    "Use `rlkit resume RUN`; load_checkpoint starts a new run from its weights": "resume_from_checkpoint",
    "Use `rlkit export RUN --to DIR`, and upload the folder": "push_to_hub",
    "With eval.envs, a run is evaluated before its first step": "eval_on_start val_before_train",
    "An environment grades its rollouts: write the reward function there": "reward_manager",
    "No loss bounds the ratio twice; set loss.clip_high, or write one as a function": "delta clip_ratio_c",
    "An environment masks an episode: return Outcome(masked=reply.truncated)": "mask_truncated_completions "
    "overlong_filter",
    "An environment returns one reward: add the parts with their weights in its grader": "reward_weights",
    "Losses have no entropy bonus; write one as a function, and set loss.function": "entropy_coef entropy_coeff",
    "A step trains once on each episode; batch.substeps splits it into optimiser steps": "ppo_epochs",
    "There is no value function: advantages compare the rewards of a group": "gamma lam",
    "The Tinker API samples with temperature, top_p and top_k": "min_p repetition_penalty",
    "A prompt may fill the model's context; leave the field out": "max_prompt_length",
    "An environment makes its messages: add the system message there": "system_prompt",
    "The service decides it; leave the field out": "lora_alpha lora_dropout target_modules bf16 fp16 use_vllm "
    "gradient_checkpointing vllm_gpu_memory_utilization n_gpus_per_node nnodes",
}

ANSWERS = {name: answer for answer, names in _ANSWERS.items() for name in names.split()}
"""Answer to a setting of another trainer that has no field here, by its name."""

VALUE_ANSWERS = {
    "loss.name=grpo": "GRPO is an estimator: set advantage to grpo. Its loss is ppo",
    "loss.name=dr_grpo": "Set advantage to group_mean, and batch.normalize to constant",
    "loss.name=dapo": "Set loss.name to ppo, and batch.normalize to token",
    "advantage.name=gae": "There is no value function: advantages compare the rewards of a group",
}
"""Answer to the name of a loss or an estimator elsewhere, by field and value."""
