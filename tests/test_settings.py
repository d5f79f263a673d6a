"""Settings come from the environment, are documented, and wrong values are refused."""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from dlinfer import settings
from dlinfer.errors import SettingError

DOCS = Path(__file__).parents[1] / "docs/reference/settings.md"
VARIABLES = {item.name: item.metadata["variable"] for item in fields(settings.Settings)}


def test_the_documented_table_is_what_the_code_reads():
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split(" | "))
        for line in DOCS.read_text().splitlines()
        if line.startswith("| `")
    ]
    assert rows == [(f"`{name}`", default or "(empty)", doc) for name, default, doc in settings.describe()]


def test_each_setting_has_a_variable_named_after_it_and_a_meaning():
    for name, variable in VARIABLES.items():
        assert variable == f"DLINFER_{name.upper()}"
    assert all(len(meaning) > 20 for _, _, meaning in settings.describe())


@pytest.mark.parametrize("environ", [{}, dict.fromkeys(VARIABLES.values(), "")], ids=["unset", "empty"])
def test_defaults(environ):
    assert settings.from_environment(environ) == settings.Settings()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("engine_options", "device=CPU, num_threads=4", "device=CPU, num_threads=4"),
        ("fallback", "allow", "allow"),
        ("fallback", "error", "error"),
        ("vendor", "reference", "reference"),
        ("linear_use_nn_layout", "1", True),
        ("linear_use_nn_layout", "0", False),
        ("cpu_kv_cache_gib", "0.25", 0.25),
        ("cpu_kv_cache_gib", "1e2", 100.0),
    ],
)
def test_values(name, text, value):
    found = settings.from_environment({VARIABLES[name]: text, "OTHER": "x"})
    assert getattr(found, name) == value
    assert type(getattr(found, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("engine_options", "device"),
        ("engine_options", "device=CPU,,threads=2"),
        ("engine_options", "=CPU"),
        ("fallback", "eror"),
        ("fallback", "WARN"),
        ("linear_use_nn_layout", "true"),
        ("linear_use_nn_layout", "2"),
        ("cpu_kv_cache_gib", "0"),
        ("cpu_kv_cache_gib", "-1"),
        ("cpu_kv_cache_gib", "nan"),
        ("cpu_kv_cache_gib", "inf"),
        ("cpu_kv_cache_gib", "4GB"),
    ],
)
def test_wrong_values_name_the_variable_the_value_and_what_is_expected(name, text):
    variable = VARIABLES[name]
    with pytest.raises(SettingError, match=rf"{variable}='{text}' is not valid: expected \w+") as caught:
        settings.from_environment({variable: text})
    assert "dlinfer doctor" in str(caught.value)


def test_origins_tell_value_and_source_and_survive_wrong_values():
    environ = {"DLINFER_FALLBACK": "error", "DLINFER_LINEAR_USE_NN_LAYOUT": "yes"}
    found = {origin.variable: origin for origin in settings.origins(environ)}
    assert list(found) == list(VARIABLES.values())
    assert found["DLINFER_FALLBACK"] == settings.Origin("DLINFER_FALLBACK", "error", "environment", "")
    assert found["DLINFER_VENDOR"] == settings.Origin("DLINFER_VENDOR", "", "default", "")
    wrong = found["DLINFER_LINEAR_USE_NN_LAYOUT"]
    assert (wrong.value, wrong.source) == ("yes", "environment")
    assert "expected one of 0, 1" in wrong.problem


def test_defaults_are_shown_as_one_writes_them():
    for variable, default, _ in settings.describe():
        assert settings.from_environment({variable: default}) == settings.Settings()


def test_batch_invariance_allows_no_fallback():
    """Another kernel would sum in another order."""
    variables = {VARIABLES["cpu_batch_invariant"]: "1", VARIABLES["fallback"]: "warn"}
    assert settings.from_environment(variables).fallback == "error"
    assert settings.from_environment({VARIABLES["fallback"]: "warn"}).fallback == "warn"


def test_unknown_variables_are_found():
    environ = {"DLINFER_FALBACK": "error", "DLINFER_VENDOR": "cpu", "PATH": "/bin", "DLINFER_TEST_TREE": "1"}
    assert settings.unknown(environ) == ["DLINFER_FALBACK"]


def test_the_setting_that_was_meant_is_found():
    assert settings.nearest("DLINFER_FALBACK") == "DLINFER_FALLBACK"
    assert settings.nearest("DLINFER_CPU_WEIGHT") == "DLINFER_CPU_WEIGHTS"
    assert settings.nearest("DLINFER_X") is None


def test_the_environment_is_read_once(monkeypatch):
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.setenv("DLINFER_FALLBACK", "allow")
    assert settings.current().fallback == "allow"
    monkeypatch.setenv("DLINFER_FALLBACK", "error")
    assert settings.current().fallback == "allow"


def test_override_is_undone_also_after_an_error():
    before = settings.current()
    with pytest.raises(KeyError), settings.override(vendor="reference") as inside:
        assert settings.current() is inside
        assert inside.vendor == "reference"
        raise KeyError
    assert settings.current() is before


def test_override_refuses_fields_that_do_not_exist():
    with pytest.raises(TypeError, match="falback"), settings.override(falback="error"):
        raise AssertionError("not reached")


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(FrozenInstanceError):
        settings.current().fallback = "error"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("chosen", "environ", "folder"),
    [
        ("/chosen", {"XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ("", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/dlinfer"),
        ("", {"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/dlinfer"),
    ],
)
def test_the_cache_folder(chosen, environ, folder, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with settings.override(cache_dir=chosen):
        assert settings.cache_folder() == Path(folder)
