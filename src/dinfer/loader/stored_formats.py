"""How others store quantized weights, and what turns their codes into weights again.

Formats: DeepSeek's and vLLM's FP8, compressed-tensors
(https://github.com/vllm-project/compressed-tensors), GPTQ (arXiv 2210.17323, as AutoGPTQ writes it)
and AWQ (arXiv 2306.00978, as AutoAWQ's GEMM version writes it).

O rows and I columns of a weight, P numbers in a packed int32, G groups of columns.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dinfer.errors import CheckpointError
from dinfer.kernel.int4 import dequantize_groups
from dinfer.loader.weights import Header

Parts = Mapping[str, Tensor]
"""Role of a tensor -> the tensor. codes, scales, zeros; columns: the group of each; shape: is not
read, as the codes tell it.
"""


class StoredWeight(NamedTuple):
    """One weight: the tensors that hold it, by their roles, its shape, and some rows of it as
    float32.
    """

    parts: dict[str, str]
    shape: tuple[int, ...]
    rows: Callable[[Parts, slice], Tensor]


Headers = Mapping[str, Header]
Settings = Mapping[str, Any]
Reader = Callable[[Settings, Headers], dict[str, StoredWeight]]
"""The weights of a checkpoint that are codes, by the names that they would have as plain ones."""

_ACTIVATIONS = ("input_scale", "output_scale", "q_scale", "k_scale", "v_scale", "prob_scale")
"""Tensors for rounding what runs through the layers; here that stays as it is."""
OURS = "dinfer"
"""The method of checkpoints that `dinfer quantize` wrote."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in an int32 of each of eight neighbours."""


def stored_weights(settings: Settings, headers: Headers) -> dict[str, StoredWeight]:
    """The weights that are codes, by the `quantization_config` of a checkpoint. Raises
    CheckpointError for a method, or a setting of one, that is not supported.
    """
    method = settings.get("quant_method")
    if method not in READERS:
        known = ", ".join(READERS)
        raise CheckpointError(
            f"config.json says that the weights are quantized by {method!r}, which is not"
            f" supported. Allowed: {known}."
        )
    return READERS[method](settings, headers)


def is_ours(settings: Settings) -> bool:
    """Whether `dinfer quantize` wrote the checkpoint: such codes are run as they are."""
    return settings.get("quant_method") == OURS


def is_for_activations(name: str) -> bool:
    """Whether a tensor serves to quantize rows or keys and values, which is not done here."""
    return name.rpartition(".")[2] in _ACTIVATIONS


def _fp8(settings: Settings, headers: Headers) -> dict[str, StoredWeight]:
    """One scale a weight, a row or a block (`weight_scale_inv` is DeepSeek's name: it multiplies,
    too).
    """
    block = settings.get("weight_block_size")
    found = {}
    for name in headers:
        scales = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in headers), None)
        if scales is not None:
            shape = headers[name].shape
            size = _block(name, shape, headers[scales].shape, block)
            found[name] = _scaled({"codes": name, "scales": scales}, shape, size)
    return found


def _compressed(settings: Settings, headers: Headers) -> dict[str, StoredWeight]:
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _unsupported("sparsity_config", settings["sparsity_config"])
    found = {}
    for codes, header in headers.items():
        packed = codes.endswith(".weight_packed")
        name = codes.removesuffix("_packed")
        if not name.endswith(".weight") or f"{name}_scale" not in headers:
            continue
        args = _compressed_args(settings, name.removesuffix(".weight"), packed)
        bits = int(args.get("num_bits", 8))
        rows, columns = header.shape
        shape = (rows, columns * (32 // bits)) if packed else (rows, columns)
        parts = {"codes": codes, "scales": f"{name}_scale"}
        scales, group = headers[f"{name}_scale"].shape, args.get("group_size")
        block = (1, group) if args.get("strategy") == "group" else args.get("block_structure")
        size = _block(name, shape, scales, block)
        more = {"zeros": "_zero_point", "columns": "_g_idx", "shape": "_shape"}
        parts |= {role: name + end for role, end in more.items() if name + end in headers}
        if "zeros" in parts:
            _expect(headers, parts["zeros"], -(-rows * bits // 32) if packed else rows, *scales[1:])
        if "columns" in parts:
            _expect(headers, parts["columns"], shape[1])
        found[name] = _scaled(parts, shape, size, _unpack_compressed(bits) if packed else None)
    return found


def _compressed_args(settings: Settings, module: str, packed: bool) -> dict[str, Any]:
    """How the weights of a module are stored: by the first group that names it, else by the one
    for all linear layers.
    """
    groups: Iterable[dict[str, Any]] = (settings.get("config_groups") or {}).values()
    chosen: dict[str, Any] = {}
    for group in groups:
        for target in group.get("targets") or []:
            pattern = target.removeprefix("re:")
            named = re.match(pattern, module) if pattern != target else module.endswith(target)
            if named or (target == "Linear" and not chosen):
                chosen = group
            if named:
                break
    form = chosen.get("format") or settings.get("format")
    allowed = ("pack-quantized",) if packed else ("float-quantized", "int-quantized")
    if form not in (*allowed, "naive-quantized"):
        raise _unsupported("format", form)
    args: dict[str, Any] = chosen.get("weights") or {}
    if args.get("strategy") not in ("tensor", "channel", "group", "block"):
        raise _unsupported("strategy", args.get("strategy"))
    if packed and args.get("num_bits") not in (4, 8):
        raise _unsupported("num_bits", args.get("num_bits"))
    return args


def _unpack_compressed(bits: int) -> Callable[[Parts], Parts]:
    """Codes are packed along a row, zeros along a column; both begin at the least number."""

    def unpack(parts: Parts) -> Parts:
        found = dict(parts)
        middle = 1 << (bits - 1)
        found["codes"] = _unpacked(parts["codes"], bits).flatten(-2).float() - middle
        if "zeros" in parts:
            zeros = _unpacked(parts["zeros"].T, bits).flatten(-2).T
            found["zeros"] = zeros[: len(parts["codes"])].float() - middle
        return found

    return unpack


def _gptq(settings: Settings, headers: Headers) -> dict[str, StoredWeight]:
    bits = settings.get("bits")
    if bits not in (2, 4, 8):
        raise _unsupported("bits", bits)
    version = settings.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", version)

    def unpack(parts: Parts) -> Parts:
        # Codes are packed along a column of [I, O], zeros along a row of [G, O].
        found = {"scales": parts["scales"].T, "codes": _unpacked(parts["codes"].T, bits).flatten(1)}
        zeros = _unpacked(parts["zeros"], bits).flatten(1).T
        found["zeros"] = zeros + 1 if version == "gptq" else zeros
        return found | ({"columns": parts["columns"]} if "columns" in parts else {})

    return _packed_groups(headers, settings, 32 // bits, unpack, down=True)


def _awq(settings: Settings, headers: Headers) -> dict[str, StoredWeight]:
    if settings.get("bits", settings.get("w_bit")) != 4:
        raise _unsupported("bits", settings.get("bits", settings.get("w_bit")))
    if str(settings.get("version", "gemm")).lower() != "gemm":
        raise _unsupported("version", settings["version"])

    def unpack(parts: Parts) -> Parts:
        both = {role: _unpacked(parts[role], 4) for role in ("codes", "zeros")}
        order = list(_AWQ_ORDER)
        found = {role: packed[..., order].flatten(1).T for role, packed in both.items()}
        return found | {"scales": parts["scales"].T}

    return _packed_groups(headers, settings, 8, unpack, down=False)


def _packed_groups(
    headers: Headers,
    settings: Settings,
    many: int,
    unpack: Callable[[Parts], Parts],
    down: bool,
) -> dict[str, StoredWeight]:
    """Weights of qweight, qzeros, scales and g_idx. many: codes in an int32; down: packed along
    the columns of [I, O], not along its rows.
    """
    found = {}
    for codes, header in headers.items():
        lead, _, last = codes.rpartition(".")
        if last != "qweight":
            continue
        parts = {"codes": codes, "zeros": f"{lead}.qzeros", "scales": f"{lead}.scales"}
        if gone := [name for name in parts.values() if name not in headers]:
            raise CheckpointError(f"{codes} is there and {', '.join(gone)} is not.")
        size, out = header.shape
        size, out = (size * many, out) if down else (size, out * many)
        group = settings.get("group_size", settings.get("q_group_size", -1))
        group = size if group in (-1, None) else group
        groups = -(-size // group)
        _expect(headers, parts["scales"], groups, out)
        _expect(headers, parts["zeros"], groups, -(-out // many))
        if f"{lead}.g_idx" in headers:
            parts["columns"] = f"{lead}.g_idx"
            _expect(headers, parts["columns"], size)
        found[f"{lead}.weight"] = _scaled(parts, (out, size), (1, group), unpack)
    return found


def _ours(settings: Settings, headers: Headers) -> dict[str, StoredWeight]:
    """int8 with a scale a row, and int4 in groups; the codes' type tells which."""
    found = {}
    for name, header in headers.items():
        if f"{name}_scale" not in headers:
            continue
        parts = {"codes": name, "scales": f"{name}_scale"}
        *lead, size = header.shape
        if header.dtype == torch.int8:
            found[name] = StoredWeight(parts, header.shape, _rows_int8)
        else:
            found[name] = StoredWeight(parts, (*lead, 2 * size), _rows_int4)
    return found


def _rows_int8(parts: Parts, some: slice) -> Tensor:
    return parts["codes"][some] * parts["scales"][some][..., None]


def _rows_int4(parts: Parts, some: slice) -> Tensor:
    return dequantize_groups(parts["codes"][some], parts["scales"][some].float())


READERS: dict[str, Reader] = {
    OURS: _ours,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}
"""By `quant_method`."""


def _scaled(
    parts: dict[str, str],
    shape: tuple[int, ...],
    block: tuple[int, int],
    unpack: Callable[[Parts], Parts] | None = None,
) -> StoredWeight:
    """`(code - zero) * scale`, with a zero and a scale for each block of rows and columns; a tensor
    of the role `columns` says the block of each column instead.
    """

    def rows(parts: Parts, some: slice) -> Tensor:
        parts = unpack(parts) if unpack else parts
        weight = parts["codes"][some].float()
        if "zeros" in parts:
            weight = weight - _spread(parts["zeros"], shape, block, some, parts.get("columns"))
        return weight * _spread(parts["scales"], shape, block, some, parts.get("columns"))

    return StoredWeight(parts, shape, rows)


def _spread(
    values: Tensor,
    shape: tuple[int, ...],
    block: tuple[int, int],
    some: slice,
    columns: Tensor | None,
) -> Tensor:
    """The values of blocks, once for each weight of some rows (experts, where there are three
    axes).
    """
    down, across = (
        torch.arange(size) // step for size, step in zip(shape[-2:], block, strict=True)
    )
    values = values.float()
    values = values.view(1, -1) if values.ndim == 0 else values
    values = values.unsqueeze(-1) if values.ndim < len(shape) else values
    if len(shape) == 2:
        down = down[some]
    else:
        values = values[some]
    return values[..., down, :][..., across if columns is None else columns.long()]


def _block(
    name: str, shape: tuple[int, ...], scales: tuple[int, ...], block: Any
) -> tuple[int, int]:
    """Rows and columns that share a scale: what the config says, else all of them or one row."""
    rows, columns = shape[-2:]
    count = torch.Size(scales[len(shape) - 2 :]).numel()
    if block is not None:
        down, across = block
        wanted = (*shape[:-2], -(-rows // down), -(-columns // across))
        if scales != wanted:
            raise CheckpointError(
                f"The scales of {name} have the shape {list(scales)}; blocks of {down} x {across}"
                f" make it {list(wanted)}."
            )
        return down, across
    if count == 1:
        return rows, columns
    if count == rows:
        return 1, columns
    raise CheckpointError(
        f"The scales of {name} have the shape {list(scales)}; one for the weight {list(shape)}, or"
        " one a row, is supported where the config names no blocks."
    )


def _expect(headers: Headers, name: str, *shape: int) -> None:
    if headers[name].shape != shape:
        raise CheckpointError(
            f"{name} has the shape {list(headers[name].shape)}; the codes beside it need"
            f" {list(shape)}."
        )


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The numbers [..., P] (uint8) in each int32, the lowest bits first."""
    mask = (1 << bits) - 1
    parts = [((packed >> shift) & mask).to(torch.uint8) for shift in range(0, 32, bits)]
    return torch.stack(parts, dim=-1)


def _unsupported(key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"config.json has {key!r}: {value!r} in quantization_config, which is not supported."
    )
