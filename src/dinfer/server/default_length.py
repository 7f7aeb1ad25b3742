"""The length of an answer that nobody chose."""

from dinfer.engine.async_llm import AsyncLLM
from dinfer.request import SamplingParams

DEFAULT = SamplingParams().max_tokens


def answer_length(llm: AsyncLLM, fixed: int) -> int:
    """The default of SamplingParams, or what the context leaves behind `fixed` tokens (1 at
    least, so that a prompt that is too long is refused as such).
    """
    return max(1, min(DEFAULT, llm.loaded.facts.context - fixed))
