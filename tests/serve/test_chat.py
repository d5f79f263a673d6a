"""``lmdeploy chat`` answers what it reads from standard input, in graph mode."""

from pathlib import Path

import pytest

from tests.serve.processes import LMDEPLOY, ProcessTree

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "double enter to end input >>> "


@pytest.mark.full
def test_answers_a_line_and_exits(model: Path):
    command = [LMDEPLOY, "chat", str(model), "--backend", "pytorch", "--device", "cpu", "--session-len", "64"]
    with ProcessTree(command, stdin="hello world\n\nexit\n\n", DLINFER_FALLBACK="error") as chat:
        assert chat.wait(500) == 0, chat.output()
        _, answer, farewell = chat.output().split(PROMPT)
        assert answer.strip()
        assert farewell.strip() == "exiting..."
        assert chat.survivors() == []
