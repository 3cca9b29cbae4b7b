"""Lets the tests of the Python interface share their trajectories."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
