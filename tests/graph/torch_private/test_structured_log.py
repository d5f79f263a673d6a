"""Artefacts reach torch's structured log, and cost nothing while nobody writes it."""

import logging

from dlinfer.graph.torch_private.structured_log import log_artifact


def test_an_artefact_is_written_when_the_log_is(caplog):
    log = logging.getLogger("torch.__trace")
    handler = logging.Handler()
    records: list[logging.LogRecord] = []
    handler.emit = records.append
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        log_artifact("dlinfer_test", lambda: "the text")
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
    (record,) = [one for one in records if "artifact" in getattr(one, "metadata", {})]
    assert record.metadata["artifact"]["name"] == "dlinfer_test"
    assert record.payload == "the text"


def test_the_text_is_not_made_otherwise():
    log_artifact("dlinfer_test", lambda: 1 / 0)
