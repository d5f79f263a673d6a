"""Who listens on a thread hears what is told there, and nothing of other threads."""

import threading

from dlinfer.utils import computing


def test_the_last_listener_of_a_thread_hears_it() -> None:
    heard: list[str] = []

    def run(name: str) -> None:
        assert computing.count() == 0
        computing.begins()  # nobody listens
        computing.listen(lambda: heard.append("never"))
        computing.listen(lambda: heard.append(name))
        computing.begins()
        assert computing.count() == 2

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
        thread.join()
    assert heard == ["a", "b"]
