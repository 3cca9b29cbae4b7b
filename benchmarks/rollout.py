"""Tokens per CPU second of the rollout engines, against transformers' generate in the same process.

    OMP_NUM_THREADS=1 PYTHONPATH=.:conversion python benchmarks/rollout.py [--model quickstart|4m|135m] [--repeats 5]
        [--vllm]

Random weights, no stop token, so all sides do the same work: `quickstart` samples 40 tokens for 32 prompts x 8 (a
0.4M Qwen2, character vocabulary), `4m` 40 tokens for 16 x 8 (2048 tokens), `135m` 20 tokens for 16 rows (a Llama of
SmolLM2-135M's shape). `--vllm` adds the vLLM engine in this process, where it is installed.
`quickstart` also runs with a stop token that ends about one row in 21 at each step: there, dropped rows count.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.rollout.protocol import RolloutEngine, SampleRequest, SamplingParams
from exgrpo_megatron.rollout.torch_engine import TorchEngine


@dataclass(frozen=True)
class Case:
    """A model shape and a batch: `num_prompts` prompts of 6 to 14 tokens, `num_samples` samples of each."""

    config: transformers.PretrainedConfig
    num_prompts: int
    num_samples: int
    max_new_tokens: int


def cases() -> dict[str, Case]:
    quickstart = transformers.Qwen2Config(
        vocab_size=21,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        tie_word_embeddings=True,
    )
    llama_135m = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        tie_word_embeddings=True,
    )
    qwen2_4m = transformers.Qwen2Config(
        vocab_size=2048,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=768,
        tie_word_embeddings=True,
    )
    return {
        "quickstart": Case(quickstart, 32, 8, 40),
        "4m": Case(qwen2_4m, 16, 8, 40),
        "135m": Case(llama_135m, 4, 4, 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["quickstart", "4m", "135m"], default="quickstart")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm", action="store_true")
    args = parser.parse_args()
    case = cases()[args.model]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(case.config, attn_implementation="sdpa").eval()
    prompts = random_prompts(case)
    engine = TorchEngine(
        Architecture.from_hf_config(case.config.to_dict()), max_batch_size=case.num_prompts * case.num_samples
    )
    started = time.process_time()
    engine.load_weights(hf_weights(model), version=0)
    print(f"{args.model}: {torch.get_num_threads()} thread(s), weights loaded in {time.process_time() - started:.3f} s")
    report("engine, no stop token", lambda: engine_tokens(engine, prompts, case, ()), args.repeats)
    report("transformers generate", lambda: generate_tokens(model, prompts, case), args.repeats)
    if case.config.vocab_size < 100:
        report("engine, stop token", lambda: engine_tokens(engine, prompts, case, (2,)), args.repeats)
    if args.vllm:
        vllm = vllm_engine(model, case)
        report("vLLM engine", lambda: engine_tokens(vllm, prompts, case, ()), args.repeats)
        vllm.close()


def vllm_engine(model: transformers.PreTrainedModel, case: Case) -> RolloutEngine:
    """A vLLM engine in this process with the model's weights."""
    from exgrpo_megatron.config import VllmConfig
    from exgrpo_megatron.rollout.vllm_engine import VLLMEngine
    from exgrpo_megatron.rollout.vllm_process import VLLMSettings
    from exgrpo_megatron.rollout.weight_buckets import in_groups

    with tempfile.TemporaryDirectory() as folder:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        rows = case.num_prompts * case.num_samples
        settings = VLLMSettings(Path(folder), VllmConfig(), torch.float32, 64, rows, 2**29)
        engine = VLLMEngine(Architecture.from_hf_config(model.config.to_dict()), settings)
        weights = dict(hf_weights(model))
        engine.load_weights(((name, weights[name]) for name in in_groups(weights)), version=0)
    return engine


def report(name: str, sample: Callable[[], int], repeats: int) -> None:
    """Print the median and the best rate of `repeats` runs after one to warm up."""
    sample()
    rates = []
    for _ in range(repeats):
        started = time.process_time()
        num_tokens = sample()
        rates.append(num_tokens / (time.process_time() - started))
    print(
        f"{name:24s} {np.median(rates):9.0f} tokens per CPU second (best {max(rates):.0f}; {num_tokens} tokens a run)"
    )


def engine_tokens(engine: RolloutEngine, prompts: list[np.ndarray], case: Case, stops: tuple[int, ...]) -> int:
    requests = [
        SampleRequest(prompt, tuple(range(i * case.num_samples, (i + 1) * case.num_samples)))
        for i, prompt in enumerate(prompts)
    ]
    responses = engine.sample(requests, SamplingParams(case.max_new_tokens, 1.0, stops))
    return sum(len(response.token_ids) for group in responses for response in group)


def generate_tokens(model: transformers.PreTrainedModel, prompts: list[np.ndarray], case: Case) -> int:
    """The same prompts, left-padded as generate wants them."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention_mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        sampled = model.generate(
            ids,
            attention_mask=attention_mask,
            do_sample=True,
            top_k=0,
            num_return_sequences=case.num_samples,
            max_new_tokens=case.max_new_tokens,
            min_new_tokens=case.max_new_tokens,
            pad_token_id=0,
            eos_token_id=None,
        )
    return (sampled.shape[1] - width) * len(sampled)


def random_prompts(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 15, size=case.num_prompts)
    return [rng.integers(0, case.config.vocab_size, size=length, dtype=np.int32) for length in lengths]


def hf_weights(model: transformers.PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    tied = model.config.tie_word_embeddings
    return [(name, tensor) for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")]


if __name__ == "__main__":
    main()
