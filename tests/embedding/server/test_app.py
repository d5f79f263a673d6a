"""The HTTP paths, with OpenAI's client and with plain requests, on a tiny model."""

import asyncio
import base64
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from torch.nn.functional import cosine_similarity, normalize

from dlinfer import settings
from dlinfer.embedding import TextModel, load
from dlinfer.embedding.server.app import create_app
from dlinfer.embedding.server.options import read
from tests.embedding import tiny
from tests.embedding.conftest import Folder, with_prompts

TEXTS = [tiny.TEXTS[0], tiny.TEXTS[1], tiny.TEXTS[4]]


@contextlib.contextmanager
def client_of(model: TextModel, *options: str) -> Iterator[TestClient]:
    app = create_app(model, read([str(model.recipe.transformer), "--model-name", "tiny", *options]))
    with TestClient(app) as client:
        yield client


@pytest.fixture(scope="module")
def model(compiled_code: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    with settings.override(cache_dir=str(compiled_code), fallback="error"):
        return load(with_prompts(tiny.build(tmp_path_factory.mktemp("bert"), "bert")))


@pytest.fixture
def client(model: TextModel) -> Iterator[TestClient]:
    with client_of(model) as client:
        yield client


def vectors(answer: Any) -> torch.Tensor:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return torch.tensor([entry["embedding"] for entry in data])


def refused(answer: Any, status: int, argument: str | None, *words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == argument
    assert set(error) == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"]


def test_all_forms_of_input(client: TestClient, model: TextModel):
    expected = model.encode(TEXTS)
    answer = client.post("/v1/embeddings", json={"model": "tiny", "input": TEXTS, "user": "somebody"})
    torch.testing.assert_close(vectors(answer), expected, rtol=0, atol=1e-6)
    rows = model.tokenizer.texts(TEXTS, "query: ", None)
    tokens = sum(map(len, rows))
    body = answer.json()
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["object"], body["model"], body["data"][0]["object"]) == ("list", "tiny", "embedding")
    single = client.post("/v1/embeddings", json={"input": TEXTS[0]})
    torch.testing.assert_close(vectors(single), expected[:1], rtol=0, atol=1e-6)
    ids = [list(row.ids) for row in rows]
    torch.testing.assert_close(
        vectors(client.post("/v1/embeddings", json={"input": ids})), expected, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        vectors(client.post("/v1/embeddings", json={"input": ids[1]})), expected[1:2], rtol=0, atol=1e-6
    )


def test_base64_and_prompts(client: TestClient, model: TextModel):
    body = {"input": TEXTS, "encoding_format": "base64", "prompt_name": "document"}
    data = client.post("/v1/embeddings", json=body).json()["data"]
    read_back = np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data])
    expected = model.encode(TEXTS, prompt_name="document")
    torch.testing.assert_close(torch.from_numpy(read_back), expected, rtol=0, atol=1e-6)
    answer = client.post("/v1/embeddings", json={"input": TEXTS, "prompt": "passage: "})
    torch.testing.assert_close(vectors(answer), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[-1]]}, "input"),
        ({"input": [[600]]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "prompt_name": "none"}, "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 4000}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": [[5] * 41]}, "input"),
        ({"input": "a", "unheard_of": 1}, "unheard_of"),
    ],
)
def test_refused_requests_name_the_field(client: TestClient, body: dict[str, Any], argument: str):
    refused(client.post("/v1/embeddings", json=body), 400, argument, argument)


def test_a_failure_has_openais_form(model: TextModel, monkeypatch: pytest.MonkeyPatch):
    def fail(rows: Any) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(model, "run", fail)
    with client_of(model) as client:
        refused(client.post("/v1/embeddings", json={"input": "a"}), 500, None, "log has the cause")


def test_what_is_no_json_and_an_unknown_model(client: TestClient):
    refused(client.post("/v1/embeddings", content=b"{"), 400, "body")
    answer = client.post("/v1/embeddings", json={"model": "other", "input": "a"})
    refused(answer, 404, "model", "other")
    assert answer.json()["error"]["code"] == "model_not_found"


def test_long_texts(folder_of: Folder):
    text = "word " * 300
    cutting = load(tiny.sentence_files(folder_of("bert"), "mean", max_seq_length=40))
    with client_of(cutting) as client:
        answer = client.post("/v1/embeddings", json={"input": text})
        torch.testing.assert_close(vectors(answer), cutting.encode([text]), rtol=0, atol=1e-6)
        assert answer.json()["usage"]["total_tokens"] == 40
        shorter = client.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": 9})
        assert shorter.json()["usage"]["total_tokens"] == 9
    strict = load(tiny.sentence_files(folder_of("bert"), "mean"))
    with client_of(strict) as client:
        refused(client.post("/v1/embeddings", json={"input": ["a", text]}), 400, "input", "text 1", "128")
        answer = client.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": -1})
        torch.testing.assert_close(vectors(answer), strict.encode([text]), rtol=0, atol=1e-6)
        ids = client.post("/v1/embeddings", json={"input": [5] * 500, "truncate_prompt_tokens": -1})
        assert ids.json()["usage"]["total_tokens"] == 128


def test_dimensions(embedding_folder: Path):
    model = load(embedding_folder)
    with client_of(model, "--matryoshka") as client:
        answer = client.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 16})
        expected = normalize(model.encode(TEXTS)[:, :16], dim=-1)
        torch.testing.assert_close(vectors(answer), expected, rtol=0, atol=1e-6)
    config = json.loads((embedding_folder / "config.json").read_text()) | {"matryoshka_dimensions": [16, 32]}
    tiny.write(embedding_folder, "config.json", config)
    with client_of(model) as client:
        assert vectors(client.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 32})).shape == (
            3,
            32,
        )
        refused(
            client.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 8}),
            400,
            "dimensions",
            "[16, 32]",
        )


def test_rerank_and_score_of_a_reranker(reranker_folder: Path):
    model = load(reranker_folder)
    query, documents = tiny.TEXTS[0], [text for text in tiny.TEXTS if len(text) < 100]
    expected = model.score([(query, text) for text in documents]).tolist()
    order = sorted(range(len(documents)), key=lambda index: -expected[index])
    with client_of(model) as client:
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            body = {"model": "tiny", "query": query, "documents": documents, "top_n": 3}
            results = client.post(path, json=body).json()["results"]
            assert [one["index"] for one in results] == order[:3]
            assert [one["relevance_score"] for one in results] == pytest.approx(
                [expected[index] for index in order[:3]], abs=1e-6
            )
            assert all("document" not in one for one in results)
        given = [{"text": text} for text in documents]
        answer = client.post(
            "/rerank", json={"query": query, "documents": given, "return_documents": True}
        ).json()
        assert [one["document"]["text"] for one in answer["results"]] == [documents[index] for index in order]
        assert answer["usage"]["total_tokens"] > 0
        scores = client.post("/v1/score", json={"text_1": query, "text_2": documents}).json()["data"]
        assert [one["score"] for one in scores] == pytest.approx(expected, abs=1e-6)
        paired = {"text_1": [query, documents[1]], "text_2": [documents[0], documents[1]]}
        scores = client.post("/score", json=paired).json()["data"]
        both = model.score([(query, documents[0]), (documents[1], documents[1])]).tolist()
        assert [one["score"] for one in scores] == pytest.approx(both, abs=1e-6)
        refused(
            client.post("/score", json={"text_1": ["a", "b"], "text_2": "c"}),
            400,
            "text_1",
            "2 texts",
            "has 1",
        )
        refused(client.post("/v1/embeddings", json={"input": "a"}), 400, "model", "/v1/embeddings")
        refused(client.post("/rerank", json={"query": "a", "documents": []}), 400, "documents")
        refused(client.post("/rerank", json={"query": "a", "documents": ["word " * 300]}), 400, "documents")


def test_an_instruction(folder_of: Folder):
    model = load(tiny.logit_score_files(folder_of("qwen3", "ForCausalLM")))
    body = {"query": "capital", "documents": TEXTS[:2], "instruction": "find lies"}
    with client_of(model) as client:
        results = client.post("/v1/rerank", json=body).json()["results"]
    scores = {one["index"]: one["relevance_score"] for one in results}
    expected = model.score([("capital", text) for text in TEXTS[:2]], prompt="find lies").tolist()
    assert [scores[index] for index in range(2)] == pytest.approx(expected, abs=1e-5)


def test_rerank_and_score_of_an_embedding_model(client: TestClient, model: TextModel):
    query = model.encode(["capital"], prompt_name="query")
    documents = model.encode(TEXTS, prompt_name="document")
    results = client.post("/v1/rerank", json={"query": "capital", "documents": TEXTS}).json()["results"]
    scores = {one["index"]: one["relevance_score"] for one in results}
    assert [scores[index] for index in range(3)] == pytest.approx(
        cosine_similarity(query, documents).tolist(), abs=1e-6
    )
    body = {"text_1": "capital", "text_2": [*TEXTS, "capital"]}
    data = client.post("/v1/score", json=body).json()["data"]
    expected = model.score([("capital", text) for text in body["text_2"]]).tolist()
    assert [one["score"] for one in data] == pytest.approx(expected, abs=1e-6)
    assert data[-1]["score"] == pytest.approx(1.0, abs=1e-6)
    refused(client.post("/score", json=body | {"instruction": "x"}), 400, "instruction")


def test_keys(model: TextModel):
    with client_of(model, "--api-keys", "one", "two") as client:
        refused(client.post("/v1/embeddings", json={"input": "a"}), 401, None)
        for path in ("/v1/models", "/metrics"):
            refused(client.get(path), 401, None)
        right = {"Authorization": "Bearer two"}
        assert client.post("/v1/embeddings", json={"input": "a"}, headers=right).status_code == 200
        assert client.get("/v1/models", headers=right).json()["data"][0]["id"] == "tiny"
        assert client.get("/health").status_code == 200


def test_metrics(client: TestClient):
    client.post("/v1/embeddings", json={"input": TEXTS})
    client.post("/v1/embeddings", json={})
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    counts = {
        sample.labels["status"]: sample.value
        for sample in families["dlinfer:embedding_requests"].samples
        if sample.name.endswith("_total")
    }
    assert counts == {"200": 1.0, "400": 1.0}
    assert {
        "dlinfer:embedding_request_seconds", "dlinfer:embedding_batch_tokens", "dlinfer:embedding_batch_texts",
        "dlinfer:embedding_forward_seconds", "dlinfer:embedding_queue_tokens",
    } <= set(families)  # fmt: skip


class Running:
    """The server on a port, whose forwards wait while ``pause`` is set."""

    def __init__(self, model: TextModel, *options: str) -> None:
        self._model, self._run = model, model.run
        self.go = threading.Event()
        self.go.set()

        def waiting(rows: Any) -> torch.Tensor:
            assert self.go.wait(60)
            return self._run(rows)

        model.run = waiting
        held = socket.socket()
        held.bind(("127.0.0.1", 0))
        self.port = held.getsockname()[1]
        app = create_app(model, read([str(model.recipe.transformer), "--model-name", "tiny", *options]))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([held])))

    def __enter__(self) -> "Running":
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *failure: object) -> None:
        self.go.set()
        self._server.should_exit = True
        self._thread.join(60)
        self._model.run = self._run

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def waiting(self) -> float:
        import urllib.request

        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            text = answer.read().decode()
        return float(text.split("\ndlinfer:embedding_queue_tokens ")[1].split()[0])


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_openais_client(model: TextModel):
    expected = model.encode(TEXTS)
    with Running(model) as running:
        answer = running.client().embeddings.create(model="tiny", input=TEXTS)
        found = torch.tensor([one.embedding for one in answer.data])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert [one.id for one in running.client().models.list()] == ["tiny"]
        with pytest.raises(openai.BadRequestError, match="--matryoshka"):
            running.client().embeddings.create(model="tiny", input="a", dimensions=4)


def test_a_full_queue_and_a_client_that_goes(model: TextModel):
    with Running(model, "--queue-tokens", "40", "--batch-tokens", "8") as running:
        running.go.clear()
        ids = [[5, 6, 7, 8]] * 6
        body = json.dumps({"input": ids}).encode()
        gone = socket.create_connection(("127.0.0.1", running.port))
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        gone.sendall(head + body)
        until(lambda: running.waiting() == 16)  # two rows are in the forward that waits
        with pytest.raises(openai.RateLimitError) as refusal:
            running.client().embeddings.create(model="tiny", input=[[5] * 25])
        assert int(refusal.value.response.headers["Retry-After"]) >= 1
        gone.close()
        until(lambda: running.waiting() == 0)
        running.go.set()
        answer = running.client().embeddings.create(model="tiny", input=[[5] * 25])
        assert answer.usage.total_tokens == 25
