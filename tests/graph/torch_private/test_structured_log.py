"""Artefacts reach torch's structured log, and cost nothing while nobody writes it."""

import logging
from typing import Any

from dlinfer.graph.torch_private.structured_log import log_artifact


def test_an_artefact_is_written_when_the_log_is(caplog):
    log = logging.getLogger("torch.__trace")
    records: list[Any] = []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append(record)

    handler = Handler()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        log_artifact("dlinfer_test", lambda: "the text")
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
    (record,) = [record for record in records if "artifact" in getattr(record, "metadata", {})]
    assert record.metadata["artifact"]["name"] == "dlinfer_test"
    assert record.payload == "the text"


def test_the_text_is_not_made_otherwise():
    log_artifact("dlinfer_test", lambda: str(1 / 0))
