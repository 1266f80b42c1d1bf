"""Processes that are killed here report to a real server: an embedded one would be killed and orphaned with them."""

from tests.flows.conftest import server

__all__ = ["server"]


@pytest.fixture
def memory(fast_dir: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=fast_dir))
    yield made
    shutil.rmtree(made)
