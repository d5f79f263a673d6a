"""A stand-in for the SDK's compiler ``qaic-exec``: takes the flags that are published, writes a stand-in QPC.

Published: quic/cloud-ai-sdk-pages, docs/Getting-Started/Inference-Workflow/model-compilation/Compile-the-Model.md, and
the command lines in the samples of quic/cloud-ai-sdk. Like the real one it wants a folder that does not exist yet.
"""

import json
import shutil
import sys
from pathlib import Path

FLAGS = {"-aic-hw", "-compile-only", "-convert-to-fp16", "-multicast-weights", "-aic-enable-depth-first"}
VALUES = {
    "-m",
    "-aic-hw-version",
    "-aic-binary-dir",
    "-aic-num-cores",
    "-mos",
    "-ols",
    "-stats-batchsize",
} | {
    "-onnx-define-symbol",
    "-aic-depth-first-mem",
    "-combine-inputs",
    "-custom-IO-list-file",
    "-node-precision-info",
    "-execute-nodes-in-fp16",
    "-allocator-dealloc-delay",
}


def main(arguments: list[str]) -> int:
    given: dict[str, str] = {}
    symbols: dict[str, str] = {}
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not (flag in VALUES if equals else flag in FLAGS):
            print(f"stand-in compiler: unknown option {argument}", file=sys.stderr)
            return 2
        given[flag] = value
        if flag == "-onnx-define-symbol":
            symbol, _, size = value.partition(",")
            symbols[symbol] = size
    model, folder = Path(given["-m"]), Path(given["-aic-binary-dir"])
    if not {"-aic-hw", "-compile-only"} <= given.keys() or folder.exists():
        print(
            "stand-in compiler: -aic-hw and -compile-only are mandatory, the folder must be new",
            file=sys.stderr,
        )
        return 2
    if not model.is_file():
        print(f"stand-in compiler: no model {model}", file=sys.stderr)
        return 1
    folder.mkdir()
    shutil.copy(model, folder / "model.onnx")
    qpc = {"stand_in": "QPC", "model": "model.onnx", "symbols": symbols, "arguments": arguments}
    (folder / "programqpc.bin").write_text(json.dumps(qpc))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
