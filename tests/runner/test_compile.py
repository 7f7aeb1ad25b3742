"""The compiled body gives what the plain one gives, at any number of rows."""

import shutil

import pytest

from dinfer.engine.engine import Engine, Limits
from dinfer.errors import RequestError
from dinfer.loader.load import Loaded
from dinfer.request import SamplingParams
from dinfer.runner.compile import CompiledModel

from ..conftest import request, serve

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("family", ["sdar", "dream"])  # dream: biases
def test_compiled_steps_give_the_same_tokens(models: dict[str, Loaded], family: str) -> None:
    loaded = models[family]
    requests = [
        request(str(n), list(range(5, 9 + 7 * n)), SamplingParams(9 + 5 * n)) for n in range(4)
    ]
    outputs = []
    for compiled in (False, True):
        limits = Limits(pages=64, poison=True)
        engine = Engine(loaded.model, loaded.facts, None, limits, compiled)
        alone = {r.id: serve(engine, [r])[r.id].token_ids for r in requests[:2]}
        together = serve(engine, requests)
        outputs.append((alone, {name: out.token_ids for name, out in together.items()}))
    assert outputs[0] == outputs[1]


def test_no_compiler_is_said_in_one_sentence(
    models: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(RequestError, match="no C\\+\\+ compiler"):
        CompiledModel(models["sdar"].model)
