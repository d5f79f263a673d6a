"""The engine's options: ``options={"engine_options": {...}}`` or DLINFER_ENGINE_OPTIONS; docs/reference/engines.md."""

from dataclasses import dataclass

from dlinfer.graph.engine_kit.options import EngineOptions, one_of, option, text, whole

_COUNT = whole(0, "a whole number, 0 or above")


@dataclass(frozen=True)
class OpenVINOOptions(EngineOptions):
    """Options of one compilation.

    device: an OpenVINO device: ``CPU``, ``GPU``, ``GPU.1``, ``NPU``.
    precision: the type that the device computes in: the model's own, or another.
    weights: the weights of linear layers: unchanged, or compressed to 8 bits with a scale for each row, or to 4 bits
        with a scale for each group.
    group_size: how many numbers of a weight's row share a scale, with ``int4``.
    dynamic_quantization_group_size: how many elements of an activation are quantised to 8 bits with one scale, for
        compressed weights; 0 keeps activations unchanged.
    num_threads: number of CPU threads; 0 takes torch's.
    """

    device: str = option("CPU", text("the name of an OpenVINO device, such as 'CPU' or 'GPU.0'"))
    precision: str = option("model", one_of("model", "f32", "bf16", "f16"))
    weights: str = option("model", one_of("model", "int8", "int4"))
    group_size: int = option(128, whole(2, "an even number above 0", lambda value: value % 2 == 0))
    dynamic_quantization_group_size: int = option(0, _COUNT)
    num_threads: int = option(0, _COUNT)
