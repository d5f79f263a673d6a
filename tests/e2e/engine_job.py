"""LMDeploy engines, one after another, driven by JSON jobs: the process that ``Lab.engines`` asks.

A line is ``{"jobs": [...], "out": FOLDER}``. It is what a user would write: ``PytorchEngineConfig(device_type="cpu")``
and no word of dlinfer. A job names the model, the engine's options (``device_type`` too, where it is not the CPU) and a
list of steps; a step's ``kind`` is a function
below. ``results.json`` has one object a job, which maps a step's name to what its function returned, or to
``{"raised": traceback}``; logits go to ``logits.npz`` as "job/name/index". An engine that cannot start is
``{"raised": traceback}`` itself.
"""

import asyncio
import json
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
from lmdeploy.messages import SpeculativeConfig
from lmdeploy.pytorch.messages import MessageStatus
from lmdeploy.pytorch.spec_decode.reject_sampler import RejectionSampler
from lmdeploy.serve.core.exceptions import RequestError

from tests.jobs import answer_jobs

OPENAI = ("presence_penalty", "frequency_penalty")


def gen_config(step: dict) -> GenerationConfig | list[GenerationConfig]:
    """The step's "gen": keywords of one GenerationConfig, or a list with one per prompt."""
    gen = step["gen"]
    return [generation(g) for g in gen] if isinstance(gen, list) else generation(gen)


def generation(fields: dict[str, Any]) -> GenerationConfig:
    """A GenerationConfig of LMDeploy's fields and of the attributes that dlinfer reads beside them."""
    own = {name: fields[name] for name in OPENAI if name in fields}
    config = GenerationConfig(**{name: value for name, value in fields.items() if name not in own})
    for name, value in own.items():
        setattr(config, name, value)
    return config


class Collector:
    """Joins the responses of one request: all tokens, the text, and the last word on everything else."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[dict[int, float]] = []
        self.logits: list[np.ndarray] = []
        self.chunks = 0
        self.last = None

    def add(self, response) -> None:
        self.tokens += response.token_ids
        self.text += response.text
        self.logprobs += response.logprobs or []
        self.chunks += bool(response.token_ids)
        if response.logits is not None:
            self.logits.append(response.logits.float().cpu().numpy())
        self.last = response

    def as_dict(self) -> dict:
        last = self.last
        assert last is not None, "a request ended without any response"
        keys = (
            "input_token_len generate_token_len finish_reason cached_tokens error_code error_message".split()
        )
        return {key: getattr(last, key, None) for key in keys} | {
            "token_ids": self.tokens,
            "text": self.text,
            "chunks": self.chunks,
            # JSON keys are strings; pairs keep the ids whole numbers
            "logprobs": [list(map(list, step.items())) for step in self.logprobs],
        }


def finish(collectors: list[Collector], step: dict, logits: dict[str, np.ndarray]) -> list[dict]:
    for i, collector in enumerate(collectors):
        if collector.logits:
            logits[f"{step['name']}/{i}"] = np.concatenate(collector.logits)
    return [collector.as_dict() for collector in collectors]


def call(pipe, step: dict, logits: dict) -> list[dict]:
    """All prompts at once through ``pipe(...)``; with "chat" they are messages for the chat template."""
    collectors = []
    for response in pipe(step["prompts"], gen_config=gen_config(step), do_preprocess=step.get("chat", False)):
        collectors.append(Collector())
        collectors[-1].add(response)
    return finish(collectors, step, logits)


def one_by_one(pipe, step: dict, logits: dict) -> list[dict]:
    """Each prompt only when the one before is finished."""
    gens = gen_config(step)
    collectors = []
    for i, prompt in enumerate(step["prompts"]):
        gen = gens[i] if isinstance(gens, list) else gens
        collectors.append(Collector())
        collectors[-1].add(pipe(prompt, gen_config=gen, do_preprocess=step.get("chat", False)))
    return finish(collectors, step, logits)


def stream(pipe, step: dict, logits: dict) -> list[dict]:
    """All prompts at once through ``stream_infer``."""
    collectors = [Collector() for _ in step["prompts"]]
    chat = step.get("chat", False)
    for response in pipe.stream_infer(step["prompts"], gen_config=gen_config(step), do_preprocess=chat):
        collectors[response.index].add(response)
    return finish(collectors, step, logits)


def staggered(pipe, step: dict, logits: dict) -> list[dict]:
    """Each prompt arrives once every earlier one has ``after`` more tokens, or has ended: it meets others decoding."""
    gens = gen_config(step)
    running = []
    for i, prompt in enumerate(step["prompts"]):
        gen = gens[i] if isinstance(gens, list) else gens
        collector = Collector()
        responses = pipe.stream_infer([prompt], gen_config=gen, do_preprocess=step.get("chat", False))
        running.append((collector, responses))
        for earlier, responses in running:
            target = len(earlier.tokens) + step["after"]
            for response in responses:
                earlier.add(response)
                if len(earlier.tokens) >= target:
                    break
    for collector, responses in running:
        for response in responses:
            collector.add(response)
    return finish([collector for collector, _ in running], step, logits)


def cancel(pipe, step: dict, logits: dict) -> list[dict]:
    """All prompts at once; the sessions in ``cancel`` are aborted when they have ``after`` tokens."""
    sessions = [pipe.session() for _ in step["prompts"]]
    collectors = [Collector() for _ in sessions]
    waiting = set(step["cancel"])
    for response in pipe.stream_infer(
        step["prompts"], sessions=sessions, gen_config=gen_config(step), do_preprocess=False
    ):
        i = response.index
        collectors[i].add(response)
        if i in waiting and len(collectors[i].tokens) >= step["after"]:
            waiting.remove(i)
            sessions[i].abort()
    return finish(collectors, step, logits)


def token_ids_of(pipe, step: dict, logits: dict) -> list[dict]:
    """All prompts, which are token ids, at once, each by its adapter in "adapters"; a refused one says why.

    With "past_checks" the adapters' names are not looked at before the engine itself. "changes" are made to the
    adapters, one after the other, once a request has "after" tokens.
    """
    reached = asyncio.Event()

    async def one(prompt: list[int], adapter: str | None) -> dict:
        engine = pipe.async_engine
        named = None if step.get("past_checks") else adapter
        try:
            request = await engine.preprocess(
                None, pipe.session(), gen_config=gen_config(step), input_ids=prompt, adapter_name=named
            )
            request.adapter_name = adapter
            said = {"token_ids": [], "cached_tokens": 0}
            async for response in engine.generate(request):
                said["token_ids"] += response.token_ids
                if len(said["token_ids"]) >= step.get("after", 1):
                    reached.set()
                said["cached_tokens"] = max(said["cached_tokens"], response.cached_tokens or 0)
            return said
        except RequestError as error:
            return {"refused": error.message}

    adapters = step.get("adapters", [None] * len(step["prompts"]))

    async def change() -> list[str]:
        await reached.wait()
        return [await changed(pipe, name, folder) for name, folder in step["changes"]]

    async def together() -> list[dict]:
        changing = asyncio.ensure_future(change()) if "changes" in step else None
        responses = await asyncio.gather(*map(one, step["prompts"], adapters))
        if changing is not None:
            assert await changing == [""] * len(step["changes"])
        return responses

    return pipe._run(coro=together()).result()


async def changed(pipe, name: str, folder: str | None) -> str:
    """Load or unload an adapter, and return why that was refused, or an empty text."""
    from dlinfer.errors import DlinferError
    from dlinfer.framework.lmdeploy_ext.adapters import routes

    try:
        await routes.change(pipe.async_engine, name, folder)
    except DlinferError as error:
        return str(error)
    return ""


def change_adapter(pipe, step: dict, logits: dict) -> str:
    """Load the adapter in "folder" as "adapter", or unload it; why that was refused, or an empty text."""
    return pipe._run(coro=changed(pipe, step["adapter"], step["folder"])).result()


def perplexity(pipe, step: dict, logits: dict) -> list[float]:
    """``get_ppl`` of token-id sequences."""
    return pipe.get_ppl(step["sequences"])


def reward(pipe, step: dict, logits: dict) -> list[float]:
    """``get_reward_score`` of token-id sequences."""
    return pipe.get_reward_score(step["sequences"])


def teacher_forced(pipe, step: dict, logits: dict) -> list[list[int]]:
    """Logits of whole token-id sequences, by the call that ``Pipeline.get_reward_score`` makes."""
    answer = pipe._run(coro=pipe.async_engine.async_get_logits(input_ids=step["sequences"])).result()
    for i, rows in enumerate(answer):
        logits[f"{step['name']}/{i}"] = rows.float().cpu().numpy()
    return [list(rows.shape) for rows in answer]


def pixels(pipe, step: dict, logits: dict) -> list[list[int]]:
    """What LMDeploy's preprocessing makes of the images of each chat: shapes; values go where logits go."""
    processor = pipe.async_engine.prompt_processor
    shapes = []
    for i, chat in enumerate(step["prompts"]):
        made = pipe._run(coro=processor.get_prompt_input(chat, True)).result()
        pixels = [part["pixel_values"].float() for part in made["multimodal"]]
        parts = [np.asarray(one.flatten(0, 1) if one.ndim == 5 else one) for one in pixels]
        logits[f"{step['name']}/{i}"] = np.concatenate(parts)
        shapes.append(list(logits[f"{step['name']}/{i}"].shape))
    return shapes


def placed(pipe, step: dict, logits: dict) -> dict[str, Any]:
    """Where caches and weights lie, and which ops an engine's steps so far had answered by their references."""
    from dlinfer.ops.core import fallback

    agent = pipe.async_engine.engine.executor.model_agent
    caches = [tensor for pair in agent.cache_engine.gpu_cache for tensor in pair]
    weights = agent.patched_model.get_model().parameters()
    return {
        "devices": sorted({one.device.type for one in (*caches, *weights)}),
        "block_size": agent.cache_config.block_size,
        "references": {kind.op: kind.reason for kind in fallback.counts()},
    }


def tables(pipe, step: dict, logits: dict) -> int:
    """How many weights of an engine are flat tables of bytes, as BF12 is."""
    weights = pipe.async_engine.engine.executor.model_agent.patched_model.get_model().parameters()
    return sum(str(one.dtype) == "torch.uint8" and one.ndim == 1 for one in weights)


def rounded(pipe, step: dict, logits: dict) -> int:
    """Round the weights that DLINFER_CPU_WEIGHTS="bits" would pack, in the engine's floats; how many there are."""
    from tests.e2e.rounded_weights import round_weights

    agent = pipe.async_engine.engine.executor.model_agent
    return round_weights(agent.patched_model.get_model(), step["bits"])


def packed(pipe, step: dict, logits: dict) -> int:
    """How many weights of an engine were packed in place to few bits."""
    from dlinfer.framework.lmdeploy_ext.layers.quantised import few_bits

    layers = pipe.async_engine.engine.executor.model_agent.patched_model.get_model().modules()
    kinds = {few_bits.LinearInt8: 1, few_bits.LinearInt4: 1, few_bits.ExpertsInt8: 2, few_bits.ExpertsInt4: 2}
    return sum(kinds.get(type(getattr(layer, "impl", None)), 0) for layer in layers)


def ranks(pipe, step: dict, logits: dict) -> int:
    """On how many processes of LMDeploy's the model lies and runs."""
    return sum(one._proc.is_alive() for one in pipe.async_engine.engine.executor.procs)


def killed_rank(pipe, step: dict, logits: dict) -> dict:
    """Kill the second rank while requests run: how long they take to end, how, and how many ranks live on."""
    ranks = [rank._proc for rank in pipe.async_engine.engine.executor.procs]
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        ranks[1].kill()

    timer = threading.Timer(1, kill)
    timer.start()
    responses = pipe(step["prompts"], gen_config=gen_config(step), do_preprocess=False)
    timer.join()
    seconds = time.monotonic() - killed[0]
    reasons = [response.finish_reason for response in responses]
    return {"seconds": seconds, "reasons": reasons, "alive": sum(rank.is_alive() for rank in ranks)}


KINDS = {
    f.__name__: f
    for f in (
        call,
        one_by_one,
        stream,
        staggered,
        cancel,
        token_ids_of,
        change_adapter,
        perplexity,
        reward,
        teacher_forced,
        pixels,
        placed,
        tables,
        rounded,
        packed,
        ranks,
        killed_rank,
    )
}


def phases(runners: list) -> list[tuple[str, str, str]]:
    """(phase, what became of it, why) of every graph of an engine, by now. runners: its part of ``counts()``."""
    return [(p.phase, p.outcome, p.reason) for runner in runners for p in runner.phases]


def explained(runners: list) -> list[dict]:
    """For each graph: its phase, engine, regions, nodes that run eagerly, and the share of computing nodes in the
    engine."""
    graphs = []
    for runner in runners:
        for phase in runner.phases:
            if phase.report is None:  # it runs eagerly
                continue
            eager = [f"{node.op}: {node.reason}" for node in phase.report.placed("eager")]
            inside = len(phase.report.placed("engine"))
            graphs.append(
                {
                    "phase": phase.phase,
                    "engine": phase.report.engine,
                    "regions": len(phase.report.regions),
                    "eager": eager,
                    "coverage": inside / (inside + len(eager)),
                    "rules": phase.report.rules(),
                }
            )
    return graphs


@contextmanager
def counted_drafts() -> Iterator[list[list[int]]]:
    """For each step of speculative decoding meanwhile, how many drafts of each sequence are right."""
    steps: list[list[int]] = []
    forward = RejectionSampler.forward

    def counted(self, target_logits, draft_token_ids, *args, **kwargs):
        result = forward(self, target_logits, draft_token_ids, *args, **kwargs)
        steps.append(
            (draft_token_ids.shape[1] - result[1]).tolist()
        )  # of a step's tokens the bonus is no draft
        return result

    setattr(RejectionSampler, "forward", counted)  # noqa: B010 - pyright knows the original's type
    try:
        yield steps
    finally:
        setattr(RejectionSampler, "forward", forward)  # noqa: B010


def fix_the_cost_of_drafts() -> None:
    """Let drafts that an engine looks up cost what it assumes at first: tests do not depend on measured times."""
    from dlinfer.framework.lmdeploy_ext.ngram.gain import StepTimes

    setattr(StepTimes, "draft_cost", lambda self, sequences: 0.1)  # noqa: B010


def looked_up(pipe) -> dict[str, int]:
    """How many drafts of an engine's own texts were verified and accepted."""
    agent = getattr(getattr(pipe.async_engine.engine.executor, "model_agent", None), "spec_agent", None)
    return {name: getattr(agent, name, 0) for name in ("drafted", "accepted")}


@contextmanager
def counted_preemptions(scheduler: Any) -> Iterator[list[int]]:
    """Meanwhile, the ids of the sequences that lost their blocks, one for each time."""
    preempted: list[int] = []
    original = scheduler.preempt_seqs

    def counted(seqs):
        seqs = tuple(seqs)
        preempted.extend(seq.seq_id for seq in seqs if seq.status == MessageStatus.RUNNING)
        original(seqs)

    scheduler.preempt_seqs = counted
    try:
        yield preempted
    finally:
        del scheduler.preempt_seqs


def answer(job: dict, logits: dict[str, np.ndarray]) -> dict[str, object]:
    """Start one engine and let it do its steps."""
    from dlinfer.framework.lmdeploy_ext.running import graph_runner
    from dlinfer.ops.core import fallback

    speculative = job["engine"].pop("speculative", None)
    speculative = SpeculativeConfig(**speculative) if speculative else None
    config = PytorchEngineConfig(**({"device_type": "cpu"} | job["engine"]))
    fallback.reset()
    fix_the_cost_of_drafts()
    results: dict[str, object] = {}
    earlier = graph_runner.counts()
    trust = job["trust_remote_code"]
    with (
        counted_drafts() as accepted,
        pipeline(  # pyright: ignore[reportCallIssue]
            job["model"], backend_config=config, trust_remote_code=trust, speculative_config=speculative
        ) as pipe,
    ):
        runners = [one for one in graph_runner.counts() if not any(one is other for other in earlier)]
        ready = phases(runners)
        preemptions: dict[str, int] = {}
        for step in job["steps"]:
            try:
                with counted_preemptions(pipe.async_engine.engine.scheduler) as preempted:
                    results[step["name"]] = KINDS[step["kind"]](pipe, step, logits)
                preemptions[step["name"]] = len(preempted)
            except Exception:  # noqa: BLE001 - the other steps still have an answer; the harness raises this one
                results[step["name"]] = {"raised": traceback.format_exc()}
        results["explained"] = explained(runners)
        results["accepted"], results["preemptions"] = accepted, preemptions
        results["looked up"] = looked_up(pipe)
        steps = sum(runner.steps for runner in runners)
        results["graphs"] = {"phases": ready, "late": len(phases(runners)) - len(ready), "steps": steps}
    return results


def answer_all(asked: dict[str, Any]) -> dict[str, Any]:
    """Answer the jobs of a line, by the release of LMDeploy that whoever asks has."""
    out = Path(asked["out"])
    there, wanted = metadata.version("lmdeploy"), asked["lmdeploy"]
    assert there == wanted, f"this process has LMDeploy {there}, and {wanted} is under test"
    results: list[dict[str, object]] = []
    logits: dict[str, np.ndarray] = {}
    for number, job in enumerate(asked["jobs"]):
        own: dict[str, np.ndarray] = {}
        try:
            results.append(answer(job, own))
        except Exception:  # noqa: BLE001 - the other engines still have an answer; the harness raises this one
            results.append({"raised": traceback.format_exc()})
        logits |= {f"{number}/{name}": values for name, values in own.items()}
    np.savez(out / "logits.npz", **logits)  # pyright: ignore[reportArgumentType]
    (out / "results.json").write_text(json.dumps(results))
    return {}


if __name__ == "__main__":
    answer_jobs(answer_all)
