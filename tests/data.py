"""Where the real graphs lie, and the mark for tests that need them."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

if not SHARED.is_dir() and os.environ.get("CI"):
    raise RuntimeError(f"CI needs the real graphs, but {SHARED} does not exist")

needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real graphs are not at {SHARED}")
