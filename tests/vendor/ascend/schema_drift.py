"""What another version of torch_npu changed of the ops that the kernels call, op by op.

python -m tests.vendor.ascend.schema_drift              the package on stubs (make torch-npu)
python -m tests.vendor.ascend.schema_drift --installed  the torch_npu of this environment, as on a machine with a card
python -m tests.vendor.ascend.schema_drift FILE         schemas, one a line, as torch prints them
python -m tests.vendor.ascend.schema_drift FOLDER       an unpacked torch_npu of any version, whose text is read:
                                                        pip install --no-deps --target FOLDER torch_npu==VERSION

Exit status: 0 where nothing changed, 1 where something did, 2 where no schemas could be read.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.vendor.ascend import schemas
from tests.vendor.ascend.vendor_package import environment, read_texts


def drift(golden: Iterable[str], other: Iterable[str]) -> list[str]:
    """A line for each difference, of the ops in ``golden`` only."""
    before, after = _by_overload(golden), _by_overload(other)
    called = {op for op, _ in before}
    lines = []
    for op in sorted(called):
        if not any(name == op for name, _ in after):
            lines.append(f"{op}: is gone")
            continue
        overloads = sorted({overload for name, overload in (*before, *after) if name == op})
        for overload in overloads:
            shown = f"{op}.{overload}" if overload else op
            old, new = before.get((op, overload)), after.get((op, overload))
            if old is None or new is None:
                lines.append(f"{shown}: {'a new overload' if old is None else 'the overload is gone'}")
            else:
                lines += [f"{shown}: {line}" for line in _changes(old, new)]
    return lines


def _by_overload(lines: Iterable[str]) -> dict[tuple[str, str], Any]:
    parsed = [torch._C.parse_schema(line) for line in lines]
    return {(one.name, one.overload_name): one for one in parsed}


def _changes(old: Any, new: Any) -> Iterator[str]:
    before, after = ({one.name: one for one in schema.arguments} for schema in (old, new))
    for name in before.keys() - after.keys():
        yield f"argument {name!r} is gone"
    for name in after.keys() - before.keys():
        needed = "" if after[name].has_default_value() else ", which has to be given"
        yield f"a new argument {name!r} ({after[name].type}){needed}"
    shared = [name for name in before if name in after]
    for name in shared:
        for what, one, other in zip(_PARTS, _parts(before[name]), _parts(after[name]), strict=True):
            if one != other:
                yield f"argument {name!r}: {what} was {one}, is {other}"
    order = [name for name in after if name in before and not after[name].kwarg_only]
    if order != [name for name in shared if not after[name].kwarg_only]:
        yield f"arguments in another order: {', '.join(order)}"
    if [str(one.type) for one in old.returns] != [str(one.type) for one in new.returns]:
        yield f"returns {[str(one.type) for one in new.returns]}, not {[str(one.type) for one in old.returns]}"


_PARTS = ("type", "default", "keyword-only", "written")


def _parts(argument: Any) -> tuple[str, str, bool, bool]:
    default = repr(argument.default_value) if argument.has_default_value() else "none"
    written = argument.alias_info is not None and argument.alias_info.is_write
    return str(argument.type), default, argument.kwarg_only, written


def installed() -> list[str]:
    """Of the torch_npu of this environment. Raises ImportError."""
    from dlinfer.vendor.ascend import sdk

    sdk.load()
    return [str(one) for one in torch._C._jit_get_all_schemas() if one.name.startswith(("npu::", "atb::"))]


def main(argv: list[str]) -> int:
    golden = schemas.golden()
    try:
        if argv == ["--installed"]:
            other = installed()
        elif argv and Path(argv[0]).is_dir():
            other = read_texts.read(Path(argv[0]), schemas.called())
            golden = [one for one in golden if schemas.name(one) not in read_texts.IN_PIECES]
            print(f"not read, since binaries hold it in pieces: {', '.join(sorted(read_texts.IN_PIECES))}")
        elif argv:
            other = [line for line in Path(argv[0]).read_text().splitlines() if line and line[0] != "#"]
        else:
            other = environment.read_schemas()
        found = drift(golden, other)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"no schemas could be read: {error}", file=sys.stderr)
        return 2
    ops = {schemas.name(one) for one in golden}
    print("\n".join(found) or f"none of {len(ops)} ops differs from {schemas.GOLDEN.name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
