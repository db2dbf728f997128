"""From text to token ids and back: the package's own tokenizer, run by openvino_genai."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swarm.errors import ConfigError, ContextExceeded, PackageError

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant" | ..., "content": text}"""

# Decoding a token takes 0.05 ms, for which OpenVINO would wake a thread on every core. That costs 1.3 ms of CPU time a
# token, taken from peers on the same machine; one thread costs 0.2 ms.
_ONE_THREAD = {"INFERENCE_NUM_THREADS": 1}
# No tokenizer truncates below this many tokens.
_MIN_TRUNCATION = 256
_SUFFIX = " and one two three"
# A decoder that cleans up spaces changes this text ("it 's" to "it's").
_CLEAN_UP_PROBE = "it 's , is n't it ?"


class Codec(Protocol):
    """What a client needs of a tokenizer; documented at `Tokenizer`."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def cleans_up_spaces(self) -> bool: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def chat(self, messages: Sequence[Message]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer:
    """One package's tokenizer. A call takes a fraction of a millisecond, a few for a long prompt."""

    def __init__(self, genai: Any) -> None:
        """`genai` is an `openvino_genai.Tokenizer`; use `load`."""
        self._genai = genai

    @classmethod
    async def load(cls, package: Path) -> Tokenizer:
        """Read it in the executor, which takes half a second. Raises PackageError naming the package."""
        return await asyncio.get_running_loop().run_in_executor(None, cls._read, package)

    @classmethod
    def _read(cls, package: Path) -> Tokenizer:
        # imported here, so that `import client` stays light
        import openvino_genai

        try:
            tokenizer = cls(openvino_genai.Tokenizer(str(package), **_ONE_THREAD))
            # an incomplete tokenizer loads without an error: use it once
            tokenizer._genai.decode(tokenizer._ids("a", special=False))
        except (RuntimeError, ConfigError) as error:
            raise PackageError(f"the tokenizer of {package} cannot be read: {_reason(error)}") from error
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._genai.chat_template)

    @property
    def cleans_up_spaces(self) -> bool:
        """Whether decoding changes earlier text: it removes spaces before punctuation."""
        ids = self.encode(_CLEAN_UP_PROBE, special=False)
        return self.decode(ids).strip() != _CLEAN_UP_PROBE

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of `text`; with `special`, also the special tokens that the model expects around a text.

        Raises ConfigError if it is not valid Unicode, ContextExceeded if it is longer than the tokenizer takes.
        """
        _check_unicode("the prompt", text)
        ids = self._ids(text, special)
        # A tokenizer truncates silently. If it did, a longer text has as many ids.
        if len(ids) >= _MIN_TRUNCATION and len(self._ids(text + _SUFFIX, special)) <= len(ids):
            raise ContextExceeded(f"the prompt is longer than the {len(ids)} tokens that the model takes: shorten it")
        return ids

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to the place where the assistant's next message begins.

        Raises ConfigError naming a malformed message, or if the model has no chat template.
        """
        for place, message in enumerate(messages):
            for name in ("role", "content"):
                if not isinstance(message.get(name) if isinstance(message, Mapping) else None, str):
                    raise ConfigError(f"message {place} has no {name}; write {{'role': 'user', 'content': '...'}}")
            _check_unicode(f"message {place}", message["content"])
        if not messages:
            raise ConfigError("there is no message: give at least one")
        if not self.has_chat_template:
            raise ConfigError("this model has no chat template: give it a raw prompt")
        try:
            text: str = self._genai.apply_chat_template([dict(message) for message in messages], True)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"the model's chat template does not take these messages: {_reason(error)}") from error
        return self.encode(text, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens; a broken UTF-8 sequence becomes U+FFFD."""
        return str(self._genai.decode(list(ids))) if ids else ""

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            tokens = self._genai.encode(text, add_special_tokens=special).input_ids
        except (TypeError, UnicodeError, RuntimeError) as error:
            raise ConfigError(f"the prompt cannot be tokenized: {_reason(error)}") from error
        return [int(token) for token in tokens.data[0]]


def _check_unicode(what: str, text: str) -> None:
    """Raises ConfigError if `text` has surrogates, which is how Python decodes bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 10) : error.start + 10]
        raise ConfigError(f"{what} is no text at character {error.start} ({around!r}): give it as UTF-8") from error


def _reason(error: Exception) -> str:
    """The last line of OpenVINO's message: the lines before it are positions in its sources."""
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"])[-1][:200]
