"""Three prompts through LMDeploy's pipeline on a CPU: ``device_type="cpu"`` is all that dlinfer asks for.

    python examples/pipeline.py MODEL_FOLDER

Nothing here imports dlinfer: where dlinfer is installed, LMDeploy knows the device.
"""

import sys

import lmdeploy
from lmdeploy import PytorchEngineConfig


def main(model: str) -> None:
    pipe = lmdeploy.pipeline(  # pyright: ignore[reportCallIssue]
        model,
        backend_config=PytorchEngineConfig(tp=1, cache_max_entry_count=0.4, device_type="cpu"),
    )
    questions = ["Shanghai is", "Please introduce China", "How are you?"]
    responses = pipe(questions, request_output_len=256, do_preprocess=False)
    for question, response in zip(questions, responses, strict=True):
        print(f"Q: {question}")
        print(f"A: {response.text}")
        print()
    pipe.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/pipeline.py MODEL_FOLDER")
    main(sys.argv[1])
