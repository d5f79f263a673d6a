"""Which of LMDeploy's options ``dlinfer serve`` takes over, passes on, and refuses."""

import pytest

from dlinfer.cli import parser_of_all
from dlinfer.serve.errors import ReplicaOptionError
from dlinfer.serve.options import _OWN, _REFUSED, read

PASSED = ("--session-len", "4096", "--enable-prefix-caching")


def test_what_replicas_get():
    options = read(["--server-port=8000", *PASSED, "--server-name", "10.0.0.1"], several=True)
    assert (options.host, options.port) == ("10.0.0.1", 8000)
    assert options.passed == (*PASSED, "--backend", "pytorch", "--device", "cpu")


def test_lmdeploys_defaults_for_clients():
    options = read([], several=False)
    assert (options.host, options.port) == ("0.0.0.0", 23333)


@pytest.mark.parametrize("words", [*([option, "2"] for option in _REFUSED), ["--dp=2"], ["--device", "cuda"]])
def test_refused_of_several_servers(words: list[str]):
    with pytest.raises(ReplicaOptionError, match=words[0].partition("=")[0]):
        read(words, several=True)
    read(words, several=False)


@pytest.mark.parametrize(
    ("words", "several", "full"),
    [
        (["--server-po", "8000"], False, "--server-port"),
        (["--server-n=host"], False, "--server-name"),
        (["--server", "x"], False, "--server-name or --server-port"),
        (["--back", "turbomind"], False, "--backend"),
        (["--dev", "cuda"], True, "--device"),
        (["--proxy", "http://x:1"], True, "--proxy-url"),
        (["--enable-ab"], True, "--enable-abort-handling"),
        (["--ss"], True, "--ssl"),
        (["--d", "2"], True, "--device or --dist-init-addr or --dp"),
    ],
)
def test_short_names_are_refused(words: list[str], several: bool, full: str):
    """LMDeploy's parser takes them for the option."""
    with pytest.raises(ReplicaOptionError, match=f"{words[0].partition('=')[0]} cannot .* as {full}\\."):
        read([*PASSED, *words], several)


def test_short_names_of_what_one_server_may_use():
    assert read(["--proxy", "http://x:1"], several=False).passed[:2] == ("--proxy", "http://x:1")


def test_another_backend():
    with pytest.raises(ReplicaOptionError, match="--backend turbomind"):
        read(["--backend", "turbomind"], several=False)


def test_the_refused_options_are_lmdeploys():
    from lmdeploy.cli.serve import SubCliServe

    SubCliServe.add_parser_api_server()
    parser = SubCliServe.subparsers.choices["api_server"]
    known = {option for action in parser._actions for option in action.option_strings}
    assert known >= {*_REFUSED, *_OWN}
    short = {name for name in known for option in (*_REFUSED, *_OWN) if option.startswith(name)}
    assert short == {*_REFUSED, *_OWN}  # no whole name is refused as the beginning of another


def test_the_command_line_keeps_options_that_it_does_not_know():
    arguments = parser_of_all().parse_args(["serve", "model", "--replicas", "2", *PASSED])
    assert (arguments.model, arguments.replicas, arguments.server_options) == ("model", 2, [*PASSED])


def test_no_other_command_does(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parser_of_all().parse_args(["doctor", "--session-len", "4096"])
    assert "unrecognized arguments: --session-len 4096" in capsys.readouterr().err
