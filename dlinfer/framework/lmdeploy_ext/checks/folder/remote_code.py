"""Refuses a model whose configuration class is remote code, if that code may not run or is missing.

Without ``trust_remote_code`` LMDeploy reads the ``config.json`` of this model into transformers' generic class. That
works if the file holds every field that LMDeploy reads. But the generic class leaves a nested configuration as a dict.
LMDeploy then fails with an AttributeError that names neither the file nor the option ``trust_remote_code``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import language_configs

_READ_FROM_CODE = ("kimi_k25",)
"""Model types whose published checkpoints are read by their own code, though transformers has classes too.

transformers' configuration of Kimi-K2.5 lacks the sizes of the vision part that LMDeploy reads, and its processor takes
other arguments and returns other names.
"""


def code_of(config: dict[str, Any]) -> str | None:
    """Return the file that defines the configuration's class; None if LMDeploy reads it with a class of transformers.

    If the file is in another repository on the hub, the result begins with the repository's name and ``--``.
    """
    from transformers import CONFIG_MAPPING

    named = (config.get("auto_map") or {}).get("AutoConfig")
    kind = config.get("model_type")
    if not isinstance(named, str) or (kind in CONFIG_MAPPING and kind not in _READ_FROM_CODE):
        return None
    return named.rpartition(".")[0] + ".py"


def check(folder: Path, config: dict[str, Any], trusted: bool) -> None:
    """Raise ModelFolderError if the configuration's class is remote code that is missing or may not run.

    config: the contents of config.json. trusted: whether remote code may run.
    """
    code = code_of(config)
    if code is None:
        kind = config.get("model_type")
        if kind in _READ_FROM_CODE:
            detail = (
                f"config.json has no auto_map, and LMDeploy reads {kind} only by the code of its checkpoint"
            )
            raise ModelFolderError(
                path=str(folder), detail=detail, advice="download the complete model again"
            )
        return
    nested = (config.get("vision_config"), config.get("audio_config"), *language_configs(config)[1:])
    if not trusted and any(isinstance(part, dict) for part in nested):
        raise _untrusted(folder, code)
    if trusted and "--" not in code and not (folder / code).is_file():
        detail = f"config.json takes its configuration class from {code}, which is missing"
        raise ModelFolderError(
            path=str(folder), detail=detail, advice="copy or download the complete model again"
        )


@contextmanager
def explained(folder: Path, trusted: bool) -> Iterator[None]:
    """Replace an AttributeError in the ``with`` block by a ModelFolderError, if the configuration class is remote code.

    If remote code may not run or fails, LMDeploy continues with transformers' generic configuration class. Reading the
    first field that the generic class lacks then raises the AttributeError.

    trusted: whether remote code may run.
    """
    try:
        yield
    except AttributeError as error:
        code = code_of(model_files.readable_config(folder))
        if code is None:
            raise
        if not trusted:
            raise _untrusted(folder, code) from error
        detail = f"the code of its configuration, {code}, fails or does not set a field that LMDeploy reads ({error})"
        advice = (
            "call transformers' AutoConfig.from_pretrained(FOLDER, trust_remote_code=True) to see the error"
        )
        raise ModelFolderError(path=str(folder), detail=detail, advice=advice) from error


def _untrusted(folder: Path, code: str) -> ModelFolderError:
    detail = (
        f"its configuration class is remote code, {code}, which runs only with the option trust_remote_code"
    )
    advice = "read that file; if you trust it, add --trust-remote-code to the command line, or pass "
    advice += "trust_remote_code=True to LMDeploy's pipeline"
    return ModelFolderError(path=str(folder), detail=detail, advice=advice)
