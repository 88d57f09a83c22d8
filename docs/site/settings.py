"""Addresses of the project, read from pyproject.toml; MINICOMPILE_REPOSITORY overrides them in a fork."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STATED = PROJECT["urls"]["Repository"]
REPOSITORY = os.environ.get("MINICOMPILE_REPOSITORY", STATED).rstrip("/")
