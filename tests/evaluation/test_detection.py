"""Detection scoring against a judge on this machine that answers as it is told to."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import WORDS
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.disk.layout import shard_file, token_file
from dmsae.errors import ConfigError, JudgeError
from dmsae.evaluation.detection import DetectionConfig, measure, parse_numbers, score, why_no_score
from dmsae.evaluation.judge import Judge, JudgeConfig, Message
from dmsae.evaluation.scores import as_json
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from planted import REQUEST

QUESTION = [Message("system", "Be brief."), Message("user", "What is it?")]


class Endpoint:
    """A chat completion endpoint: `reply` gets the messages and returns the text, or a status, or bytes to send, or
    both of these."""

    def __init__(self) -> None:
        self.reply: Callable[[list[dict[str, str]]], Any] = lambda messages: "yes"
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.promised = 0
        """Bytes that it says it will send; 0: it says nothing."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append((self.path, body, self.headers.get("Authorization")))
                answer = endpoint.reply(body["messages"])
                status, answer = answer if isinstance(answer, tuple) else (200, answer)
                status = answer if isinstance(answer, int) else status
                data = answer if isinstance(answer, bytes) else json.dumps(self.completion(answer)).encode()
                self.send_response(status)
                if endpoint.promised:
                    self.send_header("Content-Length", str(endpoint.promised))
                self.end_headers()
                self.wfile.write(data)

            def completion(self, answer: Any) -> Any:
                if isinstance(answer, int):
                    return {"error": {"message": "told to"}}
                return {"choices": [{"message": {"role": "assistant", "content": f" {answer}\n"}}]}

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def config(self, **changes: Any) -> JudgeConfig:
        settings = {"url": self.url, "model": "judge", "pause_seconds": 0.0, "timeout_seconds": 5.0, "tries": 3}
        return JudgeConfig(**{**settings, **changes})


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def test_a_judge_is_asked_with_its_key_and_its_answer_is_stripped(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert Judge(endpoint.config(key_variable="JUDGE_KEY")).ask(QUESTION, 7) == "yes"
    ((path, body, authorization),) = endpoint.requests
    assert path == "/v1/chat/completions"
    assert authorization == "Bearer secret"
    assert body == {
        "model": "judge",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}],
        "max_tokens": 7,
        "temperature": 0,
    }


def test_without_a_key_none_is_sent(endpoint: Endpoint) -> None:
    Judge(endpoint.config()).ask(QUESTION, 7)
    assert endpoint.requests[0][2] is None


def test_the_same_question_is_asked_once_and_the_key_is_not_kept(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for _ in range(2):
        assert Judge(endpoint.config(), tmp_path).ask(QUESTION, 7) == "yes"
    assert len(endpoint.requests) == 1
    (file,) = tmp_path.iterdir()
    assert "secret" not in file.read_text()
    Judge(endpoint.config(), tmp_path).ask(QUESTION, 8)
    Judge(endpoint.config(model="other"), tmp_path).ask(QUESTION, 7)
    assert len(endpoint.requests) == 3
    file.write_text("damaged")
    assert Judge(endpoint.config(), tmp_path).ask(QUESTION, 7) == "yes"


def test_an_endpoint_that_is_busy_is_asked_again(endpoint: Endpoint) -> None:
    replies = iter([503, 429, "at last"])
    endpoint.reply = lambda messages: next(replies)
    assert Judge(endpoint.config()).ask(QUESTION, 7) == "at last"


def test_an_endpoint_that_stays_busy_is_given_up_on(endpoint: Endpoint) -> None:
    endpoint.reply = lambda messages: 503
    with pytest.raises(JudgeError, match=r"cannot be reached, after 3 tries: it answers with status 503 .*told to"):
        Judge(endpoint.config()).ask(QUESTION, 7)
    assert len(endpoint.requests) == 3


def test_a_wrong_key_or_model_is_an_error_at_once(endpoint: Endpoint) -> None:
    endpoint.reply = lambda messages: 401
    with pytest.raises(JudgeError, match=r"refuses: it answers with status 401 .*OPENAI_API_KEY"):
        Judge(endpoint.config()).ask(QUESTION, 7)
    assert len(endpoint.requests) == 1


def test_an_endpoint_that_is_not_there_is_an_error(endpoint: Endpoint) -> None:
    nowhere = endpoint.config(url="http://127.0.0.1:1/v1")
    with pytest.raises(JudgeError, match=r"at http://127.0.0.1:1/v1 cannot be reached, after 3 tries"):
        Judge(nowhere).ask(QUESTION, 7)


def test_an_endpoint_that_does_not_answer_in_time_is_an_error(endpoint: Endpoint) -> None:
    def late(messages: list[dict[str, str]]) -> str:
        time.sleep(0.4)
        return "too late"

    endpoint.reply = late
    with pytest.raises(JudgeError, match=r"after 2 tries: timed out"):
        Judge(endpoint.config(timeout_seconds=0.05, tries=2)).ask(QUESTION, 7)


def test_an_answer_that_is_cut_off_is_asked_for_again(endpoint: Endpoint) -> None:
    endpoint.promised = 1000
    with pytest.raises(JudgeError, match=r"cannot be reached, after 3 tries: IncompleteRead"):
        Judge(endpoint.config()).ask(QUESTION, 7)
    assert len(endpoint.requests) == 3


def test_parameters_that_are_refused_by_name_are_left_out_from_then_on(endpoint: Endpoint) -> None:
    def newer(messages: list[dict[str, str]]) -> Any:
        body = endpoint.requests[-1][1]
        if "max_tokens" in body:
            said = "Unsupported parameter: 'max_tokens'.\n Use 'max_completion_tokens' instead."
            return 400, json.dumps({"error": {"message": said}}, indent=2).encode()
        if "temperature" in body:
            return 400, b'{"error": "Unsupported value: temperature does not support 0."}'
        return "yes"

    endpoint.reply = newer
    judge = Judge(endpoint.config(tries=1))
    assert judge.ask(QUESTION, 7) == judge.ask(QUESTION, 8) == "yes"
    assert [set(body) - {"model", "messages"} for _, body, _ in endpoint.requests] == [
        {"max_tokens", "temperature"},
        {"temperature"},
        set(),
        set(),
    ]


def test_questions_under_way_at_once_may_all_be_refused(endpoint: Endpoint) -> None:
    together = threading.Barrier(2)

    def newer(messages: list[dict[str, str]]) -> Any:
        if len(endpoint.requests) <= 2:
            together.wait(5)
            return 400, b"use max_completion_tokens"
        return "yes"

    endpoint.reply = newer
    judge = Judge(endpoint.config(tries=1))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda n: judge.ask(QUESTION, n), (7, 8))) == ["yes", "yes"]


def test_what_an_endpoint_says_about_another_parameter_is_an_error(endpoint: Endpoint) -> None:
    endpoint.reply = lambda messages: (400, b'{\n  "error": "temperature and model are unknown"\n}')
    with pytest.raises(JudgeError, match=r'status 400 \(\{ "error": "temperature and model are unknown" \}\)'):
        Judge(endpoint.config()).ask(QUESTION, 7)
    assert len(endpoint.requests) == 2, "once as it is, and once without what it names"


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"message": {"content": None}, "finish_reason": "length"}, "its finish_reason is 'length'"),
        ({"message": {"content": ""}, "finish_reason": "length"}, "its finish_reason is 'length'"),
        ({"message": {"content": None, "refusal": "I cannot."}, "finish_reason": "stop"}, "it says 'I cannot.'"),
    ],
)
def test_a_completion_without_text_is_said_to_be_one(endpoint: Endpoint, choice: Any, why: str) -> None:
    endpoint.reply = lambda messages: json.dumps({"choices": [choice]}).encode()
    with pytest.raises(
        JudgeError, match=f"The judge 'judge' at .* answers without any text; {why}. Name another model"
    ):
        Judge(endpoint.config()).ask(QUESTION, 7)


@pytest.mark.parametrize("reply", [b"<html>", b"{}", b'{"choices": [{"message": {"content": 5}}]}'])
def test_an_answer_of_another_kind_is_an_error(endpoint: Endpoint, reply: bytes) -> None:
    endpoint.reply = lambda messages: reply
    with pytest.raises(JudgeError, match="no chat completion"):
        Judge(endpoint.config()).ask(QUESTION, 7)


def test_a_judge_needs_an_address_and_a_name(endpoint: Endpoint) -> None:
    with pytest.raises(ConfigError, match=r"judge\.url = ''; it must be the address"):
        Judge(JudgeConfig(model="judge"))
    with pytest.raises(ConfigError, match=r"judge\.model"):
        Judge(JudgeConfig(url=endpoint.url))
    with pytest.raises(ConfigError, match=r"judge\.tries"):
        JudgeConfig(tries=0)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("1, 3", {1, 3}),
        ("2", {2}),
        ("1, 3 and 4.", {1, 3, 4}),
        ("[1, 2]", {1, 2}),
        ("1,9", {1}),
        ("None.", set()),
        ("none", set()),
        ("I think 1", None),
        ("", None),
    ],
)
def test_lists_of_numbers_are_understood_and_nothing_else(reply: str, expected: set[int] | None) -> None:
    assert parse_numbers(reply, 5) == expected


def test_scores_by_hand() -> None:
    """Of two texts with firing one is found; of three without one is named wrongly."""
    assert score({1, 3}, [True, True, False, False, False]) == (3 / 5, (1 / 2 + 2 / 3) / 2)
    assert score(set(), [False, False]) == (1, 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Contexts of random words; latent 0 fires on w7, latent 1 on w8."""
    w7, w8 = (3 + WORDS.index(word) for word in ("w7", "w8"))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 3 + len(WORDS), (120, 17), generator=draw, dtype=torch.int32)
    context = torch.arange(120).repeat_interleave(16)
    position = torch.arange(1, 17).repeat(120)
    current = tokens[context, position]
    x = torch.stack([current == w7, current == w8], dim=1) * (1 + torch.rand(len(context), 2, generator=draw))
    writer = StoreWriter(tmp_path / "store", REQUEST)
    writer.add(token_file(Split.HELDOUT), {"tokens": tokens, "starts": tokens < 0}, {})
    writer.add(shard_file(Split.HELDOUT, 0), {"x": x, "context": context.int(), "position": position.int()}, {})
    return writer.finish(2)


@pytest.fixture
def subject() -> Subject:
    sae = SAE(SAEConfig(d_model=2, width=2, k=1, prefixes=(2,)))
    with torch.no_grad():
        sae.W_enc_noncore.copy_(torch.eye(2))
        sae.W_dec.copy_(torch.eye(2))
    return Subject("planted", sae)


def clever(messages: list[dict[str, str]]) -> str:
    """Explain by the marked word that all examples have, and find the texts that hold it."""
    text = messages[1]["content"]
    if "<<" in text:
        examples = [set(line.replace("<<", " ").replace(">>", " ").split()) for line in text.splitlines()]
        assert all("<<" in line for line in text.splitlines())
        (common,) = set.intersection(*examples)
        return common
    word, _, listed = text.removeprefix("Description: ").partition("\n\n")
    assert "<<" not in listed
    lines = (line.partition(". ") for line in listed.splitlines())
    found = [number for number, _, line in lines if word in line.split()]
    return ", ".join(found) or "none"


class Spaced:
    """A tokenizer whose tokens begin with a space, as those of real models do."""

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"Ġ{WORDS[token - 3]}"

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" {WORDS[token - 3]}" for token in tokens)


@pytest.fixture
def model(tiny_model: Path) -> BaseModel:
    model = BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))
    model.tokenizer = Spaced()
    return model


def test_a_clever_judge_finds_what_was_planted(
    endpoint: Endpoint, store: Store, subject: Subject, model: BaseModel, tmp_path: Path
) -> None:
    endpoint.reply = clever
    config = DetectionConfig(judge=endpoint.config(), n_around=3)
    (result,) = measure([subject], store, model, config)
    assert {one.latent: one.explanation for one in result.latents} == {0: "w7", 1: "w8"}
    assert (result.detection, result.detection_balanced, result.n_latents, result.n_unclear) == (1, 1, 2, 0)
    cold = measure([subject], store, model, config, tmp_path / "cache")
    n_requests = len(endpoint.requests)
    warm = measure([subject], store, model, config, tmp_path / "cache")
    assert cold == warm == [result]
    assert len(endpoint.requests) == n_requests


def test_a_judge_that_sees_nothing_gets_one_half(
    endpoint: Endpoint, store: Store, subject: Subject, model: BaseModel
) -> None:
    """It is shown four texts with firing and ten without."""
    endpoint.reply = lambda messages: "none"
    (result,) = measure([subject], store, model, DetectionConfig(judge=endpoint.config(), n_around=3))
    assert result.detection == pytest.approx(10 / 14)
    assert result.detection_balanced == 0.5


def test_a_judge_that_talks_is_not_scored(endpoint: Endpoint, store: Store, subject: Subject, model: BaseModel) -> None:
    endpoint.reply = lambda messages: "Well, that depends."
    (result,) = measure([subject], store, model, DetectionConfig(judge=endpoint.config()))
    assert (result.detection, result.n_latents, result.n_unclear) == (None, 0, 2)
    assert "none of the judge's 2 answers was a list of numbers" in why_no_score(as_json(result), {})
    assert why_no_score({"n_latents": 1, "n_unclear": 1}, {}) == ""
    assert "--detection.n-tokens" in why_no_score({"n_latents": 0, "n_unclear": 0}, {})


def test_a_judge_that_fails_stops_the_measure(
    endpoint: Endpoint, store: Store, subject: Subject, model: BaseModel
) -> None:
    endpoint.reply = lambda messages: 500
    with pytest.raises(JudgeError, match="status 500"):
        measure([subject], store, model, DetectionConfig(judge=endpoint.config(tries=1)))


def test_without_a_judge_there_is_a_sentence(store: Store, subject: Subject, model: BaseModel) -> None:
    with pytest.raises(ConfigError, match=r"judge\.url"):
        measure([subject], store, model, DetectionConfig())
