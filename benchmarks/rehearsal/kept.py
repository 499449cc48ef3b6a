"""Keep the graphs of a pretended card in a directory, and take them from there, as the compile cache does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch.utils._python_dispatch import _disable_current_modes

from compile_cache import saved
from compile_cache.artifacts import Entry, write_manifest


@contextmanager
def entry(directory: Path) -> Iterator[Entry]:
    """Open an entry of the cache, which is found if an earlier context has filled it."""
    directory.mkdir(exist_ok=True)
    is_found = any(directory.glob("*.saved"))
    if is_found:
        write_manifest(directory)
    compile = saved._compile

    def compiled(*args: Any, **kwargs: Any) -> Any:
        """Compile without the mode that makes all tensors fake, as torch.compile does. Only what torch's caches may
        hold can be saved."""
        with (
            _disable_current_modes(),
            torch._inductor.config.patch(fx_graph_cache=True),
            torch._functorch.config.patch(enable_autograd_cache=True),
        ):
            return compile(*args, **kwargs)

    with (
        mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(directory)}),
        mock.patch.object(saved, "_compile", compiled),
    ):
        yield Entry(directory, is_found)
