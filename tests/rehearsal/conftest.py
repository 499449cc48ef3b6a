import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip rehearsals, which take minutes, unless they are selected."""
    if "rehearse" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("rehearse")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
