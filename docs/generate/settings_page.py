"""docs/reference/settings.md: the table of DLINFER_* variables."""

from dlinfer import settings
from docs.generate.text import page, table

NAME = "settings.md"
BEFORE = """\
dlinfer reads its environment variables once, at first use. `dlinfer doctor` shows the values in force, where each
comes from, and variables whose name looks like a setting but is none; LMDeploy on a device of ours warns about those
too. A value that is not valid raises [`SettingError`](errors.md#settingerror).

In code, `with dlinfer.settings.override(fallback="error"):` changes fields for a block:

```python
import dlinfer

with dlinfer.settings.override(fallback="error"):
    assert dlinfer.settings.current().fallback == "error"
```"""


def document() -> str:
    rows = [(f"`{name}`", default or "(empty)", meaning) for name, default, meaning in settings.describe()]
    return page(
        "Settings",
        "For everybody who changes how dlinfer behaves: all `DLINFER_*` environment variables.",
        BEFORE,
        table(("variable", "default", "meaning"), rows),
    )
