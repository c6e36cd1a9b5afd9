"""Text to token ids and back: tokenizer, chat template, byte-accurate decoding. No torch import.

Special tokens of a prompt come from the template alone. The texts of a chat are marked before the
template is rendered, so that nothing a user writes, alone or next to the template's own text, can
spell a special token; the marks are taken out again after the special tokens have been found.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from stopway_engine.modelspec import (
    ModelError,
    ModelSpec,
    gguf_value,
    open_gguf,
    read_json,
    read_spec,
)

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types that are matched as a whole."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters: Unicode keeps them for a program's own use, they are in no exchanged text."""


_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Words that templates compare with; they spell no special token."""


def _bytes_of_chars() -> dict[str, int]:
    """GPT-2's alphabet: each byte has a printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + i): byte for i, byte in enumerate(rest)}


class Detokenizer:
    """Text of a growing list of tokens, whole characters only.

    The bytes of a character that is not complete yet are held back. Bytes that can never become a
    character come out as U+FFFD, as Unicode recommends.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that ``token`` completes. Unknown ids (padded vocabularies) have none."""
        if not 0 <= token < len(self._pieces):
            return ""
        return self._decoder.decode(self._pieces[token])

    def finish(self) -> str:
        """The end: what is held back is dropped, so this is always empty."""
        self._decoder.reset()
        return ""


class TextCodec:
    """Tokenizer and chat template of one model."""

    def __init__(
        self,
        plain: Tokenizer,
        specials: Mapping[str, int],
        pieces: Sequence[bytes],
        template: str | None,
        spec: ModelSpec,
        *,
        add_bos: bool,
    ) -> None:
        """``plain`` knows no special token; ``pieces`` are each id's bytes, empty for specials."""
        self._plain, self._specials, self._pieces = plain, dict(specials), pieces
        self._names = {token: text for text, token in self._specials.items()}
        self._spec = spec
        self.add_bos = add_bos
        self._piece_bytes_max = max((len(piece) for piece in pieces), default=1) or 1
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        edges = {text[0] for text in longest_first} | {text[-1] for text in longest_first}
        self._edge = re.compile("[" + re.escape("".join(sorted(edges))) + "]" if edges else r"(?!)")
        self._template = _compile(template) if template else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self._spec.eos

    @property
    def vocab_size(self) -> int:
        """Rows of the model's head; at least the tokenizer's own size."""
        return self._spec.vocab

    @property
    def piece_bytes_max(self) -> int:
        """Bytes of the longest token: no text has fewer tokens than its bytes over this."""
        return self._piece_bytes_max

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str, special: bool = False, bos: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens are read as plain text unless ``special`` is set.

        ``bos`` puts the model's first token in front, where the model wants one.
        """
        ids = self._encode_marked(text, "") if special else self._plain_ids(text)
        if bos and self.add_bos and self._spec.bos >= 0 and ids[:1] != [self._spec.bos]:
            ids.insert(0, self._spec.bos)
        return ids

    def chat(self, messages: Iterable[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation under the chat template, ready for the assistant's turn.

        ``variables`` are given to the template. Raises ``ValueError`` when the template refuses
        the messages, and ``ModelError`` when the model has none.
        """
        text, mark = self._render(list(messages), variables)
        ids = self._encode_marked(text, mark)
        if self.add_bos and self._spec.bos >= 0 and ids[:1] != [self._spec.bos]:
            ids.insert(0, self._spec.bos)
        return ids

    def render(self, messages: Iterable[Mapping[str, Any]], **variables: Any) -> str:
        """The text that ``chat`` encodes, to be looked at (it is ambiguous: see the module)."""
        text, mark = self._render(list(messages), variables)
        return text.replace(mark, "")

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens`` without specials; an incomplete last character is dropped."""
        detokenizer = self.detokenizer()
        return "".join([detokenizer.push(token) for token in tokens])

    def piece(self, token: int) -> tuple[str, bytes]:
        """(text, bytes) of one token by itself; a special token is spelled out."""
        name = self._names.get(token)
        if name is not None:
            return name, name.encode()
        raw = self._pieces[token] if 0 <= token < len(self._pieces) else b""
        return raw.decode("utf-8", "replace"), bytes(raw)

    def vocabulary(self) -> tuple[list[bytes], list[int]]:
        """The bytes of every row of the model's head, and the ids of special tokens among them.

        A special token is spelled out; rows that no token belongs to are empty.
        """
        special = [token for token in self._names if not self._pieces[token]]
        tokens = [bytes(piece) for piece in self._pieces[: self.vocab_size]]
        tokens += [b""] * (self.vocab_size - len(tokens))
        for token in special:
            tokens[token] = self._names[token].encode()
        return tokens, special

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self._pieces)

    def _plain_ids(self, text: str) -> list[int]:
        # Not ``encode``, which keeps the interpreter to itself for as long as it takes.
        ids: list[int] = self._plain.encode_batch([text], add_special_tokens=False)[0].ids
        return ids

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._special.finditer(text):
            self._extend(ids, text[position : match.start()], mark)
            ids.append(self._specials[match.group()])
            position = match.end()
        self._extend(ids, text[position:], mark)
        return ids

    def _extend(self, ids: list[int], text: str, mark: str) -> None:
        if mark:
            text = text.replace(mark, "")
        if text:
            ids.extend(self._plain_ids(text))

    def _render(
        self, messages: list[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[str, str]:
        if self._template is None:
            raise ModelError("The model has no chat template: use /v1/completions instead.")
        given = json.dumps([messages, variables], ensure_ascii=False, default=str)
        mark = next((mark for mark in _MARKS if mark not in given), "")
        if not mark:
            raise ValueError("the messages use every noncharacter of Unicode: remove them")
        try:
            text = self._template.render(
                messages=self._marked(messages, mark),
                bos_token=self._names.get(self._spec.bos, ""),
                eos_token=self._names.get(self._spec.eos[0], "") if self._spec.eos else "",
                add_generation_prompt=True,
                **self._marked(dict(variables), mark),
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return text, mark

    def _marked(self, value: Any, mark: str) -> Any:
        """``value`` with each text's first and last characters of special tokens set apart."""
        if isinstance(value, str):
            if value in _ROLES:
                return value
            return self._edge.sub(lambda found: f"{mark}{found.group()}{mark}", value)
        if isinstance(value, Mapping):
            return {key: self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, mark) for item in value]
        return value


def load_codec(path: Path, spec: ModelSpec | None = None) -> TextCodec:
    """The codec of the model at ``path``. Raises ``ModelError``."""
    spec = spec or read_spec(path)
    return _codec_of_folder(path, spec) if path.is_dir() else _codec_of_gguf(path, spec)


def _codec_of_gguf(path: Path, spec: ModelSpec) -> TextCodec:
    reader = open_gguf(path)

    def value(key: str, default: Any = None) -> Any:
        return gguf_value(reader, f"tokenizer.{key}", default)

    if (kind := value("ggml.model")) != "gpt2":
        raise ModelError(
            f"{path.name} has a tokenizer of kind {kind!r}, which is not supported: use a model "
            "with byte-level BPE, or its Hugging Face folder."
        )
    tokens, types = value("ggml.tokens"), value("ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in value("ggml.merges", [])]
    whole = {token: i for i, token in enumerate(tokens) if types[i] in (_CONTROL, _USER_DEFINED)}
    vocab = {token: i for i, token in enumerate(tokens)}
    pre = value("ggml.pre", "default")
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    plain = Tokenizer(bpe)
    plain.pre_tokenizer = _pre_tokenizer(pre)
    plain.decoder = decoders.ByteLevel()
    pieces = _byte_level_pieces(tokens, whole)
    for token, i in whole.items():
        if types[i] == _USER_DEFINED:
            pieces[i] = token.encode()
    return TextCodec(
        plain,
        whole,
        pieces,
        value("chat_template"),
        spec,
        add_bos=bool(value("ggml.add_bos_token", False)),
    )


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """How a text is cut before BPE, by llama.cpp's name for it."""
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in ("llama-bpe", "qwen2"):
        pattern = Regex(_LLAMA3 if pre == "llama-bpe" else _QWEN2)
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ModelError(
        f"The pre-tokenizer {pre!r} is not supported: use a model with smollm, gpt-2, llama-bpe or "
        "qwen2, or its Hugging Face folder."
    )


def _byte_level_pieces(tokens: Sequence[str], skip: Mapping[str, int]) -> list[bytes]:
    table = _bytes_of_chars()
    pieces = []
    for token in tokens:
        known = token not in skip and all(char in table for char in token)
        pieces.append(bytes(table[char] for char in token) if known else b"")
    return pieces


def _codec_of_folder(path: Path, spec: ModelSpec) -> TextCodec:
    content = read_json(path / "tokenizer.json")
    if not content:
        raise ModelError(f"{path} has no tokenizer.json: download it (other formats aren't read).")
    if content.get("model", {}).get("type") != "BPE":
        raise ModelError(f"{path}/tokenizer.json is not BPE, which is not supported.")
    config = read_json(path / "tokenizer_config.json")
    added = content.get("added_tokens") or []
    whole = {token["content"]: int(token["id"]) for token in added}
    first = Tokenizer.from_str(json.dumps(content)).encode("").ids[:1]
    plain = Tokenizer.from_str(json.dumps(content | {"added_tokens": [], "post_processor": None}))
    tokens: dict[int, str] = {i: token for token, i in plain.get_vocab().items()}
    tokens |= {i: token for token, i in whole.items()}
    ordered = [tokens.get(i, "") for i in range(max(tokens) + 1)]
    pieces = _folder_pieces(path, content, ordered, whole)
    for token in added:
        if not token.get("special", True):
            pieces[int(token["id"])] = token["content"].encode()
    return TextCodec(
        plain,
        whole,
        pieces,
        _folder_template(path, config),
        spec,
        add_bos=bool(first) and first == [spec.bos],
    )


def _folder_pieces(
    path: Path, content: dict[str, Any], tokens: Sequence[str], skip: Mapping[str, int]
) -> list[bytes]:
    decoder = json.dumps(content.get("decoder") or {})
    if '"ByteLevel"' in decoder:
        return _byte_level_pieces(tokens, skip)
    if '"ByteFallback"' not in decoder:
        raise ModelError(
            f"{path}/tokenizer.json decodes neither byte-level nor with byte fallback, which is "
            "not supported: use another model."
        )
    pieces = []
    for token in tokens:
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        text = "" if token in skip else token.replace("▁", " ")
        pieces.append(bytes([int(byte[1], 16)]) if byte else text.encode())
    return pieces


def _folder_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        return by_name.get("default")
    return template


def _compile(template: str) -> jinja2.Template:
    """The template in the environment that its authors wrote it for (as in transformers)."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelError(f"The model's chat template is not valid: {error}.") from error
