"""vLLM's CPU build on the shape of our transformer, as a peer's process: peers_child.py has the protocol. Needs vLLM.

    python relaygr_lab/benchmarks/peers_vllm.py PREFIX CANDIDATES DTYPE

One run is CANDIDATES requests together, each the cached prefix and one token of its own, answered by one token. Layers
are those of GPT-2, as our transformer's: LayerNorm before, GELU, an MLP of four times the width. Weights are random.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from peers_child import turn

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 256, "n_layer": 8, "n_head": 4,
    "n_positions": 4096, "n_ctx": 4096, "vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


class Continuations:
    """The engine with the prefix in its cache."""

    def __init__(self, folder: Path, prefix: int, candidates: int, dtype: str) -> None:
        import vllm

        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        self.version: str = vllm.__version__
        self._once = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self._llm = vllm.LLM(
            str(folder), skip_tokenizer_init=True, load_format="dummy", dtype=dtype, enable_prefix_caching=True,
            max_model_len=prefix + 64, max_num_seqs=candidates,
        )  # fmt: skip
        history = [1 + index * 37 % 1000 for index in range(prefix)]
        self._prompts = [{"prompt_token_ids": [*history, 1 + candidate]} for candidate in range(candidates)]
        self.run()
        # A cache holds whole blocks of tokens, so up to a block of the prefix is computed for each candidate.
        self.cached = self.run()

    def run(self) -> int:
        """All continuations once. The smallest number of prompt tokens that were found in the cache."""
        answers = self._llm.generate(self._prompts, self._once, use_tqdm=False)
        return min(answer.num_cached_tokens or 0 for answer in answers)


def main() -> None:
    prefix, candidates, dtype = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to standard output
    with tempfile.TemporaryDirectory() as folder:
        engine: Continuations | None = None
        for line in sys.stdin:
            request = json.loads(line)
            try:
                engine = engine or Continuations(Path(folder), prefix, candidates, dtype)
                answer: dict[str, Any] = {"version": engine.version, "cached": engine.cached}
                if "turn" in request:
                    answer["times"] = turn(engine.run, request["turn"])
            except ModuleNotFoundError as error:
                answer = {"failed": f"{error.name} is not installed here: `make bench-vllm` installs it"}
            except Exception as error:
                answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
