"""``python -m dlinfer`` is the ``dlinfer`` command."""

import sys

from dlinfer.cli import main

sys.exit(main())
