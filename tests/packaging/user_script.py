"""A user's script that has never heard of dlinfer; test_wheel.py runs it where the wheel is installed.

    python user_script.py MODEL_FOLDER here|spawned|mp_engine

It prints one line of JSON: the greedy tokens, and the file of the dlinfer that something else imported.
"""

import json
import multiprocessing
import sys

from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline


def generate(model: str, **options) -> None:
    config = PytorchEngineConfig(device_type="cpu", session_len=128, cache_max_entry_count=0.01, **options)
    with pipeline(model, backend_config=config) as pipe:  # pyright: ignore[reportCallIssue] - a module to pyright
        answer = pipe("one two three", gen_config=GenerationConfig(max_new_tokens=8, ignore_eos=True))
    loaded = sys.modules.get("dlinfer")
    print(json.dumps({"tokens": answer.token_ids, "dlinfer": getattr(loaded, "__file__", None)}))


def main(model: str, where: str) -> None:
    if where == "here":
        generate(model)
    elif where == "mp_engine":
        generate(model, enable_mp_engine=True)  # LMDeploy's own worker process
    elif where == "spawned":
        worker = multiprocessing.get_context("spawn").Process(target=generate, args=(model,))
        worker.start()
        worker.join()
        sys.exit(worker.exitcode)
    else:
        raise ValueError(f"where: {where}")


if __name__ == "__main__":
    main(*sys.argv[1:])
