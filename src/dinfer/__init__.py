"""dInfer: inference for diffusion language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dinfer.engine.async_llm import AsyncLLM
    from dinfer.engine.llm import LLM
    from dinfer.errors import DinferError
    from dinfer.request import CanvasEvent, Output, SamplingParams, TextEvent

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CanvasEvent",
    "DinferError",
    "Output",
    "SamplingParams",
    "TextEvent",
]

_HOME = {
    "LLM": "dinfer.engine.llm",
    "AsyncLLM": "dinfer.engine.async_llm",
    "CanvasEvent": "dinfer.request",
    "DinferError": "dinfer.errors",
    "Output": "dinfer.request",
    "SamplingParams": "dinfer.request",
    "TextEvent": "dinfer.request",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that `import dinfer` is quick."""
    if name not in _HOME:
        raise AttributeError(f"module 'dinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
