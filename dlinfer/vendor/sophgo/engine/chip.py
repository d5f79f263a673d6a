"""Choose the chip for ``chip="auto"``: the chip of this machine or, without one, an emulated chip."""

from dataclasses import replace

from dlinfer import settings
from dlinfer.errors import CompileOptionError
from dlinfer.vendor.sophgo.engine.options import AUTO, SophgoOptions
from dlinfer.vendor.sophgo.runtime import chips
from dlinfer.vendor.sophgo.runtime.device import open_device


def settled(options: SophgoOptions) -> tuple[SophgoOptions, str]:
    """Return the options with a chip's name in place of ``auto``, and a sentence for the report on how it was chosen.

    Raises CompileOptionError if this machine's chip is unknown or has too few cores.
    Raises the errors of ``open_device``."""
    if options.chip != AUTO:
        return options, f"chip {options.chip}, as requested"
    emulated = settings.current().sophgo_emulate
    if emulated:
        return replace(options, chip=emulated), f"chip {emulated}, emulated because of DLINFER_SOPHGO_EMULATE"
    if chips.find().libsophon is None:
        chip = chips.DEFAULT_EMULATED
        return replace(options, chip=chip), f"chip {chip}, emulated: this machine has no Sophgo chip"
    chip = open_device(options.device).chip
    if chip not in chips.KINDS:
        expected = f"{' or '.join(chips.KINDS)}; device {options.device} of this machine is {chip}"
        raise CompileOptionError(option="engine_options['chip']", given=AUTO, expected=expected)
    return replace(options, chip=chip), f"chip {chip}, device {options.device} of this machine"
