"""The peer benchmark's process of TRL: its ``GRPOTrainer``, in its own loop, which waits before each step.

It runs in TRL's environment. Generation is that of Transformers on a CPU, and of vLLM where there is a GPU and
vLLM can be imported.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from experiments.bench.peer_child import Channel, Problem, count_sevens, prompt_texts


class TimedTrainer(GRPOTrainer):
    """Notes how long it takes to generate and score a batch, and the tokens of it."""

    rollout_seconds = 0.0
    completion_tokens = 0

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        start = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.completion_tokens = int(output["completion_mask"].sum())
        self.rollout_seconds = time.perf_counter() - start
        return output


class StepOnCommand(TrainerCallback):
    """Holds the trainer's loop before each step, and answers after it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.trainer: TimedTrainer | None = None
        self.start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait."""
        self.channel.wait()
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Answer."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        step = time.perf_counter() - self.start
        trainer = self.trainer
        self.channel.answer(rollout=trainer.rollout_seconds, step=step, tokens=trainer.completion_tokens)


def build_tokenizer(problem: Problem) -> PreTrainedTokenizerFast:
    """Ids as decimal words, and two names above the model's vocabulary for what is never sampled."""
    names = {problem.eos_id: "<eos>", problem.pad_id: "<pad>"}
    vocabulary = {names.get(i, str(i)): i for i in range(problem.vocab_size + len(names))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def build_model(problem: Problem) -> LlamaForCausalLM:
    """Random weights."""
    torch.manual_seed(problem.seed)
    config = LlamaConfig(
        vocab_size=problem.vocab_size,
        hidden_size=problem.width,
        intermediate_size=problem.ffn_width,
        num_hidden_layers=problem.num_layers,
        num_attention_heads=problem.num_heads,
        num_key_value_heads=problem.num_kv_heads,
        max_position_embeddings=problem.prompt + problem.completion,
        rope_parameters={"rope_type": "default", "rope_theta": problem.rope_theta},
        rms_norm_eps=problem.norm_eps,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def build_config(problem: Problem, folder: str, *, use_vllm: bool) -> GRPOConfig:
    """One update a batch; nothing is logged, evaluated or saved."""
    completions = problem.prompts * problem.group
    options: dict[str, Any] = {}
    if use_vllm:
        options = {"use_vllm": True, "vllm_mode": "colocate", "generation_kwargs": {"ignore_eos": True}}
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=completions // problem.micro_batches,
        gradient_accumulation_steps=problem.micro_batches,
        generation_batch_size=completions,
        num_generations=problem.group,
        max_completion_length=problem.completion,
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        learning_rate=problem.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=problem.clip_norm,
        optim="adamw_torch_fused",
        gradient_checkpointing=problem.remat,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        max_steps=10**6,
        shuffle_dataset=False,
        seed=problem.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


def main() -> None:
    channel = Channel()
    problem = channel.problem
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    use_vllm = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None
    model, tokenizer = build_model(problem), build_tokenizer(problem)
    commands = StepOnCommand(channel)
    with tempfile.TemporaryDirectory() as folder:
        policy: Any = model
        if use_vllm:  # it reads the weights for itself
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            policy = folder
        trainer = TimedTrainer(
            model=policy,
            reward_funcs=count_sevens,
            args=build_config(problem, folder, use_vllm=use_vllm),
            train_dataset=Dataset.from_dict({"prompt": prompt_texts(problem)}),
            processing_class=tokenizer,
            callbacks=[commands],
        )
        commands.trainer = trainer
        packages = ("trl", "transformers", "torch", *(["vllm"] if use_vllm else []))
        channel.ready(
            parameters=sum(x.numel() for x in model.parameters()),
            versions={name: version(name) for name in packages},
        )
        trainer.train()


if __name__ == "__main__":
    main()
