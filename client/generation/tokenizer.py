"""From text to token ids and back: the package's own tokenizer, run by openvino_genai."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swarm.errors import ConfigError, ContextExceeded, PackageError

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant" | ..., "content": text}"""

# A token's text takes a twentieth of a millisecond, for which OpenVINO would wake a thread on every core: 1.3 ms of
# processors' time a token, taken from peers on the same machine, where one thread takes 0.2.
_ONE_THREAD = {"INFERENCE_NUM_THREADS": 1}
# Shorter texts are never cut: no tokenizer has a limit as low.
_NEVER_CUT = 256
_LONGER = " and one two three"
# What decoders that tidy up ("it 's" to "it's") would change.
_TIDIED = "it 's , is n't it ?"


class Codec(Protocol):
    """What a client needs of a tokenizer; `Tokenizer` says what each does."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def tidies(self) -> bool: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def chat(self, messages: Sequence[Message]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer:
    """One package's tokenizer. Calls take a fraction of a millisecond, long prompts a few."""

    def __init__(self, genai: Any) -> None:
        """`genai` is an `openvino_genai.Tokenizer`; use `load`."""
        self._genai = genai

    @classmethod
    async def load(cls, package: Path) -> Tokenizer:
        """Read it in the executor, for half a second. Raises PackageError naming the package."""
        return await asyncio.get_running_loop().run_in_executor(None, cls._read, package)

    @classmethod
    def _read(cls, package: Path) -> Tokenizer:
        # loaded here, not above: `import client` stays light
        import openvino_genai

        try:
            tokenizer = cls(openvino_genai.Tokenizer(str(package), **_ONE_THREAD))
            tokenizer._genai.decode(tokenizer._ids("a", special=False))  # half a tokenizer loads without a word
        except (RuntimeError, ConfigError) as error:
            raise PackageError(f"the tokenizer of {package} cannot be read: {_reason(error)}") from error
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._genai.chat_template)

    @property
    def tidies(self) -> bool:
        """Whether decoding changes what came before: it removes spaces before punctuation."""
        ids = self.encode(_TIDIED, special=False)
        return self.decode(ids).strip() != _TIDIED

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of `text`; with `special`, the ones that the model wants around a text too.

        Raises ConfigError where it is no valid Unicode, ContextExceeded where it is longer than the tokenizer takes.
        """
        _check_unicode("the prompt", text)
        ids = self._ids(text, special)
        # a tokenizer cuts what is over its limit without a word: then a longer text has as many ids
        if len(ids) >= _NEVER_CUT and len(self._ids(text + _LONGER, special)) <= len(ids):
            raise ContextExceeded(f"the prompt is longer than the {len(ids)} tokens that the model takes: shorten it")
        return ids

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the assistant's next words begin.

        Raises ConfigError naming the message that is malformed, or where the model has no chat template.
        """
        for place, message in enumerate(messages):
            for name in ("role", "content"):
                if not isinstance(message.get(name) if isinstance(message, Mapping) else None, str):
                    raise ConfigError(f"message {place} has no {name}; write {{'role': 'user', 'content': '...'}}")
            _check_unicode(f"message {place}", message["content"])
        if not messages:
            raise ConfigError("there is no message")
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
    """Raises ConfigError where there are halves of characters in it, as Python reads bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 10) : error.start + 10]
        raise ConfigError(f"{what} is no text at character {error.start} ({around!r}): give it as UTF-8") from error


def _reason(error: Exception) -> str:
    """The last line of what OpenVINO says: those before it are positions in its sources."""
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"])[-1][:200]
