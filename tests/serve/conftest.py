import shutil

import pytest
import torch

from lumotree.engine import Engine
from lumotree.model.checkpoint import EMBEDDED
from tests.serve.support import served
from tests.tiny import Geometry, save_tiny

torch.set_num_threads(1)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


@pytest.fixture(scope="session")
def speaking(tmp_path_factory) -> Engine:
    """A random three-layer model with the embedded model's tokenizer: quick, and nonsense."""
    folder = tmp_path_factory.mktemp("speaking")
    save_tiny(folder, Geometry(vocab=4096))
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED / name, folder / name)
    return Engine.load(str(folder), device="cpu")


@pytest.fixture(scope="session")
def embedded() -> Engine:
    return Engine.load("embedded", device="cpu")


@pytest.fixture(scope="module")
def quick(speaking):
    """(server, address) over the nonsense model."""
    with served(speaking, active=3, queue=5, max_context=512, model_name="tiny") as pair:
        yield pair
