import os

import pytest
from pool import OnBackend, Pool

# torch's store asks for the host's name now and then, which takes 5 s where no name server answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session")
def started_pool():
    pool = Pool()
    yield pool
    pool.stop()


def pytest_generate_tests(metafunc):
    """A test file that names BACKENDS runs over each of them, others over the default."""
    if "pool" in metafunc.fixturenames:
        backends = getattr(metafunc.module, "BACKENDS", [None])
        metafunc.parametrize("pool", backends, ids=[name or "default" for name in backends], indirect=True)


@pytest.fixture
def pool(request, started_pool):
    return OnBackend(started_pool, request.param) if request.param else started_pool
