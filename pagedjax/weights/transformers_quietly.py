"""transformers, imported when first needed and without its advice to install torch: only its tokenizers are used."""

from __future__ import annotations

import os
import sys
from types import ModuleType


def transformers() -> ModuleType:
    """The transformers package."""
    if "transformers" not in sys.modules:
        name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            import transformers  # noqa: F401
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
    return sys.modules["transformers"]
