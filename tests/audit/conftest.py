import random
import shutil
from pathlib import Path

import pytest
import torch

from lumotree.audit.prompts import Prompt
from lumotree.engine import Engine
from lumotree.model.checkpoint import EMBEDDED
from tests.tiny import Geometry, save_tiny

torch.set_num_threads(1)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


@pytest.fixture(scope="session")
def speaking(tmp_path_factory) -> Path:
    """A random three-layer checkpoint with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("speaking")
    save_tiny(folder, Geometry(vocab=4096, conv=4))
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def engine(speaking) -> Engine:
    return Engine.load(str(speaking), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    choose = random.Random(0)
    return [Prompt(f"p{i}", tuple(choose.choices(range(4000), k=400))) for i in range(3)]
