"""What settings are called in other programs: so that a word of theirs is answered with Weft's.

``docs/coming-from.md`` shows the same table.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Equivalent:
    """A setting of Weft's (``section.key``, a section, or an option of a command) and what others call it.

    ``trl`` has the words of transformers, PEFT and TRL, which share their arguments. ``note`` says how it differs.
    """

    weft: str
    trl: tuple[str, ...] = ()
    llama_factory: tuple[str, ...] = ()
    axolotl: tuple[str, ...] = ()
    torchtitan: tuple[str, ...] = ()
    note: str = ""

    @property
    def words(self) -> Iterator[str]:
        """What others call it, in any of their programs."""
        for field in fields(self):
            names = getattr(self, field.name)
            if isinstance(names, tuple):
                yield from names


_ACCUMULATION = "train.batch counts the sequences of a step over all ranks; what micro_batch leaves is accumulated"
_ALL_LINEAR = 'names or patterns; by default "*", every linear layer'

#: All that is known, in the order of the page.
EQUIVALENTS = (
    Equivalent(
        "model.from", ("model_name_or_path", "model_id"), ("model_name_or_path", "adapter_name_or_path"),
        ("base_model", "lora_model_dir"),
        ("hf_assets_path", "model.hf_assets_path", "initial_load_path"),
    ),
    Equivalent(
        "model.vocab", ("vocab_size", "resize_token_embeddings"), ("resize_vocab",),
        ("resize_token_embeddings_to_32x",), (), "larger than that of model.from it grows embedding and output layer",
    ),
    Equivalent(
        "data.path", ("dataset_name", "train_file", "train_dataset"), ("dataset", "dataset_dir"), ("datasets",),
        ("training.dataset", "training.dataset_path", "dataset_path"), 'with data.kind: "chat", "text", "jsonl" ...',
    ),
    Equivalent(
        "data.field", ("dataset_text_field",), (), ("field", "field_messages"), (), "the column that has the text",
    ),
    Equivalent("data.tokenizer", ("tokenizer_name", "tokenizer_name_or_path"), (), ("tokenizer_config",),
               ("model.tokenizer_path", "tokenizer_path")),
    Equivalent(
        "data.seq_len", ("max_length", "max_seq_length", "model_max_length", "block_size"), ("cutoff_len",),
        ("sequence_len",), ("training.seq_len",),
    ),
    Equivalent(
        "data.chat.pack", ("packing",), ("packing", "neat_packing"), ("sample_packing",), (),
        "documents of a row never see each other, and text is always packed",
    ),
    Equivalent("data.chat.template", ("chat_template", "chat_template_path"), ("template",), ("chat_template",)),
    Equivalent(
        "data.chat.learn", ("assistant_only_loss", "completion_only_loss"), ("train_on_prompt", "mask_history"),
        ("train_on_inputs", "roles_to_train"), (), 'by default "assistant": what others say is not learned',
    ),
    Equivalent("data.bos", ("add_bos_token",), (), (), (), "left out, as the tokenizer does it"),
    Equivalent("data.epochs", ("num_train_epochs",), ("num_train_epochs",), ("num_epochs",)),
    Equivalent("data.validation", ("eval_dataset", "test_size"), ("val_size", "eval_dataset"),
               ("val_set_size", "test_datasets")),
    Equivalent("train.steps", ("max_steps",), ("max_steps",), ("max_steps",), ("training.steps",)),
    Equivalent(
        "train.batch", ("train_batch_size", "gradient_accumulation_steps"),
        ("gradient_accumulation_steps",), ("gradient_accumulation_steps", "batch_size"),
        ("training.global_batch_size", "global_batch_size"), _ACCUMULATION,
    ),
    Equivalent(
        "train.micro_batch", ("per_device_train_batch_size", "per_gpu_train_batch_size"),
        ("per_device_train_batch_size",), ("micro_batch_size",),
        ("training.local_batch_size", "local_batch_size"), "sequences per rank and pass; batch counts those of a step",
    ),
    Equivalent(
        "train.dtype", ("bf16", "fp16", "torch_dtype"), ("bf16", "fp16", "pure_bf16"), ("bf16", "fp16", "tf32"),
        ("training.mixed_precision_param", "mixed_precision_param"),
        '"bfloat16" computes in it beside float32 weights; there is no float16',
    ),
    Equivalent(
        "train.recompute", ("gradient_checkpointing",), ("disable_gradient_checkpointing",),
        ("gradient_checkpointing",), ("activation_checkpoint", "activation_checkpoint.mode"),
        '"selective" or "full"',
    ),
    Equivalent("train.compile", ("torch_compile",), ("torch_compile",), ("torch_compile",), ("compile.enable",)),
    Equivalent("train.freeze", (), ("freeze_trainable_layers", "freeze_vision_tower"), ("unfrozen_parameters",), (),
               "patterns of what does not learn"),
    Equivalent("train.seed", ("random_seed",), (), (), ("debug.seed",), "data.seed is that of the order of the data"),
    Equivalent("train.timeout", ("ddp_timeout",), ("ddp_timeout",), ("ddp_timeout",), ("comm.train_timeout_seconds",)),
    Equivalent(
        "adapter.kind", ("use_peft", "use_dora", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"),
        ("finetuning_type", "quantization_bit", "use_dora"), ("load_in_4bit", "load_in_8bit", "peft_use_dora"), (),
        '"lora", "dora", or "qlora" for weights in four bits; without [adapter] all weights learn',
    ),
    Equivalent("adapter.rank", ("lora_r", "r"), ("lora_rank",), ("lora_r",)),
    Equivalent("adapter.alpha", ("lora_alpha",), ("lora_alpha",), ("lora_alpha",)),
    Equivalent("adapter.dropout", ("lora_dropout", "dropout"), ("lora_dropout",), ("lora_dropout",), (),
               "only adapters have dropout"),
    Equivalent(
        "adapter.targets", ("target_modules", "lora_target_modules"), ("lora_target",),
        ("lora_target_modules", "lora_target_linear"), (), _ALL_LINEAR,
    ),
    Equivalent("adapter.rank_stabilised", ("use_rslora",), ("use_rslora",), ("peft_use_rslora",)),
    Equivalent("adapter.whole", ("modules_to_save",), ("additional_target",), ("lora_modules_to_save",), (),
               '"embed_tokens" and "lm_head"'),
    Equivalent("adapter.tokens", ("trainable_token_indices",), (), ("peft_trainable_token_indices",), (),
               'ids, or "new" for those that model.vocab adds'),
    Equivalent("optimizer.kind", ("optim",), ("optim",), (), ("optimizer.name",)),
    Equivalent("optimizer.lr", ("learning_rate",), ("learning_rate",), ("learning_rate",), ()),
    Equivalent("optimizer.schedule", ("lr_scheduler_type",), ("lr_scheduler_type",), ("lr_scheduler",),
               ("lr_scheduler.decay_type", "decay_type")),
    Equivalent(
        "optimizer.warmup", ("warmup_steps", "warmup_ratio"), ("warmup_steps", "warmup_ratio"),
        ("warmup_steps", "warmup_ratio"), ("lr_scheduler.warmup_steps",), "steps, or a share of the run if below 1",
    ),
    Equivalent("optimizer.min_lr", ("min_lr_rate", "lr_scheduler_kwargs"), (), ("cosine_min_lr_ratio",),
               ("lr_scheduler.min_lr_factor", "min_lr_factor"), "a share of lr"),
    Equivalent("optimizer.clip", ("max_grad_norm",), ("max_grad_norm",), ("max_grad_norm",), ("training.max_norm",)),
    Equivalent("optimizer.betas", ("adam_beta1", "adam_beta2"), ("adam_beta1", "adam_beta2"),
               ("adam_beta1", "adam_beta2"), ("optimizer.beta1", "optimizer.beta2", "beta1", "beta2")),
    Equivalent("optimizer.eps", ("adam_epsilon",), ("adam_epsilon",), ("adam_epsilon",)),
    Equivalent("loss.kind", ("loss_type",), ("stage", "pref_loss"), ("rl",), (),
               '"dpo" and others compare pairs, with data.kind = "preference"'),
    Equivalent("loss.beta", ("dpo_beta",), ("pref_beta",), ("rl_beta", "dpo_beta")),
    Equivalent("loss.margin", ("simpo_gamma",), ("simpo_gamma",), ()),
    Equivalent("loss.desirable", ("desirable_weight",), ("kto_chosen_weight",), ("kto_desirable_weight",)),
    Equivalent("loss.undesirable", ("undesirable_weight",), ("kto_rejected_weight",), ("kto_undesirable_weight",)),
    Equivalent("loss.reference", ("ref_model", "ref_model_name_or_path"), ("ref_model",), ()),
    Equivalent("validation.every", ("eval_steps", "eval_strategy", "evaluation_strategy"),
               ("eval_steps", "eval_strategy"), ("eval_steps", "evals_per_epoch"),
               ("validation.freq",)),
    Equivalent("validation.batches", ("per_device_eval_batch_size",), ("per_device_eval_batch_size",),
               ("eval_batch_size",), ("validation.steps",), "of train.batch sequences; 0 takes all there are"),
    Equivalent("validation.keep_best", ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
               ("load_best_model_at_end",), ("load_best_model_at_end",), (), "by the loss on data.validation"),
    Equivalent("validation.patience", ("early_stopping_patience",), ("early_stopping_steps",),
               ("early_stopping_patience",), (), "counts validations"),
    Equivalent("checkpoint.every", ("save_steps", "save_strategy"), ("save_steps",), ("save_steps", "saves_per_epoch"),
               ("checkpoint.interval",)),
    Equivalent("checkpoint.keep", ("save_total_limit",), ("save_total_limit",), ("save_total_limit",),
               ("checkpoint.keep_latest_k", "keep_latest_k")),
    Equivalent("checkpoint.export", ("push_to_hub", "hub_model_id"), ("export_dir", "export_hub_model_id"),
               ("hub_model_id",), ("checkpoint.last_save_in_hf", "last_save_in_hf"),
               "or afterwards weft export, which also uploads: --push owner/name"),
    Equivalent("observe.every", ("logging_steps",), ("logging_steps",), ("logging_steps",),
               ("metrics.log_freq", "log_freq")),
    Equivalent("observe.trackers", ("report_to",), ("report_to",), ("wandb_project", "use_wandb"),
               ("metrics.enable_tensorboard", "enable_wandb")),
    Equivalent(
        "layout.shard", ("fsdp", "fsdp_config", "deepspeed"), ("deepspeed",), ("fsdp", "fsdp_config", "deepspeed"),
        ("parallelism.data_parallel_shard_degree", "data_parallel_shard_degree"),
        "ranks over which the state is cut; layout.zero = 1, 2 or 3",
    ),
    Equivalent("layout.dp", (), (), (),
               ("parallelism.data_parallel_replicate_degree", "data_parallel_replicate_degree")),
    Equivalent("layout.tp", ("tp_size",), (), ("tensor_parallel_size",),
               ("parallelism.tensor_parallel_degree", "tensor_parallel_degree")),
    Equivalent("layout.pp", ("pp_size",), (), (),
               ("parallelism.pipeline_parallel_degree", "pipeline_parallel_degree")),
    Equivalent("layout.cp", (), ("sequence_parallel_size",), ("context_parallel_size", "sequence_parallel_degree"),
               ("parallelism.context_parallel_degree", "context_parallel_degree")),
    Equivalent("layout.ep", (), (), (), ("parallelism.expert_parallel_degree", "expert_parallel_degree")),
    Equivalent("layout.schedule", (), (), (),
               ("parallelism.pipeline_parallel_schedule", "pipeline_parallel_schedule")),
    Equivalent("--out", ("output_dir",), ("output_dir",), ("output_dir",), ("job.dump_folder", "dump_folder")),
    Equivalent("--resume", ("resume_from_checkpoint",), ("resume_from_checkpoint",),
               ("resume_from_checkpoint", "auto_resume_from_checkpoints"), ("checkpoint.load_step", "load_step")),
    Equivalent("train", (), (), (), ("training",), "a section"),
    Equivalent("layout", (), (), (), ("parallelism",), "a section"),
    Equivalent("adapter", ("peft", "peft_config", "lora", "lora_config"), (), ("peft", "lora"), (), "a section"),
)  # fmt: skip


def here_called(word: str) -> Equivalent | None:
    """What ``word`` of another program is in Weft: a key, or with its section (``training.steps``); None if unknown."""
    plain = word.strip("-").replace("-", "_")
    last = plain.rpartition(".")[2]
    for wanted in dict.fromkeys((plain, last)):
        for equivalent in EQUIVALENTS:
            if wanted in equivalent.words:
                return equivalent
    return None


def here_it_is(word: str, as_option: bool = False) -> str:
    """Words that say what ``word`` is called in Weft; empty if it is not known. ``as_option``: on a command line."""
    equivalent = here_called(word)
    if equivalent is None:
        return ""
    is_key = "." in equivalent.weft
    name = f"--set {equivalent.weft}=..." if as_option and is_key else equivalent.weft
    name = f"[{name}]" if not is_key and not name.startswith("--") else name
    note = (
        f" ({equivalent.note})"
        if equivalent.note and equivalent.note != "a section"
        else ""
    )
    return f"in Weft it is {name}{note}"
