"""Keys: equal for equal things, different for different ones, and able to say what differs."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from dlinfer import settings
from dlinfer.graph.cache.fingerprint import OPTION_SETTINGS, UNKEYED_SETTINGS, environment
from dlinfer.graph.cache.key import Key, belongs, canonical_text, differences
from dlinfer.graph.options import CompileOptions

HERE = environment()
PLAIN = Key("call", "a function", HERE)

OTHER: dict[str, object] = {
    "kind": "cluster",
    "subject": "another",
    "environment": replace(HERE, threads=HERE.threads + 1),
    "content": ("line",),
    "device": "cuda:1",
    "engine": "openvino",
    "engine_identity": {"compiler": "g++ 12"},
    "engine_options": {"precision": "model"},
    "options": {"fallback": "error"},
    "disabled_passes": ("rms_norm",),
    "steady": ("rms_norm",),
    "variant": 1,
}


def test_every_field_counts_and_is_named():
    assert set(OTHER) == {item.name for item in fields(Key)}
    names = {PLAIN.name}
    for field, value in OTHER.items():
        changed = replace(PLAIN, **{field: value})
        assert belongs(changed.name, changed.text)
        assert not belongs(PLAIN.name, changed.text)
        (said,) = differences(PLAIN.text, changed.text)
        assert said.startswith(field)
        names.add(changed.name)
    assert len(names) == 1 + len(OTHER)
    assert replace(PLAIN).name == PLAIN.name
    assert differences(PLAIN.text, PLAIN.text) == []


def test_names_of_one_subject_begin_alike():
    assert replace(PLAIN, device="cuda").name.startswith(PLAIN.prefix)
    assert not replace(PLAIN, subject="another").name.startswith(PLAIN.prefix)


VALUES = [
    1, 1.0, True, "1", "True", None, "None", "", 0, -0.0, 0.0, False, float("nan"), "nan", float("inf"), -float("inf"),
    [], (), {}, set(), [[]], [()], ([],), [1, 2], (1, 2), {1, 2}, frozenset(), ["a", "b"], ["a,b"], ["ab"], ["a\nb"],
    ["list"], ["list", 1], {"a": 1}, {"a": 1.0}, {"a": {"b": 1}}, {"a.b": 1}, {1: 2}, {"1": 2}, [("a", 1)], 2**53,
    2.0**53, 2**53 + 1, torch.float32, "torch.float32", Path("/tmp"), "/tmp", b"a", "b'a'", "\ud800",
    "\u00e9", "e\u0301",
]  # fmt: skip


def test_canonical_text_keeps_values_and_types_apart():
    texts = [canonical_text(value) for value in VALUES]
    alike = {(a, b) for i, a in enumerate(texts) for b in texts[:i] if a == b}
    # A set and a frozen one of the same things mean the same.
    assert alike == {(canonical_text(frozenset()), canonical_text(set()))}
    assert canonical_text({"a": 1, "b": 2}) == canonical_text({"b": 2, "a": 1})
    assert canonical_text({"x", "y", "z"}) == canonical_text({"z", "y", "x"})


def test_differences_name_the_place_and_both_values():
    flags = " ".join(f"flag{number}" for number in range(40))
    stored = replace(
        PLAIN,
        content=("a", "b"),
        engine_options={"precision": "model", "threads": 1},
        environment=replace(
            HERE, cpu=f"{flags} avx512", vendors={}, forced_isa={"ONEDNN_MAX_CPU_ISA": "AVX2"}
        ),
    )
    wanted = replace(
        PLAIN,
        content=("a", "b", "c"),
        engine_options={"precision": "bf16", "threads": 1.0},
        environment=replace(HERE, cpu=f"{flags} amx", vendors={"acme": "acme 1.0 ab"}, forced_isa={}),
    )
    assert differences(stored.text, wanted.text) == [
        "content: 2 items is stored, 3 items is wanted",
        "engine_options.precision: model is stored, bf16 is wanted",
        "engine_options.threads: 1 is stored, 1.0 is wanted",
        "environment.cpu: ... avx512 ... is stored, ... amx ... is wanted",
        "environment.forced_isa.ONEDNN_MAX_CPU_ISA: AVX2 is stored, nothing is wanted",
        "environment.vendors.acme: nothing is stored, acme 1.0 ab is wanted",
    ]


@pytest.mark.parametrize("name", sorted({item.name for item in fields(settings.Settings)}))
def test_each_setting_is_keyed_or_named_as_one_that_is_not(name):
    value = getattr(settings.current(), name)
    with settings.override(**{name: not value if isinstance(value, bool) else f"{value}1"}):
        same = environment().settings == HERE.settings
    assert same == (name in UNKEYED_SETTINGS | OPTION_SETTINGS)


def test_options_that_are_not_given_are_those_of_the_settings():
    with settings.override(fallback="error", small_regions="engine"):
        said = CompileOptions().identity()
    assert said == {"fallback": "error", "small_regions": True, "eager_ops": ()}
    assert said == CompileOptions(fallback="error", small_regions="engine", cache_dir=Path("/x")).identity()
