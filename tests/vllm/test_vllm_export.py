"""An exported folder in vLLM, as anybody would load it: greedy text as in transformers, log-probs as in the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from vllm_models import VOCAB, needs_vllm, save_model

from exgrpo_kernels.reference import Objective

pytestmark = needs_vllm

TOLERANCE = 1e-4
NEW_TOKENS = 24

# In a process of its own: vLLM keeps threads and generators to itself that other tests look at.
PROGRAM = f"""
import json, sys
from vllm import LLM, SamplingParams
engine = LLM(
    sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=4, enforce_eager=True, skip_tokenizer_init=True,
    kv_cache_memory_bytes=2**26, seed=0,
)
prompts = [{{"prompt_token_ids": ids}} for ids in json.loads(sys.argv[2])]
sampling = SamplingParams(temperature=0.0, max_tokens={NEW_TOKENS}, logprobs=0, ignore_eos=True, detokenize=False)
for output in engine.generate(prompts, sampling, use_tqdm=False):
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    print("ANSWER", json.dumps([ids, [step[token].logprob for token, step in zip(ids, answer.logprobs)]]))
"""


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("llama", False)])
def test_an_exported_folder_answers_in_vllm_as_in_transformers_and_in_the_trainer(
    family, tied, tmp_path, data_parallel
):
    from policy_models import make_actor, random_sequences
    from transformers import AutoModelForCausalLM

    from exgrpo_megatron.policy.export import export_hf

    source = save_model(tmp_path / "model", family, tied=tied)
    actor = make_actor(source, data_parallel)
    actor.update(random_sequences(6, vocab=VOCAB), Objective(), temperature=1.0)
    export_hf(actor, tmp_path / "hf", source)
    prompts = [np.arange(start, start + length) % VOCAB for start, length in ((1, 3), (5, 17), (9, 140))]
    answers = in_vllm(tmp_path / "hf", prompts)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for prompt, (ids, logprobs) in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            tokens = torch.from_numpy(prompt)[None]
            whole = model.generate(tokens, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        assert whole[0, len(prompt) :].tolist() == ids
        (scored,) = actor.score([(prompt.astype(np.int32), np.array(ids, np.int32))], temperature=1.0)
        np.testing.assert_allclose(logprobs, scored.logprobs, atol=TOLERANCE)


def in_vllm(folder, prompts):
    """(token ids, log-probs) of the greedy answer to each prompt."""
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps([prompt.tolist() for prompt in prompts])]
    switches = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    }
    environment = {**os.environ, **switches}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return [json.loads(line.removeprefix("ANSWER ")) for line in lines]
