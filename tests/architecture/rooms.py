"""The rooms of the house, which rooms each may import, and which third-party packages."""

from tests.architecture.imports import within

# From the lowest to the highest: a room may import itself and, of those before it, the ones that its row names.
# A room is a package path; a module belongs to the longest room that it starts with.
ARROWS: dict[str, str] = {
    "dlinfer": "",  # the package's __init__: it names modules and imports them when they are asked for
    "dlinfer.errors": "",
    "dlinfer.utils": "",
    "dlinfer.settings": "errors",
    "dlinfer.toolchain": "errors settings",
    "dlinfer.vendor": "dlinfer errors settings toolchain",  # the noun, what it says of its device, its lazy loading
    "dlinfer.ops": "errors utils settings vendor",
    "dlinfer.graph.torch_private": "",
    "dlinfer.graph.ir": "errors graph.torch_private",
    "dlinfer.graph.interface": "errors graph.torch_private graph.ir",
    "dlinfer.graph.passes": "errors ops graph.torch_private graph.ir",
    "dlinfer.graph.debug": "settings",
    "dlinfer.graph.report": "errors ops graph.torch_private graph.ir graph.passes graph.debug",
    "dlinfer.graph.options": "errors settings graph.torch_private graph.passes",
    "dlinfer.graph.engine": "errors vendor graph.ir graph.passes graph.report graph.options",
    "dlinfer.graph.cache": "dlinfer settings vendor graph.ir graph.debug",
    "dlinfer.graph.capture": "errors utils graph.torch_private graph.ir",
    "dlinfer.graph.codec": "errors ops graph.torch_private graph.ir graph.interface graph.capture",
    "dlinfer.graph.functional": "errors graph.torch_private graph.ir",
    "dlinfer.graph.onnx": "errors ops graph.torch_private graph.ir graph.functional",
    "dlinfer.graph.lowering": "errors vendor ops graph.torch_private graph.ir graph.passes "
    "graph.report graph.options graph.engine graph.capture graph.codec",
    "dlinfer.graph.selftest": "errors utils settings ops graph.torch_private graph.report graph.options "
    "graph.engine graph.cache graph.capture graph.lowering",
    # Engines stand on it, and it on what they would stand on without it: functions of values, and ONNX.
    "dlinfer.graph.engine_kit": "errors ops graph.torch_private graph.ir graph.report graph.options "
    "graph.engine graph.functional graph.onnx graph.selftest",
    "dlinfer.graph.observe": "graph.torch_private graph.ir graph.report graph.capture graph.lowering",
    "dlinfer.graph.backend": "errors graph.torch_private graph.ir graph.report graph.options "
    "graph.engine graph.capture graph.lowering graph.observe",
    "dlinfer.graph.bound_call": "errors settings vendor graph.torch_private graph.ir graph.interface "
    "graph.debug graph.report graph.options graph.engine graph.cache graph.codec graph.lowering "
    "graph.backend",
    "dlinfer.explanation": "dlinfer errors graph.torch_private graph.ir graph.report graph.options "
    "graph.cache graph.backend",
    "dlinfer.runtime.options": "errors settings",
    "dlinfer.runtime.artifact": "errors graph.torch_private graph.ir graph.interface graph.report "
    "graph.options graph.engine graph.cache graph.capture graph.codec graph.lowering runtime.options",
    "dlinfer.runtime.aot": "errors graph.torch_private graph.ir graph.interface graph.report "
    "graph.options graph.engine graph.capture graph.lowering runtime.artifact",
    "dlinfer.runtime.session": "errors graph.torch_private graph.ir graph.interface graph.codec "
    "runtime.options runtime.artifact",
    "dlinfer.conformance": "dlinfer errors settings utils vendor ops",  # and torch.compile's backend, by name
    "dlinfer.vendor.*": "errors settings utils toolchain vendor ops graph runtime",  # each vendor's folder
    "dlinfer.framework": "errors",
    "dlinfer.framework.lmdeploy_ext.versions": "framework",
    "dlinfer.framework.lmdeploy_ext.errors": "errors",
    "dlinfer.framework.lmdeploy_ext.device": "errors settings vendor framework "
    "framework.lmdeploy_ext.versions",
    "dlinfer.framework.lmdeploy_ext.gguf": "errors settings ops framework.lmdeploy_ext.errors",
    "dlinfer.framework.lmdeploy_ext.conversion": "settings ops framework framework.lmdeploy_ext.device "
    "framework.lmdeploy_ext.gguf",
    "dlinfer.framework.lmdeploy_ext.sampling": "framework framework.lmdeploy_ext.device",
    "dlinfer.framework.lmdeploy_ext.layers": "settings vendor ops framework framework.lmdeploy_ext.device "
    "framework.lmdeploy_ext.gguf framework.lmdeploy_ext.conversion",
    "dlinfer.framework.lmdeploy_ext.ranks": "ops framework framework.lmdeploy_ext.errors "
    "framework.lmdeploy_ext.device",
    "dlinfer.framework.lmdeploy_ext.faults.sampling": "framework framework.lmdeploy_ext.device",
    "dlinfer.framework.lmdeploy_ext.faults.models": "ops framework framework.lmdeploy_ext.device "
    "framework.lmdeploy_ext.layers",
    "dlinfer.framework.lmdeploy_ext.vision": "errors ops framework framework.lmdeploy_ext.errors "
    "framework.lmdeploy_ext.device framework.lmdeploy_ext.faults.models",
    "dlinfer.framework.lmdeploy_ext.running": "errors utils settings vendor ops graph.cache framework "
    "graph.torch_private graph.report graph.options graph.engine graph.bound_call framework.lmdeploy_ext.errors "
    "framework.lmdeploy_ext.device framework.lmdeploy_ext.ranks framework.lmdeploy_ext.sampling "
    "framework.lmdeploy_ext.layers framework.lmdeploy_ext.vision",
    "dlinfer.framework.lmdeploy_ext.stepping": "utils framework framework.lmdeploy_ext.device "
    "framework.lmdeploy_ext.layers framework.lmdeploy_ext.faults.sampling",
    "dlinfer.framework.lmdeploy_ext.ngram": "settings framework framework.lmdeploy_ext.device "
    "framework.lmdeploy_ext.faults.sampling framework.lmdeploy_ext.stepping",
    "dlinfer.framework.lmdeploy_ext.checks": "errors settings framework framework.lmdeploy_ext.versions "
    "framework.lmdeploy_ext.errors framework.lmdeploy_ext.device framework.lmdeploy_ext.gguf "
    "framework.lmdeploy_ext.conversion framework.lmdeploy_ext.ranks framework.lmdeploy_ext.layers "
    "framework.lmdeploy_ext.faults.sampling framework.lmdeploy_ext.faults.models framework.lmdeploy_ext.ngram",
    "dlinfer.framework.lmdeploy_ext.adapters": "errors framework framework.lmdeploy_ext.device "
    "framework.lmdeploy_ext.checks framework.lmdeploy_ext.stepping",
    "dlinfer.framework.lmdeploy_ext.faults.answers": "errors framework "
    "framework.lmdeploy_ext.device framework.lmdeploy_ext.checks",
    "dlinfer.framework.lmdeploy_ext.faults.serving": "errors framework "
    "framework.lmdeploy_ext.errors framework.lmdeploy_ext.device framework.lmdeploy_ext.ranks",
    "dlinfer.framework.lmdeploy_ext.contract": "dlinfer errors ops framework "
    "framework.lmdeploy_ext.versions framework.lmdeploy_ext.device framework.lmdeploy_ext.checks",
    "dlinfer.framework.lmdeploy_ext": "dlinfer errors vendor framework "
    "framework.lmdeploy_ext.versions framework.lmdeploy_ext.errors framework.lmdeploy_ext.device "
    "framework.lmdeploy_ext.gguf "
    "framework.lmdeploy_ext.conversion framework.lmdeploy_ext.sampling framework.lmdeploy_ext.layers "
    "framework.lmdeploy_ext.faults.sampling framework.lmdeploy_ext.faults.models "
    "framework.lmdeploy_ext.vision framework.lmdeploy_ext.ranks framework.lmdeploy_ext.running "
    "framework.lmdeploy_ext.checks framework.lmdeploy_ext.stepping framework.lmdeploy_ext.adapters "
    "framework.lmdeploy_ext.ngram "
    "framework.lmdeploy_ext.faults.answers framework.lmdeploy_ext.faults.serving framework.lmdeploy_ext.contract",
    "dlinfer.framework.lmdeploy_ext.preflight": "errors vendor ops framework.lmdeploy_ext.errors "
    "framework.lmdeploy_ext.device framework.lmdeploy_ext.gguf framework.lmdeploy_ext.conversion "
    "framework.lmdeploy_ext.checks",
    "dlinfer.framework.lmdeploy_ext.quantise": "dlinfer errors toolchain "
    "framework.lmdeploy_ext.errors framework.lmdeploy_ext.conversion framework.lmdeploy_ext.checks",
    "dlinfer.framework.transformers_ext": "errors settings ops graph.torch_private graph.ir "
    "graph.options graph.capture graph.lowering",
    "dlinfer.framework.mindie_ext.errors": "errors",
    "dlinfer.framework.mindie_ext.config": "framework.mindie_ext.errors",
    "dlinfer.framework.mindie_ext.sampling": "errors framework.mindie_ext.errors",
    "dlinfer.framework.mindie_ext.batch": "errors framework.mindie_ext.errors framework.mindie_ext.sampling",
    "dlinfer.framework.mindie_ext.adapters": "errors ops framework.mindie_ext.errors",
    "dlinfer.framework.mindie_ext.parallel": "errors vendor framework.mindie_ext.errors",
    "dlinfer.framework.mindie_ext.model": "errors settings vendor ops graph.torch_private "
    "graph.report graph.bound_call framework.transformers_ext framework.mindie_ext.errors "
    "framework.mindie_ext.config framework.mindie_ext.adapters framework.mindie_ext.parallel",
    "dlinfer.framework.mindie_ext.cache": "errors vendor framework.mindie_ext.errors framework.mindie_ext.model",
    "dlinfer.framework.mindie_ext": "framework.mindie_ext.errors framework.mindie_ext.config "
    "framework.mindie_ext.sampling "
    "framework.mindie_ext.batch framework.mindie_ext.parallel framework.mindie_ext.model framework.mindie_ext.cache",
    "dlinfer.embedding.errors": "errors",
    "dlinfer.embedding.folder": "embedding.errors",  # it and the next import the standard library alone
    "dlinfer.embedding.recipe": "embedding.errors embedding.folder",
    "dlinfer.embedding.server.options": "embedding.folder",
    "dlinfer.embedding": "errors settings graph.torch_private graph.report graph.bound_call "
    "framework.transformers_ext embedding.errors embedding.folder embedding.recipe embedding.server.options",
    "dlinfer.serve": "errors",  # processes, files and HTTP; it starts LMDeploy and imports nothing of it
    "dlinfer.cli": "dlinfer errors settings toolchain embedding.folder embedding.recipe embedding.server.options "
    "serve vendor ops graph.engine graph.selftest "
    "explanation conformance vendor.* framework.lmdeploy_ext.contract framework.lmdeploy_ext "
    "framework.lmdeploy_ext.preflight framework.lmdeploy_ext.quantise",
    "dlinfer.__main__": "cli",
}
ROOMS = tuple(ARROWS)
# Packages that hold rooms and are none themselves: they say what is in them, and import nothing.
HALLS = ("dlinfer.graph", "dlinfer.runtime", "dlinfer.framework.lmdeploy_ext.faults")
NOUN = tuple(
    f"dlinfer.vendor.{name}" for name in ("base", "claims", "device", "discovery", "reasons", "streams")
)

# The autoload hook runs in everybody's `import torch`; it reaches the adaptor inside a function only.
AUTOLOAD = "dlinfer._autoload"
AUTOLOAD_REACHES = {"dlinfer.framework.lmdeploy_ext"}

# Third-party packages by room, longest name first; what is not listed is refused. A vendor's SDK belongs in a
# row for its folder, a framework in the row of its adaptor.
TORCH = {"torch"}
THIRD_PARTY = {
    "dlinfer.framework.lmdeploy_ext.quantise": TORCH
    | {"auto_round", "lmdeploy", "safetensors", "transformers"},
    "dlinfer.framework.lmdeploy_ext.checks.request": TORCH | {"PIL", "fastapi", "lmdeploy", "xgrammar"},
    "dlinfer.framework.lmdeploy_ext.faults.answers": TORCH | {"fastapi", "lmdeploy", "shortuuid", "xgrammar"},
    "dlinfer.framework.lmdeploy_ext.faults": TORCH
    | {"PIL", "fastapi", "lmdeploy", "numpy", "transformers", "xgrammar"},
    "dlinfer.framework.lmdeploy_ext.ranks": TORCH | {"lmdeploy", "ray"},
    "dlinfer.framework.lmdeploy_ext.adapters": TORCH | {"fastapi", "lmdeploy", "pydantic"},
    "dlinfer.framework.lmdeploy_ext.vision": TORCH | {"PIL", "lmdeploy", "numpy", "transformers"},
    "dlinfer.framework.lmdeploy_ext.gguf": TORCH | {"gguf", "numpy", "tokenizers", "transformers"},
    "dlinfer.framework.lmdeploy_ext.running.metrics": {"prometheus_client"},
    "dlinfer.framework.lmdeploy_ext": TORCH
    | {"lmdeploy", "transformers", "numpy", "packaging", "safetensors", "xgrammar"},
    "dlinfer.framework.mindie_ext": TORCH | {"numpy", "pydantic", "safetensors", "transformers"},
    "dlinfer.framework.transformers_ext": TORCH | {"transformers"},
    "dlinfer.framework": TORCH | {"packaging"},
    "dlinfer.conformance": TORCH,
    "dlinfer.embedding.errors": set(),
    "dlinfer.embedding.folder": set(),
    "dlinfer.embedding.recipe": set(),
    "dlinfer.embedding.server": TORCH | {"fastapi", "prometheus_client", "pydantic", "uvicorn"},
    "dlinfer.embedding": TORCH | {"safetensors", "tokenizers", "transformers"},
    "dlinfer.serve": {"aiohttp", "prometheus_client"},
    "dlinfer.cli.explain": TORCH | {"transformers"},
    "dlinfer.cli": TORCH | {"rich"},
    "dlinfer.vendor.maca.moe": TORCH | {"triton"},  # which MetaX ships with its torch
    "dlinfer.vendor.megengine": TORCH | {"numpy"},
    "dlinfer.vendor.onnxruntime": TORCH | {"numpy", "onnx", "onnxruntime", "onnxscript"},
    "dlinfer.vendor.openvino": TORCH | {"numpy", "openvino"},
    "dlinfer.vendor.qaic": TORCH | {"numpy", "onnx", "onnx_ir", "onnxruntime", "qaic", "yaml"},
    "dlinfer.vendor.sophgo.compiler.driver": {"numpy"},  # run by the toolchain's Python
    "dlinfer.vendor.sophgo.llm": TORCH | {"numpy", "transformers"},
    "dlinfer.vendor.sophgo": TORCH | {"numpy", "onnx", "onnx_ir"},
    "dlinfer.vendor": TORCH,
    "dlinfer.explanation": TORCH,
    "dlinfer.graph.onnx": TORCH | {"numpy", "onnx", "onnx_ir", "onnxscript"},
    "dlinfer.graph.torch_private.onnx": TORCH | {"onnx_ir"},
    "dlinfer.graph": TORCH | {"numpy", "sympy"},  # guards and ranges of symbolic sizes are sympy's
    "dlinfer.runtime.artifact.sealing": TORCH | {"cryptography"},
    "dlinfer.runtime.options": TORCH | {"yaml"},
    "dlinfer.runtime": TORCH | {"numpy"},
    "dlinfer.ops": TORCH,
    "dlinfer.utils": TORCH,
    "dlinfer": set(),
}


def room(name: str) -> str:
    """The room that a module belongs to."""
    if within(name, "dlinfer.vendor"):
        return "dlinfer.vendor" if name == "dlinfer.vendor" or name in NOUN else "dlinfer.vendor.*"
    return max((r for r in ROOMS if within(name, r)), key=len)


def allowed(name: str) -> set[str]:
    """The rooms that a room may import, itself among them."""
    named = {word if word == "dlinfer" else f"dlinfer.{word}" for word in ARROWS[name].split()}
    halls = named & set(HALLS)
    return {name} | named - halls | {one for one in ROOMS if any(within(one, hall) for hall in halls)}
