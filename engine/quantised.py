"""Weights of eight-bit floats and their scales: multiplied out when a draft is read; fewer bits are refused by name.

Shapes: O output channels, I input channels; scales are [], [1], [O], [O, 1], or one for each block of a matrix.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from spectrace.engine.fields import Fields
from spectrace.engine.problem import DraftProblem
from spectrace.tracer.errors import UserError

__all__ = ["SCALES", "check_quantisation", "dequantised", "is_quantised", "what_is_no_weight"]

SCALES: Final = ("weight_scale", "weight_scale_inv")
"""What the scale of X.weight is called: by compressed-tensors and ModelOpt, and by DeepSeek, which multiplies, too."""

_FIELD: Final = "quantization_config"
_BLOCK: Final = (128, 128)
_EIGHT: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_FEWER: Final = {
    "qzeros": "GPTQ or AWQ", "weight_packed": "compressed-tensors with packed weights (int4 or nvfp4)",
    "weight_scale_2": "nvfp4", "weight_shape": "compressed-tensors with packed weights (int4)", "g_idx": "GPTQ",
    "quant_state": "bitsandbytes", "absmax": "bitsandbytes",
}  # fmt: skip
_METHODS: Final = ("", "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
_FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor holds floats of eight bits."""
    return tensor.dtype in _EIGHT


def what_is_no_weight(tensor: Tensor) -> str:
    """Why a tensor is none that weights are read from, by its type; empty where it is one."""
    if tensor.dtype in (*_FLOATS, *_EIGHT):
        return ""
    return f"is of type {str(tensor.dtype).removeprefix('torch.')}; {_READ}"


def check_quantisation(folder: Path, fields: Fields, names: Collection[str]) -> tuple[int, int]:
    """The size of a block where scales are of blocks; raises UserError, by name, for weights that are not read."""
    for name in names:
        last = name.rpartition(".")[2]
        if last in _FEWER:
            raise DraftProblem("quantised", f"{folder}: quantised with {_FEWER[last]} (tensor {name}); {_READ}")
    exported = _exported(folder)
    if (algorithm := exported.get("quant_algo")) not in (None, "FP8"):
        raise DraftProblem(
            "quantised", f"{folder}: quantised to {algorithm} by ModelOpt (hf_quant_config.json); {_READ}"
        )
    told = fields.get(_FIELD)
    if told is None:
        return _BLOCK
    if not isinstance(told, dict):
        raise UserError(f"{fields.path}: field {_FIELD} is {told!r}, expected an object or null")
    if what := _other(told):
        raise DraftProblem("quantised", f"{fields.path}: {_FIELD} says {what}; {_READ}")
    size = told.get("weight_block_size") or list(_BLOCK)
    if not isinstance(size, list) or len(size) != 2 or not all(type(one) is int and one > 0 for one in size):
        raise UserError(f"{fields.path}: field {_FIELD}.weight_block_size is {size!r}, expected two whole numbers")
    return size[0], size[1]


_READ: Final = "only weights of eight-bit floats with their scales are read: export the draft in bfloat16"


def _exported(folder: Path) -> Mapping[str, Any]:
    """ModelOpt's account beside the config."""
    path = folder / "hf_quant_config.json"
    if not path.is_file():
        return {}
    try:
        held = json.loads(path.read_text("utf-8")).get("quantization")
    except (ValueError, AttributeError, OSError) as error:
        raise UserError(f"{path}: not readable as ModelOpt's account of its quantisation ({error})") from error
    return held if isinstance(held, dict) else {}


def _other(told: Mapping[str, Any]) -> str:
    """What a config's quantisation is, where it is not eight-bit floats."""
    method, algorithm = str(told.get("quant_method") or "").lower(), told.get("quant_algo")
    if method not in _METHODS:
        return f"quant_method {method!r}"
    if told.get("bits", 8) != 8 or "int" in str(told.get("format") or ""):
        return f"bits {told.get('bits', 8)}, format {told.get('format')!r}"
    if algorithm not in (None, "FP8"):
        return f"quant_algo {algorithm!r}"
    groups = told.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and (weights.get("num_bits"), weights.get("type")) != (8, "float"):
            return f"weights of {weights.get('num_bits')} bits, type {weights.get('type')!r}"
    return ""


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The weights times their scale, in float32; raises ValueError where the scale's shape fits no part of them."""
    wide, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return wide * scale.reshape(())
    rows, columns = weight.shape
    if list(scale.shape) in ([rows], [rows, 1]):
        return wide * scale.reshape(rows, 1)
    blocks = [-(-rows // block[0]), -(-columns // block[1])]
    if list(scale.shape) == blocks:
        spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        return wide * spread
    raise ValueError(f"is {list(scale.shape)}, expected one number, [{rows}], [{rows}, 1] or {blocks}")
