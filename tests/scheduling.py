"""How ``make test`` deals tests to its processes: by file or folder, and what takes longest first."""

from typing import Any

from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/e2e/", "tests/serve/")
"""Tests of such a folder run in one process: one server answers them, and what one compiles the next finds."""

FIRST = (
    *TOGETHER,
    "tests/conformance/test_new_vendor.py",
    "tests/packaging/test_wheel.py",
    "tests/vendor/cpu/model/test_levels.py",
    "tests/vendor/sophgo/test_engine.py",
    "tests/vendor/sophgo/test_llm.py",
    "tests/conformance/test_command.py",
)
"""What takes half a minute or more: begun last, it would leave the other processes without work."""


class ByFile(LoadFileScheduling):
    """Tests of a file run in one process, those of a folder of ``TOGETHER`` too; those of ``FIRST`` begin first."""

    def _split_scope(self, nodeid: str) -> str:
        return next((one for one in TOGETHER if nodeid.startswith(one)), super()._split_scope(nodeid))

    def _assign_work_unit(self, node: Any) -> None:
        first = next((one for one in FIRST if one in self.workqueue), None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: Any) -> str | None:
        """Return the test that ended a worker, if it crashed, and give the tests that it has not run to others.

        xdist's own function also hands out files whose tests have all run. They never end, so the run hangs.
        """
        units = self.assigned_work.pop(node)
        crashed = next((test for unit in units.values() for test, ran in unit.items() if not ran), None)
        if crashed is None:
            return None
        for scope, unit in units.items():
            if crashed in unit:
                unit[crashed] = True
            if not all(unit.values()):
                self.workqueue[scope] = unit
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
