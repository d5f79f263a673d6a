"""``dlinfer quantise --loss``: what is said of logits, and what is refused before anything is served."""

import math

import pytest
import torch

from dlinfer.cli import main
from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.conversion.formats import FORMATS
from dlinfer.framework.lmdeploy_ext.errors import LossError
from dlinfer.framework.lmdeploy_ext.quantise import loss
from dlinfer.framework.lmdeploy_ext.quantise.loss_job import Sums
from tests.framework.lmdeploy_ext.quantise import folders


def test_equal_logits_lose_nothing():
    sums, rows = Sums(), torch.randn(3, 50)
    sums.add(rows, rows)
    assert sums.means() == {"logit_error": 0.0, "worst_logit": 0.0, "divergence": 0.0, "same_token": 1.0}


def test_a_shift_of_a_row_changes_no_token_and_no_error():
    sums, rows = Sums(), torch.randn(3, 50, dtype=torch.float64)
    sums.add(rows, rows + 2)
    found = sums.means()
    assert found["worst_logit"] == pytest.approx(2)
    assert max(found["logit_error"], abs(found["divergence"])) < 1e-12  # float64, sums of 50
    assert found["same_token"] == 1


def test_what_is_said_is_what_the_definitions_say():
    want, got = (
        torch.tensor([[0.0, math.log(3)], [1.0, -1.0]]),
        torch.tensor([[math.log(3), 0.0], [1.0, -1.0]]),
    )
    sums = Sums()
    for one, other in zip(want, got, strict=True):  # in pieces
        sums.add(one[None], other[None])
    found = sums.means()
    # Of the first row p = (1/4, 3/4) and q = (3/4, 1/4); the second has none.
    assert found["divergence"] == pytest.approx((0.25 * math.log(1 / 3) + 0.75 * math.log(3)) / 2)
    assert found["same_token"] == 0.5
    error, norm = 2 * math.log(3) ** 2, math.log(3) ** 2 / 2 + 2
    assert found["logit_error"] == pytest.approx(math.sqrt(error / norm))


def test_formats_that_are_not_made_while_loading_are_refused(tmp_path):
    assert set(loss.BITS) < set(FORMATS)
    with pytest.raises(LossError, match="fp8"):
        loss.measure(tmp_path, "fp8")


def test_the_command_writes_or_measures_and_tells_errors(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["quantise", str(tmp_path), "--format", "w8a8", "--loss", "-o", str(tmp_path / "out")])
    assert main(["quantise", str(tmp_path), "--format", "w8a8", "--loss", "--json"]) == 1
    assert "ModelFolderError" in capsys.readouterr().out


def test_a_broken_tokenizer_is_told_in_a_sentence(tmp_path, capsys):
    folders.write(tmp_path / "model")  # its tokenizer.json holds nothing
    with pytest.raises(ModelFolderError, match=r"its tokenizer cannot be loaded .* Next step: copy"):
        loss.measure(tmp_path / "model", "w8a8")
    assert main(["quantise", str(tmp_path / "model"), "--format", "w8a8", "--loss"]) == 1
    assert capsys.readouterr().err.startswith("error: the model folder")


@pytest.mark.parametrize("tokens", [-5, 0, 1])
def test_a_text_of_less_than_two_tokens_is_refused(tokens, tmp_path):
    with pytest.raises(LossError, match=rf"tokens is {tokens}.*use --tokens 2 or more"):
        loss.measure(tmp_path, "w8a8", tokens=tokens)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--loss --group-size 32", "not allowed with --loss: --group-size"),
        ("--loss --calibrate t.txt --steps 5", "not allowed with --loss: --calibrate, --steps"),
        ("-o out --tokens 64 --text t.txt", "not allowed with --output: --text, --tokens"),
        ("-o out --samples 8", "not allowed without --calibrate: --samples"),
    ],
)
def test_options_that_do_not_go_together_are_named(given, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["quantise", str(tmp_path), "--format", "awq-int4", *given.split()])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
