import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()
