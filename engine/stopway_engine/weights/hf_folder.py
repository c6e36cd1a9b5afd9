"""Tensors of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stopway_engine.modelspec import ModelError, read_json
from stopway_engine.parallel import Span
from stopway_engine.weights.matrix import Matrix

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class HfFolder:
    """A ``TensorSource`` over the safetensors files of a folder; only the slices are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        index = read_json(path / "model.safetensors.index.json").get("weight_map")
        if index:
            self._file_of: dict[str, str] = dict(index)
        else:
            single = "model.safetensors"
            if not (path / single).is_file():
                raise ModelError(
                    f"{path} has neither {single} nor an index of several files: download the "
                    "model's safetensors (other formats are not read)."
                )
            self._file_of = dict.fromkeys(self._open(single).keys(), single)

    def matrix(self, name: str, rows: Span | None = None, cols: Span | None = None) -> Matrix:
        """See ``TensorSource.matrix``."""
        piece = self._slice(name)
        total_rows, total_cols = piece.get_shape()
        row, col = rows or (0, total_rows), cols or (0, total_cols)
        return Matrix(self._checked(name, piece[row[0] : row[1], col[0] : col[1]]))

    def vector(self, name: str) -> torch.Tensor:
        """See ``TensorSource.vector``."""
        return self._checked(name, self._slice(name)[:]).float()

    def _slice(self, name: str) -> Any:
        full = f"{name}.weight" if name == "lm_head" else f"model.{name}.weight"
        if full not in self._file_of:
            raise ModelError(f"{self._path} has no tensor {full}: download the model again.")
        return self._open(self._file_of[full]).get_slice(full)

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self._path / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{self._path / file} cannot be read ({error}): download the model again."
            ) from error

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{self._path} stores {name} as {tensor.dtype}, which is not supported: use a "
                "model in bf16, f16 or f32."
            )
        return tensor.contiguous()
