"""The tools of others are installed as requirements/ pins them."""

from importlib.metadata import PackageNotFoundError, version

import pytest
from other_tools import ROOT

pytestmark = pytest.mark.others


@pytest.mark.parametrize("lock", ["loggers.lock", "lm-eval.lock"])
def test_the_installed_versions_are_the_locked_ones(lock):
    pins = dict(
        line.split("#")[0].strip().split("==")
        for line in (ROOT / "requirements" / lock).read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    try:
        found = {name: version(name) for name in pins}
    except PackageNotFoundError as error:
        pytest.skip(f"{error.name} not installed: make setup-others")
    assert found == pins
