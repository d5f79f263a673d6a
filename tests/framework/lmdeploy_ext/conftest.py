"""These tests need LMDeploy itself; where it is absent they say so."""

import pytest

pytest.importorskip("lmdeploy", reason="LMDeploy is not installed (make setup installs it)")
