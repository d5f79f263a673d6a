"""The patch set of a process."""

import threading

from dlinfer.framework.lmdeploy_ext import install


def test_threads_that_ask_first_at_once_get_the_same_patches(monkeypatch):
    records = install._records
    met = threading.Barrier(2)

    def both_at_once():
        met.wait(300)
        return records()

    monkeypatch.setattr(install, "_patches", None)
    monkeypatch.setattr(install, "_records", both_at_once)
    found = []
    threads = [threading.Thread(target=lambda: found.append(install.patches())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [install.patches()] * 2
