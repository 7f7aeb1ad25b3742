"""Options that several commands share."""

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from dinfer.errors import RequestError
from dinfer.native import build
from dinfer.request import SamplingParams, TextEvent

if TYPE_CHECKING:
    from dinfer.engine.llm import LLM

DEFAULT_MODEL = "tiny-sdar"
LARGE = 100_000_000
"""Bytes of weights from which on it is told how quickly they were read."""

Model = Annotated[
    str, typer.Option("--model", "-m", help="Bundled name, folder, GGUF file, or Hugging Face id.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens of the answer.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this mass.")]
TopK = Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0 = all.")]
Guidance = Annotated[
    float, typer.Option(help="Classifier-free guidance; 0 = off, costs twice the rows.")
]
MinTokens = Annotated[
    int, typer.Option(help="No end of text among so many first ones; 1 = no empty answer.")
]
Seed = Annotated[int, typer.Option(help="Same seed, same tokens.")]
Decoder = Annotated[str | None, typer.Option(help="Spec, for example threshold:threshold=0.9.")]
Cache = Annotated[str | None, typer.Option(help="Spec, for example vicinity:left=16:right=16.")]
Iteration = Annotated[str | None, typer.Option(help="Spec, for example blockwise:length=32.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Draw the canvas as it fills in.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quant = Annotated[str | None, typer.Option(help="int8 or int4: layers in fewer bits.")]
Family = Annotated[
    str | None,
    typer.Option(help="The family, where config.json names the architecture otherwise: llada, ..."),
]
Lora = Annotated[
    str | None,
    typer.Option(help="Folder or Hugging Face id of a LoRA adapter, added to the weights."),
]
MaxRows = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rows in a step: fewer give first texts sooner, more give more throughput;"
        " none: 128 on a CPU, 1024 elsewhere.",
    ),
]
KVMemory = Annotated[
    float | None,
    typer.Option(help="GiB for keys and values; none: a part of the memory that is available."),
]
GPUMemoryUtilization = Annotated[
    float,
    typer.Option(help="The part of a GPU's memory that weights, keys and values may take."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",
        help="The Ray cluster; none: one on this machine for as long as the command runs.",
    ),
]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Faster steps, after a slow first one, also where our own kernels do not serve;"
        " or leave these out too.",
    ),
]
Fact = Annotated[
    list[str] | None, typer.Option("--fact", help="Overrides a fact of the model: name=JSON value.")
]


@dataclass(frozen=True)
class Loading:
    """How weights are held and run; the names are those of LLM's arguments."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    compiled: Compiled = None
    quant: Quant = None
    family: Family = None
    kv_memory: KVMemory = None
    gpu_memory_utilization: GPUMemoryUtilization = 0.9
    lora: Lora = None


@dataclass(frozen=True)
class Opening(Loading):
    """Options of every command that opens a model."""

    model: Model = DEFAULT_MODEL
    fact: Fact = None

    def open(self, **limits: Any) -> "LLM":
        """The model; `limits` go to LLM."""
        if self.compiled is not False and self.device in ("auto", "cpu"):
            build.begin()  # importing torch takes as long
        from dinfer.engine.llm import LLM

        llm = LLM(
            self.model,
            dtype=self.dtype,
            device=self.device,
            facts=read_facts(self.fact),
            compiled=self.compiled,
            quant=self.quant,
            family=self.family,
            **{"kv_memory": self.kv_memory} | limits,
            gpu_memory_utilization=self.gpu_memory_utilization,
            lora=self.lora,
        )
        read = llm.loaded.read
        if read and read.bytes >= LARGE:
            Console(stderr=True).print(f"{self.model}: {read}", style="dim", highlight=False)
        return llm


@dataclass(frozen=True)
class Server:
    """Where a running server is; None = the model is opened here."""

    server: Annotated[
        str | None,
        typer.Option(help="Talk to this server, http://HOST:PORT; --model is a name it serves."),
    ] = None
    api_key: Annotated[
        str | None, typer.Option(envvar="DINFER_API_KEY", help="The server's key, if it has any.")
    ] = None

    def asked(self, context: typer.Context, opening: Opening) -> str | None:
        """The model to ask for: what the user gave, or None, the first that the server has."""
        source = context.get_parameter_source("model")
        return opening.model if source is not None and source.name != "DEFAULT" else None

    def send(
        self, model: str | None, messages: list[dict[str, str]], params: SamplingParams
    ) -> Iterator[TextEvent]:
        """Settled text of an answer as it comes; the last event has the output."""
        from dinfer.cli import remote

        assert self.server is not None
        body = {"model": model, "messages": messages, **asdict(params)}
        return remote.chat(self.server, self.api_key, body)


@dataclass(frozen=True)
class Strategies:
    """The three choices of a request; None = what the model recommends."""

    decoder: Decoder = None
    cache: Cache = None
    iteration: Iteration = None

    def params(self, **more: Any) -> SamplingParams:
        """With `more` fields, such as max_tokens."""
        return SamplingParams(**vars(self) | more)


@dataclass(frozen=True)
class Sampling(Strategies):
    """Options of every command that fills a canvas."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    seed: Seed = 0
    guidance: Guidance = 0.0
    min_tokens: MinTokens = 0


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses appear as the options that these hold."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        for part in inspect.signature(group).parameters.values() if group else [parameter]:
            hint = get_type_hints(group or command, include_extras=True)[part.name]
            parameters.append(part.replace(annotation=hint, kind=part.KEYWORD_ONLY))

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {part.name: part.annotation for part in parameters}
    return flat


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
