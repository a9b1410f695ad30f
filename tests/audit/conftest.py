import random
from pathlib import Path

import pytest
import torch

from lumotree.audit.prompts import Prompt
from lumotree.engine import Engine
from tests.tiny import save_speaking

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def speaking(tmp_path_factory) -> Path:
    """A random three-layer checkpoint with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("speaking")
    save_speaking(folder)
    return folder


@pytest.fixture(scope="session")
def engine(speaking) -> Engine:
    return Engine.load(str(speaking), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    choose = random.Random(0)
    return [Prompt(f"p{i}", tuple(choose.choices(range(4000), k=400))) for i in range(3)]
