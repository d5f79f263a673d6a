"""A session's life, its options and its devices."""

import pytest
import torch

import dlinfer
from dlinfer.errors import CompileOptionError, SessionOptionError
from tests.runtime.artifact.artifact_files import (
    Head,
    Stub,
    altered,
    compiled_head,
    rows,
    same,
    saved,
    use_stub,
)


def test_set_up_once_reset_and_again(path):
    session = dlinfer.load(path)
    assert not session.is_set_up
    session.setup()
    session.setup()
    assert session.is_set_up
    session.reset()
    assert not session.is_set_up
    same(session.run({"x": rows(3)}), Head().eval()(rows(3)))
    assert session.is_set_up


def test_options_before_and_after_set_up(session):
    assert set(session.backend_options()) == set(session.options.names())
    session.update_backend_options(fallback="allow")
    assert session.backend_options()["fallback"] == "allow"
    session.setup()
    assert session.backend_options() == {"io": "caller", "enable_metrics": True, "enable_profiling": False}
    session.update_backend_options(enable_metrics=False)
    with pytest.raises(SessionOptionError, match="reset"):
        session.update_backend_options(fallback="error")
    with pytest.raises(SessionOptionError, match="engine, engine_options, fallback"):
        session.update_backend_options(colour="blue")


def test_options_of_a_yaml_file(path, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("io: owned\nenable_profiling: true\n")
    session = dlinfer.load(path, options=file)
    assert (session.options.io, session.options.enable_profiling) == ("owned", True)
    for text in ("[1, 2]", "io: [", "io: sideways", "colour: blue", "1: 2", "!!python/object:os.system {}"):
        file.write_text(text)
        with pytest.raises(SessionOptionError):
            dlinfer.load(path, options=file)
    with pytest.raises(SessionOptionError, match="No such file"):
        dlinfer.load(path, options=tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    "options",
    [
        {"io": "theirs"},
        {"fallback": "maybe"},
        {"engine": 3},
        {"engine_options": "device=CPU"},
        {"enable_metrics": "yes"},
        {"allow_ops": "aten::add"},
        {"cache_dir": 3},
    ],
)
def test_options_that_have_no_such_value(path, options):
    with pytest.raises(SessionOptionError, match=next(iter(options))):
        dlinfer.load(path, options=options)


def test_the_engines_own_options_are_kept_where_they_are_meant_to_be(tmp_path, monkeypatch):
    """The session's go before the file's; of a file's only those count that change results."""

    class Told(Stub):
        stored_options = ("precision", "group")

        def check_options(self, options):
            self.told = dict(options)
            if "colour" in options:
                raise CompileOptionError(option="colour", given=options["colour"], expected="none")

    engine = use_stub(monkeypatch, Told())
    given = {"precision": "bf16", "group": 32, "folder": "/tmp/x"}
    path = saved(compiled_head(options={"engine_options": given})[1], tmp_path / "a.dlinfer")
    dlinfer.load(path).setup()
    assert engine.told == {"precision": "bf16", "group": 32}
    dlinfer.load(path, options={"engine_options": {"group": 64}}).setup()
    assert engine.told == {"precision": "bf16", "group": 64}

    def change(manifest, graph):
        manifest["stages"][0]["engine_options"]["folder"] = "/etc"

    dlinfer.load(altered(path.read_bytes(), change)).setup()
    assert engine.told == {"precision": "bf16", "group": 32}
    with pytest.raises(CompileOptionError, match="colour"):
        dlinfer.load(path, options={"engine_options": {"colour": "blue"}}).setup()


@pytest.mark.parametrize("devices", [["cpu"], [0], [torch.device("cpu")], ["cpu:0"]])
def test_devices_it_was_made_for(path, devices):
    assert dlinfer.load(path, devices=devices).get_device_ids() == [0]


@pytest.mark.parametrize("devices", [["cuda"], [], ["cpu", "cuda:1"], ["meta"]])
def test_devices_it_was_not_made_for(path, devices):
    with pytest.raises(SessionOptionError, match="compiled for: cpu"):
        dlinfer.load(path, devices=devices)
