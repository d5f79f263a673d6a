"""Say in one line how many tests of a run did not run, and why; the gate ends with it.

python -m tests.not_run JUNIT.xml [WHAT WAS MISSING]
"""

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def not_run(junit: Path) -> Counter[str]:
    """Reason of a skip, up to its first colon or comma -> how many tests were skipped for it."""
    skips = (skipped.get("message", "") for skipped in ET.parse(junit).iter("skipped"))
    return Counter(re.split(r"[:,;]", message.removeprefix("Skipped: "), maxsplit=1)[0] for message in skips)


def line(junit: Path, missing: str) -> str:
    tests = sum(1 for _ in ET.parse(junit).iter("testcase"))
    reasons = not_run(junit)
    told = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common()) or "none"
    cause = f" ({missing})" if missing else ""
    return f"ci: of {tests} tests {reasons.total()} did not run{cause}: {told}"


if __name__ == "__main__":
    print(line(Path(sys.argv[1]), " ".join(sys.argv[2:])))
