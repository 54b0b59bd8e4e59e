"""/v1/embeddings as OpenAI's client uses it, and over plain HTTP."""

from __future__ import annotations

import base64
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from pointsman.engine import LLM
from pointsman.engine.params.pooling import Pooling
from pointsman.server.wire.responses import EmbeddingResponse

pytestmark = pytest.mark.e2e

TEXTS = ["The import statement", "A class is", "def f(x):", "The import statement combines two operations"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", num_blocks=64, num_threads=1)


def vectors_of(llm: LLM, prompts: list[Any], pooling: Pooling = "last", **options: Any) -> np.ndarray:
    return np.stack([one.outputs.embedding for one in llm.embed(prompts, pooling, use_tqdm=False, **options)])


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/embeddings", json=fields)
    assert response.status_code == 200, response.text
    EmbeddingResponse.model_validate_json(response.content)
    answer: dict[str, Any] = response.json()
    return answer


def test_openai_client_gets_embedding_vectors(client: Any, llm: LLM) -> None:
    expected = vectors_of(llm, TEXTS)
    for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):  # left out, it asks for base64
        answer = client.embeddings.create(model="demo", input=TEXTS, **encoding)
        assert [one.index for one in answer.data] == [0, 1, 2, 3]
        vectors = [one.embedding for one in answer.data]
        if encoding.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(one), dtype="<f4").tolist() for one in vectors]
        assert np.abs(np.array(vectors) - expected).max() < TOLERANCE
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)
        assert answer.object == "list" and answer.model == "demo"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)


def test_embedding_input_may_be_one_or_many_texts_or_token_lists(http: httpx.Client, llm: LLM) -> None:
    tokens = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS[:2]]
    expected = vectors_of(llm, TEXTS[:2])
    for given in (TEXTS[0], tokens[0]):
        answer = post(http, input=given)
        assert np.abs(np.array(answer["data"][0]["embedding"]) - expected[0]).max() < TOLERANCE
        assert len(answer["data"]) == 1 and answer["usage"]["prompt_tokens"] == len(tokens[0])
    for many in (TEXTS[:2], tokens):
        found = np.array([one["embedding"] for one in post(http, input=many)["data"]])
        assert np.abs(found - expected).max() < TOLERANCE


def test_pooling_and_scale_can_be_chosen(http: httpx.Client, llm: LLM) -> None:
    expected = vectors_of(llm, TEXTS[:1], "mean", normalize=False)[0]
    found = np.array(post(http, input=TEXTS[0], pooling="mean", use_activation=False)["data"][0]["embedding"])
    assert np.abs(found - expected).max() < TOLERANCE * max(1.0, float(np.abs(expected).max()))


def test_embedding_response_has_the_requests_id(http: httpx.Client) -> None:
    response = http.post("/v1/embeddings", json={"input": "a", "request_id": "mine", "model": "demo"})
    assert response.json()["id"] == response.headers["x-request-id"] == "embd-mine"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": [[1] * 100_000]}, None),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "first"}, "pooling"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"input": "a", "priority": 3}, "priority"),
    ],
    ids=str,
)
def test_unsupported_values_get_400(http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    response = http.post("/v1/embeddings", json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "BadRequestError" and (param is None or param in str(error["param"]))


def test_embedding_request_for_unknown_model_gets_404(http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"input": "a", "model": "other"}).status_code == 404


def test_many_embedding_inputs_do_not_change_a_later_completion(http: httpx.Client, client: Any) -> None:
    before = client.completions.create(model="demo", prompt=TEXTS[0], max_tokens=20, temperature=0).choices[0].text
    inputs = [f"number {number} of many" for number in range(100)]
    answer = client.embeddings.create(model="demo", input=inputs)
    assert len({tuple(one.embedding[:4]) for one in answer.data}) > 90
    after = client.completions.create(model="demo", prompt=TEXTS[0], max_tokens=20, temperature=0).choices[0].text
    assert before == after
