"""The only module that reads ``DLINFER_*`` variables: a frozen dataclass with one documented field for each setting.

``current()`` returns the settings of this process. It reads the environment once, at first use. ``override(...)``
changes fields inside a ``with`` block, for tests and notebooks.
"""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from dlinfer.errors import SettingError

FALLBACK_POLICIES = ("allow", "warn", "error")
CPU_ISAS = (
    *("sse42", "avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx"),
    *("neon", "neon_dotprod"),
    *("avx512_model", "avx512_bf16_model", "amx_model"),  # for tests: emulate instructions in software
)
CPU_WEIGHTS = ("auto", "kept", "bf12", "int8", "int4")
DEBUG_TOPICS = ("graph", "passes", "placement", "cache")


def _choice(*allowed: str) -> Callable[[str, str], str]:
    def parse(variable: str, text: str) -> str:
        if text not in allowed:
            raise SettingError(variable=variable, given=text, expected="one of " + ", ".join(allowed))
        return text

    return parse


def _words(*allowed: str) -> Callable[[str, str], str]:
    def parse(variable: str, text: str) -> str:
        if not {word.strip() for word in text.split(",")} <= {*allowed, ""}:
            expected = "a comma-separated list of " + ", ".join(allowed)
            raise SettingError(variable=variable, given=text, expected=expected)
        return text

    return parse


def _pairs(variable: str, text: str) -> str:
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise SettingError(variable=variable, given=text, expected="a comma-separated list of name=value")
    return text


def _flag(variable: str, text: str) -> bool:
    return _choice("0", "1")(variable, text) == "1"


def _text(variable: str, text: str) -> str:
    return text


def _positive(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise SettingError(variable=variable, given=text, expected="a number above 0")
    return value


def _count(variable: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(variable=variable, given=text, expected="a whole number above 0")
    return int(text)


def _setting(default: Any, variable: str, parse: Callable[[str, str], Any], doc: str) -> Any:
    return field(default=default, metadata={"variable": variable, "parse": parse, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """Every setting of dlinfer. ``describe()`` lists them with variable, default and meaning."""

    fallback: str = _setting(
        "warn",
        "DLINFER_FALLBACK",
        _choice(*FALLBACK_POLICIES),
        "what happens when the active vendor has no native kernel for a call: allow runs the reference and "
        "counts the call, warn also warns once for each reason, error raises FallbackError",
    )
    vendor: str = _setting(
        "",
        "DLINFER_VENDOR",
        _text,
        "vendor to activate for its device type at first use; empty activates the available vendor of "
        "highest priority",
    )
    linear_use_nn_layout: bool = _setting(
        False,
        "DLINFER_LINEAR_USE_NN_LAYOUT",
        _flag,
        "1: weights of linear arrive as [in, out] instead of [out, in]; LMDeploy reads the same variable and "
        "transposes them",
    )
    cpu_kv_cache_gib: float | None = _setting(
        None,
        "DLINFER_CPU_KV_CACHE_GIB",
        _positive,
        "GiB of KV cache on device cpu if LMDeploy's cache_max_entry_count and num_gpu_blocks are not given. Empty: a "
        "quarter of the free memory, or 4 GiB if that is more, but at most half of the free memory",
    )
    cpu_step_seconds: float = _setting(
        0.5,
        "DLINFER_CPU_STEP_SECONDS",
        _positive,
        "target time in seconds between two tokens of a stream while LMDeploy's device cpu also reads "
        "prompts. A step reads as many prompt tokens as this time allows, by measurement. With a smaller "
        "time, prompts wait longer",
    )
    cpu_prompt_seconds: float = _setting(
        2.0,
        "DLINFER_CPU_PROMPT_SECONDS",
        _positive,
        "time in seconds of a step of LMDeploy's device cpu that only reads prompts, at most "
        "max_prefill_token_num tokens. New and cancelled requests wait until the step ends",
    )
    cpu_isa: str = _setting(
        "",
        "DLINFER_CPU_ISA",
        _choice(*CPU_ISAS),
        "the highest instruction set that the cpu vendor's C++ kernels may use: sse42, avx2, avx512, "
        "avx512_bf16, avx512_fp16 or amx; on ARM64 neon or neon_dotprod. Each includes the ones before it. Empty "
        "allows everything that this CPU has. For tests on any CPU with AVX2: avx512_model, avx512_bf16_model and "
        "amx_model compute these instructions in software, many times slower",
    )
    cpu_weights: str = _setting(
        "auto",
        "DLINFER_CPU_WEIGHTS",
        _choice(*CPU_WEIGHTS),
        "how LMDeploy's device cpu packs floating-point weights while they load. int8 and int4 pack as dlinfer "
        "quantise does for w8a8 and awq-int4. bf12 packs bfloat16 weights in 12 bits and changes no number. auto "
        "measures for up to two seconds whether this CPU is faster with bf12, for 1 to max_batch_size rows, and packs "
        "if it is. kept leaves weights as they are stored. A quantised checkpoint is never packed again",
    )
    cpu_head: str = _setting(
        "",
        "DLINFER_CPU_HEAD",
        _choice("int8", "kept"),
        "how LMDeploy's device cpu packs the output projection, and a tied embedding, while it loads. int8 packs "
        "it in 8 bits. kept leaves it as it is stored. Empty packs it as DLINFER_CPU_WEIGHTS says, but in 8 bits "
        "for int4",
    )
    cpu_activations: str = _setting(
        "",
        "DLINFER_CPU_ACTIVATIONS",
        _choice("int8"),
        "int8: on CPUs with AVX-512 VNNI, rows that are multiplied by a weight of 4 bits are first rounded to 8 bits. "
        "Each row and group of at most 128 has a scale. Steps are faster, rounded as OpenVINO and llama.cpp round "
        "them. Empty does not round the rows",
    )
    cpu_batch_invariant: bool = _setting(
        False,
        "DLINFER_CPU_BATCH_INVARIANT",
        _flag,
        "1: on LMDeploy's device cpu a request has the same tokens and logprobs, bit for bit, alone and in any batch. "
        "Chunks of its prompt, preemptions and cached prefixes change nothing either. "
        "docs/guides/batch_invariance.md says what is served and what it costs. Implies DLINFER_FALLBACK=error",
    )
    cpu_adapter_rows: int | None = _setting(
        None,
        "DLINFER_CPU_ADAPTER_ROWS",
        _count,
        "sum of the ranks of LoRA adapters that clients may load into LMDeploy's device cpu at one time, in addition "
        "to those given at start. Each linear layer reserves as many rows of A and B (docs/guides/adapters.md). "
        "Empty: adapters are loaded at start only",
    )
    max_requests: int | None = _setting(
        None,
        "DLINFER_MAX_REQUESTS",
        _count,
        "maximum number of requests, running and waiting, that LMDeploy's api_server holds at once. The next "
        "request is answered 429 with Retry-After. Empty sets no limit",
    )
    request_seconds: float | None = _setting(
        None,
        "DLINFER_REQUEST_SECONDS",
        _positive,
        "seconds after which LMDeploy's api_server cancels a request: it answers 504, or ends the stream. A "
        "request's header X-Request-Timeout may ask for less time. Empty sets no limit",
    )
    prompt_lookup_min: int = _setting(
        2,
        "DLINFER_PROMPT_LOOKUP_MIN",
        _count,
        "fewest last tokens that have to occur earlier in a sequence, so that LMDeploy's speculative method ngram "
        "drafts what followed them there",
    )
    prompt_lookup_max: int = _setting(
        5,
        "DLINFER_PROMPT_LOOKUP_MAX",
        _count,
        "most last tokens that the speculative method ngram looks up. It takes the longest match, and of several "
        "the latest",
    )
    engine: str = _setting(
        "",
        "DLINFER_ENGINE",
        _text,
        "graph engine of compilations that name no engine; empty is the default engine of the device's "
        "vendor",
    )
    engine_options: str = _setting(
        "",
        "DLINFER_ENGINE_OPTIONS",
        _pairs,
        "options of the engine that DLINFER_ENGINE names, as comma-separated name=value; "
        "docs/reference/engines.md lists them",
    )
    small_regions: str = _setting(
        "eager",
        "DLINFER_SMALL_REGIONS",
        _choice("eager", "engine"),
        "how to run parts of a graph that cost more to enter or to compile than they save: eager runs them "
        "as single kernels, engine compiles them nevertheless",
    )
    cache_dir: str = _setting(
        "",
        "DLINFER_CACHE_DIR",
        _text,
        "folder for compiled graphs, kernels and toolchains; empty is the folder dlinfer in the user's "
        "cache folder",
    )
    sophgo_emulate: str = _setting(
        "",
        "DLINFER_SOPHGO_EMULATE",
        _choice("bm1684x", "bm1688"),
        "Sophgo chip to emulate as every device; empty uses the machine's own chips, or without a chip "
        "emulates the chip that a bmodel was compiled for",
    )
    sophgo_timeout: float = _setting(
        600.0,
        "DLINFER_SOPHGO_TIMEOUT",
        _positive,
        "longest time in seconds of one call of Sophgo's runtime (loading a bmodel, running a network); "
        "after it, the call fails and its worker process is killed",
    )
    debug: str = _setting(
        "",
        "DLINFER_DEBUG",
        _words(*DEBUG_TOPICS, "all"),
        "what graph mode prints to stderr while it compiles: a comma-separated list of graph, passes, "
        "placement, cache, all",
    )

    def __post_init__(self) -> None:
        if self.cpu_batch_invariant:  # no other kernel takes over with another order of sums
            object.__setattr__(self, "fallback", "error")


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Return the settings in ``environ``. An unset or empty variable keeps its default. Raises SettingError."""
    return Settings(**{item.name: _read(item, environ) for item in fields(Settings)})


def _read(item: Field[Any], environ: Mapping[str, str]) -> Any:
    variable = item.metadata["variable"]
    text = environ.get(variable, "")
    return item.metadata["parse"](variable, text) if text else item.default


def describe() -> list[tuple[str, str, str]]:
    """Return (variable, default, meaning) of every setting, in order."""
    return [(f.metadata["variable"], _written(f.default), f.metadata["doc"]) for f in fields(Settings)]


def _written(value: Any) -> str:
    """Return the text of a setting's value in the environment.

    None gives an empty text, because its variable is unset.
    """
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Origin:
    """One setting in an environment. problem: the reason why the value is refused; empty if the value is accepted."""

    variable: str
    value: str
    source: Literal["environment", "default"]
    problem: str


def origins(environ: Mapping[str, str]) -> list[Origin]:
    """Return every setting with its value in ``environ`` and the source of the value. Never raises."""
    return [_origin(item, environ) for item in fields(Settings)]


def _origin(item: Field[Any], environ: Mapping[str, str]) -> Origin:
    variable = item.metadata["variable"]
    text = environ.get(variable, "")
    if not text:
        return Origin(variable, _written(item.default), "default", "")
    try:
        return Origin(variable, _written(_read(item, environ)), "environment", "")
    except SettingError as error:
        return Origin(variable, text, "environment", str(error))


_PREFIX = "DLINFER_"
_OF_TESTS = "DLINFER_TEST_"
"""The prefix of variables that dlinfer's own tests set for the processes that they start."""


def unknown(environ: Mapping[str, str]) -> list[str]:
    """Return the variables in ``environ`` that begin with DLINFER_ and are no settings: misspelt, or of another
    release.
    """
    known = _variables()
    return sorted(
        name
        for name in environ
        if name.startswith(_PREFIX) and not name.startswith(_OF_TESTS) and name not in known
    )


def nearest(variable: str) -> str | None:
    """Return the variable whose name is most similar to ``variable``; None if no name is similar."""
    known = {name.removeprefix(_PREFIX): name for name in _variables()}  # compare without the common prefix
    close = difflib.get_close_matches(variable.removeprefix(_PREFIX), known, n=1)
    return known[close[0]] if close else None


def _variables() -> list[str]:
    return [item.metadata["variable"] for item in fields(Settings)]


def cache_folder() -> Path:
    """Return DLINFER_CACHE_DIR if set, else ``dlinfer`` in the user's cache folder."""
    chosen = current().cache_dir
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlinfer"


_current: Settings | None = None


def current() -> Settings:
    """Return the settings of this process."""
    global _current
    if _current is None:
        _current = from_environment(os.environ)
    return _current


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Run a block with some fields changed, e.g. ``with override(fallback="error"):``."""
    global _current
    before = current()
    _current = replace(before, **changes)
    try:
        yield _current
    finally:
        _current = before
