from pathlib import Path

import pytest
import torch
from hypothesis import settings

from lumotree.engine import Engine
from lumotree.model.checkpoint import EMBEDDED
from tests.tiny import Geometry, save_speaking, save_tiny

settings.register_profile("core", derandomize=True, deadline=None, print_blob=False, database=None)
settings.load_profile("core")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random three-layer checkpoint with a draft head and a vocabulary of 97."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, Geometry())
    return folder


@pytest.fixture(scope="session")
def speaking_folder(tmp_path_factory) -> Path:
    """A random checkpoint with the embedded model's tokenizer: it can serve requests."""
    folder = tmp_path_factory.mktemp("speaking")
    save_speaking(folder)
    return folder


@pytest.fixture(scope="session")
def engines(tiny_folder, speaking_folder):
    """engines(model, dtype, rows): engines over `tiny`, `speaking` or `embedded`, loaded once."""
    folders = {"tiny": tiny_folder, "speaking": speaking_folder, "embedded": EMBEDDED}
    loaded: dict[tuple[str, str, str], Engine] = {}
    probed: dict[tuple[str, str], int | None] = {}

    def get(model: str, dtype: str = "float32", rows: str = "natural") -> Engine:
        key = (model, dtype, rows)
        if key not in loaded:
            with pytest.MonkeyPatch.context() as patch:
                if (model, dtype) in probed:  # what it finds does not depend on the row mode
                    found = probed[model, dtype]
                    patch.setattr("lumotree.engine.probe_row_multiple", lambda model: found)
                engine = Engine.load(str(folders[model]), dtype=dtype, device="cpu", rows=rows)
            probed[model, dtype], loaded[key] = engine.row_multiple, engine
        return loaded[key]

    return get


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield
