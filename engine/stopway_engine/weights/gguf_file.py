"""Tensors of a GGUF file: Q4_0, Q4_1, Q8_0, F16, BF16 and F32."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Format

from stopway_engine.modelspec import ModelError, ModelSpec, open_gguf
from stopway_engine.parallel import Span
from stopway_engine.weights.matrix import GROUP, Q4, Matrix

_FORMATS = (Format.Q4_0, Format.Q4_1, Format.Q8_0, Format.F16, Format.BF16, Format.F32)

_GLOBAL = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor (``layers.3.mlp.up_proj`` -> ``blk.3.ffn_up.weight``)."""
    if name in _GLOBAL:
        return f"{_GLOBAL[name]}.weight"
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{_LAYER[rest]}.weight"


class GgufFile:
    """A ``TensorSource`` over one GGUF file, memory-mapped."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._path = path
        self._head_dim = spec.head_dim
        self._tensors = {tensor.name: tensor for tensor in open_gguf(path).tensors}

    def matrix(self, name: str, rows: Span | None = None, cols: Span | None = None) -> Matrix:
        """See ``TensorSource.matrix``; rows are dequantized after they are cut."""
        tensor = self._find(name)
        data = tensor.data
        data = data.reshape(-1, data.shape[-1])
        permuted = name.endswith(("q_proj", "k_proj"))
        order = _row_order(data.shape[0], self._head_dim if permuted else 0, rows)
        raw = data[order]
        q4 = _q4(raw, tensor.tensor_type)
        if q4 is not None and cols is not None and (cols[0] % GROUP or cols[1] % GROUP):
            dense, q4 = q4.dense(), None  # the slice cuts a group: keep the values only
        else:
            q4 = q4 if cols is None or q4 is None else _q4_columns(q4, cols)
            dense = _dense(raw, tensor.tensor_type) if q4 is None else q4.dense()
        if cols is not None and q4 is None:
            dense = dense[:, cols[0] : cols[1]].contiguous()
        return Matrix(dense, q4)

    def vector(self, name: str) -> torch.Tensor:
        """See ``TensorSource.vector``."""
        tensor = self._find(name)
        return _dense(tensor.data.reshape(1, -1), tensor.tensor_type)[0]

    def _find(self, name: str) -> gguf.ReaderTensor:
        tensor = self._tensors.get(gguf_name(name))
        if tensor is None:
            raise ModelError(
                f"{self._path.name} has no tensor {gguf_name(name)}: convert the model again."
            )
        if tensor.tensor_type not in _FORMATS:
            raise ModelError(
                f"{self._path.name} stores {tensor.name} as {tensor.tensor_type.name}, which is "
                f"not supported: quantize the model as one of "
                f"{', '.join(known.name for known in _FORMATS)}."
            )
        return tensor


def _row_order(total: int, head_dim: int, rows: Span | None) -> np.ndarray | slice:
    """Which stored rows make the wanted span. ``head_dim`` > 0: undo llama.cpp's rotary order.

    The converter interleaves each head's halves (row 2 i + h of the file is row h * d / 2 + i of
    the model), because its kernel rotates neighbours.
    """
    start, stop = rows or (0, total)
    if not head_dim:
        return slice(start, stop)
    order = np.arange(total).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    return order[start:stop]


def _dense(raw: np.ndarray, kind: Format) -> torch.Tensor:
    values = gguf.quants.dequantize(np.ascontiguousarray(raw), kind)
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _q4(raw: np.ndarray, kind: Format) -> Q4 | None:
    """Unpack blocks of [f16 scale, (f16 minimum), 16 bytes]: low nibbles are columns 0..15."""
    if kind not in (Format.Q4_0, Format.Q4_1):
        return None
    header = 2 if kind is Format.Q4_0 else 4
    n = raw.shape[0]
    blocks = np.ascontiguousarray(raw).reshape(n, -1, header + 16)
    floats = np.ascontiguousarray(blocks[..., :header]).view(np.float16).astype(np.float32)
    packed = blocks[..., header:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(n, -1)
    scale = floats[..., 0]
    minimum = -8.0 * scale if kind is Format.Q4_0 else floats[..., 1]
    return Q4(
        torch.from_numpy(codes),
        torch.from_numpy(np.ascontiguousarray(scale)),
        torch.from_numpy(np.ascontiguousarray(minimum)),
    )


def _q4_columns(q4: Q4, cols: Span) -> Q4:
    groups = slice(cols[0] // GROUP, cols[1] // GROUP)
    return Q4(
        q4.codes[:, cols[0] : cols[1]].contiguous(),
        q4.scale[:, groups].contiguous(),
        q4.minimum[:, groups].contiguous(),
    )
