"""Options by keyword and YAML, those that may change, and every kind of mistake."""

import warnings
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlinfer import settings
from dlinfer.vendor.qaic import Session
from dlinfer.vendor.qaic.errors import QaicOptionError, QaicUnavailableError
from dlinfer.vendor.qaic.options.file import read_options
from dlinfer.vendor.qaic.options.options import Options, QaicOptionWarning
from dlinfer.vendor.qaic.options.table import ALIASES, OPTIONS

# The YAML file of the guide, to the letter.
GUIDE = """\
aic_num_cores: 4
num_activations: 1
convert_to_fp16: true
onnx_define_symbol:
  batch: 1
output_dir: './resnet_qpc'
"""
# samples/python/vit_qaic/vit_config.yaml of quic/cloud-ai-sdk: keys as the compiler's flags.
SAMPLE = """\
aic_num_cores: 4
convert_to_fp16: true
mos: 1
ols: 2
multicast-weights: true
onnx_define_symbol:
  batch: 1
stats-batchsize: 1
compile-only: true

num_activations: 3
set_size: 4
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "options.yaml"
    path.write_text(text)
    return path


# --- keywords


def test_every_keyword_of_the_guide(linear, stand_in, tmp_path):
    session = Session(
        linear,
        backend="aic",
        options_path=written(tmp_path, "onnx_define_symbol: {batch: 2}"),
        num_activations=4,
        set_size=10,
        dev_id=1,
    )
    assert session.backend_options() == {"num_activations": 4, "set_size": 10, "dev_id": 1}
    asked = stand_in.CALLS[-1][1]
    assert (asked["num_activations"], asked["set_size"], asked["dev_id"]) == (4, 10, 1)


def test_what_is_not_said_is_left_to_the_package(linear, stand_in):
    Session(linear, onnx_define_symbol={"batch": 1}, oversubscription_name="group1")
    assert stand_in.CALLS[-1][1]["group"] == "group1"
    assert stand_in.CALLS[-1][1]["set_size"] == 10  # its own default


# --- YAML


def test_the_guides_yaml_reaches_the_compiler(linear, stand_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Session(linear, options_path=str(written(tmp_path, GUIDE)))
    qpc = (tmp_path / "resnet_qpc" / "programqpc.bin").read_text()
    for argument in ("-aic-num-cores=4", "-convert-to-fp16", "-onnx-define-symbol=batch,1"):
        assert f'"{argument}"' in qpc
    assert stand_in.CALLS[-1][1]["num_activations"] == 1


def test_the_guides_yaml_on_onnxruntime(linear, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each of its keys has an effect
        session = Session(linear, backend="onnxruntime", options_path=written(tmp_path, GUIDE))
    assert session.model_input_shape_dict()["data"] == ((1, 8), np.dtype(np.float32))
    assert (tmp_path / "resnet_qpc" / "linear.compiled.onnx").is_file()


def test_convert_to_fp16_computes_in_fp16_and_keeps_the_types_outside(linear):
    data = np.random.default_rng(2).standard_normal((4, 8)).astype(np.float32)
    exact = Session(linear, backend="onnxruntime").run({"data": data})["output"]
    half = Session(linear, backend="onnxruntime", convert_to_fp16=True).run({"data": data})["output"]
    assert half.dtype == np.float32
    assert not np.array_equal(half, exact)
    # Weights, data and result are rounded to 11 bits: sums of 8 products of about 1.
    np.testing.assert_allclose(half, exact, rtol=4e-3, atol=8e-3)


def test_the_samples_yaml_with_dashes(linear, stand_in, tmp_path):
    Session(linear, options_path=written(tmp_path, SAMPLE), output_dir=tmp_path / "qpc")
    qpc = (tmp_path / "qpc" / "programqpc.bin").read_text()
    assert all(
        f'"{flag}"' in qpc for flag in ("-multicast-weights", "-stats-batchsize=1", "-mos=1", "-ols=2")
    )
    assert qpc.count("-compile-only") == 1
    assert stand_in.CALLS[-1][1]["set_size"] == 4


def test_a_keyword_goes_before_the_files_key(linear, stand_in, tmp_path):
    path = written(tmp_path, "num_activations: 1\nonnx_define_symbol: {batch: 1}")
    session = Session(linear, options_path=path, num_activations=3)
    assert session.backend_options()["num_activations"] == 3
    assert session.model_input_shape_dict["data"][0] == (1, 8)


def test_the_file_may_name_the_backend_and_a_keyword_may_change_it(linear, tmp_path, without_sdk):
    path = written(tmp_path, "backend: onnxruntime")
    assert Session(linear, options_path=path).backend_options()
    with pytest.raises(QaicUnavailableError):
        Session(linear, options_path=path, backend="aic")


def test_an_empty_file_says_nothing(linear, tmp_path):
    assert read_options(written(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- 1\n- 2", "a YAML mapping of option to value, not a list"),
        ("just words", "a YAML mapping of option to value, not a str"),
        ("a: [1", "a YAML file"),
        ("a: b: c", "a YAML file"),
        ("\t", "a YAML file"),
        ("d: 2024-99-99", "a YAML file"),
        ("x: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("3: 4", "3=4 is not valid"),
        ("aic-num-cores: 1\naic_num_cores: 2", "which is given twice"),
    ],
)
def test_a_bad_file_is_refused(linear, tmp_path, text, complaint):
    with pytest.raises(QaicOptionError, match=complaint):
        Session(linear, backend="onnxruntime", options_path=written(tmp_path, text))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: \x00", b"\x80abc"])
def test_a_binary_file_is_refused(tmp_path, content):
    (tmp_path / "options.yaml").write_bytes(content)
    with pytest.raises(QaicOptionError, match="a YAML file"):
        read_options(tmp_path / "options.yaml")


@pytest.mark.parametrize("path", ["none.yaml", ".", "", 3, {"a": 1}])
def test_no_file_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QaicOptionError, match="options_path="):
        read_options(path)


def test_without_pyyaml_the_next_step_is_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(QaicUnavailableError, match="pip install pyyaml"):
        read_options(written(tmp_path, GUIDE))


# --- options that may change


def test_backend_options_are_those_that_may_change(linear, stand_in, quiet):
    on_cpu = Session(linear, backend="onnxruntime").backend_options()
    on_card = Session(linear, onnx_define_symbol={"batch": 1}).backend_options()
    assert on_cpu == on_card == {"num_activations": 1, "set_size": 10, "dev_id": 0}
    on_cpu["num_activations"] = 7  # a copy
    assert Session(linear, backend="onnxruntime").backend_options()["num_activations"] == 1


@pytest.mark.parametrize("backend", ["aic", "onnxruntime"])
def test_update_backend_options(linear, stand_in, quiet, backend):
    session = Session(linear, backend=backend, onnx_define_symbol={"batch": 1})
    assert session.update_backend_options(num_activations=2) is None
    session.update_backend_options(set_size=3, dev_id=1)
    assert session.backend_options() == {"num_activations": 2, "set_size": 3, "dev_id": 1}
    if backend == "aic":
        assert stand_in.CALLS[-2:] == [
            ("update_backend_options", {"num_activations": 2}),
            ("update_backend_options", {"set_size": 3, "dev_id": 1}),
        ]


def test_num_activation_is_taken_with_a_hint(linear):
    """The guide's text writes num_activation, its example num_activations."""
    session = Session(linear, backend="onnxruntime")
    with pytest.warns(
        QaicOptionWarning, match="'num_activation' means 'num_activations'; use that name"
    ) as said:
        session.update_backend_options(num_activation=2)
    assert session.backend_options()["num_activations"] == 2
    assert said[0].filename == __file__


def test_a_change_that_is_refused_changes_nothing(linear):
    session = Session(linear, backend="onnxruntime")
    before = session.backend_options()
    for wrong in ({"num_activations": 0}, {"aic_num_cores": 2}, {"size": 1}):
        with pytest.raises(QaicOptionError):
            session.update_backend_options(
                num_activations=2, **wrong
            ) if "num_activations" not in wrong else (session.update_backend_options(**wrong))
    with settings.override(fallback="error"), pytest.raises(QaicOptionError, match="the CPU is device 0"):
        session.update_backend_options(num_activations=2, dev_id=1)
    assert session.backend_options() == before


def test_what_only_creation_sets_is_named(linear):
    session = Session(linear, backend="onnxruntime")
    with pytest.raises(QaicOptionError, match="may change after creation: num_activations, set_size, dev_id"):
        session.update_backend_options(convert_to_fp16=True)


# --- mistakes


def test_an_unknown_option_names_the_likely_one_and_all_valid_ones(linear):
    with pytest.raises(QaicOptionError, match=r"'aic_num_cores' \(did you mean that\?\)") as caught:
        Session(linear, backend="onnxruntime", aic_num_core=4)
    assert all(name in str(caught.value) for name in OPTIONS)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_activations", [0, -1, 1.0, "1", True, None, [1]]),
        ("dev_id", [-1, "0", False]),
        ("convert_to_fp16", [1, "true", None]),
        ("compile_only", [False, "yes"]),
        (
            "onnx_define_symbol",
            [{"batch": 0}, {"batch": "1"}, {1: 1}, "batch", [("a",)], [("a", 1), ("a", 2)], {"b": True}],
        ),
        ("output_dir", ["", 1, None]),
        ("quantization_precision_bias", ["Int16", 8]),
        ("aic_depth_first_mem", [7, 33]),
        ("vtcm_working_set_limit_ratio", [-0.1, 1.1, "1", float("nan")]),
        ("percentile_calibration_value", [89.9, 100.1]),
        ("execute_nodes_in_fp16", ["Add", [1], {"Add": 1}]),
        ("sdp_cluster_sizes", [[1.0], ["2"], 2]),
    ],
)
def test_wrong_types_and_values_are_refused(linear, name, values):
    for value in values:
        with pytest.raises(QaicOptionError, match=rf"{name}=.*is not valid\. Expected "):
            Session(linear, backend="onnxruntime", **{name: value})


def test_metrics_and_profiling_exclude_each_other(linear):
    """As Qualcomm's keyword table says."""
    with pytest.raises(QaicOptionError, match="only one of enable_metrics and enable_profiling"):
        Session(linear, backend="onnxruntime", enable_metrics=True, enable_profiling=True)
    Session(linear, backend="onnxruntime", enable_metrics=True, enable_profiling=False)


def test_an_alias_and_its_option_may_agree_but_not_differ():
    with pytest.warns(QaicOptionWarning):
        assert dict(Options.of({}, {"num_activation": 2, "num_activations": 2})) == {"num_activations": 2}
    with pytest.warns(QaicOptionWarning), pytest.raises(QaicOptionError, match="given twice"):
        Options.of({}, {"num_activation": 2, "num_activations": 3})


def test_options_without_effect_follow_the_fallback_policy(linear):
    given = {"mos": 2, "dev_id": 3, "set_size": 4, "combine_inputs": False, "oversubscription_name": "group1"}
    with settings.override(fallback="warn"), pytest.warns(QaicOptionWarning) as said:
        Session(linear, backend="onnxruntime", **given)
    for part in (
        "dev_id (the CPU is device 0)",
        "set_size",
        "mos (only the card's compiler uses it)",
        "oversubscription_name",
    ):
        assert part in str(said[0].message)
    assert "combine_inputs" not in str(said[0].message)  # off is what it is here
    assert said[0].filename == __file__
    with (
        settings.override(fallback="error"),
        pytest.raises(QaicOptionError, match=r"dev_id=3.*policy is 'error'"),
    ):
        Session(linear, backend="onnxruntime", **given)
    with settings.override(fallback="allow"), warnings.catch_warnings():
        warnings.simplefilter("error")
        Session(linear, backend="onnxruntime", **given)


# --- the table


def test_every_option_has_words_and_a_flag():
    for name, option in OPTIONS.items():
        assert name == option.name == name.lower()
        assert option.doc and option.kind.words
    assert set(ALIASES.values()) <= OPTIONS.keys()


@pytest.mark.parametrize(
    ("name", "value", "arguments"),
    [
        ("mos", 2, ["-mos=2"]),
        ("convert_to_fp16", True, ["-convert-to-fp16"]),
        ("convert_to_fp16", False, []),
        ("combine_inputs", False, ["-combine-inputs=false"]),
        ("use_producer_dma", True, ["-use-producer-dma=1"]),
        (
            "onnx_define_symbol",
            [("batch", 1), ("length", 128)],
            ["-onnx-define-symbol=batch,1", "-onnx-define-symbol=length,128"],
        ),
        ("execute_nodes_in_fp16", ["Add", "Div"], ["-execute-nodes-in-fp16=Add,Div"]),
        ("node_precision_info_file", "a.yaml", ["-node-precision-info=a.yaml"]),
        ("custom_io_list_file", "io.yaml", ["-custom-IO-list-file=io.yaml"]),
        ("vtcm_working_set_limit_ratio", 1, ["-vtcm-working-set-limit-ratio=1"]),
    ],
)
def test_flags_are_spelled_as_published(name, value, arguments):
    """Sources: the compile guide, samples of quic/cloud-ai-sdk, MLPerf submissions for qaic."""
    option = OPTIONS[name]
    assert option.arguments(option.parse(value)) == arguments


# Machines that do much else besides draw slowly.
slowly = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
ANY_VALUE = st.none() | st.booleans() | st.integers() | st.text(max_size=3)


@slowly
@given(st.dictionaries(st.sampled_from(sorted(OPTIONS)), ANY_VALUE, max_size=4))
def test_any_values_are_taken_or_refused_by_our_error(values):
    try:
        options = Options.of({}, values)
    except QaicOptionError as error:
        assert error.fields["option"] in values
    else:
        assert options.keys() == values.keys()
