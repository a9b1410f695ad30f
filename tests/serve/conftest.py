import pytest
import torch

from lumotree.engine import Engine
from tests.serve.support import served, speaking_folder

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def speaking(tmp_path_factory) -> Engine:
    return Engine.load(str(speaking_folder(tmp_path_factory)), device="cpu")


@pytest.fixture(scope="session")
def embedded() -> Engine:
    return Engine.load("embedded", device="cpu")


@pytest.fixture(scope="module")
def quick(speaking):
    """(server, address) over the nonsense model."""
    with served(speaking, active=3, queue=5, max_context=512, model_name="tiny") as pair:
        yield pair
