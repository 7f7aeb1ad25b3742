"""Options that several commands share."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dinfer.errors import RequestError

if TYPE_CHECKING:
    from dinfer.engine.llm import LLM

DEFAULT_MODEL = "tiny-sdar"

Model = Annotated[
    str, typer.Option("--model", "-m", help="Bundled name, folder, or Hugging Face id.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens of the answer.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this mass.")]
TopK = Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0 = all.")]
Seed = Annotated[int, typer.Option(help="Same seed, same tokens.")]
Decoder = Annotated[str | None, typer.Option(help="Spec, for example threshold:threshold=0.9.")]
Cache = Annotated[str | None, typer.Option(help="Spec, for example vicinity:left=16:right=16.")]
Iteration = Annotated[str | None, typer.Option(help="Spec, for example blockwise:length=32.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Draw the canvas as it fills in.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Fact = Annotated[
    list[str] | None, typer.Option("--fact", help="Overrides a fact of the model: name=JSON value.")
]


def open_model(model: str, dtype: str, device: str, facts: list[str] | None) -> "LLM":
    """The model of the shared options."""
    from dinfer.engine.llm import LLM

    return LLM(model, dtype=dtype, device=device, facts=read_facts(facts))


def read_facts(facts: list[str] | None) -> dict[str, Any]:
    """`name=value` pairs as a dictionary; values are JSON, or plain text where they are none."""
    found: dict[str, Any] = {}
    for text in facts or []:
        name, sign, value = text.partition("=")
        if not sign:
            raise RequestError(
                f"--fact is {text!r}; write name=value, for example --fact block_length=8."
            )
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
