"""The conversation format for the training scripts, which run without an installed package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from replay.agent.prompt import BASH_TOOL, SYSTEM_PROMPT  # noqa: E402

__all__ = ["BASH_TOOL", "SYSTEM_PROMPT"]
