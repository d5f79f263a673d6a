"""Random requests on a KV cache that preempts all the time: ``python -m tests.serve.storm [--requests 400] [--seed 0]
[--keep FILE] [--graph] [-- OPTIONS OF API_SERVER]``.

Each request is asked alone first. Then clients ask all of them at once, in another order, some as streams. Token ids,
texts, ends, tool calls and log-probabilities have to be those of the request alone; what ends by itself under a schema,
a pattern or a required tool has to follow it, and no answer holds its stop. It prints JSON at the end, and ends with 1
where an answer was wrong.

Draws are among few tokens. Logits differ in their last bits by how many rows a batch has, in any engine whose products
do; among a thousand tokens that decides about one draw in fifty thousand.

A request follows from the seed and its number. ``--keep`` names a file of answers so far, from which a run goes on.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from examples.tiny_models.build import build
from tests.serve.api_server import MODEL_NAME, ApiServer

CLIENTS = 16
SESSION_LEN = 1024
# Any request fits alone. Eight need about five times as much.
BLOCKS, BLOCK = 66, 16
# Options of a server that answers each request.
ANSWERS = ("--logprobs-mode", "raw_logprobs", "--tool-call-parser", "qwen3")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
WORDS = "the quick brown fox jumps over a lazy dog while two red hens watch and some green frogs sing".split()
STOPS = ("e", "th", " fo", "a l", "xx", "\n\n", "q", "ing", " the", "%")
PATTERNS = (r"([a-z]{2,8} ){30}end", r"[0-9]{3}(-[0-9]{3}){40}", r"(yes|no)( (yes|no)){20,60}\.")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", "Bonn"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 10, "maxItems": 30},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    PARAMETERS,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 40, "maxItems": 90},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "rest": {
                "type": "array",
                "items": {"enum": ["fox", "dog", None, 1.5]},
                "minItems": 20,
                "maxItems": 40,
            },
        },
        "required": ["name", "rest"],
        "additionalProperties": False,
    },
)
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ping"}},
]


def make_request(seed: int, number: int) -> tuple[str, dict[str, Any]]:
    """(path, body) of one request."""
    rng = random.Random(f"{seed}/{number}")
    text = " ".join(rng.choices(WORDS, k=rng.choice([rng.randrange(1, 60), rng.randrange(150, 330)])))
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "return_token_ids": True,
        "max_tokens": rng.randrange(1, 160),
    }
    kind = rng.choices(["plain", "schema", "pattern", "tool", "completion"], [3, 2, 1, 2, 2])[0]
    if rng.random() < 0.3:
        body |= {"temperature": 0.0}
    else:
        body |= {
            "temperature": rng.uniform(0.2, 1.5),
            "top_k": rng.choice([1, 5, 20]),
            "top_p": rng.uniform(0.5, 1.0),
            "min_p": rng.choice([0.0, 0.0, 0.05]),
            "seed": rng.randrange(10**6),
        }
    if rng.random() < 0.5:
        body |= {"repetition_penalty": rng.uniform(1.0, 1.5)}
    if rng.random() < 0.5:
        body |= {"presence_penalty": rng.uniform(-1, 2), "frequency_penalty": rng.uniform(0, 1)}
    if rng.random() < 0.3 and kind in ("plain", "completion"):
        body |= {"stop": rng.sample(STOPS, rng.randrange(1, 4))}
    if kind == "completion":
        return COMPLETION, body | {"prompt": text}
    body |= {"messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": rng.choice([1, 5, 20])}
    if "seed" in body and rng.random() < 0.2:
        body |= {"n": rng.randrange(2, 4)}
    if kind == "plain":
        body |= {"min_new_tokens": rng.randrange(body["max_tokens"] + 1)} if rng.random() < 0.3 else {}
        body |= {"repetition_ngram_size": 1, "repetition_ngram_threshold": 3} if rng.random() < 0.2 else {}
    else:
        body |= {"max_tokens": 500}
    if kind == "schema":
        style = {"type": "json_schema", "json_schema": {"name": "x", "schema": rng.choice(SCHEMAS)}}
        body |= {"response_format": style}
    elif kind == "pattern":
        body |= {"response_format": {"type": "regex_schema", "regex_schema": rng.choice(PATTERNS)}}
    elif kind == "tool":
        named = {"type": "function", "function": {"name": rng.choice(["weather", "ping"])}}
        body |= {"tools": TOOLS, "tool_choice": rng.choice(["required", named])}
        body |= {"parallel_tool_calls": False}
    return CHAT, body


def ask(server: ApiServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer: tokens, text, end, calls and log-probabilities of each."""
    status, text = server.request("POST", path, json.dumps(body).encode())
    if status != 200:
        raise ValueError(f"status {status}: {text[:300]}")
    choices = sorted(json.loads(text)["choices"], key=lambda choice: choice["index"])
    return [choice_of(choice) for choice in choices]


def choice_of(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    rows = (choice.get("logprobs") or {}).get("content") or ()
    return {
        "tokens": choice["output_ids"],
        "text": message.get("content") or "",
        "end": choice["finish_reason"],
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "logprobs": [[row["logprob"], sorted(top["logprob"] for top in row["top_logprobs"])] for row in rows],
    }


def ask_stream(server: ApiServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """As ``ask``, put together from a stream; log-probabilities are left to the other."""
    status, text = server.request("POST", path, json.dumps(body | {"stream": True}).encode())
    if status != 200:
        raise ValueError(f"status {status}: {text[:300]}")
    choices: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ValueError(f"in a stream: {event['error']}")
        for part in event["choices"]:
            new = {"tokens": [], "text": "", "end": None, "calls": []}
            choice = choices.setdefault(part["index"], new)
            delta = part.get("delta") or {"content": part.get("text")}
            choice["tokens"] += part.get("output_ids") or []
            choice["text"] += delta.get("content") or ""
            choice["end"] = part.get("finish_reason") or choice["end"]
            for call in delta.get("tool_calls") or ():
                add_call(choice["calls"], call)
    return [choices[index] for index in sorted(choices)]


def add_call(calls: list[list[str]], delta: dict[str, Any]) -> None:
    while len(calls) <= delta["index"]:
        calls.append(["", ""])
    function = delta.get("function") or {}
    calls[delta["index"]][0] += function.get("name") or ""
    calls[delta["index"]][1] += function.get("arguments") or ""


def difference(alone: list[dict[str, Any]], among: list[dict[str, Any]]) -> str:
    """In what two answers differ, in a line; empty where they are the same."""
    if len(alone) != len(among):
        return f"{len(among)} choices instead of {len(alone)}"
    for number, (one, other) in enumerate(zip(alone, among, strict=True)):
        for name in ("tokens", "text", "end", "calls"):
            if one[name] != other[name]:
                return f"choice {number}: {name} {other[name]!r} instead of {one[name]!r}"
        if "logprobs" in other and not close(one["logprobs"], other["logprobs"]):
            return f"choice {number}: log-probabilities"
    return ""


def close(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return abs(one - other) < 1e-3


def fault(body: dict[str, Any], answer: list[dict[str, Any]]) -> str:
    """Why an answer is not what was asked for, in a line; empty where it is, or says that it was cut off."""
    for choice in answer:
        for stop in body.get("stop", ()):
            if "min_new_tokens" not in body and stop in choice["text"]:
                return f"the stop {stop!r} in {choice['text']!r}"
        style = body.get("response_format")
        if choice["end"] != "length" and style is not None and not follows(style, choice["text"]):
            return f"ended by {choice['end']!r} with {choice['text']!r}"
        if "tool_choice" in body and choice["end"] != "length" and not calls_one(body, choice["calls"]):
            return f"ended by {choice['end']!r} with the calls {choice['calls']}, text {choice['text']!r}"
        most = body.get("top_logprobs")
        if any(len(top) != most for _, top in choice.get("logprobs", ())):
            return f"another number of log-probabilities than {most}"
    return ""


def follows(style: dict[str, Any], text: str) -> bool:
    if style["type"] == "regex_schema":
        return re.fullmatch(style["regex_schema"], text) is not None
    return fits(style["json_schema"]["schema"], text)


def fits(schema: dict[str, Any], text: str) -> bool:
    try:
        return Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


def calls_one(body: dict[str, Any], calls: list[list[str]]) -> bool:
    choice = body["tool_choice"]
    names = ["weather", "ping"] if choice == "required" else [choice["function"]["name"]]
    schemas = {"weather": PARAMETERS, "ping": {"const": {}}}
    return len(calls) == 1 and calls[0][0] in names and fits(schemas[calls[0][0]], calls[0][1])


class Kept:
    """Answers so far, by number, in a file of JSON lines if one is named."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._lock = file, threading.Lock()
        self.alone: dict[int, Any] = {}
        self.wrong: dict[int, str] = {}
        lines = file.read_text().splitlines() if file is not None and file.exists() else ()
        for line in lines:
            self._take(json.loads(line))

    def add(self, entry: dict[str, Any]) -> None:
        """entry: number, and "alone" or "wrong"."""
        with self._lock:
            self._take(entry)
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps(entry) + "\n")

    def _take(self, entry: dict[str, Any]) -> None:
        for name in ("alone", "wrong"):
            if name in entry:
                getattr(self, name)[entry["number"]] = entry[name]


def storm(server: ApiServer, requests: int, seed: int, kept: Kept) -> dict[str, Any]:
    """Ask each request alone and then all at once; what was found."""
    asked = {number: make_request(seed, number) for number in range(requests)}
    start = time.monotonic()
    for number, request in asked.items():
        if number not in kept.alone:
            kept.add({"number": number, "alone": ask(server, *request)})
    alone_seconds = time.monotonic() - start

    def again(number: int) -> None:
        path, body = asked[number]
        streams = number % 3 == 0
        try:
            answer = (ask_stream if streams else ask)(server, path, body)
            wrong = difference(kept.alone[number], answer) or fault(body, answer)
        except (OSError, ValueError, KeyError) as error:
            wrong = f"{type(error).__name__}: {error}"
        kept.add({"number": number, "wrong": wrong})

    left = [number for number in asked if number not in kept.wrong]
    random.Random(seed).shuffle(left)
    start = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(again, left))
    wrong = {number: text for number, text in sorted(kept.wrong.items()) if text}
    wrong |= {
        -number - 1: f"alone: {text}"
        for number in asked
        if (text := fault(asked[number][1], kept.alone[number]))
    }
    ends = Counter(choice["end"] for answer in kept.alone.values() for choice in answer)
    return {
        "requests": requests,
        "ends": dict(ends),
        "tokens": sum(len(choice["tokens"]) for answer in kept.alone.values() for choice in answer),
        "seconds": [round(alone_seconds), round(time.monotonic() - start)],
        "wrong": {str(number): text[:600] for number, text in list(wrong.items())[:20]},
        "passed": not wrong and server.process.poll() is None,
    }


def options(graph: bool) -> list[str]:
    """Of a server whose cache is too small for its batch."""
    always = [*ANSWERS, "--num-gpu-blocks", str(BLOCKS), "--cache-block-seq-len", str(BLOCK)]
    return always if graph else [*always, "--eager-mode"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a file of answers so far")
    parser.add_argument("--graph", action="store_true", help="compiled graphs; without it eagerly")
    parser.add_argument("options", nargs="*", help="more options of api_server, behind --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        build("qwen2", model, dtype="float32")
        with ApiServer(model, *options(args.graph), *args.options, session_len=SESSION_LEN) as server:
            server.ready()
            report = storm(server, args.requests, args.seed, Kept(args.keep))
            if not report["passed"]:
                print(server.output()[-6000:], file=sys.stderr)
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
