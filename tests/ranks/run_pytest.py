"""Rank program: pytest, with these arguments."""

import sys

import pytest

sys.exit(pytest.main(sys.argv[1:]))
