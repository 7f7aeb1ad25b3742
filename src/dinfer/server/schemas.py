"""Fields that several endpoints share. Strict: no conversion, no unknown field.

Every list stops at its first wrong item (`fail_fast`) and has a greatest length where there is a
natural one: pydantic otherwise makes an error object for each item, and a body of 1 MB holds
hundreds of thousands.
"""

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dinfer.errors import DinferError
from dinfer.registry import STRATEGIES, build
from dinfer.request import Output, SamplingParams
from dinfer.server.api_error import APIError, naming

MOST_CHOICES = 1024
"""Answers of one call; the server's own limit may be lower."""
MOST_ITEMS = 10_000
"""Messages of one conversation, parts of one message, pinned pieces of one canvas."""
MOST_TOOLS = 128
"""Tools of one call."""
_MOST_FIELDS = 100

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[Token], Field(fail_fast=True)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[int, Field(ge=1, le=1)]
StopText = Annotated[str, Field(min_length=1)]
Spec = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(max_length=1000)]


class Strict(BaseModel):
    """A body or a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, data: Any) -> Any:
        """Each unknown field would be an error of its own."""
        if isinstance(data, dict) and len(data) > _MOST_FIELDS:
            text = f"An object has {len(data)} fields; at most {_MOST_FIELDS} are allowed"
            raise PydanticCustomError("too_many_fields", text)
        return data


class StreamOptions(Strict):
    """include_usage: a last chunk with the usage. include_canvas: chunks without choices that
    carry what each step set, final or not.
    """

    include_usage: bool | None = None
    include_canvas: bool | None = None


class Common(Strict):
    """What every generating endpoint takes. Left out or null = the default of SamplingParams; a
    seed that is left out is drawn anew.

    timeout: seconds after which the call ends with an error, if the server's own limit is longer.
    """

    model: Name | None = None
    temperature: Annotated[float, Field(ge=0, le=1e38)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    decoder: Spec | None = None
    cache: Spec | None = None
    iteration: Spec | None = None
    guidance: Annotated[float, Field(ge=0, le=100)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # known to clients; of no consequence here

    def sampling(self, **more: Any) -> SamplingParams:
        """The parameters; fields of the same name in a subclass are found by their name."""
        if self.stream_options is not None and not self.stream:
            text = "stream_options is given and stream is not true."
            raise APIError(400, text, "stream_options", "invalid_value")
        for kind in STRATEGIES:
            if spec := getattr(self, kind):
                with naming(kind):
                    build(kind, spec)
        drawn = secrets.randbelow(2**31) if self.seed is None else self.seed
        fields = SamplingParams.__dataclass_fields__
        given: dict[str, Any] = {name: getattr(self, name, None) for name in fields}
        given = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**given | {"seed": drawn} | more)
        except DinferError as error:
            raise APIError(400, str(error), str(error).partition(" ")[0]) from error

    @property
    def wants_canvas(self) -> bool:
        """Whether the stream carries canvas chunks."""
        return bool(self.stream_options and self.stream_options.include_canvas)

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Answering(Common):
    """What completions and chat take besides. The fields at the end are known to OpenAI clients,
    but only their neutral value is possible here.
    """

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None


class UsageBody(BaseModel):
    """Tokens of a call: all prompts (each once), all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int) -> "UsageBody":
        """With the sum."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        )


class StatsBody(BaseModel):
    """What an answer cost, and the seed that gives it again."""

    forward_passes: int
    tokens_per_forward: float
    seconds: float
    queued_seconds: float
    repetition: float
    seed: int

    @classmethod
    def of(cls, output: Output, seed: int) -> "StatsBody":
        """Of one answer."""
        stats = output.stats
        return cls(
            forward_passes=stats.forward_passes,
            tokens_per_forward=stats.tokens_per_forward,
            seconds=stats.seconds,
            queued_seconds=stats.queued_seconds,
            repetition=stats.repetition,
            seed=seed,
        )


class CanvasBody(BaseModel):
    """What one step set: positions counted from the answer's start, their tokens as ids and text,
    and the probability of each. Step 0 gives what is fixed from the outset and the length of all.
    """

    index: int
    step: int
    positions: list[int]
    token_ids: list[int]
    tokens: list[str]
    confidence: list[float]
    length: int | None = None


Finish = Literal["stop", "length"]
