"""dInfer: inference for diffusion language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dinfer.engine.async_llm import AsyncLLM
    from dinfer.engine.llm import LLM
    from dinfer.errors import DinferError
    from dinfer.request import Output, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "DinferError", "Output", "SamplingParams"]

_HOME = {
    "LLM": "dinfer.engine.llm",
    "AsyncLLM": "dinfer.engine.async_llm",
    "DinferError": "dinfer.errors",
    "Output": "dinfer.request",
    "SamplingParams": "dinfer.request",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that `import dinfer` is quick."""
    if name not in _HOME:
        raise AttributeError(f"module 'dinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
