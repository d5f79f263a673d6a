"""Every family of tiny models, and what preflight says where a configuration is code in the model's folder."""

import json
import shutil
from pathlib import Path

import pytest

import dlinfer.errors
from dlinfer.cli import main
from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import check_model_folder
from dlinfer.framework.lmdeploy_ext.preflight.check import Report, preflight
from examples.tiny_models.build import BUILT, ELSEWHERE, build
from examples.tiny_models.vision_families import VISION_ELSEWHERE

INTERNVL = [family for family in BUILT if family.startswith("internvl_chat")]
NESTED = [*INTERNVL, "interns1", "interns2_preview", "kimi_k25", *VISION_ELSEWHERE]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """One tiny model of each family, by its name; not to be changed."""
    root = tmp_path_factory.mktemp("families")
    for family in BUILT:
        build(family, root / family, dtype="bfloat16")
    return root


@pytest.fixture
def copy(folders: Path, tmp_path: Path) -> Path:
    """An InternVLChatModel that a test may break."""
    return Path(shutil.copytree(folders / "internvl_chat", tmp_path / "model"))


def look(folder: Path, trusted: bool) -> Report:
    return preflight(folder, "cpu", trust_remote_code=trusted, session_len=256, max_batch_size=2)


def edit(folder: Path, **changed) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("family", BUILT)
def test_every_family_is_planned_or_refused_by_an_error_of_ours(family, trusted, folders):
    report = look(folders / family, trusted)
    if family in ELSEWHERE or (family in NESTED and not trusted):
        (refused,) = report.refusals
        assert issubclass(getattr(dlinfer.errors, refused.error), dlinfer.errors.DlinferError)
        assert refused.next_step
    else:
        assert report.refusals == []
        assert report.memory is not None
        assert report.ops


@pytest.mark.parametrize("family", INTERNVL)
def test_code_that_may_not_run_is_named_with_the_option(family, folders, capsys):
    folder = str(folders / family)
    assert main(["preflight", folder, "--session-len", "256"]) == 1
    out = capsys.readouterr().out
    assert "ModelFolderError" in out
    assert "configuration_internvl_chat.py" in out
    assert "--trust-remote-code" in out
    assert main(["preflight", folder, "--session-len", "256", "--trust-remote-code"]) == 0
    assert "lmdeploy.pytorch.models.internvl.InternVLChatModel" in capsys.readouterr().out


def test_code_runs_only_where_it_may(copy, tmp_path):
    ran = tmp_path / "ran"
    code = copy / "configuration_internvl_chat.py"
    code.write_text(code.read_text() + f"\nopen({str(ran)!r}, 'w').close()\n")
    assert not look(copy, trusted=False).fits
    assert not ran.exists()
    assert look(copy, trusted=True).fits
    assert ran.exists()


def test_an_engine_refuses_in_the_same_words(copy):
    """``check_model_folder`` is the first that LMDeploy's pipelines and servers call on our devices."""
    with pytest.raises(ModelFolderError, match=r"configuration_internvl_chat\.py.* --trust-remote-code"):
        check_model_folder(copy)
    check_model_folder(copy, trust_remote_code=True)


def test_code_that_is_missing_or_fails_is_told_of(copy):
    code = copy / "configuration_internvl_chat.py"
    code.write_text("raise RuntimeError('no configuration')\n")
    (refused,) = look(copy, trusted=True).refusals
    assert (refused.error, "configuration_internvl_chat.py, fails" in refused.text) == (
        "ModelFolderError",
        True,
    )
    code.unlink()
    (refused,) = look(copy, trusted=True).refusals
    assert "which is missing" in refused.text


def test_a_flat_configuration_is_read_without_its_code_while_it_is_complete(folders, tmp_path):
    copy = Path(shutil.copytree(folders / "internlm2", tmp_path / "model"))
    assert look(copy, trusted=False).fits
    path = copy / "config.json"
    given = json.loads(path.read_text())
    eps = given.pop("rms_norm_eps")
    with (copy / "configuration_internlm2.py").open("a") as code:
        code.write(f"\nInternLM2Config.rms_norm_eps = {eps}  # a default, as real ones have it\n")
    path.write_text(json.dumps(given))
    (refused,) = look(copy, trusted=False).refusals
    assert refused.error == "ModelFolderError"
    assert "configuration_internlm2.py" in refused.text
    assert look(copy, trusted=True).fits


def test_a_class_of_transformers_needs_no_code(folders, tmp_path):
    copy = Path(shutil.copytree(folders / "internvl", tmp_path / "model"))
    edit(copy, auto_map={"AutoConfig": "configuration_other.Other"})
    check_model_folder(copy)


def test_a_checkpoint_that_lost_its_code_is_refused(folders, tmp_path):
    copy = Path(shutil.copytree(folders / "kimi_k25", tmp_path / "model"))
    edit(copy, auto_map=None)
    (refused,) = look(copy, trusted=True).refusals
    assert "config.json has no auto_map" in refused.text
    assert refused.next_step == "download the complete model again"
