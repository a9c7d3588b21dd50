"""vLLM's CPU build on our transformer's shape: 64 continuations of one cached prefix. Needs vLLM alone.

    python benchmarks/peers_vllm.py --prefix 2048 --candidates 64 --seconds 10

Prints one line of JSON: seconds of each round of `candidates` requests, each the prefix and one further token, answered
by one token. Prefix caching is on and the prefix is cached; the layers are GPT-2's, their weights random.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

#: GPT-2 has our transformer's layers: LayerNorm before, GELU, an MLP of four times the width.
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 256, "n_layer": 8, "n_head": 4,
    "n_positions": 4096, "n_ctx": 4096, "vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to standard output
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        found = rounds(folder, options)
    print(json.dumps(found), file=answers, flush=True)


def rounds(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each round, the first (which computes the prefix) apart, and tokens found in the cache."""
    import vllm

    llm = vllm.LLM(
        folder, skip_tokenizer_init=True, load_format="dummy", dtype=options.dtype, enable_prefix_caching=True,
        max_model_len=options.prefix + 64, max_num_seqs=options.candidates,
    )  # fmt: skip
    once = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    prefix = [1 + index * 37 % 1000 for index in range(options.prefix)]
    prompts = [{"prompt_token_ids": [*prefix, 1 + candidate]} for candidate in range(options.candidates)]
    start = time.perf_counter()
    llm.generate(prompts[:1], once, use_tqdm=False)
    first = time.perf_counter() - start
    llm.generate(prompts, once, use_tqdm=False)
    times: list[float] = []
    cached = 0
    until = time.perf_counter() + options.seconds
    while not times or time.perf_counter() < until:
        start = time.perf_counter()
        answers = llm.generate(prompts, once, use_tqdm=False)
        times.append(time.perf_counter() - start)
        cached = min(answer.num_cached_tokens or 0 for answer in answers)
    return {"version": vllm.__version__, "first": first, "times": times, "cached_tokens": cached}


if __name__ == "__main__":
    main()
