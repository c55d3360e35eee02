import os

import pytest


@pytest.fixture(scope="session")
def real_model() -> str:
    """A folder with real pretrained weights; such tests are skipped without one."""
    folder = os.environ.get("NPQWEN_REAL_MODEL")
    if not folder:
        pytest.skip("NPQWEN_REAL_MODEL names no folder with real pretrained weights")
    return folder
