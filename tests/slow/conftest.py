"""Fixtures shared by the slow tests."""

import pytest
import smollm2_model


@pytest.fixture(scope="module")
def model():
    """The folder of SmolLM2-135M-Instruct."""
    return smollm2_model.made()
