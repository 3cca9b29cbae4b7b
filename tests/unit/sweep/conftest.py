"""Lets the tests of a sweep share their recipe."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
