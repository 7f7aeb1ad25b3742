"""Drives an original Fast-dLLM checkout. Run as a script by the interpreter that can import it; it
imports nothing of dInfer.

Arguments: checkout, checkpoint folder, dtype, threads. Reads one job a line from standard input
(mode, prompts, length, block, steps, mask_id, and perhaps threshold or factor) and answers each
with one line: token ids, passes and seconds of every prompt.
"""

import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

FUNCTIONS = {
    "none": "generate",
    "prefix": "generate_with_prefix_cache",
    "dual": "generate_with_dual_cache",
}


def serve(checkout: str, folder: str, dtype: str, threads: str) -> None:
    """Answers jobs until the input ends. The first line says which options the checkout has."""
    sys.path.insert(0, str(Path(checkout) / "llada"))
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the checkout prints is no answer
    import torch

    torch.set_num_threads(int(threads))
    import generate  # type: ignore[import-not-found]
    from model.modeling_llada import LLaDAModelLM  # type: ignore[import-not-found]

    model = LLaDAModelLM.from_pretrained(folder, torch_dtype=getattr(torch, dtype)).eval()

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"factor": "factor" in inspect.signature(generate.generate).parameters})
    for line in sys.stdin:
        say(run(model, generate, json.loads(line)))


def run(model: Any, module: Any, job: dict[str, Any]) -> dict[str, list[Any]]:
    """One job: its prompts one after the other."""
    import torch

    given = {name: job[name] for name in ("threshold", "factor") if job.get(name) is not None}
    function = getattr(module, FUNCTIONS[job["mode"]])
    found: dict[str, list[Any]] = {"ids": [], "passes": [], "seconds": []}
    for prompt in job["prompts"]:
        began = time.perf_counter()
        canvas, passes = function(
            model,
            torch.tensor([prompt]),
            steps=job["steps"],
            gen_length=job["length"],
            block_length=job["block"],
            mask_id=job["mask_id"],
            **given,
        )
        found["seconds"].append(time.perf_counter() - began)
        found["ids"].append(canvas[0, len(prompt) :].tolist())
        found["passes"].append(passes)
    return found


if __name__ == "__main__":
    serve(*sys.argv[1:])
