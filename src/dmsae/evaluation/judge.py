"""A language model as a judge, through any endpoint that speaks OpenAI's chat completions.

Answers are kept in the cache by a hash of the question, so the same question is not asked, or paid for, twice. A model
that refuses the limit of tokens, or a temperature of 0, is asked without.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dmsae.config import Json, require, require_whole
from dmsae.disk.files import canonical_hash, write_json
from dmsae.errors import JudgeError, first_line

_WORTH_ANOTHER_TRY = {408, 409, 429, 500, 502, 503, 504}
_MAY_BE_REFUSED = {"max_tokens": "max_completion_tokens", "temperature": "temperature"}
"""Parameters that newer models refuse, and what the refusal names."""
_EXPLANATION_BYTES = 2000


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    """Which model judges, and how it is reached."""

    url: str = ""
    """The endpoint, up to and with its version: `http://localhost:8000/v1`, `https://api.openai.com/v1`."""
    model: str = ""
    """Name of the model, as the endpoint knows it."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key. If it is not set, none is sent."""
    timeout_seconds: float = 60.0
    """How long to wait for an answer."""
    tries: int = 4
    """How often a question is asked before giving up."""
    pause_seconds: float = 2.0
    """How long to wait before the second try; each further one waits twice as long."""
    workers: int = 4
    """Questions under way at once."""

    def __post_init__(self) -> None:
        for name in ("tries", "workers"):
            require_whole(f"judge.{name}", getattr(self, name), 1)
        require(self.timeout_seconds > 0, "judge.timeout_seconds", self.timeout_seconds, "be positive")
        require(self.pause_seconds >= 0, "judge.pause_seconds", self.pause_seconds, "be at least 0")


class Message(NamedTuple):
    """One message of a conversation."""

    role: Literal["system", "user"]
    content: str


class Judge:
    """Asks a model, and remembers what it answered."""

    def __init__(self, config: JudgeConfig, cache: Path | None = None) -> None:
        where = "an OpenAI-compatible endpoint such as http://localhost:8000/v1"
        require(config.url.startswith(("http://", "https://")), "judge.url", config.url, f"be the address of {where}")
        require(bool(config.model), "judge.model", config.model, "name a model that the endpoint knows")
        self._config = config
        self._address = f"{config.url.rstrip('/')}/chat/completions"
        self._cache = cache
        self._refused: set[str] = set()
        """Parameters that the endpoint has refused."""

    def ask(self, messages: Sequence[Message], max_tokens: int) -> str:
        """Return the model's answer."""
        question = {
            "model": self._config.model,
            "messages": [message._asdict() for message in messages],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if self._cache is None:
            return self._answer(question)
        file = self._cache / f"judge-{canonical_hash([self._address, question])[:32]}.json"
        if (kept := _kept(file)) is not None:
            return kept
        answer = self._answer(question)
        write_json(file, {"answer": answer})
        return answer

    def _answer(self, question: Json) -> str:
        """Ask until there is an answer, the tries are used up, or asking again is of no use."""
        for number in range(self._config.tries):
            if number:
                time.sleep(self._config.pause_seconds * 2 ** (number - 1))
            try:
                return self._content(self._post(question))
            except _StatusError as error:
                reason = f"it answers with status {error.code} ({error.shown})"
                if error.code not in _WORTH_ANOTHER_TRY:
                    raise JudgeError(
                        f"{self._name} refuses: {reason}. Check judge.url, judge.model and the key in "
                        f"${self._config.key_variable}."
                    ) from None
            except (OSError, HTTPException) as error:  # no route, refused, reset, cut off, or no answer in time
                reason = first_line(error)
        raise JudgeError(
            f"{self._name} cannot be reached, after {self._config.tries} tries: {reason}. Check judge.url and the "
            "network. Answers so far are kept in the cache."
        )

    @property
    def _name(self) -> str:
        return f"The judge {self._config.model!r} at {self._config.url}"

    def _post(self, question: Json) -> bytes:
        """Return what comes back; a parameter that the endpoint refuses by name is left out from then on."""
        sent = {name: value for name, value in question.items() if name not in self._refused}
        try:
            return self._send(sent)
        except _StatusError as error:
            refused = {name for name, sign in _MAY_BE_REFUSED.items() if name in sent and sign in error.text}
            if error.code != 400 or not refused:
                raise
        self._refused |= refused
        return self._post(question)

    def _send(self, question: Json) -> bytes:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._config.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._address, json.dumps(question).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self._config.timeout_seconds) as response:
                data: bytes = response.read()
                return data
        except urllib.error.HTTPError as error:
            raise _StatusError(error) from None

    def _content(self, data: bytes) -> str:
        try:
            choice: Any = json.loads(data)["choices"][0]
            content: str | None = choice["message"]["content"]
            if content is None or (not content and choice.get("finish_reason") == "length"):
                raise self._without_text(choice)
            return content.strip()
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            shown = data[:200].decode(errors="replace")
            raise JudgeError(
                f"What {self._config.url} answers is no chat completion: {shown!r}. Check that judge.url ends in its "
                "version, such as /v1."
            ) from None

    def _without_text(self, choice: Json) -> JudgeError:
        """Return the error for a chat completion that holds no text."""
        refusal = choice["message"].get("refusal")
        why = f"it says {str(refusal)[:200]!r}" if refusal else f"its finish_reason is {choice.get('finish_reason')!r}"
        return JudgeError(
            f"{self._name} answers without any text; {why}. Name another model with judge.model: one that does not "
            "refuse, and that answers without thinking first, because the length of an answer is limited."
        )


class _StatusError(Exception):
    """An endpoint answers with a status that is an error."""

    def __init__(self, error: urllib.error.HTTPError) -> None:
        self.code = error.code
        try:
            self.text = error.read(_EXPLANATION_BYTES).decode(errors="replace")
        except (OSError, HTTPException):
            self.text = error.reason
        super().__init__(self.text)

    @property
    def shown(self) -> str:
        """The beginning of what it says, on one line."""
        return " ".join(self.text.split())[:300].rstrip(".")


def _kept(file: Path) -> str | None:
    """Return the answer in a file; None if there is none that can be read."""
    try:
        answer: str = json.loads(file.read_text(encoding="utf8"))["answer"]
    except (OSError, ValueError, KeyError):
        return None
    return answer
