"""A model's body as one compiled graph for any number of rows.

Between two matrix products a small model spends more time on calls than on arithmetic; one graph
leaves a single call a step. Attention stays outside it: one opaque operation, which looks up the
step in progress.
"""

import itertools

import torch
from torch import Tensor

from dinfer.errors import RequestError
from dinfer.native import pages
from dinfer.nn.attention import Attend
from dinfer.nn.transformer import Transformer

_attends: dict[int, Attend] = {}
_numbers = itertools.count()


# Declared by hand: what torch.library.custom_op wraps around a call costs as much as attention over
# a few hundred positions.
torch.library.define(
    "dinfer::attend", "(Tensor q, Tensor k, Tensor v, int layer, int graph) -> Tensor"
)


@torch.library.impl("dinfer::attend", "default")
def _attend(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, layer: int, graph: int) -> Tensor:
    return _attends[graph](layer, q_THd, k_TKd, v_TKd)


@torch.library.register_fake("dinfer::attend")  # type: ignore[untyped-decorator]
def _(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, layer: int, graph: int) -> Tensor:
    return torch.empty_like(q_THd)


def _check_compiler(device: torch.device) -> None:
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise RequestError(
            "compile was asked for and there is no C++ compiler;"
            " install one (such as g++), or leave it off: everything works without."
        ) from error


class CompiledModel:
    """Runs like the model. Needs a C++ compiler on a CPU; the first step takes seconds to minutes,
    later processes find its result in torch's cache on disk. Weights are constants of the graph
    and must not change.
    """

    def __init__(self, model: Transformer) -> None:
        device = model.embedding.weight.device
        _check_compiler(device)
        if device.type == "cpu":
            pages.collapse()
        self._number = next(_numbers)
        number = self._number

        def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            out: Tensor = torch.ops.dinfer.attend(q_THd, k_TKd, v_TKd, layer, number)
            return out

        def body(x_TD: Tensor, positions_T: Tensor, *more: Tensor) -> Tensor:
            out: Tensor = model(x_TD, positions_T, attend, *more)
            return out

        # Whether a weight is still the same is asked at every call otherwise: 2 ms for 12 layers.
        skip = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        self._body = torch.compile(
            body, dynamic=True, fullgraph=True, options={"guard_filter_fn": skip}
        )

    def __call__(self, x_TD: Tensor, positions_T: Tensor, attend: Attend, *more: Tensor) -> Tensor:
        """Normed hidden rows [T, D], as Transformer.forward gives them."""
        _attends[self._number] = attend
        # Freezing packs the weights; as an option of torch.compile it would be ignored.
        with torch._inductor.config.patch(freezing=True):
            out: Tensor = self._body(x_TD, positions_T, *more)
        return out
