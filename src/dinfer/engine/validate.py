"""Which strategies a model can be served with."""

from dinfer.engine.sequence import Strategy
from dinfer.errors import RequestError
from dinfer.request import SamplingParams
from dinfer.step import ModelInfo


def check(strategy: Strategy, params: SamplingParams, facts: ModelInfo) -> None:
    """Raises RequestError where the model does not allow one of the three or the guidance."""
    strategy.cache.allow(facts)
    decoder = params.decoder or facts.decoder
    if facts.shift and "shadow" in strategy.decoder.needs:
        raise RequestError(
            f"The decoder {decoder!r} judges tokens at their own place, and the logits"
            " of this model are shifted by one; use another decoder."
        )
    drafts = getattr(strategy.decoder, "drafts", False)
    if drafts and facts.mask_id is not None:
        raise RequestError(
            f"The decoder {decoder!r} denoises random tokens and this model fills in masks; use"
            f" another one, such as the recommended {facts.decoder!r}."
        )
    if facts.mask_id is not None:
        return
    reason = "this model has no mask token: it denoises random tokens"
    if not drafts:
        raise RequestError(
            f"The decoder {decoder!r} fills in masks and {reason}; use another one, such as the"
            f" recommended {facts.decoder!r}."
        )
    if hasattr(strategy.iteration, "mix"):
        raise RequestError(
            f"The iteration {params.iteration!r} softens masks and {reason}; use another one, such"
            f" as the recommended {facts.iteration!r}."
        )
    if params.guidance:
        raise RequestError(
            f"guidance is {params.guidance} and masks the prompt, but {reason}; leave it at 0."
        )
