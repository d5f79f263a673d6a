"""Another version of torch_npu shows op by op what it changed of the calls that the kernels make."""

from pathlib import Path

import pytest

from tests.vendor.ascend import schema_drift, schemas
from tests.vendor.ascend.vendor_package import environment, read_texts

NORM = "npu::npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"


def altered(change) -> list[str]:
    return [change(line) for line in schemas.golden()]


def test_the_same_version_has_not_drifted():
    assert (
        schema_drift.drift(schemas.golden(), [*schemas.golden(), "npu::npu_another(Tensor x) -> Tensor"])
        == []
    )


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (
            "npu::npu_rms_norm(Tensor self, Tensor gamma, float eps=1e-06) -> (Tensor, Tensor)",
            ["argument 'epsilon' is gone", "a new argument 'eps' (float)"],
        ),
        (
            "npu::npu_rms_norm(Tensor gamma, Tensor self, float epsilon=1e-06) -> (Tensor, Tensor)",
            ["arguments in another order: gamma, self, epsilon"],
        ),
        (
            "npu::npu_rms_norm(Tensor self, Tensor? gamma, float epsilon=1e-05) -> (Tensor, Tensor)",
            [
                "argument 'gamma': type was Tensor, is Optional[Tensor]",
                "argument 'epsilon': default was 1e-06, is 1e-05",
            ],
        ),
        (
            "npu::npu_rms_norm(Tensor self, Tensor gamma, Tensor b, float epsilon=1e-06) -> (Tensor, Tensor)",
            ["a new argument 'b' (Tensor), which has to be given"],
        ),
        (
            "npu::npu_rms_norm(Tensor self, Tensor gamma, *, float epsilon=1e-06) -> (Tensor, Tensor)",
            ["argument 'epsilon': keyword-only was False, is True"],
        ),
        (
            "npu::npu_rms_norm(Tensor(a!) self, Tensor gamma, float epsilon=1e-06) -> Tensor",
            ["argument 'self': written was False, is True", "returns ['Tensor'], not ['Tensor', 'Tensor']"],
        ),
        (
            "npu::npu_rms_norm.out(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
            ["the overload is gone", ".out: a new overload"],
        ),
        ("npu::npu_other(Tensor x) -> Tensor", ["is gone"]),
    ],
)
def test_what_changed(new, said):
    found = schema_drift.drift([NORM], [new])
    assert len(found) == len(said)
    assert all(any(line.endswith(words) for line in found) for words in said), found
    assert all(line.startswith("npu::npu_rms_norm") for line in found)


def test_the_command(tmp_path: Path, capsys):
    file = tmp_path / "torch_npu-9.schemas"
    file.write_text("\n".join(schemas.golden()))
    assert schema_drift.main([str(file)]) == 0
    file.write_text(
        "# altered\n" + "\n".join(altered(lambda line: line.replace("Tensor key_cache", "Tensor keys")))
    )
    assert schema_drift.main([str(file)]) == 1
    out = capsys.readouterr().out
    assert "_npu_paged_attention_mla: argument 'key_cache' is gone" in out
    assert schema_drift.main([str(tmp_path / "none")]) == 2


@pytest.mark.slow
def test_the_package_on_stubs(capsys):
    if reason := environment.missing():
        pytest.skip(reason)
    assert schema_drift.main([]) == 0
    assert "ops differs" in capsys.readouterr().out


def test_the_text_of_binaries(tmp_path: Path, capsys):
    readable = [one for one in schemas.golden() if schemas.name(one) not in read_texts.IN_PIECES]
    texts = [one.partition("::")[2] for one in readable]
    library = tmp_path / "torch_npu" / "lib" / "libtorch_npu.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF\0" + b"\0".join(text.encode() for text in texts) + b"\0")
    assert read_texts.read(tmp_path, schemas.called()) == readable
    assert schema_drift.main([str(tmp_path)]) == 0
    library.write_bytes(library.read_bytes().replace(b"Tensor gamma", b"Tensor gains"))
    assert schema_drift.main([str(tmp_path)]) == 1
    assert "npu_rms_norm: argument 'gamma' is gone" in capsys.readouterr().out
    library.unlink()
    assert schema_drift.main([str(tmp_path)]) == 2


@pytest.mark.slow
def test_the_text_of_the_package_is_what_it_registers():
    if not (environment.folder() / environment.STAMP).exists():
        pytest.skip(environment.missing())
    readable = [one for one in schemas.golden() if schemas.name(one) not in read_texts.IN_PIECES]
    assert read_texts.read(environment.folder() / "site", schemas.called()) == readable
