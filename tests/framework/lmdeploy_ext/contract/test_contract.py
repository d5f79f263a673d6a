"""The comparison with LMDeploy's source: none of the installed release drifted, and planted drifts are met."""

import ast
import dataclasses
import inspect
import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from lmdeploy.version import __version__

from dlinfer.cli import main
from dlinfer.errors import FrameworkSourceError
from dlinfer.framework.lmdeploy_ext.contract import check, drift, records, signatures
from dlinfer.framework.lmdeploy_ext.contract.drift import Drift, Report
from dlinfer.framework.lmdeploy_ext.contract.source import Tree
from dlinfer.framework.lmdeploy_ext.versions import FAULTY, describe
from dlinfer.framework.patching import bare_signature

KERNELS = "pytorch/kernels/dlinfer"
DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the installed release's source, the parts that hold the contract."""
    folder = tmp_path_factory.mktemp("source")
    installed = check.installed_source()
    for part in (
        installed,
        *(installed / one for one in ("pytorch", "serve", "cli", "metrics", "vl", "tokenizer", "hf_configs")),
    ):
        if part.is_dir():
            target = folder / "lmdeploy" / part.relative_to(installed)
            deep = part != installed
            ignore = shutil.ignore_patterns("*.so", "*.cu", "__pycache__", *([] if deep else ["*/"]))
            if deep:
                shutil.copytree(part, target, ignore=ignore, dirs_exist_ok=True)
            else:
                target.mkdir()
                for file in part.glob("*.py"):
                    shutil.copy(file, target)
    return folder


@pytest.fixture
def plant(source) -> Callable[..., Report]:
    """Changes files of the copy, compares it, and puts the files back."""

    def plant(*changes: tuple[str, str, str], device: str = "cpu") -> Report:
        before = {}
        try:
            for file, old, new in changes:
                path = source / "lmdeploy" / file
                text = path.read_text()
                before.setdefault(path, text)
                assert old in text, f"{file} of LMDeploy {__version__} has no {old!r}"
                path.write_text(text.replace(old, new))
            return check.check(device, source)
        finally:
            for path, text in before.items():
                path.write_text(text)

    return plant


def only(report: Report, word: str) -> Drift:
    """The one drift that speaks of a word."""
    (found,) = (one for one in report.drifts if word in one.used + one.offered + one.where)
    return found


# --- as it is


def test_nothing_drifted_of_the_installed_release(source):
    report = check.check("cpu")
    assert report.drifts == []
    assert (report.lmdeploy, report.record, report.admitted) == (__version__, __version__, True)
    assert dataclasses.replace(check.check("cpu", source), source="") == dataclasses.replace(
        report, source=""
    )
    assert min(dataclasses.asdict(report.looked).values()) > 10


def test_every_admitted_release_with_a_record_is_named():
    assert FAULTY.partition(",")[0].removeprefix(">=") in records.versions()
    assert all(describe(version)[0] for version in records.versions())


RUNTIME = ("pytorch/backends/dlinfer/ascend/op_backend.py", "ensure_ascend_runtime", "ensure_other_runtime")


@pytest.mark.parametrize("device", ["ascend", "maca", "camb"])
def test_nothing_is_missing_of_what_other_devices_ask(device):
    assert check.check(device).drifts == []


def test_what_other_devices_ask_is_no_drift_of_the_cpu_and_drift_of_theirs(plant):
    cpu, ascend = plant(RUNTIME), plant(RUNTIME, device="ascend")
    on_ascend = {one.name for one in cpu.elsewhere if one.device == "ascend"}
    assert "dlinfer.vendor.ascend.version.ensure_other_runtime" in on_ascend
    assert {one.used.removeprefix("import of ") for one in ascend.drifts} >= on_ascend
    missing = [one for one in ascend.drifts if one.used.startswith("import of ")]
    assert missing and all(one.severity == "essential" and ":" in one.where for one in missing)
    assert all(one.device for one in cpu.elsewhere)  # the ops have all that LMDeploy's dlinfer backend calls


def test_what_moves_no_meaning_is_no_drift(plant):
    report = plant(
        ("utils.py", "def get_max_batch_size(device_type: str):", "def get_max_batch_size(device_type):"),
        ("utils.py", "Get the max inference batch size", "# changed\n    The largest batch"),
        (f"{KERNELS}/rms_norm.py", "ext_ops", "their_ops"),
    )
    assert report.drifts == []


# --- drifts that are planted


def test_a_renamed_op(plant):
    found = only(plant((f"{KERNELS}/rms_norm.py", "ext_ops.rms_norm(", "ext_ops.rms_norm2(")), "rms_norm2")
    assert (found.kind, found.severity) == ("missing", "essential")
    assert found.where == f"lmdeploy/{KERNELS}/rms_norm.py:8"
    assert found.next_step


def test_a_reordered_parameter(plant):
    call = "ext_ops.rms_norm(hidden_states, weight, epsilon)"
    report = plant((f"{KERNELS}/rms_norm.py", call, "ext_ops.rms_norm(weight, hidden_states, epsilon)"))
    (found,) = report.drifts
    assert (found.kind, found.severity) == ("misbinding", "essential")
    assert "weight is passed as x" in found.offered
    # where names tell nothing, the record does
    call = "ext_ops.linear(x, weight, bias=bias"
    report = plant((f"{KERNELS}/linear.py", call, "ext_ops.linear(weight.data, x.data, bias=bias"))
    assert [one.kind for one in report.drifts] == ["changed call"]
    call = "ext_ops.silu_and_mul(input_tensor)"
    report = plant((f"{KERNELS}/activation.py", call, "ext_ops.silu_and_mul(input_tensor.flip(-1))"))
    assert [one.kind for one in report.drifts] == ["changed call"]


def test_a_new_required_parameter(plant):
    old = "attn_metadata: T,\n        k_scales"
    report = plant(("pytorch/backends/attention.py", old, "attn_metadata: T, mask: T,\n        k_scales"))
    both = [one for one in report.drifts if "'mask'" in one.used + one.offered + one.where]
    assert [(one.kind, one.severity) for one in both] == [("changed signature", "essential")] * 2
    assert all("AttentionImpl.forward" in one.used for one in both)
    assert all("layers/attention.py" in one.offered for one in both)
    assert len({one.offered for one in both}) == 2
    call = "ext_ops.silu_and_mul(input_tensor)"
    (found,) = plant((f"{KERNELS}/activation.py", call, "ext_ops.silu_and_mul(input_tensor, 7.0)")).drifts
    assert found.kind == "misbinding"


def test_a_renamed_keyword(plant):
    (found,) = plant((f"{KERNELS}/linear.py", "all_reduce=all_reduce", "reduce=all_reduce")).drifts
    assert (found.kind, found.severity) == ("unknown keyword", "essential")
    assert "'reduce'" in found.offered


def test_a_removed_import(plant):
    report = plant((f"{KERNELS}/fill_kv_cache.py", "import dlinfer.ops as ext_ops\n", ""))
    assert [(one.kind, one.severity) for one in report.drifts] == [("no longer used", "optional")]
    assert "fill_kv_cache" in report.drifts[0].offered


def test_a_name_that_we_import_and_that_is_gone(plant):
    report = plant(("pytorch/distributed.py", "def get_dist_manager", "def dist_manager_of"))
    assert {one.kind for one in report.drifts} == {"missing"}
    room = "dlinfer/framework/lmdeploy_ext"
    assert {(one.severity, one.where.partition(":")[0]) for one in report.drifts} == {
        ("essential", f"{room}/running/backend.py"),
        ("essential", f"{room}/checks/model/weights.py"),
        ("essential", f"{room}/ranks/sums.py"),
        ("optional", f"{room}/preflight/model.py"),  # which serves nothing
    }


def test_a_renamed_field_of_a_build_spec(plant):
    old = "    logit_softcapping: float\n    causal: bool\n    use_flash_mla: bool"
    report = plant(("pytorch/backends/attention.py", old, old.replace("logit_softcapping", "soft_cap")))
    kinds = {(one.kind, one.severity) for one in report.drifts}
    assert kinds == {("new field", "essential"), ("removed field", "essential")}
    assert any("which we read" in one.used and "layers/attention.py" in one.where for one in report.drifts)


def test_a_changed_signature_under_a_patch(plant):
    report = plant(
        ("utils.py", "get_max_batch_size(device_type: str)", "get_max_batch_size(device_type: str, n=1)")
    )
    (found,) = report.drifts
    assert (found.kind, found.severity, found.offered) == (
        "changed signature",
        "essential",
        "(device_type, n=1)",
    )


def test_floats_are_written_as_a_function_that_was_imported_shows_them():
    def imported(scores, low=-float("inf"), none=float("nan"), plain=0.5): ...

    (read,) = ast.parse(textwrap.dedent(inspect.getsource(imported))).body
    assert isinstance(read, ast.FunctionDef)
    assert signatures.text_of(read) == bare_signature(imported) == "(scores, low=-inf, none=nan, plain=0.5)"


@pytest.mark.parametrize("device", ["cpu", "ascend", "maca", "camb"])
def test_a_changed_body_under_a_patch(plant, device):
    old = "return val.to_device('cuda', non_blocking=non_blocking)"
    change = ("pytorch/engine/model_agent/agent.py", old, old.replace("'cuda'", "'cuda:0'"))
    (found,) = plant(change, device=device).drifts
    assert (found.kind, found.severity) == ("new meaning suspected", "essential")


def test_a_changed_body_under_a_patch_that_is_optional(plant):
    old = "            self._decode_count = 0\n            return False"
    report = plant(("pytorch/engine/inputs_maker.py", old, old.replace("= 0", "= 1")))
    assert only(report, "do_prefill_default").severity == "optional"


def test_a_new_use_of_cuda_is_met_where_it_is_not_excused(plant):
    new = "\n\ndef new():\n    torch.cuda.Event()\n    torch.cuda.Event()\n"
    report = plant(
        ("pytorch/engine/inputs_maker.py", "\nlogger = ", new + "\nlogger = "),
        ("pytorch/backends/cuda/attention/__init__.py", "\nlogger = ", new + "\nlogger = "),
    )
    (found,) = report.drifts
    assert (found.kind, found.severity) == ("new use of CUDA", "essential")
    assert found.used == "lmdeploy.pytorch.engine.inputs_maker: torch.cuda.Event"


def test_a_changed_body_under_a_class_of_ours(plant):
    report = plant(
        ("pytorch/backends/attention.py", "scale = 1.0 / (head_size**0.5)", "scale = 1.0 / head_size")
    )
    (found,) = report.drifts
    assert found.kind == "new meaning suspected"
    assert "AttentionImpl.__init__, under our PagedAttention" in found.used


def test_a_removed_function_under_a_patch(plant):
    report = plant(("pytorch/backends/selector.py", "_get_backend()", "_backend()"))
    (found,) = report.drifts
    assert (found.kind, found.severity) == ("missing", "essential")
    assert found.where == "lmdeploy/pytorch/backends/selector.py"


def test_a_new_build_spec_that_a_served_model_needs(plant):
    spec = "\n@dataclass(frozen=True)\nclass NewNormBuildSpec(BuildSpec[RMSNormImpl]):\n    size: int\n"
    spec += "    eps: float = 0\n"
    layers = "from ..backends.norm import LayerNormBuildSpec, RMSNormBuildSpec"
    report = plant(
        (
            "pytorch/backends/norm.py",
            "\n@dataclass(frozen=True)\nclass RMSNormBuildSpec",
            f"{spec}\n\n@dataclass(frozen=True)\nclass RMSNormBuildSpec",
        ),
        ("pytorch/nn/norm.py", layers, f"{layers}, NewNormBuildSpec"),
        (
            "pytorch/nn/norm.py",
            "spec = RMSNormBuildSpec(hidden_size, eps)",
            "spec = NewNormBuildSpec(hidden_size, eps)",
        ),
    )
    (found,) = report.drifts
    assert (found.kind, found.severity) == ("new BuildSpec", "essential")
    assert "NewNormBuildSpec(size, eps=); reached by " in found.used
    assert found.where.startswith("lmdeploy/pytorch/backends/norm.py:")
    report = plant(
        (
            "pytorch/backends/norm.py",
            "\n@dataclass(frozen=True)\nclass RMSNormBuildSpec",
            f"{spec}\n\n@dataclass(frozen=True)\nclass RMSNormBuildSpec",
        )
    )
    assert [one.severity for one in report.drifts] == ["optional"]  # nothing asks for it


def test_a_new_abstract_method(plant):
    old = "    @classmethod\n    @abstractmethod\n    def get_cache_backend"
    new = (
        "    @classmethod\n    @abstractmethod\n    def get_new_thing(cls):\n        raise NotImplementedError\n\n"
        + old
    )
    (found,) = plant(("pytorch/backends/base.py", old, new)).drifts
    assert (found.kind, found.severity) == ("new method", "essential")


def test_a_release_without_build_specs_says_so_once(plant):
    report = plant(
        ("pytorch/backends/base.py", "class BuildSpec(", "class Request("),
        *((f"pytorch/backends/{file}.py", "(BuildSpec[", "(Request[") for file in ("attention", "norm")),
    )
    kinds = {one.kind for one in report.drifts if "PagedAttentionBuildSpec" in one.offered}
    assert kinds == {"removed BuildSpec"}


# --- records and the command


def test_a_record_is_what_is_compared_with(source, tmp_path):
    written = check.record(source, tmp_path)
    assert written.read_text() == (records.FOLDER / f"{__version__}.json").read_text()
    older = records.Record(**json.loads(written.read_text()) | {"version": "0.1.0"})
    older.write(tmp_path)
    assert records.versions(tmp_path) == ["0.1.0", __version__]
    assert records.nearest("0.0.9", tmp_path).version == "0.1.0"
    assert records.nearest("99.0", tmp_path).version == __version__


def test_a_folder_without_source_is_refused(tmp_path, capsys):
    with pytest.raises(FrameworkSourceError, match="does not contain the package 'lmdeploy'"):
        Tree(tmp_path)
    assert main(["contract", "--source", str(tmp_path)]) == 2
    assert "Next step" in capsys.readouterr().err
    (tmp_path / "lmdeploy").mkdir()
    (tmp_path / "lmdeploy/__init__.py").write_text("")
    (tmp_path / "lmdeploy/version.py").write_text("nothing = 1")
    with pytest.raises(FrameworkSourceError, match="no __version__"):
        check.check("cpu", tmp_path)


def test_the_command_prints_json_and_a_table_and_its_status(source, capsys):
    assert main(["contract", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [field.name for field in dataclasses.fields(drift.Report)]
    file, old, new = RUNTIME
    asking = source / "lmdeploy" / file
    text = asking.read_text()
    try:
        asking.write_text(text.replace(old, new))
        assert main(["contract", "--source", str(source), "--device", "ascend"]) == 1
    finally:
        asking.write_text(text)
    out = capsys.readouterr().out
    assert "import of dlinfer.vendor.ascend.version.ensure_other_runtime" in out
    assert "next step: " in out
    removed = source / "lmdeploy" / KERNELS / "fill_kv_cache.py"
    text = removed.read_text()
    try:
        removed.write_text(text.replace("import dlinfer.ops as ext_ops\n", ""))
        assert main(["contract", "--source", str(source)]) == 3
    finally:
        removed.write_text(text)


def test_the_page_documents_every_field_and_kind():
    text = (DOCS / "reference/json.md").read_text()
    for part in (drift.Report, drift.Drift, drift.Elsewhere, drift.Looked):
        for field in dataclasses.fields(part):
            assert f"`{field.name}`" in text, field.name
    text = (DOCS / "internals/contract.md").read_text()
    for kind in drift.Kind.__args__:
        assert f"| {kind} |" in text


@pytest.mark.e2e
def test_lmdeploy_is_not_imported():
    code = "import sys; from dlinfer.cli import main; print(main(['contract']), 'lmdeploy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "0 False"
