"""``lmdeploy serve api_server FILE.gguf`` and ``dlinfer preflight FILE.gguf``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.framework.lmdeploy_ext.gguf import gguf_files
from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    gguf_files.build("qwen2", path, gguf_files.mixed)
    return path


def test_a_server_answers(file: Path, tmp_path: Path) -> None:
    with ApiServer(file, DLINFER_CACHE_DIR=str(tmp_path)) as server:
        server.ready()
        with server.client() as client:
            assert [model.id for model in client.models.list()] == [MODEL_NAME]
            chat = client.chat.completions.create(
                model=MODEL_NAME, max_tokens=4, messages=[{"role": "user", "content": "hello world"}]
            )
        assert chat.usage is not None
        # <|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n, by the file's own template and tokens
        assert chat.usage.prompt_tokens < 24
        assert "stay in blocks" in server.output()


def test_preflight_foretells_the_bytes_of_blocks(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dlinfer", "preflight", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(done.stdout)
    assert report["fits"], report["refusals"]
    assert {"linear_gguf", "embedding_gguf"} <= {served["op"] for served in report["ops"]}
    assert {served["vendor"] for served in report["ops"]} == {"cpu"}
    vectors = 4 * 256 * 8  # norms and biases, which take the dtype of activations
    assert report["memory"]["weights"] == pytest.approx(file.stat().st_size, abs=vectors + (64 << 10))


def test_a_truncated_file_ends_the_server_with_our_error(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with ApiServer(cut) as server:
        assert server.wait(300) == 1
        assert "truncated" in server.output()
        assert "Traceback" not in server.output()
