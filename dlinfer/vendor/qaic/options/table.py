"""The table of all options of a Session.

The names, types and meanings are Qualcomm's. They come from the keyword table of docs/Python-API/qaic/qaic.md in
quic/cloud-ai-sdk-pages and, where marked, from the samples of quic/cloud-ai-sdk. The options ``output_node_names`` and
``model_inputs`` are left out: they are for TensorFlow and PyTorch models, but a Session takes .onnx.
"""

from dlinfer.vendor.qaic.options.option import (
    ONLY_TRUE,
    PATH,
    SYMBOLS,
    TEXT,
    TRUTH,
    Kind,
    Option,
    choice,
    integer,
    list_of,
    number,
)

COUNT = integer(1)
SCHEMA = choice("asymmetric", "symmetric", "symmetric_with_uint8", "symmetric_with_power2_scale")
NAMES = list_of(str)
BOTH = ("=true", "=false")  # the compiler's default is on, so False needs a flag


def _run(name: str, kind: Kind, doc: str) -> Option:
    return Option(name, kind, "run", doc)


def _session(name: str, kind: Kind, doc: str) -> Option:
    return Option(name, kind, "session", doc)


def _compile(
    name: str, kind: Kind, doc: str, flag: str = "", spelled: tuple[str | None, str | None] = ("", None)
) -> Option:
    return Option(name, kind, "compile", doc, flag, spelled)


ROWS = (
    _run("num_activations", COUNT, "number of instances of the network that run at the same time"),
    _run("set_size", COUNT, "number of inferences to queue ahead for each instance"),
    _run("dev_id", integer(0), "the card that runs it"),
    _session("enable_metrics", TRUTH, "record the latency of every run; excludes enable_profiling"),
    _session("enable_profiling", TRUTH, "profile the calls of every run, and record its latency"),
    _session("oversubscription_name", TEXT, "name of a group whose sessions take turns on a card (samples)"),
    # --- what is compiled
    _compile("aic_num_cores", COUNT, "number of AI cores that one instance runs on"),
    _compile("convert_to_fp16", TRUTH, "run all floating-point ops in fp16"),
    _compile("onnx_define_symbol", SYMBOLS, "sizes of the model's symbolic dimensions"),
    _compile("output_dir", PATH, "folder for the compiled model"),
    _compile("compile_only", ONLY_TRUE, "always True; published YAML files have this key (samples)"),
    # --- how the network is laid out
    _compile("mos", COUNT, "effort to reduce the use of on-chip memory"),
    _compile("ols", COUNT, "factor that splits ops for parallelism"),
    _compile(
        "allocator_dealloc_delay", integer(0), "how long buffers stay allocated, to avoid false dependencies"
    ),
    _compile("size_split_granularity", integer(512, 2048), "largest tile, in KiB"),
    _compile(
        "vtcm_working_set_limit_ratio",
        number(0, 1),
        "largest part of the fast memory that an instruction may use",
    ),
    _compile("multicast_weights", TRUTH, "load weights once for all cores"),
    _compile("aic_enable_depth_first", TRUTH, "depth-first schedule"),
    _compile("aic_depth_first_mem", integer(8, 32), "memory size of the depth-first schedule"),
    _compile("sdp_cluster_sizes", list_of(int), "clusters of a partition on one card"),
    _compile("use_producer_dma", TRUTH, "start transfers from the producing thread", spelled=("=1", "=0")),
    _compile("combine_inputs", TRUTH, "fewer buffers to the card", spelled=BOTH),
    _compile("combine_outputs", TRUTH, "one buffer from the card", spelled=BOTH),
    _compile("host_preproc", TRUTH, "run pre- and postprocessing on the host"),
    _compile("aic_preproc", TRUTH, "run pre- and postprocessing on the card"),
    _compile("mdp_load_partition_config", PATH, "read the partition over several cards from a file"),
    _compile("mdp_dump_partition_config", PATH, "write the partition over several cards to a file"),
    _compile("dynamic_shape_input", NAMES, "inputs that have dynamic shapes"),
    _compile("always_expand_onnx_functions", TRUTH, "expand ONNX functions"),
    # --- precision and quantization
    _compile("execute_nodes_in_fp16", NAMES, "op types that run in fp16"),
    _compile("node_precision_info_file", PATH, "file with the precision of each node", "node-precision-info"),
    _compile("keep_original_precision_for_nodes", NAMES, "op types that are not quantized"),
    _compile(
        "custom_io_list_file",
        PATH,
        "file with the layout and precision of inputs and outputs",
        "custom-IO-list-file",
    ),
    _compile(
        "dump_custom_io_config_template_file",
        PATH,
        "write a template of custom_io_list_file",
        "dump-custom-IO-config-template",
    ),
    _compile(
        "external_quantization_file", PATH, "quantization profile from another tool", "external-quantization"
    ),
    _compile("quantization_schema_activations", SCHEMA, "quantization of activations"),
    _compile("quantization_schema_constants", SCHEMA, "quantization of constants"),
    _compile(
        "quantization_calibration",
        choice("None", "KLMinimization", "KLMinimizationV2", "Percentile", "MSE", "SQNR"),
        "method that finds the ranges of values",
    ),
    _compile("percentile_calibration_value", number(90, 100), "percentile of the calibration Percentile"),
    _compile("num_histogram_bins", COUNT, "number of bins of a node's histogram"),
    _compile("quantization_precision", choice("Int8"), "precision of quantized values"),
    _compile("quantization_precision_bias", choice("Int8", "Int32"), "precision of biases"),
    _compile("enable_rowwise", TRUTH, "rowwise quantization of fully connected layers"),
    _compile("enable_channelwise", TRUTH, "channelwise quantization of convolutions"),
    _compile("dump_profile", PATH, "write the quantization profile"),
    _compile("load_profile", PATH, "quantize with a profile"),
    _compile("convert_to_quantize", TRUTH, "profile the inputs and run quantized"),
    _compile("load_embedding_tables", PATH, "read embedding tables from a zip file"),
    _compile("dump_embedding_tables", PATH, "write embedding tables to a zip file"),
    # --- diagnosis and speed of compiling
    _compile("stats_batchsize", COUNT, "batch size to divide statistics by"),
    _compile("enable_debug", TRUTH, "debug mode of the compiler"),
    _compile("time_passes", TRUTH, "print the times of the compiler's passes"),
    _compile("io_crc", TRUTH, "compute checksums of inputs and outputs"),
    _compile("io_crc_stride", COUNT, "stride of the checksums"),
    _compile("profiling_threads", COUNT, "number of threads that make a quantization profile"),
    _compile("compile_threads", COUNT, "number of threads that compile"),
    _compile("aic_perf_warnings", TRUTH, "print performance warnings"),
    _compile("aic_perf_metrics", TRUTH, "print the compiler's performance metrics"),
    _compile(
        "aic_pmu_recipe",
        choice("AxiRd", "AxiWr", "AxiRdWr", "KernelUtil", "HmxMacs"),
        "performance counters to read, as a recipe",
    ),
    _compile("aic_pmu_events", TEXT, "performance counters to read, up to 8 events"),
    _compile("ddr_stats", TRUTH, "print the memory traffic of each core"),
)

OPTIONS = {row.name: row for row in ROWS}

# Spellings that Qualcomm's own texts use beside the right one.
ALIASES = {
    "num_activation": "num_activations",  # update_backend_options in the user guide
    "allocator_dealloac_delay": "allocator_dealloc_delay",  # the keyword table; the compiler has the other
}
