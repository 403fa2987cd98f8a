"""What a plan reads must be cheap to import."""

from __future__ import annotations

import subprocess
import sys


def test_planning_imports_nothing_heavy() -> None:
    program = (
        "import sys, hvpflow.data.cache, hvpflow.data.order, hvpflow.data.epochs, hvpflow.data.prepare\n"
        "heavy = {'torch', 'pandas', 'tokenizers', 'pyarrow', 'zstandard', 'datasets', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
